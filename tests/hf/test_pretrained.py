"""Folders for from_pretrained, and adapters of PEFT; judged by both libraries on one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import autopar
from autopar.errors import CheckpointError, ProgramError
from autopar.pins import data_parallel
from tests.support.one_process import compare_step, compare_weights
from tests.support.ranks import run_ranks

LINE = "cpu: data=2 @1TB/s 1ns"
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip


def llama() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).double()


def gpt2() -> nn.Module:
    """Its head is tied to its embedding."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


def mixtral() -> nn.Module:
    """Its experts have other names in published checkpoints."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
    return transformers.MixtralForCausalLM(config).double()


def adapted() -> nn.Module:
    base = llama()
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["q_proj", "down_proj"]
    )
    return peft.get_peft_model(base, config).double()


def batch(number: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(number)
    tokens = torch.randint(32, (4, 8), generator=draw)
    return {"input_ids": tokens, "labels": tokens}


def entropy(output: Any, targets: Tensor) -> Tensor:
    """The loss in float64; that of transformers is in float32."""
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def save(folder: Path, make: Any, **options: Any) -> None:
    program = autopar.compile(make(), LINE, optimizer=adam, **options)
    program.step(**batch(0))
    trained = {name: value.clone() for name, value in program.state_dict().items()}
    place = folder / make.__name__
    program.save_pretrained(place, max_shard_size=10**9)  # whose file the next save replaces
    program.save_pretrained(place, max_shard_size="4KB")
    if dist.get_rank() == 0:
        again = type(make()).from_pretrained(place, dtype=torch.float64)
        same(dict(again.state_dict()), trained)
        index = json.loads((place / "model.safetensors.index.json").read_text())
        files = {path.name for path in place.glob("*.safetensors")}
        assert files == set(index["weight_map"].values())
        assert len(files) > 3
        largest = max(value.nbytes for value in trained.values())
        assert all((place / file).stat().st_size < max(largest, 4096) + 4096 for file in files)
        if make is mixtral:
            assert any("experts.0.w1" in name for name in index["weight_map"])
    program.load_state_dict({name: torch.zeros_like(value) for name, value in trained.items()})
    program.load_weights(place)
    same(program.state_dict(), trained)
    program.close()


def refuse(folder: Path) -> None:
    (folder / "taken").touch()
    with autopar.compile(gpt2(), LINE, example_inputs=batch(0)) as program:
        with pytest.raises(CheckpointError, match="taken"):
            program.save_pretrained(folder / "taken")
        few = {"transformer.ln_f.weight": torch.full((16,), 2.0, dtype=torch.float64)}
        with pytest.raises(CheckpointError, match="missing"):
            program.load_weights(few)
        before = program.state_dict()
        kept = program.load_weights(few, strict=False)
        assert set(kept) == set(before) - set(few) - {"lm_head.weight"}
        same(program.state_dict(), {**before, **few})
    linear = autopar.compile(nn.Linear(4, 4), LINE, example_inputs=torch.ones(4, 4))
    with linear as program, pytest.raises(ProgramError, match="Linear"):
        program.save_pretrained(folder / "linear")


def adapt(folder: Path) -> None:
    """LoRA trains on two ranks as on one, its folder loads in PEFT, and in a session."""
    alone = adapted()
    options = {"state": "zero3", "pins": data_parallel("data")}
    program = autopar.compile(adapted(), LINE, optimizer=adam, loss_fn=entropy, **options)
    optimizer = adam([each for each in alone.parameters() if each.requires_grad])
    for number in range(3):
        tokens = batch(number)["input_ids"]
        loss = program.step(input_ids=tokens, targets=tokens)
        expected = entropy(alone(input_ids=tokens), tokens)
        expected.backward()
        compare_step(loss, expected, optimizer)
    compare_weights(program, alone)
    place = program.save_pretrained(folder / "adapter")
    trained = program.state_dict()
    if dist.get_rank() == 0:
        assert sum(path.stat().st_size for path in place.glob("*.safetensors")) < 2**14
        again = peft.PeftModel.from_pretrained(llama(), place)
        found, wanted = (  # PEFT loads adapters in float32
            {name: value.float() for name, value in each.items()}
            for each in (again.state_dict(), trained)
        )
        same(found, wanted)
    fresh = autopar.compile(adapted(), LINE, optimizer=adam, example_inputs=batch(0))
    kept = fresh.load_weights(place)
    assert kept
    assert not any("lora" in name for name in kept)
    same(fresh.state_dict(), trained)
    with pytest.raises(CheckpointError, match="unexpected"):
        autopar.compile(llama(), LINE, example_inputs=batch(0)).load_weights(place)


def on_two(folder: Path) -> None:
    save(folder, llama, state="zero3", pins=data_parallel("data"))
    refuse(folder)
    adapt(folder)


def test_two_ranks(tmp_path: Path) -> None:
    run_ranks(on_two, tmp_path, count=2)


def more_on_two(folder: Path) -> None:
    save(folder, gpt2, stages=2, microbatches=2)
    save(folder, mixtral)


@pytest.mark.slow
def test_stages_and_experts_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(more_on_two, tmp_path, count=2)

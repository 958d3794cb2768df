"""Published names of checkpoints, compared with the models of transformers that wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.foreign_weights import weights_index
from autopar.session.published_names import PublishedNames

SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_local_experts": 11, "num_experts": 11, "num_experts_per_tok": 2,
}  # fmt: skip


def model(kind: str) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def read(folder: Path, of: nn.Module) -> dict[str, Tensor]:
    """The tensors of a folder by the model's names, put together from their boxes."""
    _, index, _ = weights_index(folder, PublishedNames(of))
    values = {}
    for name, stored in index.tensors.items():
        values[name] = torch.full(stored.shape, torch.nan)
        for chunk in stored.chunks:
            with safe_open(folder / chunk.file, "pt") as opened:
                values[name][chunk.box.slices] = opened.get_tensor(chunk.key)
    return values


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt2"])
def test_names_and_stacks_are_those_of_the_model(tmp_path: Path, kind: str) -> None:
    saved = model(kind)
    saved.save_pretrained(tmp_path)
    values = read(tmp_path, saved)
    tied = set(saved.all_tied_weights_keys or ())
    wanted = {k: v for k, v in saved.state_dict().items() if k not in tied}
    assert set(values) == set(wanted)
    assert all(torch.equal(values[name], value) for name, value in wanted.items())


def test_a_prefix_of_the_whole_model_is_added(tmp_path: Path) -> None:
    saved = model("gpt2")
    saved.transformer.save_pretrained(tmp_path)
    assert {"transformer.wte.weight", "transformer.h.1.ln_1.bias"} <= set(read(tmp_path, saved))


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (lambda values, name: values.pop(name), "unequal numbers"),
        (lambda values, name: values.update({name: values[name][1:].clone()}), "unlike others"),
        (lambda values, name: values.update({name: values[name].half()}), "float16"),
    ],
)
def test_experts_that_do_not_fit_are_refused(tmp_path: Path, change: object, answer: str) -> None:
    saved = model("mixtral")
    saved.save_pretrained(tmp_path)
    values = load_file(tmp_path / "model.safetensors")
    assert callable(change)
    change(values, "model.layers.1.block_sparse_moe.experts.7.w1.weight")
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"(?s)layers\.1\.mlp\.experts\.gate_up_proj.*{answer}"
    ):
        read(tmp_path, saved)


def test_other_conversions_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned = WeightConverter("lm_head.weight", "lm_head.weight", [Transpose(0, 1)])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: [turned])
    saved = model("mixtral")
    save_file(
        {"lm_head.weight": torch.ones(16, 32), "more": torch.ones(1)}, tmp_path / "a.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"(?s)lm_head\.weight.*Transpose"):
        read(tmp_path, saved)

"""Generation, compared with transformers' own `generate` on the unsharded model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import autopar
from autopar.errors import (
    BatchError,
    CaptureError,
    OptionError,
    PlanMismatchError,
    ProgramError,
)
from autopar.pins import data_parallel, megatron
from autopar.session.generation.processors import Processors
from tests.support.ranks import run_ranks

LINE, GRID = "cpu: gpu=2", "cpu: node=2, gpu=2"
FAST = "cpu: gpu=2 @1TB/s 1ns"  # cutting weights that are stored whole pays for one prompt
NEW = 6
WORDS, WIDTH = 64, 16


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, eos_token_id=7,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def gpt2() -> nn.Module:
    config = GPT2Config(
        vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=32,
        initializer_range=0.3, eos_token_id=7, bos_token_id=7,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def mixtral() -> nn.Module:
    config = MixtralConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, eos_token_id=7,
        num_experts_per_tok=2, initializer_range=0.3,
    )  # fmt: skip
    return MixtralForCausalLM(config)  # transformers' experts compute in float32 at most


def t5() -> nn.Module:
    config = T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=4, d_ff=32, num_layers=2, num_heads=4,
        decoder_start_token_id=0, initializer_factor=3.0, eos_token_id=7, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).double()


MODELS = {"llama": llama, "gpt2": gpt2, "mixtral": mixtral, "t5": t5}
DRAWN: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8}
ENDS: dict[str, Any] = {"eos_token_id": [7, 9, 12, 33, 50]}


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]().eval()


def prompts(batch: int = 4, tokens: int = 5) -> dict[str, Any]:
    """Prompts, some padded on the left."""
    ids = torch.randint(8, WORDS, (batch, tokens), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :2] = mask[3, :3] = 0
    given = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0}
    return {"input_ids": ids.masked_fill(mask == 0, 0), **given}


def alone() -> dict[str, Any]:
    """One prompt, of which a batch cannot be split."""
    return {"input_ids": prompts()["input_ids"][:1], "max_new_tokens": NEW}


def by_transformers(model: nn.Module, seed: int = 3, **how: Any) -> Tensor:
    torch.manual_seed(seed)
    tokens: Tensor = model.generate(**prompts(), **how)  # type: ignore[operator]
    return tokens


def _serves(mesh: str, cases: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Generates from every model greedily, to its ends, and by draws."""
    results: dict[str, Any] = {}
    for name, options in cases:
        with autopar.compile(made(name), mesh, **options) as program:
            every = [
                program.generate(**prompts()),
                program.generate(**prompts(), **ENDS),
                program.generate(**prompts(), **DRAWN, seed=3),
            ]
            nodes = program.plan.stage.nodes.items()
            caches = {str(node) for name, node in nodes if name.startswith("caches_")}
        results[f"{name} {options}"] = every, caches
    return results


SPLIT_BATCH = ("llama", {"pins": data_parallel("gpu")})
SPLIT_HEADS = ("llama", {"pins": megatron("gpu")})
FREE = [(name, {}) for name in MODELS]


def _check(ranks: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Compares every rank's tokens with transformers'; returns the types of caches by case."""
    for key, (first, _) in ranks[0].items():
        model = made(key.split()[0])
        wanted = [by_transformers(model), by_transformers(model, **ENDS)]
        wanted.append(by_transformers(model, **DRAWN))
        assert len({tuple(row.tolist()) for row in wanted[0]}) > 1  # no constant text
        for rank in ranks:
            for own, tokens, expected in zip(rank[key][0], first, wanted, strict=True):
                assert own.equal(tokens)
                assert tokens.equal(expected), f"{key}\n{tokens}\n{expected}"
    return {key: caches for key, (_, caches) in ranks[0].items()}


def test_two_ranks_generate_the_tokens_of_transformers() -> None:
    caches = _check(run_ranks(_serves, LINE, [("t5", {}), SPLIT_HEADS], count=2))
    assert caches[f"llama {SPLIT_HEADS[1]}"] == {"[4, 2@gpu, 11, 4]"}


@pytest.mark.slow
def test_two_ranks_generate_from_every_model() -> None:
    caches = _check(run_ranks(_serves, LINE, [*FREE, SPLIT_BATCH], count=2))
    assert caches[f"llama {SPLIT_BATCH[1]}"] == {"[4@gpu, 2, 11, 4]"}


@pytest.mark.slow
def test_four_ranks_generate_the_tokens_of_transformers() -> None:
    both = {"pins": [data_parallel("node"), megatron("gpu")]}
    cases = [*FREE, ("llama", both), ("gpt2", both)]
    caches = _check(run_ranks(_serves, GRID, cases, count=4))
    assert caches[f"llama {both}"] == {"[4@node, 2@gpu, 11, 4]"}


def _trains_and_generates(ways: dict[str, dict[str, Any]]) -> dict[str, Any]:
    results = {}
    batch = {"input_ids": prompts()["input_ids"], "labels": prompts()["input_ids"]}
    for name, options in ways.items():
        model = made("gpt2")
        with autopar.compile(model, FAST, example_inputs=batch, **options) as program:
            program.step(**batch)
            before = program.generate(**prompts())
            losses = [float(program.step(**batch)) for _ in range(2)]
            again = program.generate(**prompts()), program.generate(**alone())
            results[name] = before, losses, again, program.state_dict()
    return results


WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"state": "ddp"},
    "zero3": {"state": "zero3"},
    "megatron": {"pins": megatron("gpu")},
}


@pytest.mark.parametrize(
    "names", [("zero3",), pytest.param(("ddp", "megatron"), marks=pytest.mark.slow)], ids="-".join
)
def test_a_program_in_training_generates_from_its_shards(names: tuple[str, ...]) -> None:
    ways = {name: WAYS[name] for name in names}
    ranks = run_ranks(_trains_and_generates, ways, count=2)
    batch = {"input_ids": prompts()["input_ids"], "labels": prompts()["input_ids"]}
    model = made("gpt2")
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for number in range(3):
        loss = model(**batch).loss
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 0:
            first = by_transformers(model)
    last = by_transformers(model), model.generate(**alone())
    for way in ways:
        for before, own, again, weights in (rank[way] for rank in ranks):
            assert before.equal(first)
            assert own == pytest.approx(losses[1:], abs=1e-9)
            assert again[0].equal(last[0])
            assert again[1].equal(last[1])
            assert not any("cache" in name for name in weights)


@pytest.mark.slow
def test_programs_that_cannot_generate_say_how_another_one_does(tmp_path: Path) -> None:
    """Local batches are refused; what the error says to do gives the tokens of its weights."""
    batch = {"input_ids": prompts()["input_ids"], "labels": prompts()["input_ids"]}
    with autopar.compile(made("gpt2"), "cpu: gpu=1", batches="local") as program:
        program.step(**batch)
        with pytest.raises(ProgramError, match=r"other\.load_checkpoint\(folder\)"):
            program.generate(**prompts())
        program.save_checkpoint(tmp_path)
        model = made("gpt2")
        model.load_state_dict(program.state_dict(), strict=False)
    with autopar.compile(made("gpt2"), "cpu: gpu=1", example_inputs=batch) as other:
        other.load_checkpoint(tmp_path)
        assert other.generate(**prompts()).equal(by_transformers(model))


class Own(nn.Module):
    """A decoder that is not of transformers, without mask and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.projections = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))

    def forward(self, input_ids: Tensor, past_key_values: Any = None) -> Tensor:
        x, tokens = self.table(input_ids), input_ids.shape[1]
        seen, keys = 0, tokens
        if past_key_values is not None:
            seen, keys = past_key_values.get_seq_length(), past_key_values.get_mask_sizes(tokens)[0]
        mask = self.mask(seen, tokens, keys)
        for layer, projection in enumerate(self.projections):
            parts = projection(x).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in parts)
            if past_key_values is not None:
                k, v = past_key_values.update(k, v, layer)
            attended = nn.functional.scaled_dot_product_attention(q, k, v, mask)
            x = x + attended.transpose(1, 2).flatten(2)
        logits: Tensor = self.head(x)
        return logits

    def mask(self, seen: Any, tokens: int, keys: int) -> Tensor:
        return torch.arange(keys) <= torch.arange(tokens)[:, None] + seen


class Windowed(Own):
    """Attends to three tokens by a table, as GPT-Neo, whose rows it counts from the last key."""

    def __init__(self) -> None:
        super().__init__()
        places = torch.arange(32)
        away = places[:, None] - places
        self.register_buffer("window", (away >= 0) & (away < 3), persistent=False)

    def mask(self, seen: Any, tokens: int, keys: int) -> Tensor:
        table: Tensor = self.window
        return table[keys - tokens : keys, :keys]


def test_a_model_of_ones_own_generates_by_a_plan() -> None:
    """Judged by the model without a cache, on ever longer texts."""
    torch.manual_seed(0)
    model, ids = Own().double(), prompts()["input_ids"]
    wanted = ids
    for _ in range(NEW):
        wanted = torch.cat([wanted, model(wanted)[:, -1].argmax(-1, keepdim=True)], 1)
    sizes = {"batch": 4, "prompt": 5, "new_tokens": NEW}
    plan = autopar.plan(model, "cpu: gpu=1", task="generate", **sizes)
    assert autopar.GenerationPlan.from_toml(str(plan)) == plan
    with autopar.compile(model, "cpu: gpu=1", plan=plan) as program:
        with pytest.raises(PlanMismatchError, match="other prompts"):
            program.generate(ids, max_new_tokens=NEW - 1)
        assert program.generate(ids, max_new_tokens=NEW).equal(wanted)
        assert program.generate(ids, max_new_tokens=3).equal(wanted[:, :8])
        with pytest.raises(ProgramError, match="cannot train"):
            program.step(ids)
        with pytest.raises(BatchError, match="need a mask"):
            program.generate(ids, prompts()["attention_mask"], max_new_tokens=NEW)


def test_scores_change_as_those_of_transformers() -> None:
    ids = prompts()["input_ids"]
    padding = torch.tensor([0, 2, 0, 3])
    scores = torch.randn(4, WORDS, generator=torch.Generator().manual_seed(1))
    penalty = transformers.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=padding)
    cases: list[tuple[Processors, Tensor, int, list[Any]]] = [
        (Processors(penalty=1.3), ids, 2, [penalty]),
        (Processors(first=5), ids[:, :1], 2, [transformers.ForcedBOSTokenLogitsProcessor(5)]),
        (Processors(first=5), ids, 2, []),
        (Processors(last=(5, 6)), ids, 2, []),
        (Processors(last=(5, 6)), ids, 1, [transformers.ForcedEOSTokenLogitsProcessor(6, [5, 6])]),
    ]
    for own, text, left, theirs in cases:
        wanted = transformers.LogitsProcessorList(theirs)(text, scores.clone())
        assert own.apply(text, scores, padding, left).equal(wanted)


def test_settings_are_those_of_transformers() -> None:
    """Those of a call and those of the model's configuration, which also says how many tokens."""
    given = {"input_ids": prompts()["input_ids"], "attention_mask": prompts()["attention_mask"]}
    no_pairs = [transformers.NoRepeatNGramLogitsProcessor(2)]
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"max_new_tokens": NEW}, {"repetition_penalty": 1.7}),
        ({"max_length": 5 + NEW}, {"repetition_penalty": 0.6, **DRAWN}),
        ({"max_new_tokens": NEW}, {"logits_processor": no_pairs}),
        ({"max_length": 5 + NEW, "forced_eos_token_id": 9, "repetition_penalty": 1.7}, {}),
        ({"max_length": 5}, {"max_new_tokens": NEW}),
    ]
    model = made("gpt2")
    own = model.generation_config
    texts = set()
    with autopar.compile(model, "cpu: gpu=1") as program:
        for stated, options in cases:
            model.generation_config = copy.deepcopy(own)
            model.generation_config.update(pad_token_id=0, **stated)
            torch.manual_seed(3)
            wanted: Tensor = model.generate(**given, **options)  # type: ignore[operator]
            assert program.generate(**given, seed=3, **options).equal(wanted), (stated, options)
            texts.add(str(wanted.tolist()))
        assert len(texts) == len(cases)
        model.generation_config.update(max_length=5)
        with pytest.raises(OptionError, match="no room"):
            program.generate(**given)


def test_what_cannot_be_generated_is_refused_by_name() -> None:
    model, given = made("gpt2"), prompts()
    with autopar.compile(model, "cpu: gpu=1") as program:
        with pytest.raises(BatchError, match="the model has 32 positions"):
            program.generate(given["input_ids"], max_new_tokens=29)
        with pytest.raises(BatchError, match="padded on the right"):
            program.generate(given["input_ids"], given["attention_mask"].flip(1))
        with pytest.raises(BatchError, match="unknown to the model"):
            program.generate(given["input_ids"] + WORDS)
        with pytest.raises(TypeError, match="num_beams"):
            program.generate(given["input_ids"], num_beams=2)
        with pytest.raises(OptionError, match="a function of tokens and scores"):
            program.generate(given["input_ids"], logits_processor=[1])
        model.generation_config.no_repeat_ngram_size = 2
        with pytest.raises(OptionError, match="no_repeat_ngram_size"):
            program.generate(given["input_ids"])
    with (
        autopar.compile(Windowed(), "cpu: gpu=1") as program,
        pytest.raises(CaptureError, match="'window' at a place that the number of keys gives"),
    ):
        program.generate(given["input_ids"], max_new_tokens=NEW)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 32}
    moshi = transformers.MoshiConfig(vocab_size=WORDS, head_dim=4, sliding_window=4, **sizes)
    with (
        autopar.compile(transformers.MoshiForCausalLM(moshi), "cpu: gpu=1") as program,
        pytest.raises(CaptureError, match="cannot generate beyond 4 tokens"),
    ):
        program.generate(given["input_ids"], max_new_tokens=NEW)
    with (
        autopar.compile(nn.Linear(2, 2), "cpu: gpu=1") as program,
        pytest.raises(CaptureError, match="past_key_values"),
    ):
        program.generate(given["input_ids"])


def test_prices_of_a_generation_follow_closed_forms() -> None:
    """On one device: bytes of weights and caches, and rates that barely fall with the batch."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=1000))
    few, many = (
        autopar.plan(model, "H100: gpu=1", task="generate", batch=n, prompt=64, new_tokens=32)
        for n in (1, 4)
    )
    weights = sum(4 * parameter.numel() for parameter in model.parameters())
    cache = 2 * 4096 * (64 + 32) * 4  # keys and values of one sequence
    for plan, batch in ((few, 1), (many, 4)):
        held = weights + batch * cache
        assert held < plan.decode.predicted.peak_bytes < 1.1 * held
        assert plan.token_seconds > held / 3.35e12  # every byte is read for a token
        assert plan.seconds == pytest.approx(plan.first_token_seconds + 31 * plan.token_seconds)
        assert plan.tokens_per_second == pytest.approx(32 * batch / plan.seconds)
    assert few.token_seconds < many.token_seconds < 1.1 * few.token_seconds  # weights dominate

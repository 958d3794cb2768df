"""Generation by pipeline stages, judged by transformers' own `generate` on the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.errors import PlanError, ProgramError
from autopar.pins import megatron
from tests.programs.test_generation import (
    DRAWN,
    ENDS,
    MODELS,
    NEW,
    by_transformers,
    made,
    prompts,
)
from tests.support.ranks import run_ranks


def generated(program: autopar.Session) -> list[Tensor]:
    """Tokens that are greedy, that end, and that are drawn."""
    every = program.generate(**prompts()), program.generate(**prompts(), **ENDS)
    return [*every, program.generate(**prompts(), **DRAWN, seed=3)]


def wanted(model: nn.Module) -> list[Tensor]:
    every = by_transformers(model), by_transformers(model, **ENDS)
    assert len({tuple(row) for row in every[0].tolist()}) > 1  # no constant text
    return [*every, by_transformers(model, **DRAWN)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(one, other, strict=True))


def _serves(mesh: str, cases: list[tuple[str, dict[str, Any]]]) -> list[list[Tensor]]:
    results = []
    for name, options in cases:
        with autopar.compile(made(name), mesh, **options) as program:
            results.append(generated(program))
            assert len(program.plan.stages) == options["stages"]
    return results


def _trains(cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Trains a step, generates, and trains on; returns tokens, weights and losses."""
    results = []
    batch = {"input_ids": prompts()["input_ids"], "labels": prompts()["input_ids"]}
    for name, options in cases:
        with autopar.compile(made(name), "cpu: gpu=2", example_inputs=batch, **options) as program:
            program.step(**batch)
            weights = program.state_dict()
            results.append((generated(program), weights, float(program.step(**batch))))
    return results


def test_two_stages_of_one_process_generate_the_tokens_of_transformers() -> None:
    """A plan and a training generate; every stage has its own caches."""
    two: dict[str, Any] = {"stages": 2, "schedule": "interleaved_1f1b chunks=2"}
    sizes: dict[str, Any] = {"batch": 4, "prompt": 5, "new_tokens": NEW}
    plan = autopar.plan(made("gpt2"), "cpu: gpu=1", task="generate", **sizes, **two)
    batch = {"input_ids": prompts()["input_ids"], "labels": prompts()["input_ids"]}
    with autopar.compile(made("gpt2"), "cpu: gpu=1", plan=plan) as program:
        assert equal(generated(program), wanted(made("gpt2")))
        with pytest.raises(ProgramError, match="cannot train"):
            program.step(**batch)
    trained = made("gpt2")
    with autopar.compile(
        made("gpt2"), "cpu: gpu=1", example_inputs=batch, microbatches=2, **two
    ) as program:
        program.step(**batch)
        trained.load_state_dict(program.state_dict(), strict=False)
        assert equal(generated(program), wanted(trained))


@pytest.mark.slow
def test_stages_on_two_ranks_generate_the_tokens_of_transformers() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [(name, {"stages": 2}) for name in MODELS]
    cases.append(("llama", {"stages": 4, "schedule": "zb_v"}))
    for rank in run_ranks(_serves, "cpu: gpu=2", cases, count=2):
        for (name, options), own in zip(cases, rank, strict=True):
            assert equal(own, wanted(made(name))), (name, options)


@pytest.mark.slow
def test_stages_of_several_ranks_generate_the_tokens_of_transformers() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("llama", {"stages": 2, "pins": megatron("gpu")}),
        ("gpt2", {"stages": 2, "pins": megatron("gpu")}),
        ("gpt2", {"stages": 4}),
    ]
    for rank in run_ranks(_serves, "cpu: pp=2, gpu=2", cases, count=4):
        for (name, options), own in zip(cases, rank, strict=True):
            assert equal(own, wanted(made(name))), (name, options)


@pytest.mark.slow
def test_pipelines_in_training_generate_from_their_stages() -> None:
    two: dict[str, Any] = {"microbatches": 2}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("gpt2", {"stages": 2, **two}),
        ("llama", {"stages": 4, "schedule": "interleaved_1f1b chunks=2", **two}),
        ("llama", {"stages": 2, "schedule": "2bw", "allow": "stale gradients", **two}),
        ("llama", {"accumulate": 2}),
    ]
    ranks = run_ranks(_trains, cases, count=2)
    for number, (name, options) in enumerate(cases):
        model = made(name)
        model.load_state_dict(ranks[0][number][1], strict=False)
        for rank in ranks:
            tokens, _, loss = rank[number]
            assert equal(tokens, wanted(model)), (name, options)
            assert loss == ranks[0][number][2]


def test_a_plan_in_stages_is_priced_by_its_stages() -> None:
    """One token passes both stages, each with half of the weights and of the caches."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=1000))
    sizes: dict[str, Any] = {"batch": 4, "prompt": 64, "new_tokens": 32}
    alone = autopar.plan(model, "H100: gpu=1", task="generate", **sizes)
    plan = autopar.plan(model, "H100: gpu=2", task="generate", stages=2, **sizes)
    assert autopar.GenerationPlan.from_toml(str(plan)) == plan
    assert plan.prefill.ends
    assert [stage.starts for stage in plan.decode.stages] == [(0,), (1,)]
    # The second stage also waits for a message; both read together what one device reads.
    assert alone.token_seconds < plan.token_seconds < alone.token_seconds + 1e-4
    assert 0.45 < plan.decode.predicted.peak_bytes / alone.decode.predicted.peak_bytes < 0.65
    assert plan.decode.predicted.bubble == pytest.approx(0.5, abs=0.1)
    other = str(plan).replace("ranks = [1]", "ranks = [0]", 1)
    with pytest.raises(PlanError, match=r"partition the ranks|same stages"):
        autopar.GenerationPlan.from_toml(other)


@pytest.mark.slow
def test_a_search_takes_the_fastest_number_of_stages() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=1000))
    sizes: dict[str, Any] = {"batch": 4, "prompt": 64, "new_tokens": 32}
    slow = "H100: gpu=2 @1GB/s 10ms"

    def plan(stages: int | str, **options: Any) -> autopar.GenerationPlan:
        return autopar.plan(model, slow, task="generate", stages=stages, **sizes, **options)

    alone = plan(1)
    assert plan("auto") == alone  # whole weights on every device need no message
    # Less memory needs messages: one for two stages, several for layers that are split.
    limit = alone.peak_bytes * 0.9
    fastest = plan("auto", memory=limit)
    assert fastest == plan(2, memory=limit)
    assert fastest.seconds < plan(1, memory=limit).seconds


def test_stages_that_cannot_generate_are_refused() -> None:
    sizes: dict[str, Any] = {"batch": 4, "prompt": 4, "new_tokens": 4}
    with pytest.raises(ProgramError, match="several copies of every stage"):
        autopar.plan(
            made("gpt2"), "cpu: gpu=2", task="generate", stages=2, schedule="chimera",
            microbatches=2, **sizes,
        )  # fmt: skip

"""Published plans communicate as their papers say, on any model that they fit."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.codegen.emit import emit
from autopar.cost.model import AnalyticModel
from autopar.errors import MeshError, PinError
from autopar.pins import (
    PinContext,
    PinFunction,
    alexnet_split,
    data_parallel,
    fsdp,
    gshard,
    megatron,
    megatron_sp,
)
from benchmarks.published.models import Llama, LlamaSizes
from benchmarks.published.step import captured
from tests.support import parity
from tests.support.patterns import FAMILIES, communication, parameters, split_dim
from tests.support.ranks import run_ranks
from tests.support.words import GRID, LINE, graph, make, planned

PLANS: list[PinFunction] = [
    data_parallel(),
    fsdp("gpu"),
    megatron("gpu"),
    megatron_sp("gpu"),
    gshard("gpu"),
    alexnet_split("gpu"),
]


def program(name: str, pins: Any, mesh: str = LINE) -> str:
    made = planned(name, pins, mesh)
    return emit(graph(name), made.stage, AnalyticModel(made.mesh).collective)


def used(name: str, made: autopar.Plan) -> dict[str, tuple[str, str]]:
    """Parameter -> how the plan stores and uses it."""
    found = {}
    for leaf in graph(name).leaves("param"):
        if graph(name).template[leaf.name] == leaf.name:
            (share,) = graph(name).users[leaf.name]
            entry = made.stage.nodes[share]
            (shape, stored), (_, use) = entry.operands[0], entry.results[0]
            found[leaf.target] = (stored.format(shape), use.format(shape))
    return found


# What is split ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_megatron_splits_what_the_names_of_a_family_say(name: str) -> None:
    """Compares with patterns over the names of transformers' modules."""
    case = parity.Case("gpu=2", "tensor")
    jobs = parity.Sharded(name, [case])
    (plan,) = jobs.plans
    assert plan is not None
    for node in parameters(jobs.graph(case)):
        ((_, layout),) = plan.stage.nodes[node.name].results
        wanted = split_dim(FAMILIES[name], node)
        split = [dim for dim, axes in enumerate(layout.dims) if axes]
        assert split == ([] if wanted is None else [wanted]), node.target


def test_megatron_finds_linears_by_what_they_read_and_write() -> None:
    """Attention and perceptron side by side share one f and one g; names say nothing."""
    steps = communication(program("even", megatron("gpu")))
    assert steps == Counter({("to_varying", ("gpu",)): 1, ("all_reduce", ("gpu",)): 1})
    made = planned("even", megatron("gpu"))
    columns, rows, whole = ("[{}@gpu, 16]", "bcdfg"), ("[16, {}@gpu]", "eh"), "eh"
    found = used("even", made)
    sizes = {**dict.fromkeys("bcde", 32), **dict.fromkeys("fgh", 24)}
    for pattern, letters in (columns, rows):
        for letter in letters:
            wanted = pattern.format(sizes[letter])
            assert found[f"blocks.0.{letter}.weight"] == (wanted, wanted)
    assert all(found[f"blocks.0.{letter}.bias"][0] == "[16]" for letter in whole)


def test_sequence_parallelism_gathers_and_scatters_instead() -> None:
    steps = communication(program("even", megatron_sp("gpu")))
    # The norm's two parameters and, read by a sum of what was scattered, none else.
    assert steps["all_gather", ("gpu",)] == steps["reduce_scatter", ("gpu",)] == 1
    assert steps["to_varying", ("gpu",)] == 2
    assert sum(steps.values()) == 4


@pytest.mark.parametrize("word", [megatron("tp"), megatron_sp("tp")])
@pytest.mark.parametrize("batch", [1, 512])
def test_linears_of_pairs_are_split_however_many_tokens_there_are(
    batch: int, word: PinFunction
) -> None:
    """One sample has no class of its own; of many, gathering weights would send fewer bytes."""
    sizes = LlamaSizes(64, 4, 4, 96, 2, 128, 32)
    with torch.device("meta"):
        model, tokens = Llama(sizes).bfloat16(), torch.zeros(batch, 32, dtype=torch.long)
        turns = torch.zeros(32, 8, dtype=torch.complex64)
    inputs = {"tokens": tokens, "labels": tokens, "turns": turns}
    of = captured(model, inputs, "H100: dp=8, tp=2", word)
    sums, splits = Counter[bool](), Counter[bool]()
    for node in of.block:
        if node.op == "aten.linear":
            (_, layout), *_ = of.plan.nodes[node.name].results
            splits["tp" in layout.dims[-1]] += 1
            sums["tp" in layout.partial] += 1
    assert splits[True] == 5  # query, key, value and two of the perceptron
    assert sums[True] == 2


def test_plans_along_different_axes_combine() -> None:
    """Each does along its axis what it does alone; what both leave open is the solver's."""
    steps = communication(program("even", [data_parallel("node"), megatron("gpu")], GRID))
    count = len([target for target in used("even", planned("even", None)) if "blocks" in target])
    assert steps == Counter(
        {
            ("to_varying", ("node",)): count,
            ("to_varying", ("gpu",)): 1,
            ("all_reduce", ("gpu",)): 1,
        }
    )
    # Pins by name come on top, and must hold with the others.
    pins = [data_parallel("node"), {"last.weight": "[32, 16@gpu] along gpu"}]
    made = planned("even", pins, GRID)
    assert used("even", made)["last.weight"][1] == "[32, 16@gpu] -sum(node)"
    # Hybrid sharding (FSDP, arXiv:2304.11277, section 3.2.2): in parts inside a node.
    found = used("even", planned("even", [data_parallel("node"), fsdp("gpu")], GRID))
    assert found["blocks.0.f.weight"] == ("[24@gpu, 16]", "[24, 16] -sum(node, gpu)")


def test_fsdp_cuts_in_the_first_dimension_that_divides() -> None:
    found = used("even", planned("even", fsdp()))
    assert {use.partition(" ")[2].strip() for _, use in found.values()} >= {"16] -sum(gpu)"}
    assert found["first.weight"] == ("[32@gpu, 16]", "[32, 16] -sum(gpu)")
    assert all("@gpu" in stored and "@" not in use for stored, use in found.values())
    odd = used("primes", planned("primes", fsdp("gpu"), "toy[1GFLOP/s 1GiB 1GB/s]: gpu=3"))
    assert odd["blocks.0.e.weight"][0] == "[11@gpu, 14]"  # 4, 4 and 3 rows: none divides


def test_experts_stay_where_they_are_and_tokens_travel() -> None:
    """Two all_to_all a layer and direction; no gradient of an expert is communicated."""
    source = program("mixture", gshard("gpu"))
    steps = communication(source)
    rest = [t for t in used("mixture", planned("mixture", None)) if "blocks" in t]
    experts = [t for t in rest if t.endswith(("into", "out"))]
    assert steps["all_to_all", ("gpu",)] == 2
    assert steps["to_varying", ("gpu",)] == len(rest) - len(experts) == 3
    found = used("mixture", planned("mixture", gshard("gpu")))
    assert found["blocks.0.experts.into"] == ("[4@gpu, 16, 32]",) * 2
    assert found["blocks.0.experts.gate.weight"][0] == "[4, 16]"
    # Random numbers are drawn for all tokens; nothing else is gathered.
    assert steps["all_gather", ("gpu",)] == 0


def test_convolutions_share_the_batch_and_linears_their_outputs() -> None:
    found = used("convolutions", planned("convolutions", alexnet_split("gpu")))
    for layer in "ab":
        assert found[f"{layer}.weight"][1].endswith("] -sum(gpu)")
        assert "@" not in found[f"{layer}.weight"][1]
    shapes = {"c": "[32@gpu, 64]", "d": "[32@gpu, 32]", "e": "[12@gpu, 32]"}
    assert {layer: found[f"{layer}.weight"][1] for layer in shapes} == shapes
    source = program("convolutions", alexnet_split("gpu"))
    code = re.sub(r"#.*", "", source)
    steps = Counter(re.findall(r"mesh\.(all_gather|to_varying|all_to_all)\(", code))
    # The inputs of three linears are gathered, the gradients of two convolutions summed.
    assert steps == {"all_gather": 3, "to_varying": 4}


def test_data_parallelism_sums_statistics_of_the_batch_and_nothing_else() -> None:
    """Every value that has the batch is split by it: no all_to_all, no value gathered."""
    for name in ("convolutions", "mixture"):
        code = re.sub(r"#.*", "", program(name, data_parallel()))
        assert "mesh.all_to_all" not in code
        assert "mesh.all_gather(" not in code
        assert all(
            stored == use.partition(" ")[0] or "-sum" in use
            for stored, use in used(name, planned(name, data_parallel())).values()
        )


# What does not apply ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "name", "reason"),
    [
        (megatron("gpu"), "perceptron", "found 2 linears and 0 residual additions"),
        (megatron("gpu"), "convolutions", "no such pair"),
        (megatron("gpu"), "primes", "'heads' has 2"),
        (megatron_sp("gpu"), "convolutions", "pairs of linears"),
        (gshard("gpu"), "even", "a matrix for each expert"),
        (alexnet_split("gpu"), "even", "found 0 convolutions, 8 linears"),
        (data_parallel(), "primes", "the batch of 3 splits nowhere"),
        (fsdp(), "primes", "split it 4 ways"),
    ],
)
def test_a_plan_that_does_not_apply_says_what_it_looked_for(
    word: PinFunction, name: str, reason: str
) -> None:
    with pytest.raises(PinError, match="does not apply") as caught:
        planned(name, word)
    assert str(word) in caught.value.what
    assert reason in caught.value.why
    assert caught.value.todo


@pytest.mark.parametrize("make_word", [data_parallel, fsdp, megatron, gshard, alexnet_split])
def test_an_axis_that_the_mesh_lacks_is_refused(make_word: Callable[[str], PinFunction]) -> None:
    with pytest.raises(MeshError, match="no axis 'rack'"):
        planned("even", make_word("rack"))


@pytest.mark.parametrize("word", PLANS, ids=str)
def test_along_an_axis_of_one_device_there_is_nothing_to_say(word: PinFunction) -> None:
    mesh = autopar.Mesh.parse("toy[1GFLOP/s 1GiB 1GB/s]: gpu=1")
    assert word(PinContext(graph("perceptron"), mesh, {})) == {}


def test_plans_that_contradict_each_other_are_both_named() -> None:
    with pytest.raises(PinError, match="contradict each other") as caught:
        planned("even", [data_parallel("gpu"), megatron("gpu")])
    for text in ("[32, 16] => [32, 16] along gpu", "[32@gpu, 16] => [32@gpu, 16] along gpu"):
        assert f"'first.weight' = {text!r}" in caught.value.what
    assert caught.value.where == "the param 'first.weight'"


def test_any_callable_is_a_word_and_nothing_else() -> None:
    def last_by_rows(context: PinContext) -> dict[str, str]:
        return {"last.weight": f"[32@{context.mesh.names[0]}, 16]"}

    assert used("even", planned("even", last_by_rows))["last.weight"][1] == "[32@gpu, 16]"
    with pytest.raises(PinError, match="is not a pin"):
        planned("even", ["megatron"])  # type: ignore[list-item]


# Training -----------------------------------------------------------------------------------------

TRAINED = [
    ("mixture", [gshard("gpu")], LINE),
    ("convolutions", [alexnet_split("gpu")], LINE),
    ("even", [data_parallel("node"), megatron_sp("gpu")], GRID),
    ("even", [autopar.layout({"batch": "node", "heads": "gpu", "vocab": "gpu"})], GRID),
]


def train(case: int | None) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Losses of three steps and the state after them of every case, or of one on one device."""
    runs = []
    for name, pins, mesh in TRAINED if case is None else [TRAINED[case]]:
        model, batch = make(name)
        torch.manual_seed(1)
        if case is None:
            compiled = importlib.import_module("autopar.compile").compile(
                model, mesh, pins=pins, optimizer=_sgd, example_inputs=batch
            )
            torch.manual_seed(1)
            losses = [compiled.step(**batch).item() for _ in range(3)]
            runs.append((losses, compiled.state_dict()))
            continue
        losses = parity.train_plainly(partial(model, **batch), _sgd(model.parameters()), 3)
        runs.append((losses, dict(model.state_dict())))
    return runs


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@pytest.mark.slow
def test_training_is_that_on_one_device() -> None:
    """Megatron and FSDP on models of transformers are in test_parity.py."""
    ranks = run_ranks(train, None)
    for number in range(len(TRAINED)):
        ((losses, state),) = train(number)
        for rank in ranks:
            assert rank[number][0] == pytest.approx(losses, rel=1e-9)
            for key, value in state.items():
                torch.testing.assert_close(rank[number][1][key], value, rtol=1e-9, atol=1e-11)

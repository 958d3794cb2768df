"""Mixtures of many libraries' models, dispatched by all_to_all, train as the model alone does."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

import autopar
from autopar.capture.capture import Captured
from autopar.intra_op import node_choices
from autopar.intra_op.rule import Signature
from autopar.intra_op.strategy import Strategy, form_strategies, strategies
from autopar.ir.graph import Node
from autopar.ir.mesh import Mesh
from autopar.operators.mixture import MIXTURE
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from tests.support.mixtures import MIXTURES, mixture
from tests.support.parity import train_plainly
from tests.support.ranks import run_ranks
from tests.training.test_families import GRID, LINE, STEPS, TOLERANCE, Run, sgd

Runs = dict[str, tuple[str, ...]]  # models, and the ways in which each is trained


def train_whole(name: str) -> Run:
    """On one device, by the library's own loop over experts."""
    model, batch = mixture(name, "eager")
    updates = sgd([p for p in model.parameters() if p.requires_grad])
    losses = train_plainly(lambda: model(**batch)["loss"], updates, STEPS)
    return Run(losses, dict(model.state_dict()))


# On which mesh, how every mixture is split along its axes, and in which form.
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "line": (LINE, {"gpu": "e&...0"}),
    "pair": ("cpu: gpu=2", {"gpu": "e&...0"}),
    "beside data": (GRID, {"data": "...0", "tensor": "e&...0"}),
    "over both": (GRID, {"data": "e&...0", "tensor": "e&...0"}),
    "over both, direct": (GRID, {"data": "e&...0", "tensor": "e&...0"}),
    "to parts of experts": (GRID, {"data": "e&...0", "tensor": "f"}),
    "beside other experts": (GRID, {"data": "e&...0", "tensor": "e"}),
}


# Every kind of way, and every spelling of experts; the slow test has all pairs.
QUICK: Runs = {
    "Custom": ("over both, direct",),
    "DeepseekV3": ("to parts of experts",),
}


@contextmanager
def only(way: str) -> Iterator[None]:
    """Leaves mixtures one strategy."""
    _, parts = WAYS[way]
    direct = way.endswith("direct")

    def plain(signature: Signature, mesh: Mesh, runs: int | None) -> tuple[Strategy, ...]:
        every = strategies(signature, mesh, runs)
        wanted = {} if direct else parts
        return tuple(s for s in every if not signature.together or dict(s.parts) == wanted)

    def formed(
        node: Node, types: Any, mesh: Mesh, runs: int | None
    ) -> Iterator[tuple[Strategy, float]]:
        for strategy, share in form_strategies(node, types, mesh, runs):
            if node.op != MIXTURE or (direct and dict(strategy.parts) == parts):
                yield strategy, share

    with (
        patch.object(node_choices, "strategies", plain),
        patch.object(node_choices, "form_strategies", formed),
    ):
        yield


def train(
    found: dict[str, Captured], wanted: Runs, implementation: str
) -> dict[tuple[str, str], Run]:
    """The runs of this rank."""
    compiler = importlib.import_module("autopar.session.compiler")
    runs = {}
    for name, captured in found.items():
        for way in wanted[name]:
            mesh, _ = WAYS[way]
            model, batch = mixture(name, implementation)
            with (
                patch.object(compiler, "capture_parts", lambda *_, c=captured: c),
                only(way),
            ):
                program = autopar.compile(model, mesh, optimizer=sgd, example_inputs=batch)
            losses = [program.step(**batch).item() for _ in range(STEPS)]
            runs[name, way] = Run(losses, program.state_dict(), program.source)
    return runs


def check(wanted: Runs, implementation: str = "grouped_mm", count: int = 4) -> None:
    found = {}
    for name in wanted:
        model, batch = mixture(name, implementation)
        found[name] = capture_graph(model, (), batch, Options(), Trace(None))
        assert any(node.op == MIXTURE for node in found[name].graph.nodes), name
    ranks = run_ranks(train, found, wanted, implementation, count=count)
    wrong = {}
    for name, ways in wanted.items():
        whole = train_whole(name)
        for way in ways:
            runs = [rank[name, way] for rank in ranks]
            error = max(max(run.errors(whole)) for run in runs)
            if not error <= TOLERANCE:
                wrong[name, way] = f"off by {error:.2g}"
            elif ("mixture_direct(" in runs[0].source) != way.endswith("direct"):
                wrong[name, way] = "another form"
    assert not wrong, wrong


def test_training() -> None:
    check(QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(MIXTURES), 5))
def test_training_of_all(first: int) -> None:
    ways = tuple(way for way in WAYS if way != "pair")
    check(dict.fromkeys(tuple(MIXTURES)[first : first + 5], ways))


# Libraries' own loops over the rows of each expert, or over pieces cut by counts.
LOOPS = ("Dbrx", "JetMoe", "Mixtral", "GptOss", "NemotronH", "Olmoe", "DeepseekV3", "Qwen3Moe")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(LOOPS), 4))
def test_loops_over_experts_are_mixtures(first: int) -> None:
    check(dict.fromkeys(LOOPS[first : first + 4], ("pair",)), "eager", 2)

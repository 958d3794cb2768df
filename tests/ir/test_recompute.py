"""The operators that recomputed blocks run again, against torch's checkpoint."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.errors import PlanError, PlanMismatchError
from autopar.ir.graph import Graph
from autopar.ir.recompute import KINDS, Recompute, again, of_runs, run_names
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from tests.support import models

aten = torch.ops.aten
# Kernels that run in the forward of one operator of these graphs, and in no backward.
FORWARD_ONLY = {
    "aten.linear": (aten.addmm.default,),
    "aten.layer_norm": (aten.native_layer_norm.default,),
    "aten.tanh": (aten.tanh.default,),
    "aten.scaled_dot_product_attention": (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ),
}


class Calls(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count[func] += 1
        return func(*args, **(kwargs or {}))


@cache
def captured(layers: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor], Graph]:
    torch.manual_seed(0)
    model, batch = models.MODELS["gpt2"](layers=layers)
    graph = capture_graph(model, (), batch, Options(), Trace(None)).graph
    return model, batch, graph


@cache
def calls(how: str) -> Counter[Any]:
    """Counts the calls of one step of a program that recomputes in this way."""
    model, batch, _ = captured(3)
    program = autopar.compile(model, "cpu: data=1", example_inputs=batch, recompute=how)
    with Calls() as counted:
        program.step(**batch)
    return counted.count


@pytest.mark.parametrize("kind", KINDS)
def test_what_runs_again_is_what_torch_runs_again(kind: str) -> None:
    _, _, graph = captured(3)
    what = again(graph, graph.repeats[0], kind)
    once, more = calls("none"), calls(f"{kind} 2")
    for op, kernels in FORWARD_ONLY.items():
        expected = 2 * sum(graph[name].op == op for name in what.operators)
        assert sum(more[k] - once[k] for k in kernels) == expected, op


def test_the_last_product_is_not_needed_again() -> None:
    _, _, graph = captured(2)
    block = [graph[name] for name in graph.repeats[0].iterations[0] if not graph[name].is_leaf]
    products = [node.name for node in block if node.op == "aten.linear"]
    full, selective = (again(graph, graph.repeats[0], kind) for kind in ("full", "selective"))
    assert full.operators & set(products) == set(products[:-1])
    assert set(products) <= full.reached
    assert full.last == products[-1]
    assert not selective.operators & set(products)
    assert set(products) <= selective.kept
    assert selective.operators < full.operators


@pytest.mark.parametrize(
    "text",
    [
        "full", "full 0", "some 3", "full -1", "full x", "full ²", "full " + "9" * 5000,
        "save linear: 1", "save linear:0 1", "save linear:" + "9" * 5000 + " 1", "",
    ],
)  # fmt: skip
def test_what_says_nothing(text: str) -> None:
    with pytest.raises(PlanError, match="not a valid recomputation"):
        Recompute.parse(text)


def test_runs_are_called_as_their_modules() -> None:
    _, _, graph = captured(3)
    assert run_names(graph) == ("transformer.h",)
    how = Recompute.parse("selective 3")
    assert str(how) == "selective 3"
    assert of_runs(graph, {"transformer.h": how}) == (how,)
    assert of_runs(graph, {}) == (None,)
    with pytest.raises(PlanMismatchError, match="the model has 3 of them"):
        of_runs(graph, {"transformer.h": Recompute("full", 4)})
    with pytest.raises(PlanMismatchError, match=r"runs: transformer\.h"):
        of_runs(graph, {"encoder": Recompute("full", 1)})

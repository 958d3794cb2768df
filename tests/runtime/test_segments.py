"""Segments of a function compute the same, and the mesh is called in the same order."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime.module_loader import load
from autopar.runtime.segments import segmented
from tests.support import emitted

# Names given twice, what is read from tables in the middle, an alias, several results, a loop.
PROGRAM = """
import torch

MESH, INPUTS, OUTPUTS, LOSS, RANDOM = "cpu: x=1", {}, {}, None, False


def parameters():
    return []


def block(mesh, p, i, hidden, other):
    w = mesh.all_gather(p[f"w.{i}"])
    x = hidden @ w
    x = torch.tanh(x + p[f"b.{i}"])
    b = mesh.all_gather(p[f"b.{i}"])
    x_ = x * 2
    low, high = x.aminmax()
    hidden = x + b
    hidden = mesh.all_reduce(hidden)
    other = mesh.to_partial(other)
    y = hidden * low + other
    other = y
    y = y - high + x_
    return y, other


def forward(mesh, p, batch):
    tokens = batch["x"]
    hidden = tokens * 3
    kept = hidden + 1
    hidden = hidden + torch.ones(4, device=mesh.device)
    other = batch["x"] - kept
    for i in range(2):
        hidden, other = block(mesh, p, i, hidden, other)
    hidden = hidden + other
    loss = hidden.sum()
    loss = mesh.all_reduce(loss) * 2
    return {"loss": loss / 2, "hidden": hidden}
"""


class Recorder:
    """A mesh whose calls double what they are given, and are written down."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[tuple[str, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        def call(x: Tensor) -> Tensor:
            self.calls.append((name, x.clone()))
            return x * 2

        return call


def test_a_cut_program_computes_the_same() -> None:
    torch.manual_seed(0)
    p = {f"{kind}.{i}": torch.randn((4, 4) if kind == "w" else 4) for kind in "wb" for i in (0, 1)}
    batch = {"x": torch.randn(3, 4)}
    tree, names = segmented(PROGRAM)
    found = []
    for cut in (None, tree):
        mesh, module = Recorder(), load(PROGRAM, "<a program>", cut)
        found.append((module.forward(mesh, p, batch), mesh.calls))
    (results, calls), (again, calls_again) = found
    for name, value in results.items():
        assert torch.equal(value, again[name]), name
    assert [name for name, _ in calls] == [name for name, _ in calls_again]
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(calls, calls_again, strict=True))
    # Of the block what waits for no collective, and what does; before and behind the loop.
    assert names == ("block_1", "block_2", "forward_1", "forward_2")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_data_parallel_blocks_are_one_segment(name: str) -> None:
    """Gathering and marking parameters does not cut what computes."""
    case = emitted.family(name)
    tree, names = segmented(case.source("H100: a=2, b=2"))
    functions = {f.name: ast.unparse(f) for f in tree.body if isinstance(f, ast.FunctionDef)}
    for segment in names:
        assert not re.search(r"\b(mesh|p|batch)\b", functions[segment]), segment
    block = next(f for f in functions if f.endswith("_block"))
    moved = set(re.findall(r"mesh\.(\w+)\((?!p\[)", functions[block]))
    assert moved or [n for n in names if n.startswith(block)] == [f"{block}_1"]

"""Stages of a graph together compute the same as the graph, and send no more than necessary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.capture import capture
from autopar.capture.decompose import decompose_unknown
from autopar.errors import StageError
from autopar.intra_op.rule_table import table
from autopar.ir.graph import Graph
from autopar.ir.graph_text import format_graph, parse_graph
from autopar.ir.stage_graphs import alike, cut
from autopar.operators.interpret import run
from autopar.passes.normalise import FINDING, NORMALISING, prepare
from autopar.passes.verify import verify
from tests.support import models


def normalised(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Graph, dict[str, Tensor]]:
    """The graph, and a value for each of its leaves."""
    captured = capture(model, (), batch, known=table())
    graph = prepare(decompose_unknown(captured.graph, table()), passes=NORMALISING)
    values = {name: p.detach() for name, p in model.named_parameters()}
    return graph, {**values, **captured.buffers, **captured.inputs.flatten((), batch)}


def operators(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes if not node.is_leaf]


def in_stages(parts: tuple[Graph, ...], values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of all stages, each run on what the stages before it sent."""
    known = dict(values)
    for part in parts:
        known.update(run(prepare(verify(part), passes=FINDING), known))
    return {name: value for name, value in known.items() if name not in values}


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
@pytest.mark.parametrize("stages", [2, 5])
def test_together_they_are_the_model(name: str, stages: int) -> None:
    torch.manual_seed(0)
    model, batch = models.MODELS[name]()
    graph, values = normalised(model, batch)
    names = operators(graph)
    ends = [names[len(names) * k // stages - 1] for k in range(1, stages)]
    parts = cut(graph, ends)
    found = in_stages(parts, values)
    for key, value in run(graph, values).items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=0)
    for part in parts:
        assert parse_graph(format_graph(part)) == part


class Skips(nn.Module):
    """A value that is read three stages later, a tied weight, and a mask that is made once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask = (x > 0).to(x.dtype) * 2
        a = self.first(x * mask)
        b = self.second(a).tanh()
        c = self.first(b) * mask
        return {"loss": (c + a).sum(), "middle": b}


def test_skips_ties_and_masks() -> None:
    graph, values = normalised(Skips(), {"x": torch.randn(2, 4)})
    by_op: dict[str, list[str]] = {}
    for node in graph.nodes:
        by_op.setdefault(node.op, []).append(node.name)
    first, _, third = by_op["aten.linear"]
    parts = cut(graph, [first, by_op["aten.tanh"][0], third])
    sent = [[user for user, _ in part.outputs if user.startswith("%")] for part in parts]
    got = [[leaf.target for leaf in part.leaves("received")] for part in parts]
    tanh = by_op["aten.tanh"][0]
    assert sent == [[f"%{first}"], [f"%{tanh}"], [f"%{third}"], []]
    assert got == [[], [f"%{first}"], [f"%{tanh}"], [f"%{first}", f"%{third}"]]
    # Both stages that read the weight hold it; the mask is made again from the input.
    holders = [any(leaf.target == "first.weight" for leaf in p.leaves("param")) for p in parts]
    assert holders == [True, False, True, False]
    assert [len(part.leaves("input")) for part in parts] == [1, 0, 0, 1]
    assert [user for user, _ in parts[1].outputs] == ["middle", f"%{tanh}"]
    assert [part.loss is None for part in parts] == [True, True, True, False]
    found = in_stages(parts, values)
    assert found["loss"] == run(graph, values)["loss"]


def test_equal_stages_are_alike() -> None:
    model, batch = models.mlp((8, 8, 8, 8, 8, 8))
    graph, _ = normalised(model, batch)
    gelus = [node.name for node in graph.nodes if node.op == "aten.gelu"]
    parts = [prepare(part, passes=FINDING) for part in cut(graph, gelus)]
    looks = [alike(part) for part in parts]
    assert looks[1] == looks[2] == looks[3]
    assert len(set(looks)) == 3


def test_refusals() -> None:
    graph, _ = normalised(*models.mlp())
    names = operators(graph)
    with pytest.raises(StageError, match="no such operator"):
        cut(graph, ["nowhere"])
    with pytest.raises(StageError, match="would have no operator"):
        cut(graph, [names[1], names[0]])
    with pytest.raises(StageError, match="would have no operator"):
        cut(graph, [names[-1]])


class Counts(nn.Module):
    """A buffer that is written early and read late."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        old = self.seen.clone()
        self.seen.add_(x.sum(0))
        return (self.two(self.one(x).relu()) * old).sum()


def test_a_written_buffer_stays_in_one_stage() -> None:
    graph, _ = normalised(Counts(), {"x": torch.randn(2, 4)})
    relu = next(node.name for node in graph.nodes if node.op == "aten.relu")
    with pytest.raises(StageError, match="is written in stage 0 and read in stage 1"):
        cut(graph, [relu])


def test_a_stage_that_gives_nothing_is_refused() -> None:
    """Its only value is a mask, which the next stage makes for itself."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            mask = (x > 0).to(x.dtype)
            return (self.linear(x) * mask).sum()

    graph, _ = normalised(Masked(), {"x": torch.randn(2, 4)})
    with pytest.raises(StageError, match="computes nothing that is needed later"):
        cut(graph, [operators(graph)[0]])

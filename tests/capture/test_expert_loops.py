"""Loops over the rows of experts: one mixture in the graph, or refused at their line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.operators.interpret import run
from autopar.operators.mixture import MIXTURE
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace

EXPERTS, WIDTH = 3, 8
Body = Callable[["Loop", Tensor, Tensor, Tensor], Tensor]


class Loop(nn.Module):
    """Tokens through experts that a body loops over."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.router, self.body = nn.Linear(WIDTH, EXPERTS), body
        self.up = nn.Parameter(torch.ones(EXPERTS, 2 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.ones(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        return self.body(self, x, ids, weights).square().mean()


def each(
    model: Loop,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    expert: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """The loop, as libraries write it."""
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    for number in (mask.sum((-1, -2)) > 0).nonzero():
        slot, token = torch.where(mask[number[0]])
        rows = expert(x[token], model.up[number[0]], model.down[number[0]])
        out.index_add_(0, token, rows * weights[token, slot, None])
    return out


def gated(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, value = F.linear(rows, up).chunk(2, -1)
    return F.linear(F.silu(gate) * value, down)


def by_counts(model: Loop, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Rows sorted by expert and cut by counts."""
    order = ids.flatten().sort(0)[1]
    counts = torch.zeros(len(x), EXPERTS).scatter(1, ids, 1).long().sum(0).tolist()
    pieces = x[order.div(2, rounding_mode="trunc")].split(counts)
    rows = torch.cat([F.linear(piece, model.down[at]) for at, piece in enumerate(pieces)])
    return rows * weights.flatten()[order, None]


def captured(body: Body) -> Counter[str]:
    graph = capture_graph(Loop(body), (torch.ones(6, WIDTH),), {}, Options(), Trace(None)).graph
    return Counter(node.op for node in graph.nodes)


def test_a_loop_is_one_mixture_and_pieces_are_one_product() -> None:
    ops = captured(lambda *given: each(*given, gated))
    assert ops[MIXTURE] == 1
    assert not {"aten.nonzero", "aten.one_hot", "aten.index_add"} & set(ops)
    assert captured(by_counts)["autopar.grouped_linear"] == 1


def test_pieces_are_multiplied_by_matrices_as_by_linears() -> None:
    """The values are those of the loop, which no symmetric weight hides."""

    def turned(model: Loop, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        order = ids[:, 0].argsort()
        pieces = x[order].split(F.one_hot(ids[:, 0], EXPERTS).sum(0).tolist())
        return torch.cat([F.gelu(piece @ model.down[at]) for at, piece in enumerate(pieces)])

    torch.manual_seed(0)
    model, x = Loop(turned).double(), torch.randn(6, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        model.down.normal_()
    graph = capture_graph(model, (x,), {}, Options(), Trace(None)).graph
    assert any(node.op == "autopar.grouped_linear" for node in graph.nodes)
    values = run(graph, {**dict(model.named_parameters()), "x": x})
    torch.testing.assert_close(values["loss"], model(x), rtol=1e-12, atol=1e-12)


def idle(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.dropout(F.dropout(gated(rows, up, down), 0.0), 0.5, training=False)


def test_dropout_that_drops_nothing_leaves_a_mixture() -> None:
    assert captured(lambda *given: each(*given, idle))[MIXTURE] == 1


def dropped(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.dropout(gated(rows, up, down), 0.1)


def dropped_piece(model: Loop, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    pieces = x.split(F.one_hot(ids[:, 0], EXPERTS).sum(0).tolist())
    return torch.cat([F.dropout(F.linear(p, model.down[at])) for at, p in enumerate(pieces)])


def mean_of_rows(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return gated(rows, up, down) - rows.mean(0)


def unweighted(model: Loop, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    for number in (mask.sum((-1, -2)) > 0).nonzero():
        _, token = torch.where(mask[number[0]])
        out.index_add_(0, token, gated(x[token], model.up[number[0]], model.down[number[0]]))
    return out


def some_experts(model: Loop, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    for number in (mask.sum((-1, -2)) > 1).nonzero():
        x = x + model.down[number[0]].sum()
    return x


def reversed_pieces(model: Loop, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    pieces = x.split(F.one_hot(ids[:, 0], EXPERTS).sum(0).tolist())
    return torch.cat([F.linear(p, model.down[at]) for at, p in enumerate(pieces)][::-1])


def mean_of_some(model: Loop, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Nothing is added for an expert without rows, whose mean is no number."""
    for number in range(EXPERTS):
        token, _ = torch.where(ids == number)
        if token.numel() > 0:
            x = x + x[token].mean()
    return x


def written_mask(model: Loop, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    first, second = ids == 0, ids == 0
    first[0] = False
    return x * second.any(-1, keepdim=True)


def length_of_rows(model: Loop, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return x * len(torch.where(ids == 0)[0])


def late_number(model: Loop, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The body has already been traced as that of all experts."""
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
    for number in (mask.sum((-1, -2)) > 0).nonzero():
        if number[0] == EXPERTS:
            continue
        slot, token = torch.where(mask[number[0]])
        rows = gated(x[token], model.up[number[0]], model.down[number[0]])
        if number[0] != 1:
            out.index_add_(0, token, rows * weights[token, slot, None])
    return out


REFUSED: dict[str, tuple[Body, str]] = {
    "a late number": (late_number, "needs the number"),
    "rows that meet": (lambda *given: each(*given, mean_of_rows), "mean of the rows"),
    "dropout": (lambda *given: each(*given, dropped), "which numbers a row gets"),
    "dropout of pieces": (dropped_piece, "which numbers a row gets"),
    "no weight": (unweighted, "index_add_ of the rows"),
    "some experts": (some_experts, "sizes"),
    "another order": (reversed_pieces, "cat of the rows"),
    "a mean of some": (mean_of_some, "mean of the rows"),
    "a mask that is written": (written_mask, "__setitem__ of the rows"),
    "a length": (length_of_rows, "len of the rows"),
    "a size": (lambda m, x, ids, w: x.new_ones(ids[:, 0].tolist()[:1]), "Python number"),
    "a number": (lambda m, x, ids, w: x * (ids[:, 0].tolist()[0] + 1), "Python number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_loops_are_refused_at_their_line(name: str) -> None:
    body, what = REFUSED[name]
    with pytest.raises(CaptureError, match=what) as error:
        captured(body)
    assert "test_expert_loops.py" in str(error.value)

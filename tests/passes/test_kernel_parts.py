"""Parts of kernels: traffic against sets of values, products against one linear, saved results."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autopar.cost.model import NodeWork
from autopar.cost.operator_memory import recipe
from autopar.errors import OptionError
from autopar.intra_op.node_choices import operand_types
from autopar.intra_op.rule import resolve
from autopar.intra_op.rule_table import table
from autopar.intra_op.work.kernel_work import node_work
from autopar.ir.executed.execution import Execution
from autopar.ir.fusion.async_tensor_parallel import OverlappableLinears
from autopar.ir.graph import Graph
from autopar.ir.graph_text import format_graph, parse_graph
from autopar.ir.mesh import Mesh
from autopar.ir.recompute import kept_products
from autopar.ir.tensor import Layout
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from autopar.runtime.recompute import keeping

SIZE, INNER, ROWS = 8, 24, 16
ONE = Mesh.parse("H100: gpu=1")


class Gated(nn.Module):
    """A block with two linears of one value, and operators between products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(SIZE, INNER, bias=False), nn.Linear(SIZE, INNER, bias=False)
        self.down = nn.Linear(INNER, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)) * self.gate(x))


class Blocks(nn.Module):
    """Two such blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(SIZE, SIZE, bias=False)
        self.layers = nn.ModuleList(Gated() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def captured(model: nn.Module, execution: str) -> Graph:
    options = Options(execution=Execution.read(execution))
    inputs = {"x": torch.zeros(ROWS, SIZE)}
    return capture_graph(model, (), inputs, options, Trace(None)).graph


def works(graph: Graph) -> dict[str, NodeWork]:
    """Kernels of every node, whole on one device."""
    found, rules = {}, table()
    for node in graph.folded:
        types = operand_types(graph, node)
        rule = rules.get(node.op)
        signature = resolve(rule, node, types, node.types) if rule and not node.is_leaf else None
        sides = ([Layout.replicated(len(t.shape)) for t in side] for side in (types, node.types))
        found[node.name] = node_work(graph, node, *sides, signature, ONE)
    return found


def test_a_kernel_reads_and_writes_what_crosses_its_border_once() -> None:
    """Kernels counted by hand: silu and the product are one, the residual addition another."""
    graph = captured(Blocks(), "compiled=blocks")
    made = works(graph)
    inside = [n for n in graph.folded if n.part.fused and n.op != "autopar.share"]
    assert {n.op for n in inside} >= {"aten.silu", "aten.mul.Tensor"}
    pointwise = [n for n in inside if n.op in ("aten.silu", "aten.mul.Tensor")]
    moved = sum(work.nbytes for n in pointwise for work in made[n.name].forward)
    assert moved == 4 * 3 * ROWS * INNER  # up and gate are read, their product is written
    back = sum(work.nbytes for n in pointwise for work in made[n.name].backward)
    # The gradient, up and gate are read, and the gradients of both are written.
    assert back == 4 * 5 * ROWS * INNER
    silu = next(n for n in pointwise if n.op == "aten.silu")
    assert not made[silu.name].forward or silu.part.readers == 0
    saved = {name for n in pointwise for name in n.saved}
    assert silu.name not in saved  # it is computed again


def test_a_library_runs_contractions_and_selections_of_a_compiled_model() -> None:
    """Products of two operands by einsum and selections are kernels of their own, by hand."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(SIZE, INNER))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.einsum("ab,bc->ac", x.exp(), self.weight).exp()
            first = y.topk(2, dim=-1)[0].sum(-1)
            return torch.einsum("a,ac,c->ac", first, y, y[0]).sum()

    graph = captured(Mixed(), "compiled=all")
    made = works(graph)
    product, numbers = (node for node in graph.folded if node.op == "aten.einsum")
    assert (product.part.fused, numbers.part.fused) == (False, True)
    assert {work.gemm.flops for work in made[product.name].forward if work.gemm} == {
        2 * ROWS * SIZE * INNER
    }
    (select,) = (node for node in graph.folded if node.op == "aten.topk")
    assert not select.part.fused
    keys, picked = ROWS * INNER * 4, ROWS * 2 * (4 + 8)
    # f32 keys are read for each of four digits, and once more for what is gathered.
    assert made[select.name].forward[0].nbytes == 5 * keys + picked


def test_operators_as_written_have_no_parts() -> None:
    assert all(
        node.part.share == 1 and not node.part.fused for node in captured(Blocks(), "").nodes
    )


def test_joined_linears_cost_what_one_linear_with_all_columns_does() -> None:
    graph = captured(Blocks(), "merged")
    made = works(graph)
    parts = [n for n in graph.folded if n.part.share < 1]
    assert len(parts) == 2

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Linear(SIZE, SIZE, bias=False)
            self.both = nn.Linear(SIZE, 2 * INNER, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.both(self.start(x)).square().mean()

    one = captured(Whole(), "")
    linear = [n for n in one.nodes if n.op == "aten.linear"][-1]
    whole = works(one)[linear.name]
    for node in parts:
        own = made[node.name]
        assert sum(part.part.share for part in parts) == pytest.approx(1.0)
        assert [replace(work, share=1.0) for work in own.forward] == list(whole.forward)
        gemms = {work.gemm for work in own.backward}
        assert gemms == {work.gemm for work in whole.backward}


def test_linears_in_8_bits_are_cast_once_or_by_rows_and_blocks_for_each_product() -> None:
    for text, inputs, weights, each in (
        ("compiled=blocks linears=float8", 1, 2, 5),
        ("compiled=blocks linears=float8 primary", 1, 0, 5),  # weights are kept in 8 bits
        ("linears=float8-rows", 2, 2, 5),
        ("linears=mxfp8", 2, 2, 3 + 1 / 32),  # a block of 32 is read once, and has a scale
        ("linears=mxfp8 primary", 2, 0, 3 + 1 / 32),
    ):
        graph = captured(Blocks(), text)
        made = works(graph)
        first = [n for n in graph.folded if n.part.narrow and n.type.shape[-1] == INNER]
        cast = sum(made[n.name].forward[0].nbytes for n in first)
        assert cast == each * (inputs * ROWS * SIZE + weights * SIZE * INNER)
        assert all(work.dtype == "f8e4" for n in first for work in made[n.name].forward[1:])
        if inputs == 2:  # backwards all operands but one along their other dimension
            cast = sum(made[n.name].backward[0].nbytes for n in first)
            there = inputs * ROWS * SIZE + weights * SIZE * INNER
            assert cast == each * (there + 2 * 2 * ROWS * INNER)


def test_collectives_run_beside_linears_in_8_bits_only_where_the_execution_says_so() -> None:
    """Programs run them apart. torch joins all but gathers before rows (pytorch issue 149990)."""

    class Normed(Gated):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(x)
            loss: Tensor = self.down(F.silu(self.up(y)) * self.gate(y)).square().mean()
            return loss

    for text, gathers, scatters in (
        ("", True, True),
        ("linears=float8", False, False),
        ("linears=float8 joined", True, True),
        ("linears=float8-rows joined", False, True),
    ):
        graph = captured(Normed(), text)
        linears = OverlappableLinears(graph)
        shares = [n for n in graph.folded if n.op == "autopar.share"]
        assert any(linears.readers(share) for share in shares) == gathers
        ends = [n for n in graph.folded if n.op == "aten.linear"]
        assert any(linears.reader(linear) is not None for linear in ends) == scatters


def test_a_loss_in_place_keeps_the_softmax_in_the_memory_of_the_logits() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(SIZE, INNER)

        def forward(self, x: Tensor) -> Tensor:
            labels = torch.zeros(ROWS, dtype=torch.long)
            return F.cross_entropy(self.head(x) * 1.0, labels)

    logits = 4 * ROWS * INNER
    for loss, extra, gradient, temporary in (("steps", 1, 1, 2), ("inplace", 0, 0, 0)):
        graph = captured(Loss(), f"loss={loss}")
        (node,) = (n for n in graph.nodes if n.op == "aten.cross_entropy_loss")
        into = tuple(Layout.replicated(len(graph[name].type.shape)) for name in node.inputs)
        reads = tuple(graph[name] for name in node.inputs)
        found = recipe(node, reads, into, (Layout.replicated(0),), ONE, accelerator=True)
        assert sum(found.extra) // logits == extra
        assert max(found.gradients[0], 0) == gradient * logits
        assert found.backward_scratch == temporary * logits
        assert (0 in found.saved) == (loss == "inplace")


def test_convolutions_without_measured_algorithms_are_not_winograds() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.near, self.far = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = self.far(self.near(x.view(1, 1, ROWS, SIZE))).square().mean()
            return loss

    for text, near in (("", True), ("convolutions=direct", False)):
        made = works(captured(Mixed(), text))
        convolved = [w.convolved for work in made.values() for w in work.forward if w.convolved]
        assert [(one.result, one.winograd) for one in convolved] == [
            ("forward", near),
            ("forward", False),
        ]


def test_a_softmax_in_steps_moves_its_operand_again_for_each_reduction() -> None:
    """By hand: reads for maximum and sum, written exponentials; backwards results and gradients."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(SIZE, INNER), nn.Linear(INNER, SIZE)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.softmax(self.into(x) * 0.5, -1)).square().mean()

    one, steps = (
        works(captured(Weighted(), f"compiled=all{more}")) for more in ("", " reductions=steps")
    )
    for side, times in (("forward", 3), ("backward", 2)):
        before, after = (
            sum(kernel.nbytes for work in made.values() for kernel in getattr(work, side))
            for made in (one, steps)
        )
        assert after - before == 4 * times * ROWS * INNER


def test_batch_statistics_are_complete_before_what_needs_them() -> None:
    """By hand: statistics read the values, the norm and its relu read them again and write once."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.norm(self.conv(x.view(ROWS, 1, 1, SIZE))))
            return F.conv2d(y, y.new_ones(1, 4, 1, 1)).square().mean()

    graph = captured(Normed(), "compiled=all")
    made = works(graph)
    own = {n.name for n in graph.folded if n.part.fused and "norm" in n.source.module}
    own |= {n.name for n in graph.folded if n.op == "aten.relu"}
    moved = sum(kernel.nbytes for name in own for kernel in made[name].forward)
    assert 3 <= moved / (4 * ROWS * 4 * SIZE) < 3.5  # and some figures for each channel


def test_an_execution_and_its_graph_are_read_back() -> None:
    text = (
        "compiled=blocks merged together loss=steps reductions=steps convolutions=direct "
        "linears=float8 joined host=eager "
        "optimizer=28 reserve=0.15"
    )
    assert str(Execution.read(text)) == str(Execution.read(str(Execution.read(text))))
    graph = captured(Blocks(), text)
    assert parse_graph(format_graph(graph)) == graph
    for wrong in (
        "compiled=always",
        "merged=1",
        "speed=2",
        "optimizer=many",
        "reserve=2",
        "merged merged",
        "fused=a",
    ):
        with pytest.raises(OptionError):
            Execution.read(wrong)


def test_a_policy_by_operator_keeps_every_second_linear() -> None:
    graph = captured(Blocks(), "")
    nodes = [graph[name] for name in graph.repeats[0].iterations[0]]
    assert list(kept_products(nodes, "save linear:2").values()) == [True, False, True]
    assert list(kept_products(nodes, "save attention").values()) == [False, False, False]
    assert list(kept_products(nodes, "selective").values()) == [True, True, True]


class Counted(TorchDispatchMode):
    """Counts products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts a product and runs it."""
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kept", [(True, False, True), (False, False, False), (True, True, True)])
def test_a_block_reruns_the_products_that_it_did_not_keep(kept: tuple[bool, ...]) -> None:
    torch.manual_seed(0)
    block, x = Gated().double(), torch.randn(ROWS, SIZE, dtype=torch.float64, requires_grad=True)
    block(x).square().sum().backward()
    wanted = [x.grad, *(p.grad for p in block.parameters())]
    x.grad = None
    block.zero_grad()
    out = checkpoint(block, x, use_reentrant=False, context_fn=keeping(*kept))
    with Counted() as products:
        out.square().sum().backward()
    # Two for each linear's gradients; the last linear's result is not needed.
    assert products.count == 6 + kept[:2].count(False)
    for one, other in zip(wanted, [x.grad, *(p.grad for p in block.parameters())], strict=True):
        torch.testing.assert_close(one, other)
    assert prod(x.shape) == ROWS * SIZE

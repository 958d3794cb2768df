"""Memory of a mixture of experts, against every storage that torch allocates."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.cost.operator_memory import recipe
from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout, TensorType
from autopar.operators.interpret import annotate
from autopar.operators.mixture import MIXTURE, Experts, mixture
from autopar.runtime.communication.communicator import Communicator
from benchmarks.alive import Alive
from tests.support.ranks import run_ranks

TOKENS, CHOICES, EXPERTS = 192, 2, 4
ONE = Mesh.parse("cpu: gpu=1")


def node_of(width: int, inner: int) -> tuple[Graph, Node]:
    """A mixture and what it reads, annotated."""
    shapes = {"gate": (EXPERTS, inner, width), "up": (EXPERTS, inner, width)}
    shapes |= {"down": (EXPERTS, width, inner), "x": (TOKENS, width)}
    kinds = {name: TensorType("f32", shape) for name, shape in shapes.items()}
    kinds["ids"] = TensorType("i64", (TOKENS, CHOICES))
    kinds["weights"] = TensorType("f32", (TOKENS, CHOICES))
    leaves = tuple(
        Node(name, "param" if kind.floating else "input", (name,), (), (kind,), requires_grad=True)
        if kind.floating
        else Node(name, "input", (name,), (), (kind,))
        for name, kind in kinds.items()
    )
    args = (*(Ref(name) for name in kinds), "silu")
    node = Node("y", MIXTURE, args, (), (kinds["x"],), requires_grad=True)
    graph = annotate(Graph("g", (*leaves, node), (("y", "y"),)))
    return graph, graph["y"]


def given(graph: Graph, node: Node) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = []
    for kind in (graph[name].type for name in node.inputs):
        if kind.floating:
            values.append(torch.randn(kind.shape, generator=generator).requires_grad_())
        else:  # every expert equally often
            values.append((torch.arange(kind.numel) % EXPERTS).view(kind.shape))
    return values


@pytest.mark.parametrize(("width", "inner"), [(64, 224), (128, 128), (256, 32)])
def test_predicted_bytes_are_measured_bytes(width: int, inner: int) -> None:
    graph, node = node_of(width, inner)
    values, gradient = given(graph, node), torch.ones(TOKENS, width)
    with Alive([*values, gradient]) as alive:
        before = alive.live
        out = mixture(Experts(*values[:3], "silu"), *values[3:])
        kept, forward = alive.live - before, max(live for _, live in alive.curve) - before
        alive.curve.clear()
        out.backward(gradient)
        backward = max(live for _, live in alive.curve) - before
    layouts = [Layout.replicated(len(graph[name].type.shape)) for name in node.inputs]
    operands = tuple(graph[name] for name in node.inputs)
    found = recipe(node, operands, tuple(layouts), (Layout.replicated(2),), ONE)
    held = found.results[0] + sum(found.extra)
    gradients = sum(size for size in found.gradients if size > 0)
    assert held == pytest.approx(kept, rel=0.02)
    assert held + found.scratch == pytest.approx(forward, rel=0.1)
    # Gradients of parameters are counted from the start, though some come when rows have gone.
    assert 0.95 < (held + gradients + found.backward_scratch) / backward < 1.2


SIZES = ((64, 224), (256, 32))


def measured() -> list[tuple[int, int, int]]:
    """Bytes on this rank that are kept, and at the peaks of forward and backward, for each size."""
    comm, found = Communicator(Mesh.parse("cpu: gpu=2")), []
    for sizes in SIZES:
        values = given(*node_of(*sizes))
        values[4] = torch.tensor(list(itertools.combinations(range(EXPERTS), CHOICES))).repeat(
            32, 1
        )
        parts = [x.detach().chunk(2)[dist.get_rank()].clone() for x in values]
        own = [x.requires_grad_(x.is_floating_point()) for x in parts]
        gradient = torch.ones_like(own[3])
        with Alive([*own, gradient]) as alive:
            before = alive.live
            out = comm.mixture(*own, "silu", axis="gpu", size=EXPERTS, over="gpu")
            kept, forward = alive.live - before, max(live for _, live in alive.curve) - before
            alive.curve.clear()
            out.backward(gradient)
            found.append((kept, forward, max(live for _, live in alive.curve) - before))
    return found


def test_tokens_that_travel_are_in_the_predicted_bytes() -> None:
    """Two devices with a half of tokens and experts each; every pair of experts is as frequent."""
    mesh, ranks = Mesh.parse("cpu: gpu=2"), run_ranks(measured, count=2)
    for at, sizes in enumerate(SIZES):
        graph, node = node_of(*sizes)
        # Threads of gloo free what was sent, on one rank later than on the other.
        kept, forward, backward = map(min, zip(*(rank[at] for rank in ranks), strict=True))
        operands = tuple(graph[name] for name in node.inputs)
        into = tuple(Layout((("gpu",), *((),) * (len(x.type.shape) - 1))) for x in operands)
        found = recipe(node, operands, into, (Layout((("gpu",), ())),), mesh)
        held = found.results[0] + sum(found.extra)
        gradients = sum(size for size in found.gradients if size > 0)
        assert held == pytest.approx(kept, rel=0.02)
        assert held + found.scratch == pytest.approx(forward, rel=0.1)
        assert 0.95 < (held + gradients + found.backward_scratch) / backward < 1.2

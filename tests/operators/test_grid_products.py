"""Products on grids of devices: what is sent, against published closed forms, and training."""

from __future__ import annotations

import importlib
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.intra_op.node_choices import Option, node_options
from autopar.intra_op.rules import rules
from autopar.intra_op.work.kernel_work import node_work
from autopar.ir.graph import Graph
from autopar.ir.graph_text import parse_graph
from autopar.ir.mesh import Mesh
from autopar.ir.resharding.resharder import Resharder
from autopar.ir.tensor import Layout
from autopar.operators.exchange import exchanged
from tests.support.parity import train_plainly
from tests.support.ranks import run_ranks

M, N, K = 144, 192, 288


def linear(columns: int = N) -> Graph:
    return parse_graph(f"""graph 'linear'
%x = input('x') : f32[{M}, {K}] grad
%w = input('w') : f32[{columns}, {K}] grad
%y = aten.linear(%x, %w) : f32[{M}, {columns}] grad
""")


def option(mesh: Mesh, form: str, axes: tuple[str, str, tuple[str, ...]]) -> Option:
    """The choice in which x is split over (down, across), by depth too."""
    down, across, depth = axes
    graph = linear()
    options, _ = node_options(graph, graph["y"], mesh, rules())
    wanted = Layout(((down,), (*depth, across))), Layout(((across,), (*depth, down)))
    (found,) = (o for o in options if o.form == form and o.operands == wanted)
    return found


def sent(mesh: Mesh, form: str, axes: tuple[str, str, tuple[str, ...]]) -> tuple[float, float]:
    """Elements that a device sends to others, forwards and backwards, the sum over depth too."""
    graph, chosen = linear(), option(mesh, form, axes)
    node, types = graph["y"], (graph["x"].type, graph["w"].type)
    calls = exchanged(node, types, chosen.operands, mesh, form)
    down, across, depth = axes
    scattered = Layout(((down, *depth), (across,)))
    steps = Resharder(mesh, lambda call: float(call.nbytes)).steps(
        node.type, chosen.results[0], scattered, True
    )
    found = []
    for side, moved in zip(calls, ("forward", "backward"), strict=True):
        more = [call for step in steps if (call := getattr(step, moved)) is not None]
        total = 0.0
        for call in (*side, *more):
            count = math.prod(map(mesh.axis_size, call.axes))
            # All bytes are those of a buffer of which one part stays; a gather sends its part.
            times = count - 1 if call.kind.startswith("all_gather") else (count - 1) / count
            total += call.nbytes / 4 * times
        found.append(total)
    return found[0], found[1]


@pytest.mark.parametrize("side", [2, 3, 4])
def test_a_plane_sends_what_summa_does(side: int) -> None:
    """Each device has one block of each panel, and sends it to the others of its row or column.

    Backwards one operand is sent again and the gradient of the other summed, for both of them: Xu
    et al. (arXiv:2104.05343), section 3.1.
    """
    mesh = Mesh.parse(f"A100-80: r={side}, c={side}")
    once = (side - 1) * (M * K + K * N) / side**2
    assert sent(mesh, "2d", ("r", "c", ())) == pytest.approx((once, 2 * once))


@pytest.mark.parametrize(("side", "depth"), [(2, 3), (3, 2), (4, 2)])
def test_layers_divide_what_is_sent_in_a_plane(side: int, depth: int) -> None:
    """Solomonik & Demmel (2011): c layers send 1 / c of the panels each, and sum the result."""
    mesh = Mesh.parse(f"A100-80: d={depth}, r={side}, c={side}")
    panels = (side - 1) * (M * K + K * N) / (side**2 * depth)
    total = (depth - 1) / depth * M * N / side**2
    found = sent(mesh, "2.5d", ("r", "c", ("d",)))
    assert found == pytest.approx((panels + total, 2 * panels + total))


@pytest.mark.parametrize("side", [2, 3, 4])
def test_a_cube_sends_one_matrix_along_each_axis(side: int) -> None:
    """Agarwal et al. (1995): (q - 1) / q**3 of every matrix; the inputs again for the backward."""
    mesh = Mesh.parse(f"A100-80: d={side}, r={side}, c={side}")
    inputs, result = ((side - 1) * size / side**3 for size in (M * K + K * N, M * N))
    found = sent(mesh, "3d", ("r", "c", ("d",)))
    assert found == pytest.approx((inputs + result, 2 * inputs + result))


def test_every_form_states_where_rows_begin() -> None:
    """Devices multiply slowly where rows begin between units of 16 bytes, in whatever form."""
    columns = 2 * 97
    graph, mesh = linear(columns), Mesh.parse("A100-80: d=2, r=2, c=2")
    options, signature = node_options(graph, graph["y"], mesh, rules())
    assert {"2d", "3d"} <= {option.form for option in options}
    for option in options:
        work = node_work(
            graph, graph["y"], option.operands, option.results, signature, mesh, option.form
        )
        gemms = [kernel.gemm for kernel in (*work.forward, *work.backward) if kernel.gemm]
        assert gemms
        assert all(math.gcd(gemm.rows, columns) == gemm.rows for gemm in gemms), option


def test_parts_of_all_matrices_are_held() -> None:
    mesh = Mesh.parse("A100-80: d=2, r=2, c=2")
    chosen = option(mesh, "3d", ("r", "c", ("d",)))
    x, w = chosen.operands
    assert math.prod(x.local_shape((M, K), mesh)) == M * K // 8
    assert math.prod(w.local_shape((N, K), mesh)) == N * K // 8


class Perceptron(nn.Module):
    """Linears with and without biases, of a sequence, and a product of two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(24, 48), nn.Linear(48, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.last(torch.relu(self.first(x)))
        loss: Tensor = (hidden @ hidden.flatten(0, 1).t()).square().mean()
        return loss


def data() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {"x": torch.randn(4, 12, 24, generator=draw, dtype=torch.float64)}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Perceptron().double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train(mesh: str, form: str) -> tuple[list[float], dict[str, Tensor], str]:
    """Losses, state and source of this rank."""
    compiler = importlib.import_module("autopar.compile")
    program = compiler.compile(
        model(), mesh, optimizer=sgd, example_inputs=data(), pins=autopar.pins.form("*", form)
    )
    return [program.step(**data()).item() for _ in range(3)], program.state_dict(), program.source


def check(mesh: str, form: str, call: str) -> None:
    alone = model()
    losses = train_plainly(lambda: alone(**data()), sgd(alone.parameters()), 3)
    for got, state, source in run_ranks(train, mesh, form, count=Mesh.parse(mesh).size):
        assert source.count(f"mesh.linear_{call}(") == 2
        assert len(re.findall(rf"mesh\.(?:matmul|mm)_{call}\(", source)) == 1
        assert got == pytest.approx(losses, rel=1e-9)
        for key, value in alone.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-11)


def test_training_on_a_plane_is_that_on_one_device() -> None:
    check("cpu: y=2, x=2", "2d", "2d")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "form", "call"),
    [("cpu: z=2, y=2, x=2", "3d", "3d"), ("cpu: z=3, y=2, x=2", "2.5d", "25d")],
)
def test_training_on_layers_is_that_on_one_device(mesh: str, form: str, call: str) -> None:
    check(mesh, form, call)

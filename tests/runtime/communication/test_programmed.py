"""Every algorithm on gloo ranks gives the library's result, bitwise equal on all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from autopar.cost.collectives import algorithms
from autopar.errors import CollectiveError
from autopar.ir.chosen_algorithms import Algorithm, ChosenAlgorithms, directions
from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh
from autopar.ir.resharding import Resharder
from autopar.ir.tensor import Layout, TensorType
from autopar.runtime.communication.communicator import Communicator
from autopar.runtime.communication.group import Group
from tests.cost.programs.grids import ALGORITHMS
from tests.support.ranks import run_ranks

DTYPES = (torch.float64, torch.bfloat16, torch.int32)
SIZES = (1, 1001)  # fewer elements than chunks, and a number that does not divide


def moved(group: Group, kind: str, elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the result of a call on this rank, and a tensor that it must leave as it is."""
    made = torch.Generator().manual_seed(1000 * elements + torch.distributed.get_rank())
    x = torch.randn(group.size * elements, generator=made, dtype=torch.float64) * 100
    x = x.to(dtype)
    calls = group.calls
    if kind == "all_reduce":
        return group.reduce(x), x
    if kind == "all_gather":
        x = x[:elements].clone()
        out = x.new_empty(group.size * elements)
        calls.all_gather(out, x)
    elif kind == "reduce_scatter":
        out = x.new_empty(elements)
        calls.reduce_scatter(out, x)
    elif kind == "all_to_all":
        out = torch.empty_like(x)
        calls.all_to_all(out, x)
    else:
        out = x.clone()
        calls.broadcast(out, calls.ranks[0])
    return out, x


def everything(text: str, axes: tuple[str, ...], pieces: int) -> dict[Any, Any]:
    comm = Communicator(Mesh.parse(text))
    found: dict[Any, Any] = {}
    for kind, name in ALGORITHMS:
        for dtype in DTYPES:
            for elements in SIZES:
                own, before = moved(comm.group(axes), kind, elements, dtype)
                by = str(Algorithm(name, pieces))
                ours, after = moved(comm.group(axes, by), kind, elements, dtype)
                assert torch.equal(before, after), (kind, by, "changes what it is given")
                found[kind, by, dtype, elements] = own, ours
    return found


def check(ranks: list[dict[Any, Any]]) -> None:
    """`ranks` are those of one group."""
    for key in ranks[0]:
        kind, _, dtype, _ = key
        for rank in ranks:
            own, ours = rank[key]
            if kind in ("all_reduce", "reduce_scatter") and dtype.is_floating_point:
                # Sums of eight numbers of up to some hundreds, in another order.
                bound = 2e4 * torch.finfo(dtype).eps
                assert torch.allclose(own.double(), ours.double(), rtol=0, atol=bound), key
            else:
                assert torch.equal(own, ours), key
            if kind == "all_reduce":
                assert torch.equal(ours, ranks[0][key][1]), (key, "other bits on another rank")


@pytest.mark.parametrize(
    "text", [pytest.param("cpu: gpu=4", marks=pytest.mark.slow), "cpu: node=2, gpu=2"]
)
def test_on_four_ranks(text: str) -> None:
    axes = Mesh.parse(text).names
    check(run_ranks(everything, text, axes, 1))


@pytest.mark.slow
def test_in_pieces_and_on_eight_ranks() -> None:
    check(run_ranks(everything, "cpu: node=2, gpu=4", ("node", "gpu"), 3, count=8))


class Shown(NamedTuple):
    """Findings of one of four ranks."""

    along_one_axis: dict[Any, Any]
    stepped: list[tuple[str, Tensor, Tensor]]
    refused: str
    switched: list[str]
    beside: tuple[list[float], list[float], list[float]]


def shown() -> Shown:
    mesh = "cpu: node=2, gpu=2"
    return Shown(everything(mesh, ("gpu",), 2), stepped(), refused(), switched(), beside())


@pytest.fixture(scope="module")
def ranks() -> list[Shown]:
    return run_ranks(shown)


def test_along_one_axis_of_two(ranks: list[Shown]) -> None:
    results = [rank.along_one_axis for rank in ranks]
    check(results[:2])
    check(results[2:])


def stepped() -> list[tuple[str, Tensor, Tensor]]:
    """Every step of a few changes of layout, by the library and by algorithms, with gradients."""
    mesh = Mesh.parse("cpu: node=2, gpu=2")
    comm, tensor = Communicator(mesh), TensorType("f64", (5, 7))
    whole = torch.arange(35.0, dtype=torch.float64).view(5, 7)
    found = []
    for src, dst in (
        (Layout(((), ()), ("node", "gpu")), Layout(((), ()))),
        (Layout((("node", "gpu"), ())), Layout(((), ()), (), ("node", "gpu"))),
        (Layout((("node",), ())), Layout(((), ("node",)))),
        (Layout(((), ())), Layout((("gpu",), ()))),
        (Layout(((), ()), ("gpu",)), Layout(((), ("gpu",)))),
    ):
        for named in (None, _named):
            way = Resharder(mesh, lambda call: 1.0 + call.nbytes, named=named)
            x = comm.shard(whole, src).requires_grad_()
            y, text = x, []
            for step in way.steps(tensor, src, dst):
                y = comm.apply(step, y, tensor.shape)
                text += [step.op, str(directions(step))]
            y.backward(torch.ones_like(y))
            assert x.grad is not None
            found.append((" ".join(text), y.detach(), x.grad))
    return found


def _named(call: Collective) -> Collective:
    name = {"all_to_all": "two_level"}.get(call.kind, "2d_torus")
    return Collective(call.kind, call.axes, call.nbytes, 0, name)


def test_steps_of_layouts_go_by_their_algorithm_both_ways(ranks: list[Shown]) -> None:
    for results in (rank.stepped for rank in ranks):
        for (plain, y, gradient), (by, other, its) in zip(results[::2], results[1::2], strict=True):
            assert "2d_torus" not in plain
            assert "2d_torus" in by or "two_level" in by
            assert torch.equal(y, other)
            assert torch.equal(gradient, its)


def refused() -> str:
    comm = Communicator(Mesh.parse("cpu: node=2, gpu=2"))
    with pytest.raises(CollectiveError) as caught:
        comm.group("gpu", "2d_torus over 2x2")
    with pytest.raises(CollectiveError, match="telepathy"):
        comm.group("gpu", "telepathy").reduce(torch.ones(3))
    assert comm.group("gpu", "2d_torus").maximum(torch.ones(2)).tolist() == [1.0, 1.0]
    return str(caught.value)


def test_what_does_not_fit_is_refused_by_name(ranks: list[Shown]) -> None:
    assert all("2d_torus over 2x2 runs among 2 ranks" in rank.refused for rank in ranks)
    assert "telepathy" not in algorithms("all_reduce")


def switched() -> list[str]:
    """Returns what runs one call before and after another table of algorithms is set."""
    comm, x = Communicator(Mesh.parse("cpu: node=2, gpu=2")), torch.ones(64)
    row = "all_reduce over node, gpu from 100: {}"
    for rows in ([], [row.format("2d_torus")], [row.format("h_ring")]):
        comm.chosen = ChosenAlgorithms.parse(rows)
        for tensor in (x, x[:8]):
            comm.group(("node", "gpu")).reduce(tensor)
        comm.group(("node", "gpu"), "library").reduce(x)
    kinds = [event.kind for event in comm.peers.recorder.events]
    return [kind for kind in kinds if kind.startswith("all_reduce")][-9:]


def test_calls_that_name_none_are_run_as_the_table_says(ranks: list[Shown]) -> None:
    plain = "all_reduce"
    expected = [plain] * 3
    for name in ("2d_torus", "h_ring"):
        expected += [f"{plain} by {name}", plain, plain]  # 32 bytes are less than the row says
    assert [rank.switched for rank in ranks] == [expected] * 4


def beside() -> tuple[list[float], list[float], list[float]]:
    """Two programs while a gather of the library on the same ranks is under way."""
    comm = Communicator(Mesh.parse("cpu: node=2, gpu=2"))
    x = torch.full((3,), 10.0**comm.rank)
    gathered = x.new_empty(12)
    waiting = comm.group(("node", "gpu")).calls.all_gather(gathered, x, ahead=True)
    over_all = comm.group(("node", "gpu"), "h_ring/2").reduce(x)
    over_one = comm.group("gpu", "flat_ring").reduce(x)
    assert waiting is not None
    waiting.wait()
    return gathered.tolist(), over_all.tolist(), over_one.tolist()


def test_programs_run_beside_a_call_of_the_library(ranks: list[Shown]) -> None:
    for rank, shown in enumerate(ranks):
        gathered = [value for value in (1.0, 10.0, 100.0, 1000.0) for _ in range(3)]
        assert shown.beside == (gathered, [1111.0] * 3, [11.0 if rank < 2 else 1100.0] * 3)

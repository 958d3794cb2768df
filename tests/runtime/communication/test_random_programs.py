"""Random calls by every algorithm, and random programs, against sums that one process makes.

The cases are drawn here and run by ranks in one go; a rank makes its input and the inputs of its
peers from the case alone, so that what is expected needs no communication.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from autopar.cost import collectives
from autopar.cost.collectives import written
from autopar.cost.programs.collective_checker import check_program
from autopar.cost.programs.row_check import checked
from autopar.errors import AutoparError, CollectiveError
from autopar.ir.chosen_algorithms import Algorithm, ChosenAlgorithms
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout
from autopar.runtime.communication import programmed
from autopar.runtime.communication.communicator import Communicator
from tests.cost.programs.grids import ALGORITHMS
from tests.support.ranks import run_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


class Call(NamedTuple):
    """A drawn call: of a kind over axes, by an algorithm, of so many elements in a block."""

    kind: str
    axes: tuple[str, ...]
    by: str
    elements: int
    dtype: torch.dtype
    seed: int


def draw(number: int, mesh: Mesh, among: list[tuple[str, str]]) -> Call:
    """A call of a kind and an algorithm that `among` has, over some axes in any order."""
    dice = random.Random(number)
    kind, name = dice.choice(among)
    axes = dice.sample(mesh.names, dice.randint(1, len(mesh.names)))
    ranks = math.prod(mesh.axis_size(axis) for axis in axes)
    by = Algorithm(name, dice.choice((1, 1, 2, 3, 7)), dice.choice(((), (ranks,), (1, ranks))))
    elements = dice.choice((0, 1, 2, 3, 5, 8, 17, 64, 301))
    dtype = dice.choice([t for t in DTYPES if t.is_floating_point or kind in MOVES])
    return Call(kind, tuple(axes), str(by), elements, dtype, number)


MOVES = ("all_gather", "all_to_all", "broadcast")


def given(call: Call, rank: int, length: int) -> Tensor:
    """What a rank of the mesh brings: whole numbers, so that sums are exact in every dtype."""
    made = torch.Generator().manual_seed(64 * call.seed + rank)
    return torch.randint(-3, 4, (length,), generator=made).to(call.dtype)


def expected(call: Call, members: list[int], me: int) -> Tensor:
    """What rank number `me` of the group has afterwards."""
    count, each = len(members), call.elements
    whole = each if call.kind in ("all_gather", "broadcast", "all_reduce") else each * count
    brought = [given(call, rank, whole) for rank in members]
    if call.kind == "all_gather":
        return torch.cat(brought)
    if call.kind == "broadcast":
        return brought[0]
    if call.kind == "all_to_all":
        return torch.cat([x.view(count, each)[me] for x in brought])
    total = torch.stack(brought).sum(0).to(call.dtype)
    return total if call.kind == "all_reduce" else total.view(count, each)[me]


def made(comm: Communicator, call: Call, members: list[int], rank: int) -> Tensor:
    """What the call gives here; its input must be as before, but where it is the result."""
    group, count, each = comm.group(call.axes, call.by), len(members), call.elements
    whole = each if call.kind in ("all_gather", "broadcast", "all_reduce") else each * count
    x = given(call, rank, whole)
    before, out = x.clone(), x.clone()
    if group.channel is None:
        return expected(call, members, 0)
    if call.kind == "all_reduce":
        group.calls.all_reduce(out)
    elif call.kind == "broadcast":
        group.calls.broadcast(out, group.calls.ranks[0])
    elif call.kind == "all_gather":
        out = x.new_empty(count * each)
        group.calls.all_gather(out, x)
    elif call.kind == "reduce_scatter":
        out = x.new_empty(each)
        group.calls.reduce_scatter(out, x)
    else:
        out = torch.empty_like(x)
        group.calls.all_to_all(out, x)
    assert torch.equal(x, before), call
    return out


def on_rank(text: str, calls: list[Call], folder: str = "") -> int:
    """Makes every call; returns how many."""
    if folder:
        sys.path.insert(0, folder)
        collectives.__path__.append(folder)
        collectives.algorithms.cache_clear()
    mesh = Mesh.parse(text)
    comm = Communicator(mesh)
    for call in calls:
        groups = mesh.groups([name for name in mesh.names if name in call.axes])
        (members,) = (list(group) for group in groups if comm.rank in group)
        got = made(comm, call, members, comm.rank)
        assert torch.equal(got, expected(call, members, members.index(comm.rank))), call
    return len(calls)


@pytest.mark.parametrize(
    "text",
    [
        "cpu: gpu=2",
        "cpu: node=2, gpu=2",
        "cpu: gpu=3",
        pytest.param("cpu: rack=2, node=2, gpu=2", marks=pytest.mark.slow),
    ],
)
def test_random_calls_give_what_one_process_computes(text: str) -> None:
    mesh = Mesh.parse(text)
    calls = [draw(number, mesh, ALGORITHMS) for number in range(150)]
    assert run_ranks(on_rank, text, calls, count=mesh.size) == [150] * mesh.size


RANDOM = '''
"""An all_reduce that reduces every chunk along a tree of its own, and broadcasts it so."""

import math
import random

from autopar.cost.programs.collective_program import Message

NAME = "random_{seed}"


def all_reduce(shape):
    dice, count = random.Random({seed}), math.prod(shape)
    chunks, rounds = dice.randint(1, 4), []
    orders = [dice.sample(range(count), count) for _ in range(chunks)]
    above = [
        {{rank: dice.choice(order[:place]) for place, rank in enumerate(order) if place}}
        for order in orders
    ]
    for place in range(count - 1, 0, -1):
        rounds += _apart((order[place], up[order[place]], (c,), True)
                         for c, (order, up) in enumerate(zip(orders, above)))
    for place in range(1, count):
        rounds += _apart((up[order[place]], order[place], (c,), False)
                         for c, (order, up) in enumerate(zip(orders, above)))
    return chunks, rounds


def _apart(rows):
    """One round, with the chunks that two ranks send one another in one message."""
    found = {{}}
    for source, target, chunks, adds in rows:
        found.setdefault((source, target, adds), []).extend(chunks)
    return [tuple(Message(s, t, tuple(sorted(c)), a) for (s, t, a), c in found.items())]
'''


def test_random_programs_run_as_the_checker_proves(tmp_path: Path) -> None:
    """Trees that differ from chunk to chunk: chunks of one message were written by others apart."""
    seeds = range(12)
    for seed in seeds:
        (tmp_path / f"random_{seed}.py").write_text(RANDOM.format(seed=seed))
    calls = [
        Call("all_reduce", ("gpu",), f"random_{seed}", elements, torch.float64, seed)
        for seed in seeds
        for elements in (1, 7, 40)
    ]
    collectives.__path__.append(str(tmp_path))
    collectives.algorithms.cache_clear()
    try:
        for seed in seeds:
            check_program(written("all_reduce", f"random_{seed}", (4,)))
    finally:
        collectives.__path__.remove(str(tmp_path))
        collectives.algorithms.cache_clear()
        collectives.written.cache_clear()
    assert run_ranks(on_rank, "cpu: gpu=4", calls, str(tmp_path)) == [len(calls)] * 4


def test_a_later_sum_does_not_overtake_what_was_kept() -> None:
    """A rank keeps chunks 0 and 3, then adds to chunks 0 and 1, then sends chunk 1, in this order.

    The two that are kept do not lie together, so that they are copied when they are awaited.
    """
    assert run_ranks(kept_then_added, count=2) == [[1.0, 2.0, 6.0, 1.0], [2.0, 6.0, 0.0, 1.0]]


def kept_then_added() -> list[float]:
    me = torch.distributed.get_rank()
    spans = [(0, chunk, 1) for chunk in range(4)]

    def post(chunks: tuple[int, ...], does: str, tag: int) -> tuple[programmed._Message, ...]:
        here = tuple(spans[chunk] for chunk in chunks)
        return (programmed._Message(1 - me, chunks, here, does, tag),)

    if me:
        rounds = post((0, 3), "keep", 0), post((0, 1), "add", 1), post((1,), "send", 0)
    else:
        rounds = post((0, 3), "send", 0), post((0, 1), "send", 1), post((2,), "keep", 0)
    buffer = torch.tensor([[1.0, 2.0, 0.0, 1.0], [2.0, 4.0, 0.0, 0.0]][me])
    comm = Communicator(Mesh.parse("cpu: gpu=2"))
    calls = comm.group("gpu").calls
    programmed._Run(calls.handle, calls.ranks, [buffer]).execute(programmed._Work(rounds, 0))
    return buffer.tolist()


ROWS = {
    "telepathy": "all_reduce over node, gpu from 99999999: telepathy",
    "direct": "all_reduce over gpu from 0: direct",
    "allreduce": "allreduce over gpu from 0: flat_ring",
    "twice": "all_reduce over gpu, gpu from 0: flat_ring",
    "written for 8": "all_gather over node, gpu from 0: h_ring over 2x4",
    "tensor": "all_gather over tensor from 0: flat_ring",
}


@pytest.mark.parametrize("named", list(ROWS))
def test_rows_that_cannot_run_are_refused_before_a_call(named: str) -> None:
    with pytest.raises(AutoparError, match=named):
        checked(ChosenAlgorithms.parse([ROWS[named]]), Mesh.parse("cpu: node=2, gpu=2"))


def test_programs_of_too_many_messages_are_refused_before_they_are_written() -> None:
    with pytest.raises(CollectiveError, match="messages"):
        written("all_gather", "flat_ring", (64,), 9999)
    with pytest.raises(CollectiveError, match="ranks"):
        written("all_gather", "flat_ring", (99999999,))


def test_two_rows_of_one_size_are_refused() -> None:
    rows = [
        "all_reduce over node, gpu from 8: 2d_torus",
        "all_reduce over gpu, node from 8: h_ring",
    ]
    with pytest.raises(CollectiveError, match="same size"):
        ChosenAlgorithms.parse(rows)
    assert ChosenAlgorithms.parse([rows[0], rows[0]])


def by_layouts(text: str, seeds: list[int]) -> int:
    """Autograd through random changes of layout on uneven tensors, by algorithms and without."""
    mesh = Mesh.parse(text)
    comm = Communicator(mesh)
    for seed in seeds:
        dice = random.Random(seed)
        shape = (dice.randint(4, 9), dice.randint(4, 9))
        whole = torch.arange(math.prod(shape), dtype=torch.float64).view(shape).sin()
        weights = torch.arange(math.prod(shape), dtype=torch.float64).view(shape).cos()
        axes = tuple(dice.sample(mesh.names, dice.randint(1, len(mesh.names))))
        dim = dice.randint(0, 1)
        split: Any = ((axes, ()), ((), axes))[dim]
        name, pieces = (
            dice.choice(("flat_ring", "2d_torus", "ho_ring", "h_ring")),
            dice.choice((1, 3)),
        )
        by = str(Algorithm(name, pieces))
        x = comm.shard(whole.t().contiguous().t(), Layout(split)).requires_grad_()
        y = comm.all_gather(x, dim, axes, shape[dim], by=by, back=by)
        assert torch.equal(y, whole), seed
        # The gradient is the sum over ranks, each of which weights the whole by its number.
        (y * weights * (comm.rank + 1)).sum().backward()
        groups = mesh.groups([n for n in mesh.names if n in axes])
        (members,) = (list(group) for group in groups if comm.rank in group)
        factor = sum(rank + 1 for rank in members)
        want = comm.shard(weights * factor, Layout(split))
        torch.testing.assert_close(x.grad, want, rtol=1e-13, atol=0)
    return len(seeds)


@pytest.mark.parametrize("text", ["cpu: gpu=2", "cpu: node=2, gpu=2"])
def test_gradients_go_through_algorithms_on_uneven_parts(text: str) -> None:
    seeds = list(range(30))
    count = Mesh.parse(text).size
    assert run_ranks(by_layouts, text, seeds, count=count) == [30] * count

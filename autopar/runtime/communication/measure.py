"""Measures kernels and collectives on this machine, for `cost.measured`.

All processes of the mesh run each problem at once, so that they compete for the machine as in
training; a run takes as long as the slowest of them. Operators are measured with autograd
recording, several independent ones per run, so that their time includes the overhead of Python, the
dispatcher and autograd.

Where processes share processors, collectives are measured after work, as programs call them. The
processes then do not arrive at once, since each runs for some milliseconds before another has its
turn; waiting for the last of them is part of a collective's time.

All problems are measured once before any is measured again, so that a temporary disturbance affects
one round of all of them, which the median over rounds discards.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.cost.calibration import (
    Calibration,
    Exchange,
    Kernel,
    Point,
    Product,
    Timing,
    disorder,
)
from autopar.cost.work import Gemm
from autopar.ir.mesh import Mesh
from autopar.runtime.communication.clocks import Bench, timing
from autopar.runtime.communication.communicator import Communicator
from autopar.runtime.communication.group import Group
from autopar.runtime.communication.measure_host import host_figures

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
WIDTH = 256  # row length of normalisations and softmax
HEAD = 64  # width of a head of attention
_AGAIN = 10  # most repetitions of problems that took longer than larger ones
Progress = Callable[[str, int, int], None]
P = TypeVar("P", bound=Point)


@dataclass(frozen=True)
class Settings:
    """The extent of a calibration.

    Attributes:
        dtypes: dtypes of the IR.
        lengths: lengths of each side of matrix products.
        elements: numbers of elements of kernels' results.
        sequences: lengths of attention.
        payloads: bytes per device of collectives.
        runs: consecutive runs of each problem.
        rounds: rounds over all problems.
        seconds: least duration of a run; shorter problems are repeated in it.
        products: dtypes of further matrix products.
    """

    dtypes: tuple[str, ...]
    lengths: tuple[int, ...]
    elements: tuple[int, ...]
    sequences: tuple[int, ...]
    payloads: tuple[int, ...]
    runs: int
    rounds: int
    seconds: float
    products: tuple[str, ...] = ()


def settings(device: torch.device, quick: bool = False) -> Settings:
    """Returns the usual settings for a kind of device; `quick` ones are imprecise."""
    usual = Settings(
        dtypes=("f32",),
        lengths=(16, 64, 256, 1024),
        elements=_powers(8, 22, 2),
        sequences=(32, 128, 512),
        payloads=_powers(8, 24, 2),
        runs=3,
        rounds=5,
        seconds=0.01,
        products=("bf16",),  # of mixed precision and of Muon; no fixed share of the rate in f32
    )
    if quick:
        few, some = (16, 64), _powers(10, 14, 4)
        usual = replace(usual, lengths=few, elements=some, sequences=(16, 32), payloads=some)
        return replace(usual, runs=3, rounds=1, seconds=0.0)
    if device.type == "cuda":
        usual = replace(usual, dtypes=("bf16", "f32"), products=())
        usual = replace(usual, lengths=(128, 512, 2048, 8192))
        usual = replace(usual, elements=_powers(12, 28, 4), payloads=_powers(12, 28, 2))
        return replace(usual, sequences=(512, 2048, 8192))
    return usual


def _powers(low: int, high: int, step: int) -> tuple[int, ...]:
    return tuple(1 << i for i in range(low, high + 1, step))


@dataclass(frozen=True)
class Problem:
    """An operator to measure, forwards and backwards.

    Attributes:
        op: its name in graphs.
        inputs: creates inputs of one dtype; floating ones get a gradient.
        run: the operator.
        flops: FLOPs of each direction on matrix units, else 0.
        nbytes: bytes that each direction reads and writes, as `intra_op.kernel_work` counts them.
        kernels: number of kernels in the backward.
    """

    op: str
    inputs: Callable[[torch.dtype, torch.device], tuple[Tensor, ...]]
    run: Callable[..., Tensor]
    flops: tuple[float, float]
    nbytes: tuple[float, float]
    kernels: int = 1


def problems(size: int, itemsize: int) -> Iterator[Problem]:
    """Yields operators bound by memory, with results of `size` elements in rows of WIDTH."""
    n, rows = float(size * itemsize), max(size // WIDTH, 1)
    row = (rows, min(size, WIDTH))

    def one(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.randn(row, dtype=dtype, device=device),)

    def two(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        return (*one(dtype, device), *one(dtype, device))

    def turned(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """Creates a tensor with permuted strides, like heads of attention."""
        return (torch.randn(16, size // 16, dtype=dtype, device=device).transpose(0, 1),)

    def labelled(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        return (*one(dtype, device), torch.zeros(rows, dtype=torch.int64, device=device))

    def normalised(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])

    yield Problem("aten.add.Tensor", two, torch.add, (0, 0), (3 * n, 0))
    yield Problem("aten.mul.Tensor", two, torch.mul, (0, 0), (3 * n, 3 * n), kernels=2)
    yield Problem("aten.gelu", one, F.gelu, (0, 0), (2 * n, 3 * n))
    yield Problem("aten.silu", one, F.silu, (0, 0), (2 * n, 3 * n))
    yield Problem("aten.tanh", one, torch.tanh, (0, 0), (2 * n, 3 * n))
    yield Problem("aten.pow.Tensor_Scalar", one, _cubed, (0, 0), (2 * n, 3 * n))
    yield Problem("aten.layer_norm", one, normalised, (0, 0), (2 * n, 3 * n))
    yield Problem("aten.softmax.int", one, _softmax, (0, 0), (2 * n, 3 * n))
    yield Problem("aten.reshape", turned, _copied, (0, 0), (2 * n, 2 * n))
    yield Problem("aten.cross_entropy_loss", labelled, F.cross_entropy, (0, 0), (2 * n, 2 * n))


def attention(length: int, itemsize: int, heads: int = 4) -> Problem:
    """Returns causal attention of `heads` heads over `length` positions."""

    def inputs(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(torch.randn(heads, length, HEAD, dtype=dtype, device=device) for _ in "qkv")

    once = 2.0 * heads * length * ((length + 1) // 2) * HEAD
    nbytes = 4.0 * heads * length * HEAD * itemsize
    op = "aten.scaled_dot_product_attention"
    return Problem(op, inputs, _attention, (2 * once, 5 * once), (nbytes, 2 * nbytes))


def _cubed(x: Tensor) -> Tensor:
    return torch.pow(x, 3.0)


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _copied(x: Tensor) -> Tensor:
    return x.reshape(-1)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # Fused attention kernels need four dimensions.
    result = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
    return result[0]


def calibrate(
    mesh: Mesh, device: torch.device, chosen: Settings, date: str, progress: Progress
) -> Calibration:
    """Measures this machine; all processes of the mesh call it and get the same result.

    Args:
        mesh: a mesh with as many devices as there are processes.
        device: device of this process.
        chosen: the extent of the calibration.
        date: today's date, as text.
        progress: called for each problem with its name, its number and the total.

    Raises:
        MeshError: the mesh and the number of processes differ.
        CalibrationError: a time is not positive.
    """
    comm = Communicator(mesh)
    bench = Bench(comm.group(mesh.names), device, chosen.runs, chosen.seconds)
    plan = list(_plan(bench, comm, chosen))
    total, rounds = chosen.rounds * len(plan), list[list[list[Point]]]()
    for _ in range(chosen.rounds):
        rounds.append([])
        for name, measure in plan:
            progress(name, (len(rounds) - 1) * len(plan) + len(rounds[-1]) + 1, total)
            rounds[-1].append(measure())
    medians = [middle(each) for each in zip(*rounds, strict=True)]
    # Other load on the machine only slows problems down, so a small problem that took longer than a
    # larger one is measured again.
    for _ in range(_AGAIN):
        slow = {id(small) for small, _ in disorder(itertools.chain(*medians))}
        for number, points in enumerate(medians):
            if any(id(point) in slow for point in points):
                progress(plan[number][0], total, total)
                again = zip(points, plan[number][1](), strict=True)
                medians[number] = [
                    min(pair, key=lambda point: point.time.seconds) for pair in again
                ]
    measured = list(itertools.chain(*medians))
    points = in_order(measured)
    changed = [str(new) for old, new in zip(measured, points, strict=True) if new != old]
    if changed and comm.rank == 0:
        warnings.warn(
            f"took longer than larger problems and got their times: {', '.join(changed)};"
            " calibrate again on a quiet machine for better ones",
            RuntimeWarning,
            stacklevel=2,
        )
    return Calibration(
        mesh,
        torch.__version__,
        date,
        tuple(point for point in points if isinstance(point, Product)),
        tuple(point for point in points if isinstance(point, Kernel)),
        tuple(point for point in points if isinstance(point, Exchange)),
    )


def in_order(points: Sequence[Point]) -> list[Point]:
    """Returns the points, of which none takes clearly longer than a larger one.

    A problem takes at most as long as a larger one, so it gets the time of that one where it was
    measured clearly longer.
    """
    ordered = {str(point): point for point in points}
    while found := list(disorder(ordered.values())):
        for small, large in found:
            shorter = min(ordered[str(small)].time, large.time, key=lambda time: time.seconds)
            ordered[str(small)] = replace(small, time=shorter)
    return list(ordered.values())


def middle(rounds: Sequence[Sequence[P]]) -> list[P]:
    """Returns the points of one or several problems, each with the median over its rounds."""
    if len(rounds) == 1:
        return list(rounds[0])
    return [
        replace(points[0], time=timing([point.time.seconds for point in points]))
        for points in zip(*rounds, strict=True)
    ]


def _plan(
    bench: Bench, comm: Communicator, chosen: Settings
) -> Iterator[tuple[str, Callable[[], list[Point]]]]:
    """Yields the name and the measuring function of each problem."""
    for dtype in (*chosen.dtypes, *chosen.products):
        for m, n, k in itertools.product(chosen.lengths, repeat=3):
            name = f"matmul {m} x {n} x {k} {dtype}"
            yield name, partial(_product, bench, dtype, Gemm(1, m, n, k, rows=0))
    for dtype in chosen.dtypes:
        size = DTYPES[dtype].itemsize
        for elements in chosen.elements:
            for problem in problems(elements, size):
                name = f"{problem.op} of {elements} elements {dtype}"
                yield name, partial(_kernels, bench, dtype, problem)
            name = f"optimizer of {elements} elements {dtype}"
            yield name, partial(_optimizer, bench, dtype, elements)
        for length in chosen.sequences:
            name = f"attention over {length} {dtype}"
            yield name, partial(_kernels, bench, dtype, attention(length, size))
    if bench.device.type != "cpu":  # where the host does the work itself
        yield "the host", lambda: list(host_figures(bench, comm.group(comm.mesh.names)))
    for axes, payload in itertools.product(groups(comm.mesh), chosen.payloads):
        for kind in COLLECTIVES:
            name = f"{kind} of {payload} bytes over {', '.join(axes)}"
            yield name, partial(_exchange, bench, comm.group(axes), kind, payload)


def groups(mesh: Mesh) -> list[tuple[str, ...]]:
    """Returns every set of axes with more than one device, in mesh order."""
    wide = [axis.name for axis in mesh.axes if axis.size > 1]
    return [
        names for count in range(1, len(wide) + 1) for names in itertools.combinations(wide, count)
    ]


def _product(bench: Bench, dtype: str, gemm: Gemm) -> list[Point]:
    x, w = (
        torch.randn(rows, gemm.k, dtype=DTYPES[dtype], device=bench.device, requires_grad=True)
        for rows in (gemm.m, gemm.n)
    )
    return [Product(dtype, gemm, bench.alone(lambda: F.linear(x, w)))]


def _kernels(bench: Bench, dtype: str, problem: Problem) -> list[Point]:
    """Measures both directions of an operator; the backward only if it launches something."""
    copies = 8 if problem.nbytes[0] < 1 << 22 else 2
    inputs = [problem.inputs(DTYPES[dtype], bench.device) for _ in range(copies)]
    forward, backward = bench.operator(inputs, problem.run)
    back = Timing(backward.seconds / problem.kernels, backward.spread)
    sides = ((problem.op, forward), (f"{problem.op} backward", back))
    return [
        Kernel(name, dtype, flops, nbytes, taken, "flops" if flops else "nbytes")
        for (name, taken), flops, nbytes in zip(sides, problem.flops, problem.nbytes, strict=True)
        if nbytes
    ]


def _optimizer(bench: Bench, dtype: str, elements: int) -> list[Point]:
    """Measures AdamW's update of one parameter."""
    parameter = torch.nn.Parameter(torch.randn(elements, dtype=DTYPES[dtype], device=bench.device))
    parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW([parameter], lr=1e-6)
    nbytes = parameter.numel() * parameter.element_size()
    return [Kernel("optimizer", dtype, 0.0, 7.0 * nbytes, bench.alone(optimizer.step))]


COLLECTIVES: dict[str, Callable[[Group, Tensor], object]] = {
    "all_reduce": lambda group, x: group.reduce(x),
    "all_gather": lambda group, x: group.gather(x, 0),
    "reduce_scatter": lambda group, x: group.reduce_scatter(x, 0),
    "all_to_all": lambda group, x: group.exchange(x.view(group.size, -1), 1, 0),
    "broadcast": lambda group, x: group.calls.broadcast(x, group.calls.ranks[0]),
    "send": lambda group, x: group.neighbours(x, x),
}


def _exchange(bench: Bench, group: Group, kind: str, payload: int) -> list[Point]:
    """Measures a collective of `payload` bytes per device, in f32, as programs call it."""
    count = max(payload // 4 // group.size, 1) * group.size
    x = torch.randn(count, device=bench.device)
    # Each accelerator belongs to one process and gets its work ahead of time.
    measure = bench.alone if bench.device.type == "cuda" else bench.behind
    taken = measure(lambda: COLLECTIVES[kind](group, x))
    if kind == "send":  # neighbours send in both directions at once
        taken = Timing(taken.seconds / 2, taken.spread)
    return [Exchange(kind, group.axes, 4.0 * count, taken)]

"""Chooses the cheapest algorithm of a collective by its kind, axes and size.

Without a calibration, all algorithms are simulated and compared with the predicted time of the
library. If a calibration compared them on these devices (`runtime/communication/compare.py`), only
its measurements count: the library runs all other calls, because simulated and measured times
cannot be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

from autopar.cost.collectives import algorithms, written
from autopar.cost.network import Network
from autopar.cost.programs.collective_program import Round
from autopar.cost.programs.message_simulation import flow_of
from autopar.ir.chosen_algorithms import LIBRARY, Algorithm, ChosenAlgorithms, ChosenRow
from autopar.ir.collective import Collective

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")  # those in plans
MOST_RANKS = 128  # of a group whose algorithms are compared; larger groups use the library's call
MOST_MESSAGES = 20_000
PIECES = (4, 16)  # numbers of pieces per chunk that are tried, in addition to whole chunks
NEAR = 2.0  # an algorithm slower than the best by this factor is not tried in pieces
SIZES = tuple(1 << power for power in range(10, 33))
GAIN = 1.02  # an algorithm must be faster than the library by this factor

Price = Callable[[Collective], float]
Compared = Callable[[str, tuple[str, ...]], tuple[str, ...]]


def choose(network: Network, price: Price, compared: Compared | None = None) -> ChosenAlgorithms:
    """Returns the cheapest algorithm of every collective over every set of axes, by size.

    Args:
        network: the levels under the axes of a mesh.
        price: returns the seconds of a call, whether or not it names its algorithm.
        compared: returns the texts of the algorithms that were measured for a collective over some
            axes; None if prices are simulated.
    """
    mesh = network.mesh
    names = [axis.name for axis in mesh.axes if axis.size > 1]
    rows: list[ChosenRow] = []
    for axes in (axes for n in range(1, len(names) + 1) for axes in combinations(names, n)):
        shape = tuple(level.size for level in network.levels(axes))
        sizes = tuple(mesh.axis_size(name) for name in axes)
        for kind in KINDS:
            if compared is not None:
                choice = partial(_fastest, compared(kind, axes), price)
            else:
                ways = list(_ways(kind, shape, () if shape == sizes else shape))
                choice = partial(_best, ways, price)
            before = LIBRARY
            for nbytes in SIZES:
                best = choice(Collective(kind, axes, nbytes))
                if best != before:
                    rows.append(ChosenRow(kind, axes, nbytes, best))
                before = best
    return ChosenAlgorithms(tuple(rows))


def _ways(
    kind: str, shape: tuple[int, ...], named: tuple[int, ...]
) -> Iterator[tuple[Algorithm, int]]:
    """Yields each algorithm to compare, with its number of messages; `named` are its levels."""
    for name in algorithms(kind) if 2 < math.prod(shape) <= MOST_RANKS else ():
        messages = len(flow_of(kind, name, shape).waits)
        if messages <= MOST_MESSAGES:
            yield Algorithm(name, 1, named), messages


def candidates(kind: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Returns the algorithms to measure for ranks on these levels, as text.

    Each algorithm occurs with whole chunks and with every number of `PIECES`; of two with equal
    rounds only one is returned. The result is empty for more than `MOST_RANKS` ranks.
    """
    programs: dict[tuple[int, tuple[Round, ...]], str] = {}
    for name in algorithms(kind) if math.prod(shape) <= MOST_RANKS else ():
        for pieces in (1, *PIECES):
            by = Algorithm(name, pieces)
            if pieces * len(flow_of(kind, name, shape).waits) <= MOST_MESSAGES:
                program = written(kind, name, shape, pieces)
                programs.setdefault((program.chunks, program.rounds), str(by))
    return tuple(programs.values())


def _fastest(names: Sequence[str], price: Price, call: Collective) -> str:
    """Returns the fastest measured algorithm, or the library's call."""
    best, least = LIBRARY, price(call) / GAIN
    for name in names:
        seconds = price(replace(call, algorithm=name))
        if seconds < least:
            best, least = name, seconds
    return best


def _best(ways: list[tuple[Algorithm, int]], price: Price, call: Collective) -> str:
    best, least = LIBRARY, price(call) / GAIN
    near: list[tuple[Algorithm, int]] = []
    for way, messages in ways:
        if price(_by(call, way, 0)) >= least:
            continue  # its latencies alone take longer than the best
        seconds = price(_by(call, way, call.nbytes))
        near += [(way, messages)] if seconds < NEAR * least else []
        if seconds < least:
            best, least = str(way), seconds
    for way, messages in near:
        for pieces in (n for n in PIECES if n * messages <= MOST_MESSAGES):
            finer = Algorithm(way.name, pieces, way.shape)
            seconds = price(_by(call, finer, call.nbytes))
            if seconds < least:
                best, least = str(finer), seconds
    return best


def _by(call: Collective, way: Algorithm, nbytes: int) -> Collective:
    return Collective(call.kind, call.axes, nbytes, 0, str(way))

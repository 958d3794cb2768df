"""The integer program of a problem as arrays, solved by HiGHS in a separate process.

One binary s_v,i for every choice, one e_uv,ij >= 0 for every allowed pair:

    minimise    sum_v c_v . s_v  +  sum_uv <C_uv, e_uv>
    subject to  sum_i s_v,i = 1                                    one choice for every node
                sum_j e_uv,ij = s_u,i,  sum_i e_uv,ij = s_v,j      marginals of an edge: its nodes
                sum_v m_v,t . s_v <= limit                         for every t

Costs are measured from the least of every node and edge, in units in which the relevant range spans
10^4; memory from the least of every node, in units in which the remaining limit is 10^3. Tolerances
of 1e-6 are thus one part in 10^9 or less.
"""

from __future__ import annotations

import importlib.util
import io
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autopar.intra_op.reduce.flat import Flat, Floats, Ints, offsets
from autopar.intra_op.solvers._budget import Budget

MOST_INSIDE = 4_000
"""Columns of a program that is solved in this process, as it takes less than a second."""

LOOK_SECONDS = 4e-5
"""Seconds on a slow core, per column, between two looks of HiGHS at its limits."""


@dataclass(frozen=True)
class Program:
    """Arrays of a program, and its scale: seconds = offset + unit * objective."""

    arrays: dict[str, Floats | Ints]
    unit: float
    offset: float
    flat: Flat


def program(flat: Flat, span: float, cuts: tuple[Ints, ...] = ()) -> Program:
    """States the problem so that solutions within `span` seconds of the least are resolved.

    `cuts` are choices that exceed the limit by less than the tolerance; each becomes a cover
    inequality: of the nodes live at the fullest time, one must choose something with less memory.
    """
    sizes = np.diff(flat.start)
    allowed = np.flatnonzero(flat.matrix < np.inf)
    edge = np.searchsorted(flat.place, allowed, side="right") - 1
    columns = sizes[flat.ends[edge, 1]]
    within = allowed - flat.place[edge]
    left = flat.start[flat.ends[edge, 0]] + within // columns
    right = flat.start[flat.ends[edge, 1]] + within % columns
    cheapest = np.minimum.reduceat(flat.cost, flat.start[:-1])
    lowest = np.full(len(flat.ends), np.inf)
    np.minimum.at(lowest, edge, flat.matrix[allowed])
    nodes = flat.cost - np.repeat(cheapest, sizes)
    cost = np.concatenate([nodes, flat.matrix[allowed] - lowest[edge]])
    largest = float(cost.max(initial=0.0))
    unit = min(span, largest) / 1e4 if 0 < min(span, largest) < np.inf else 1.0
    count = len(flat.cost)
    rows: list[Rows] = [
        (offsets(sizes), np.arange(count), np.ones(count), np.ones(flat.nodes), None)
    ]
    pairs = count + np.arange(len(allowed))
    for ends, at in ((left, 0), (right, 1)):
        rows.append(_marginals(flat, edge, ends, pairs, at))
    rows += [row for row in _limits(flat) if row is not None]
    rows += [_cover(flat, choice) for choice in cuts]
    arrays = _stacked(rows) | {"cost": cost / unit, "binaries": np.array(count)}
    return Program(arrays, unit, flat.total + float(cheapest.sum() + lowest.sum()), flat)


def peak_program(flat: Flat) -> Program:
    """States the problem of the least peak; its objective is in bytes."""
    free = replace(flat, cost=np.zeros(len(flat.cost)), limit=np.inf, base=flat.base[:0])
    stated = program(replace(free, span=flat.span[:0], held=flat.held[:1]), np.inf).arrays
    table, columns = flat.table(), len(stated["cost"])
    unit = float((flat.base + table.sum(axis=0)).max(initial=0.0)) or 1.0
    rows: list[Rows] = [
        (
            stated["start"].astype(np.int64),
            stated["index"].astype(np.int64),
            stated["value"].astype(np.float64),
            stated["upper"].astype(np.float64),
            stated["lower"].astype(np.float64),
        )
    ]
    for k in np.flatnonzero(flat.cost == np.inf):
        rows.append((np.array([0, 1]), np.array([k]), np.ones(1), np.zeros(1), None))
    for t in range(len(flat.base)):
        index = np.append(np.flatnonzero(table[:, t]), columns)
        value = np.append(table[index[:-1], t] / unit, -1.0)
        most = np.array([-flat.base[t] / unit])
        rows.append((np.array([0, len(index)]), index, value, most, np.array([-np.inf])))
    cost = np.append(np.zeros(columns), 1.0)
    arrays = _stacked(rows) | {"cost": cost, "binaries": stated["binaries"]}
    return Program(arrays, unit, 0.0, flat)


Rows = tuple[Ints, Ints, Floats, Floats, Floats | None]
"""Starts, columns, values, upper limits, and lower limits (None: equal to the upper)."""


def _marginals(flat: Flat, edge: Ints, ends: Ints, pairs: Ints, at: int) -> Rows:
    """Returns for every edge and each choice of one end: the sum of its pairs minus the choice."""
    owners = flat.ends[:, at]
    sizes = np.diff(flat.start)[owners]
    first = offsets(sizes)
    row = first[edge] + ends - flat.start[owners[edge]]
    heads = np.repeat(flat.start[owners] - first[:-1], sizes) + np.arange(first[-1])
    order = np.argsort(np.concatenate([np.arange(first[-1]), row]), kind="stable")
    index = np.concatenate([heads, pairs])[order]
    value = np.concatenate([np.full(len(heads), -1.0), np.ones(len(pairs))])[order]
    starts = offsets(1 + np.bincount(row, minlength=int(first[-1])))
    return starts, index, value, np.zeros(len(heads)), None


def _limits(flat: Flat) -> Iterator[Rows]:
    table = flat.table()
    least = np.minimum.reduceat(table, flat.start[:-1], axis=0) if len(table) else table
    extra = table - np.repeat(least, np.diff(flat.start), axis=0)
    for t in range(len(flat.base)):
        index = np.flatnonzero(extra[:, t])
        room = max(flat.limit - flat.base[t] - float(least[:, t].sum()), 0.0)
        unit = room / 1e3 if room else 1.0
        yield (
            np.array([0, len(index)]),
            index,
            extra[index, t] / unit,
            np.array([room / unit]),
            np.array([-np.inf]),
        )


def _cover(flat: Flat, choice: Ints) -> Rows:
    table = flat.table()
    taken = flat.start[:-1] + choice
    fullest = int(np.argmax(flat.base + table[taken].sum(axis=0)))
    heavy = table[:, fullest] >= np.repeat(table[taken, fullest], np.diff(flat.start))
    live = np.maximum.reduceat(table[:, fullest], flat.start[:-1]) > 0
    index = np.flatnonzero(heavy & np.repeat(live, np.diff(flat.start)))
    most = np.array([float(live.sum() - 1)])
    return np.array([0, len(index)]), index, np.ones(len(index)), most, np.array([-np.inf])


def _stacked(rows: list[Rows]) -> dict[str, Floats | Ints]:
    lengths = np.concatenate([np.diff(starts) for starts, *_ in rows])
    return {
        "start": offsets(lengths).astype(np.int32),
        "index": np.concatenate([index for _, index, *_ in rows]).astype(np.int32),
        "value": np.concatenate([value for _, _, value, *_ in rows]),
        "upper": np.concatenate([upper for *_, upper, _ in rows]),
        "lower": np.concatenate([u if low is None else low for *_, u, low in rows]),
    }


def solve_program(
    stated: Program,
    budget: Budget,
    gap: float,
    report: Callable[[float, Ints | None], bool],
    idle: Callable[[], None] | None = None,
    seed: int = 0,
) -> tuple[str, float]:
    """Solves a program within a budget.

    HiGHS calls back whenever it looks at its limits, at the same places in every run; these calls
    are counted as work. A program is not begun if the work that is left is less than one of them.

    `report` gets (bound in seconds, choice or None) as they arrive, and stops the solver by
    returning False.

    Returns "optimal", "infeasible", or "stopped" (the budget is spent), and the bound in seconds.
    """
    look = LOOK_SECONDS * len(stated.arrays["cost"])
    if budget.unspent() < look:
        budget.spend(look)  # so that it is over
        return "stopped", -np.inf
    if importlib.util.find_spec("highspy") is None:
        from autopar.intra_op.solvers._integer import cbc

        return cbc.solve_program(stated, budget, gap, report)
    limits = {"time_limit": budget.left(), "gap": gap / stated.unit, "seed": seed}
    reader = _Reader(stated, report, budget, look)
    if len(stated.arrays["cost"]) <= MOST_INSIDE:
        from autopar.intra_op.solvers._integer import highs

        highs.solve({**stated.arrays, **limits}, reader.read)
        return reader.status, reader.bound
    buffer = io.BytesIO()
    np.savez(buffer, **stated.arrays, **limits)  # type: ignore[arg-type]
    script = str(Path(__file__).with_name("highs.py"))
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=_exchange, args=(child, buffer.getvalue(), lines)).start()
        try:
            _follow(reader, lines, budget, idle)
        finally:
            child.kill()
    return reader.status, reader.bound


class _Reader:
    """Reads the solver's reports: its status ("stopped" until it has ended) and bound."""

    def __init__(
        self,
        stated: Program,
        report: Callable[[float, Ints | None], bool],
        budget: Budget,
        look: float,
    ) -> None:
        self.stated, self.report, self.budget, self.look = stated, report, budget, look
        self.status, self.bound, self.stopped = "stopped", -np.inf, False

    def read(self, told: dict[str, Any]) -> bool:
        """Processes one report; returns whether the budget lets the solver go on."""
        if told.get("looked"):
            self.budget.spend(self.look)
        if told.get("status") == "infeasible":
            self.status, self.bound, self.stopped = "infeasible", np.inf, True
            return False
        risen = self.stated.offset + self.stated.unit * told.get("bound", -np.inf)
        self.bound = max(self.bound, risen)
        choice = None
        if "choice" in told:
            choice = np.array(told["choice"], dtype=np.int64) - self.stated.flat.start[:-1]
        going = self.report(self.bound, choice)
        self.status = told.get("status", self.status)
        over = self.budget.over
        self.stopped = "status" in told or not going or over
        return not over


def _exchange(child: subprocess.Popen[bytes], data: bytes, lines: queue.Queue[bytes]) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(data)
        child.stdin.close()
        for line in child.stdout:
            lines.put(line)
    except (BrokenPipeError, ValueError):
        pass  # the process was stopped
    lines.put(b"")


def _follow(
    reader: _Reader, lines: queue.Queue[bytes], budget: Budget, idle: Callable[[], None] | None
) -> None:
    while not reader.stopped:
        wait = budget.left()
        try:
            line = lines.get(timeout=1e-3 if idle else min(max(wait, 1e-3), 0.5))
        except queue.Empty:
            if wait <= 0:
                return
            reader.read({})
            if idle:
                idle()
            continue
        if not line:
            return
        reader.read(json.loads(line))

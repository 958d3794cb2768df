"""Extrapolates a deep model's graph from two shallow ones, to trace few blocks instead of many.

Most of the planning time goes into tracing equal blocks. From n blocks to n + 1 a graph's text
grows by one block, and the numbers in names grow evenly: those of `%linear_21` by the number of
linears in a block, that in 'layers.3.mlp' by one. The text of any depth thus follows line by line.
Anything that grows differently is refused; nothing else in a line may change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.ir.graph_text import format_graph, parse_graph
from autopar.passes.verify import verify

# Names of the first block may lack a number, and so may names of the second.
LEAST = 4
_DIGITS = re.compile(r"(\d+)")
_NAMES = re.compile(r"%\w+|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|  # .*")
_BLOCK = re.compile(r"  block ")

Home = tuple[int, int] | None  # (run, block), or outside
Numbers = tuple[int, ...]


def deepen(shallow: Graph, deep: Graph, more: int) -> Graph:
    """Returns the prepared graph of the model with `more` blocks than `deep` has.

    Args:
        shallow: graph of the model with one block less than `deep`.
        deep: graph of a model with at least `LEAST` blocks.
        more: number of blocks to add to each run.

    Raises:
        GraphError: the blocks are not equal, or names do not grow evenly.
    """
    few, many = _lines(shallow), _lines(deep)
    ends = [repeat.count - 1 for repeat in deep.repeats]
    if not ends or [repeat.count for repeat in shallow.repeats] != ends or min(ends) < LEAST - 1:
        raise GraphError(
            "the graphs cannot be deepened",
            why=f"runs of {[r.count for r in shallow.repeats]} and {[e + 1 for e in ends]} blocks",
            todo="trace the model whole",
        )
    text: list[str] = []
    place = dict.fromkeys(many, 0)
    order = [home for home, _ in _tagged(deep)]
    for home, same in groupby(order):
        start, length = place[home], len(list(same))
        place[home] += length
        rows = range(start, start + length)
        known = home if home is None or home[1] < ends[home[0]] else (home[0], home[1] - 1)
        grown = [_growth(_at(few, known, row), _at(many, known, row)) for row in rows]
        now = [_at(many, home, row) for row in rows]
        text += [_moved(line, by, more) for line, by in zip(now, grown, strict=True)]
        if home is None or home[1] < ends[home[0]]:
            continue
        run, last = home
        steps = []
        for row in rows:
            old, before, line = (_at(many, (run, last - back), row) for back in (2, 1, 0))
            steps.append(_growth(before, line))
            # Values of the first block have no number where the second block reads them.
            alike = _DIGITS.split(old)[::2] == _DIGITS.split(before)[::2]
            if alike and _growth(old, before) != steps[-1]:
                raise _uneven(line)
        for added in range(1, more + 1):
            for line, by, step in zip(now, grown, steps, strict=True):
                text.append(_moved(_moved(line, by, more), step, added))
    return verify(parse_graph("\n".join(text)))


def _tagged(graph: Graph) -> Iterator[tuple[Home, str]]:
    """Yields each line of the graph's text, with its block."""
    homes: dict[str, Home] = {
        name: (run, block)
        for run, repeat in enumerate(graph.repeats)
        for block, names in enumerate(repeat.iterations)
        for name in names
    }
    blocks = iter([(r, b) for r, repeat in enumerate(graph.repeats) for b in range(repeat.count)])
    for line in format_graph(graph).splitlines():
        if _BLOCK.match(line):
            yield next(blocks), line
        else:
            name = line[1:].partition(" ")[0] if line.startswith("%") else ""
            yield homes.get(name), line


def _lines(graph: Graph) -> dict[Home, list[str]]:
    lines: dict[Home, list[str]] = {}
    for home, line in _tagged(graph):
        lines.setdefault(home, []).append(line)
    return lines


def _at(lines: dict[Home, list[str]], home: Home, row: int) -> str:
    rows = lines.get(home, [])
    if row >= len(rows):
        raise GraphError(
            "the graphs cannot be deepened",
            why=f"they differ outside blocks or between them, at line {row + 1} of {home}",
            todo="trace the model whole",
        )
    return rows[row]


def _growth(before: str, after: str) -> Numbers:
    """Returns how much each number of a line grows; raises GraphError if anything else changes."""
    if before == after:
        return ()
    old, new = _DIGITS.split(before), _DIGITS.split(after)
    if old[::2] != new[::2]:
        raise _uneven(after)
    spans = [match.span() for match in _NAMES.finditer(after)]
    growth, at = [], 0
    for index, piece in enumerate(new):
        if index % 2:
            growth.append(int(piece) - int(old[index]))
            if growth[-1] and not any(start <= at < stop for start, stop in spans):
                raise _uneven(after)
        at += len(piece)
    return tuple(growth)


def _moved(line: str, growth: Numbers, times: int) -> str:
    """Returns the line with its numbers grown `times` over."""
    if not any(growth):
        return line
    pieces = _DIGITS.split(line)
    for index, by in enumerate(growth):
        if by:
            pieces[2 * index + 1] = str(int(pieces[2 * index + 1]) + by * times)
    return "".join(pieces)


def _uneven(line: str) -> GraphError:
    return GraphError(
        "the graphs cannot be deepened",
        where=line.strip(),
        why="its names do not grow evenly with the number of blocks",
        todo="trace the model whole",
    )

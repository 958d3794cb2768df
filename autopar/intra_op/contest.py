"""Converts a Problem to and from the JSON format of the IOPDDL contest.

This is the format of the ASPLOS 2025 contest on intra-operator parallelism for distributed deep
learning, so that its instances can be read and ours published. It has no names of nodes and no
labels of choices; these are not written. It allows one interval per node, so that further memory
of a node is written as further nodes whose choices must agree with it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from autopar.errors import ProblemError
from autopar.files.kinds import MIB, Kind
from autopar.intra_op.problem import Choices, Edge, Problem

FILE = Kind(
    "the problem",
    ProblemError,
    "check the path and that the file is complete",
    limit=2048 * MIB,
    bad="this is not a problem in the contest's JSON",
)


def parse_problem(source: str | bytes | dict[str, Any]) -> Problem:
    """Returns the problem written in the contest's JSON, given as text or already parsed.

    Raises:
        ProblemError: the text is not JSON, or not of the contest's form, or the problem is
            malformed.
    """
    try:
        data = source if isinstance(source, dict) else FILE.json(source)
        return _from_dict(data["problem"])
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, AttributeError) as error:
        raise ProblemError(
            FILE.bad,
            why=f"{type(error).__name__}: {error}",
            todo="pass a complete file in the format of the contest's example.json",
        ) from error


def format_problem(problem: Problem) -> str:
    """Returns the problem as contest JSON, without `usage_limit` if there is no memory limit.

    Each further interval of a node becomes a node at the end of the list whose choice must agree
    with that node's.
    """
    split = problem.split()
    nodes = {
        "intervals": [list(node.live) for node in split.nodes],
        "costs": [_numbers(node.cost) for node in split.nodes],
        "usages": [_numbers(node.memory) for node in split.nodes],
    }
    edges = {
        "nodes": [[edge.a, edge.b] for edge in split.edges],
        "costs": [_numbers(edge.cost.ravel().tolist()) for edge in split.edges],
    }
    data: dict[str, Any] = {"name": problem.name, "nodes": nodes, "edges": edges}
    if problem.memory_limit is not None:
        data["usage_limit"] = _numbers([problem.memory_limit])[0]
    return json.dumps({"problem": data})


def read_problem(path: str | Path) -> Problem:
    """Returns the problem in a contest file, `.json` or `.json.gz`.

    Raises:
        ProblemError: the file cannot be read or is incomplete.
    """
    return parse_problem(FILE.content(path))


def _from_dict(data: dict[str, Any]) -> Problem:
    nodes, edges = data["nodes"], data["edges"]
    choices = [
        Choices(
            f"n{index}",
            _labels(len(cost)),
            tuple(_floats(cost)),
            tuple(_floats(usage)),
            _pair(live),
        )
        for index, (live, cost, usage) in enumerate(
            zip(nodes["intervals"], nodes["costs"], nodes["usages"], strict=True)
        )
    ]
    links = []
    for ends, costs in zip(edges["nodes"], edges["costs"], strict=True):
        a, b = _pair(ends)
        if not (0 <= a < len(choices) and 0 <= b < len(choices)):
            raise ProblemError(
                "an edge names a node that does not exist",
                where=f"edge {a}-{b}",
                why=f"there are {len(choices)} nodes",
            )
        shape = len(choices[a].cost), len(choices[b].cost)
        if len(costs) != shape[0] * shape[1]:
            raise ProblemError(
                "an edge's matrix does not fit its nodes",
                where=f"edge {a}-{b}",
                why=f"{len(costs)} costs for {shape[0]} x {shape[1]} choices",
            )
        links.append(Edge(a, b, np.array(_floats(costs), dtype=np.float64).reshape(shape)))
    limit = data.get("usage_limit")
    limit = None if limit is None else float(_floats([limit])[0])
    return Problem(str(data["name"]), tuple(choices), tuple(links), limit)


def _floats(values: Any) -> list[float]:
    if not isinstance(values, list | tuple) or not set(map(type, values)) <= {int, float}:
        raise TypeError(f"expected a list of numbers, got {str(values)[:60]}")
    return cast("list[float]", values)


def _pair(values: Any) -> tuple[int, int]:
    first, second = values
    if type(first) is not int or type(second) is not int:
        raise TypeError(f"expected two integers, got {str(values)[:60]}")
    return first, second


@lru_cache(maxsize=256)
def _labels(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))


def _numbers(values: Sequence[float]) -> list[int | float]:
    """Writes integral values as integers, like the contest's own files."""
    return [int(value) if float(value).is_integer() else float(value) for value in values]

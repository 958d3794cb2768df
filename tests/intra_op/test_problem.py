"""Problems as values: refusals, prices of choices, and the contest's JSON."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.errors import ProblemError
from autopar.intra_op.contest import format_problem, parse_problem, read_problem
from autopar.intra_op.problem import (
    FORBIDDEN,
    Choices,
    Edge,
    Problem,
    Solution,
    evaluate,
)

# The example that the contest's description works through.
EXAMPLE = """{"problem": {"name": "example",
  "nodes": {"intervals": [[30, 70], [40, 70], [50, 120], [110, 140], [110, 150]],
            "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95]],
            "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15]]},
  "edges": {"nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
            "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60]]},
  "usage_limit": 50}}"""


def node(
    cost: tuple[float, ...], memory: tuple[float, ...], live: tuple[int, int] = (0, 1)
) -> Choices:
    return Choices("v", tuple(map(str, range(len(cost)))), cost, memory, live)


def test_the_example_is_priced_as_by_hand() -> None:
    problem = parse_problem(EXAMPLE)
    # Nodes 15 + 55 + 45 + 75 + 95, edges 30 + 10 + 10 + 20 + 60; from 50 to 70: 10 + 25 + 20.
    result = evaluate(problem, (0, 0, 1, 1, 0))
    assert (result.cost, result.peak, result.feasible) == (415.0, 55.0, False)
    # Nodes 15 + 55 + 35 + 75 + 95, edges 30 + 40 + 10 + 30 + 60; from 50 to 70: 10 + 25 + 15.
    solution = Solution((0, 0, 2, 1, 0), 0.0, 0.0, "hand", 0.0)
    result = evaluate(problem, solution)
    assert (result.cost, result.peak, result.feasible) == (445.0, 50.0, True)


def test_edge_matrices_are_row_major_and_read_only() -> None:
    problem = parse_problem(EXAMPLE)
    assert problem.edges[2].cost.tolist() == [[90.0, 10.0], [20.0, 80.0]]
    with pytest.raises(ValueError, match="read-only"):
        problem.edges[2].cost[0, 0] = 1.0


def test_an_edge_keeps_its_own_copy() -> None:
    matrix = np.zeros((1, 1))
    edge = Edge(0, 1, matrix)
    matrix[0, 0] = 7.0
    assert edge.cost[0, 0] == 0.0


def test_json_round_trip(tmp_path: Path) -> None:
    problem = parse_problem(EXAMPLE)
    assert json.loads(format_problem(problem)) == json.loads(EXAMPLE)
    assert parse_problem(json.loads(EXAMPLE)) == problem
    (tmp_path / "p.json").write_text(format_problem(problem))
    (tmp_path / "p.json.gz").write_bytes(gzip.compress(format_problem(problem).encode()))
    assert read_problem(tmp_path / "p.json") == problem == read_problem(tmp_path / "p.json.gz")


def test_json_keeps_fractions_forbidden_pairs_and_the_absence_of_a_limit() -> None:
    nodes = (node((1e-6 / 3, 0.1), (1.5, 2.0)), node((0.0, math.inf), (0.0, 3e11), (-4, -4)))
    edge = Edge(1, 0, np.array([[FORBIDDEN, 0.1], [1e30, -2.0]]))
    problem = Problem("fractions", nodes, (edge, edge), math.inf)
    text = format_problem(problem)
    read = parse_problem(text)
    assert "usage_limit" not in text
    assert read.memory_limit is None
    assert read.edges == problem.edges
    assert [(n.cost, n.memory, n.live) for n in read.nodes] == [
        (n.cost, n.memory, n.live) for n in nodes
    ]
    assert evaluate(read, (0, 0)).cost == math.inf


def test_parallel_edges_add_up_and_one_forbidden_is_enough() -> None:
    nodes = (node((1.0,), (0.0,)), node((2.0, 2.0), (0.0, 0.0)))
    first = Edge(0, 1, np.array([[10.0, FORBIDDEN]]))
    second = Edge(1, 0, np.array([[5.0], [-100.0]]))
    problem = Problem("parallel", nodes, (first, second), None)
    assert evaluate(problem, (0, 0)).cost == 18.0
    assert evaluate(problem, (0, 0)).feasible
    assert not evaluate(problem, (0, 1)).feasible


def test_intervals_are_half_open() -> None:
    def peak(*lives: tuple[int, int]) -> float:
        nodes = tuple(node((0.0,), (10.0,), live) for live in lives)
        return evaluate(Problem("intervals", nodes, (), None), (0,) * len(nodes)).peak

    assert peak((0, 5), (5, 9)) == 10
    assert peak((0, 6), (5, 9)) == 20
    assert peak((3, 3)) == 0
    assert peak((0, 9), (3, 3), (1, 4), (3, 5)) == 30


def test_memory_is_summed_exactly() -> None:
    # In doubles, 1e16 swallows a 1 that is added to it.
    nodes = tuple(node((0.0,), (amount,)) for amount in (1e16, 1.0, 1.0))
    assert evaluate(Problem("exact", nodes, (), 1e16), (0, 0, 0)).peak == 1e16 + 2
    assert not evaluate(Problem("exact", nodes[:2], (), 1e16), (0, 0)).feasible


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"cost": (), "labels": (), "memory": ()}, "no choices"),
        ({"labels": ("a",)}, "differ in length"),
        ({"memory": (1.0, 2.0, 3.0)}, "differ in length"),
        ({"cost": (math.nan, 1.0)}, "not a number"),
        ({"cost": (1.0, -math.inf)}, "minus infinity"),
        ({"memory": (-1.0, 0.0)}, "negative"),
        ({"memory": (math.nan, 0.0)}, "negative or not a finite"),
        ({"memory": (math.inf, 0.0)}, "negative or not a finite"),
        ({"live": (3, 2)}, "ends before it begins"),
    ],
)
def test_malformed_nodes(arguments: dict[str, Any], what: str) -> None:
    good: dict[str, Any] = {
        "name": "v",
        "labels": ("a", "b"),
        "cost": (1.0, 2.0),
        "memory": (0.0, 0.0),
        "live": (0, 1),
    }
    Choices(**good)
    with pytest.raises(ProblemError, match=what):
        Choices(**(good | arguments))


@pytest.mark.parametrize(
    ("a", "b", "cost", "what"),
    [
        (0, 0, [[1.0]], "joins a node to itself"),
        (0, 1, [1.0], "not a matrix"),
        (0, 1, [[math.nan]], "not a number"),
        (0, 1, [[-math.inf]], "minus infinity"),
        (0, 2, [[1.0]], "does not exist"),
        (-1, 1, [[1.0]], "does not exist"),
        (0, 1, [[1.0, 2.0]], "does not fit"),
    ],
)
def test_malformed_edges(a: int, b: int, cost: Any, what: str) -> None:
    nodes = (node((1.0,), (0.0,)), node((1.0,), (0.0,)))
    with pytest.raises(ProblemError, match=what):
        Problem("edges", nodes, (Edge(a, b, cost),), None)


@pytest.mark.parametrize("limit", [-1.0, math.nan])
def test_malformed_limit(limit: float) -> None:
    with pytest.raises(ProblemError, match="limit"):
        Problem("limit", (), (), limit)


@pytest.mark.parametrize("choice", [(0,), (0, 0, 3, 0, 0), (0, 0, -1, 0, 0)])
def test_a_choice_that_does_not_fit_its_problem(choice: tuple[int, ...]) -> None:
    with pytest.raises(ProblemError):
        evaluate(parse_problem(EXAMPLE), choice)


@pytest.mark.parametrize("length", range(0, len(EXAMPLE), 23))
def test_truncated_text(length: int) -> None:
    with pytest.raises(ProblemError):
        parse_problem(EXAMPLE[:length])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"problem"', '"puzzle"'),
        ('"intervals"', '"times"'),
        ("[15], [55", "15, [55"),
        ("[15], [55", '["15"], [55'),
        ("[15], [55", "[null], [55"),
        ("[15], [55", "[], [55"),
        ("[30, 70]", "[30]"),
        ("[30, 70]", "[30.5, 70]"),
        ("[30, 70]", "[70, 30]"),
        ("[[30, 70], ", "["),
        ("[30, 40]", "[30, 40, 50]"),
        ("[0, 1], [0, 2]", "[0, 9], [0, 2]"),
        ("[0, 1], [0, 2]", "[0, 1, 2], [0, 2]"),
        ("[0, 1], [0, 2]", "[0, 2]"),
        ("50}}", '"much"}}'),
        ("50}}", "-50}}"),
        ("[85, 75]", "[85, NaN]"),
    ],
)
def test_garbled_text(old: str, new: str) -> None:
    assert old in EXAMPLE
    with pytest.raises(ProblemError):
        parse_problem(EXAMPLE.replace(old, new))


@pytest.mark.parametrize("value", ["[]", "3", '{"problem": []}', "\x00", ""])
def test_text_of_another_kind(value: str) -> None:
    with pytest.raises(ProblemError):
        parse_problem(value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    packed = gzip.compress(EXAMPLE.encode())
    for name, content in (("cut", packed[:-20]), ("raw", b"not gzip"), ("bad", packed[:-90] * 2)):
        path = tmp_path / f"{name}.json.gz"
        path.write_bytes(content)
        with pytest.raises(ProblemError):
            read_problem(path)
    (tmp_path / "latin.json").write_bytes(b"\xff\xfe\xfa")
    for name in ("latin.json", "absent.json"):
        with pytest.raises(ProblemError):
            read_problem(tmp_path / name)

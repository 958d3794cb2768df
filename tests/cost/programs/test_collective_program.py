"""Programs of collectives are values: they print, parse back, and damaged ones are refused."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from autopar.cost import collectives
from autopar.cost.collectives import algorithms, written
from autopar.cost.programs import collective_program
from autopar.cost.programs.collective_checker import check_program
from autopar.cost.programs.collective_program import CollectiveProgram, Message, Post
from autopar.errors import CollectiveError
from autopar.ir.chosen_algorithms import KINDS
from tests.cost.programs.grids import ALGORITHMS
from tests.support.further_modules import find_also

RING = """\
all_reduce by flat_ring over 3 in 3 chunks
0: 0>1 +0; 1>2 +1; 2>0 +2
1: 0>1 +2; 1>2 +0; 2>0 +1
2: 0>1 =1; 1>2 =2; 2>0 =0
3: 0>1 =0; 1>2 =1; 2>0 =2
"""


def test_a_ring_reads_as_its_documentation_says() -> None:
    program = CollectiveProgram.parse(RING)
    check_program(program)
    assert str(program) == RING
    assert textwrap.indent(RING, "    ") in (collective_program.__doc__ or "")
    # The algorithm's own goes the other way around at first: it is a gather run backwards.
    assert [len(messages) for messages in written("all_reduce", "flat_ring", (3,)).rounds] == [
        3
    ] * 4


@pytest.mark.parametrize(("kind", "name"), ALGORITHMS)
@pytest.mark.parametrize("shape", [(1,), (4,), (2, 3), (3, 1), (2, 2, 2)])
def test_programs_parse_back(kind: str, name: str, shape: tuple[int, ...]) -> None:
    for pieces in (1, 3):
        program = written(kind, name, shape, pieces)
        assert CollectiveProgram.parse(str(program)) == program
        check_program(program)


def test_spans_of_chunks_are_short() -> None:
    program = CollectiveProgram(
        "broadcast", "mine", (2,), 6, ((Message(0, 1, (0, 1, 2, 4, 5), False),),)
    )
    assert "0>1 =0-2,4-5" in str(program)
    assert program.scripts == (
        ((Post(1, (0, 1, 2, 4, 5), "send"),),),
        ((Post(0, (0, 1, 2, 4, 5), "keep"),),),
    )


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("all_reduce", "gossip", "gossip"),
        ("over 3", "over 0", "over 0"),
        ("over 3", "over 9999", "at most"),
        ("in 3 chunks", "in 0 chunks", "0 chunks"),
        ("all_reduce by", "all_gather of", "head"),
        ("0: 0>1 +0", "0: 0>1 *0", "message"),
        ("0: 0>1 +0", "0: 0>1 +0-", "chunks"),
        ("0: 0>1 +0", "0: 0>3 +0", "0>3"),
        ("0: 0>1 +0", "0: 0>0 +0", "0>0"),
        ("0: 0>1 +0", "0: 0>1 +2-1", "0>1"),
        ("0: 0>1 +0", "0: 0>1 +3", "0>1"),
        ("0: 0>1 +0", "0: 0>1 =0; 2>1 +0", "twice"),
        ("0: 0>1 +0", "0: 0>1 =0; 2>1 =0", "twice"),
        ("1>2 +1", "1>2 +0", "sends and receives"),
        ("1: 0>1", "7: 0>1", "round 1"),
    ],
)
def test_damaged_programs_are_refused(old: str, new: str, says: str) -> None:
    assert old in RING
    with pytest.raises(CollectiveError) as caught:
        CollectiveProgram.parse(RING.replace(old, new, 1))
    assert says in str(caught.value)


def test_what_chunks_there_must_be() -> None:
    for kind, chunks in (("all_gather", 4), ("reduce_scatter", 5), ("all_to_all", 6)):
        with pytest.raises(CollectiveError, match="chunks"):
            CollectiveProgram(kind, "mine", (3,), chunks, ())
    assert written("all_to_all", "direct", (3,)).share == pytest.approx(1 / 3)
    assert written("all_gather", "flat_ring", (3,), 2).share == pytest.approx(1 / 2)
    assert written("all_reduce", "flat_ring", (3,)).share == pytest.approx(1 / 3)


def test_unknown_algorithms_are_named() -> None:
    with pytest.raises(CollectiveError, match="'telepathy'") as caught:
        written("all_reduce", "telepathy", (4,))
    assert "2d_torus" in caught.value.why
    with pytest.raises(CollectiveError, match="gossip"):
        algorithms("gossip")
    for shape, pieces in (((), 1), ((0,), 1), ((2,), 0)):
        with pytest.raises(CollectiveError, match="pieces"):
            written("all_reduce", "flat_ring", shape, pieces)


STAR = '''
"""All to rank 0 and back."""
from autopar.cost.collectives._rounds import Rounds
import math
NAME = "star"

def all_gather(shape):
    count, rounds = math.prod(shape), Rounds()
    for rank in range(1, count):
        rounds.send(0, rank, 0, [rank])
        rounds.send(1, 0, rank, [chunk for chunk in range(count) if chunk != rank])
    return count, rounds.written
'''


def test_one_more_algorithm_is_one_more_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "star_of_a_test.py").write_text(STAR)
    find_also(monkeypatch, collectives, tmp_path)
    algorithms.cache_clear()
    try:
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            assert "star" in algorithms(kind)
            check_program(written(kind, "star", (2, 3), 2))
        (tmp_path / "another_of_a_test.py").write_text(STAR)
        algorithms.cache_clear()
        with pytest.raises(CollectiveError, match="two algorithms 'star'"):
            algorithms("all_gather")
    finally:
        algorithms.cache_clear()
    assert set(KINDS) == {kind for kind, _ in ALGORITHMS}

"""Every algorithm computes its collective on every grid; broken programs are detected."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.collectives import written
from autopar.cost.programs.collective_checker import check_program, check_scripts
from autopar.cost.programs.collective_program import CollectiveProgram, Message, Script
from autopar.errors import CollectiveError
from tests.cost.programs.grids import ALGORITHMS, grids


def check_on_every_grid(kind: str, name: str, ranks: range) -> None:
    """Checks programs of equal rounds once: some algorithms are the same on many grids."""
    for count in ranks:
        judged = set()
        for shape in grids(count):
            program = written(kind, name, shape)
            work = program.chunks, program.rounds
            if work not in judged:
                check_program(program)
                judged.add(work)


@pytest.mark.parametrize(("kind", "name"), ALGORITHMS)
def test_on_every_grid_of_up_to_twelve_ranks(kind: str, name: str) -> None:
    check_on_every_grid(kind, name, range(1, 13))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), ALGORITHMS)
def test_on_every_grid_of_up_to_sixty_four_ranks(kind: str, name: str) -> None:
    check_on_every_grid(kind, name, range(13, 65))


shapes = (
    st.lists(st.integers(1, 6), min_size=1, max_size=4)
    .map(tuple)
    .filter(lambda shape: _product(shape) <= 32)
)
algorithm = st.sampled_from(ALGORITHMS)


def _product(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


@settings(deadline=None, max_examples=60)
@given(algorithm=algorithm, shape=shapes, pieces=st.integers(1, 5))
def test_on_any_grid_in_any_number_of_pieces(
    algorithm: tuple[str, str], shape: tuple[int, ...], pieces: int
) -> None:
    check_program(written(*algorithm, shape, pieces))


@settings(deadline=None, max_examples=150)
@given(algorithm=algorithm, shape=shapes, pieces=st.integers(1, 3), data=st.data())
def test_every_message_is_needed_as_it_is(
    algorithm: tuple[str, str], shape: tuple[int, ...], pieces: int, data: st.DataObject
) -> None:
    """One message is lost, or adds what should be kept or the other way round, or loses a chunk."""
    program = written(*algorithm, shape, pieces)
    if not program.rounds:
        return
    number = data.draw(st.integers(0, len(program.rounds) - 1))
    place = data.draw(st.integers(0, len(program.rounds[number]) - 1))
    message = program.rounds[number][place]
    changed = data.draw(
        st.sampled_from([None, message._replace(adds=not message.adds), _shorter(message)])
    )
    with pytest.raises(CollectiveError):
        check_program(_with(program, number, place, changed))


def _shorter(message: Message) -> Message | None:
    return message._replace(chunks=message.chunks[1:]) if len(message.chunks) > 1 else None


def _with(
    program: CollectiveProgram, number: int, place: int, message: Message | None
) -> CollectiveProgram:
    row = program.rounds[number]
    row = (*row[:place], *(() if message is None else (message,)), *row[place + 1 :])
    return replace(program, rounds=(*program.rounds[:number], row, *program.rounds[number + 1 :]))


def test_a_message_to_another_rank_or_a_round_too_early_is_caught() -> None:
    program = written("all_reduce", "2d_torus", (2, 2))
    first = program.rounds[0][0]
    with pytest.raises(CollectiveError):
        check_program(_with(program, 0, 0, first._replace(target=3 - first.target)))
    gather = written("all_gather", "flat_ring", (4,))
    early = replace(gather, rounds=gather.rounds[::-1])
    with pytest.raises(CollectiveError, match="before it has it"):
        check_program(early)


def _scripts() -> list[Script]:
    return list(written("all_reduce", "flat_ring", (4,)).scripts)


def test_ranks_that_wait_for_one_another_are_named() -> None:
    scripts = _scripts()
    # Rank 2 receives in its first round and sends in another one behind it, as all others do.
    split = [
        (tuple(p for p in s[0] if p.does != "send"), tuple(p for p in s[0] if p.does == "send"))
        for s in scripts
    ]
    scripts = [(*two, *script[1:]) for two, script in zip(split, scripts, strict=True)]
    with pytest.raises(CollectiveError, match="wait for one another") as caught:
        check_scripts("all_reduce", 4, scripts)
    assert "rank 0 in its round 0 for rank" in caught.value.why
    lost = _scripts()
    lost[1] = ((lost[1][0][0],), *lost[1][1:])
    with pytest.raises(CollectiveError):
        check_scripts("all_reduce", 4, lost)


def test_two_ranks_must_mean_the_same_message() -> None:
    scripts = _scripts()
    first, *rest = scripts[0]
    wrong = tuple(
        p._replace(chunks=((p.chunks[0] + 2) % 4,)) if p.does == "add" else p for p in first
    )
    scripts[0] = (wrong, *rest)
    with pytest.raises(CollectiveError, match="other chunks"):
        check_scripts("all_reduce", 4, scripts)
    swapped = _scripts()
    swapped[2] = (swapped[2][1], swapped[2][0], *swapped[2][2:])
    with pytest.raises(CollectiveError):
        check_scripts("all_reduce", 4, swapped)


def test_what_is_added_twice_is_named() -> None:
    text = "all_reduce by mine over 2 in 1 chunks\n0: 0>1 +0\n1: 0>1 +0\n"
    with pytest.raises(CollectiveError, match="parts of rank 0 twice"):
        check_program(CollectiveProgram.parse(text))
    with pytest.raises(CollectiveError, match="ends with the wrong chunk"):
        check_program(CollectiveProgram.parse("all_reduce by mine over 2 in 1 chunks\n0: 0>1 +0\n"))
    with pytest.raises(CollectiveError, match="adds to chunk 0"):
        check_program(CollectiveProgram.parse("broadcast by mine over 2 in 1 chunks\n0: 0>1 +0\n"))

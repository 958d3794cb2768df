"""Tests the checker on damaged programs, against an execution with numbers.

Each rank of the machine has a vector of random numbers, and its rounds follow one another. A
message is copied at any moment between its posts and the end of the round, straight from the
sender's memory, as a network may. A program that it accepts must compute the collective in any
order of events.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from autopar.cost.collectives import written
from autopar.cost.programs.collective_checker import check_scripts
from autopar.cost.programs.collective_program import CollectiveProgram, Message, Post, Script
from autopar.errors import CollectiveError
from tests.cost.programs.grids import ALGORITHMS, grids

SHAPES = [shape for ranks in range(2, 9) for shape in grids(ranks)]
Memory = dict[int, int]


def before_and_after(kind: str, ranks: int, chunks: int, draw: random.Random) -> list[list[Memory]]:
    """Returns the ranks' memory before and after, by the definition of the collective."""
    given = [[draw.getrandbits(40) for _ in range(chunks)] for _ in range(ranks)]
    total = [sum(column) for column in zip(*given, strict=True)]
    part = chunks // ranks
    each = range(ranks)
    if kind == "all_reduce":
        start = [dict(enumerate(row)) for row in given]
        end = [dict(enumerate(total)) for _ in each]
    elif kind == "broadcast":
        start = [dict(enumerate(given[0])) if rank == 0 else {} for rank in each]
        end = [dict(enumerate(given[0])) for _ in each]
    elif kind == "all_gather":
        start = [{c: given[r][c] for c in range(r * part, (r + 1) * part)} for r in each]
        end = [{c: given[c // part][c] for c in range(chunks)} for _ in each]
    elif kind == "reduce_scatter":
        start = [dict(enumerate(row)) for row in given]
        end = [{c: total[c] for c in range(r * part, (r + 1) * part)} for r in each]
    else:
        block = chunks // ranks**2
        pairs = {c: divmod(c // block, ranks) for c in range(chunks)}
        start = [{c: given[r][c] for c, (s, _) in pairs.items() if s == r} for r in each]
        end = [{c: given[s][c] for c, (s, t) in pairs.items() if t == r} for r in each]
    return [start, end]


def runs(kind: str, chunks: int, scripts: Sequence[Script], draw: random.Random) -> bool:
    """Returns whether the machine computes the collective in one random order of events."""
    memory, wanted = before_and_after(kind, len(scripts), chunks, draw)
    place = [-1] * len(scripts)
    left: list[list[Post]] = [[] for _ in scripts]
    posted: dict[tuple[int, int, str], list[Post]] = {}
    while True:
        moves: list[tuple[int, int]] = []
        for rank, script in enumerate(scripts):
            if not left[rank] and place[rank] + 1 < len(script):
                moves.append((rank, -1))
        for source, target, way in posted:
            if (
                way == "send"
                and posted[source, target, way]
                and posted.get((source, target, "take"))
            ):
                moves.append((source, target))
        if not moves:
            break
        source, target = draw.choice(moves)
        if target < 0:
            place[source] += 1
            left[source] = list(scripts[source][place[source]])
            for post in left[source]:
                pair = (source, post.peer) if post.does == "send" else (post.peer, source)
                way = "send" if post.does == "send" else "take"
                posted.setdefault((*pair, way), []).append(post)
            continue
        send, take = (posted[source, target, way].pop(0) for way in ("send", "take"))
        for there, here in zip(send.chunks, take.chunks, strict=True):
            value = memory[source][there]
            memory[target][here] = value + (memory[target][here] if take.does == "add" else 0)
        left[source].remove(send)
        left[target].remove(take)
    if any(left) or any(at + 1 < len(script) for at, script in zip(place, scripts, strict=True)):
        return False
    return all(m.get(c) == v for m, w in zip(memory, wanted, strict=True) for c, v in w.items())


def damaged(program: CollectiveProgram, draw: random.Random) -> tuple[Script, ...]:
    """The scripts of a program with one or two faults, in its messages or in one rank's script."""
    for _ in range(draw.randint(1, 2)):
        if draw.random() < 0.5:
            program = _wrong_message(program, draw)
    scripts = [list(map(list, script)) for script in program.scripts]
    own = draw.choice(scripts)
    if own and draw.random() < 0.6:
        number = draw.randrange(len(own))
        posts = own[number]
        post = draw.randrange(len(posts))
        fault = draw.choice(["lose", "twice", "peer", "does", "chunk", "round", "split", "join"])
        if fault == "lose":
            del posts[post]
        elif fault == "twice":
            posts.append(posts[post])
        elif fault == "peer":
            posts[post] = posts[post]._replace(peer=draw.randrange(program.ranks))
        elif fault == "does":
            posts[post] = posts[post]._replace(does=draw.choice(["send", "add", "keep"]))
        elif fault == "chunk":
            posts[post] = posts[post]._replace(chunks=(draw.randrange(program.chunks),))
        elif fault == "round":
            other = draw.randrange(len(own))
            own[number], own[other] = own[other], own[number]
        elif fault == "split":
            own[number : number + 1] = [[each] for each in posts]
        elif number + 1 < len(own):
            own[number : number + 2] = [own[number] + own[number + 1]]
    return tuple(tuple(tuple(posts) for posts in script) for script in scripts)


def _wrong_message(program: CollectiveProgram, draw: random.Random) -> CollectiveProgram:
    rounds = [list(messages) for messages in program.rounds]
    if not any(rounds):
        return program
    row = draw.choice([messages for messages in rounds if messages])
    place = draw.randrange(len(row))
    message = row[place]
    row[place : place + 1] = draw.choice(
        [
            [],
            [message._replace(adds=not message.adds)],
            [message._replace(source=message.target, target=message.source)],
            [message._replace(target=draw.randrange(program.ranks))],
            [message._replace(chunks=(draw.randrange(program.chunks),))],
        ]
    )
    if draw.random() < 0.3:
        draw.shuffle(rounds)
    found: list[tuple[Message, ...]] = [tuple(messages) for messages in rounds]
    try:
        return replace(program, rounds=tuple(found))
    except CollectiveError:
        return program  # rejected before it is checked


def attack(number: int) -> bool:
    """Returns whether the checker accepts a damaged program; the execution must agree."""
    draw = random.Random(number)
    kind, name = draw.choice(ALGORITHMS)
    program = written(kind, name, draw.choice(SHAPES), draw.randint(1, 2))
    scripts = damaged(program, draw)
    try:
        check_scripts(kind, program.chunks, scripts)
    except CollectiveError:
        return False
    for _ in range(4):
        assert runs(kind, program.chunks, scripts, draw), (number, program)
    return True


def test_the_machine_runs_every_sound_program() -> None:
    draw = random.Random(0)
    for kind, name in ALGORITHMS:
        for shape in ((4,), (2, 3)):
            program = written(kind, name, shape, 2)
            assert runs(kind, program.chunks, program.scripts, draw), program


def test_what_the_judge_accepts_is_computed_in_any_order() -> None:
    accepted = sum(map(attack, range(300)))
    assert 0 < accepted < 200  # some faults change nothing, most are found


@pytest.mark.slow
def test_no_damaged_program_of_many_gets_through() -> None:
    assert sum(map(attack, range(300, 5_000))) > 0


@pytest.mark.parametrize(
    ("posts", "said"),
    [
        ([(1, "send"), (1, "keep")], "keep and send chunk 0 at once"),
        ([(1, "keep"), (1, "add")], "add and keep chunk 0 at once"),
        ([(0, "send")], "message with rank 0"),
        ([(7, "send")], "message with rank 7"),
        ([(1, "lose")], "is to lose chunks"),
    ],
)
def test_rounds_that_depend_on_chance_are_refused(posts: list[tuple[int, str]], said: str) -> None:
    first = tuple(Post(peer, (0,), does) for peer, does in posts)
    with pytest.raises(CollectiveError, match=said):
        check_scripts("all_reduce", 1, [(first,), ()])

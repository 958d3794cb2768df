"""Lowered schedules: sends and receives meet, transfers overlap, and the judge sees failures."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import DeadlockError, ScheduleError
from autopar.inter_op.rendezvous import check
from autopar.inter_op.schedule import Schedule
from autopar.inter_op.schedule_time import StageCost, simulate
from autopar.inter_op.schedules import schedule, schedules
from autopar.inter_op.transfers import Lowered, Queue, lower
from autopar.ir.action import COMPUTE, REDUCE, TRANSFER, Action, parse_row

WAYS: tuple[tuple[Queue, int], ...] = (("link", 1), ("link", 0), ("link", 3), ("rank", 0))


def legal(name: str, ranks: range, microbatches: range) -> Iterator[Schedule]:
    for count, batches in product(ranks, microbatches):
        try:
            yield schedule(name, count, batches)
        except ScheduleError:
            continue


@pytest.mark.parametrize("name", schedules())
def test_every_schedule_runs_to_its_end_however_calls_queue(name: str) -> None:
    for made in legal(name, range(1, 5), range(1, 10, 2 if name != "chimera" else 1)):
        for way in WAYS:
            check(lower(made, *way))


@pytest.mark.slow
@pytest.mark.parametrize("name", schedules())
def test_every_size_runs_to_its_end_however_calls_queue(name: str) -> None:
    for made in legal(name, range(1, 9), range(1, 17)):
        for way in WAYS:
            check(lower(made, *way))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", schedules())
def test_what_crosses_ranks_is_sent_and_received_once(name: str, way: tuple[Queue, int]) -> None:
    made = schedule(name, 4, 8)
    lowered = lower(made, *way)
    expected: Counter[tuple[int, Action]] = Counter()
    for row in made.rows:
        for kind, stage, batch, copy in row:
            to = stage + (1 if kind == "F" else -1)
            if kind == "W" or not 0 <= to < made.stages:
                continue
            ranks = made.placement[copy]
            if ranks[stage] != ranks[to]:
                letter = "F" if kind == "F" else "B"
                expected[ranks[stage], Action(f"SEND_{letter}", stage, batch, copy)] += 1
                expected[ranks[to], Action(f"RECV_{letter}", to, batch, copy)] += 1
    rows = enumerate(lowered.rows)
    there = Counter((rank, one) for rank, row in rows for one in row if one.kind in TRANSFER)
    assert there == expected
    for row, lowered_row in zip(made.rows, lowered.rows, strict=True):
        assert tuple(one for one in lowered_row if one.kind in COMPUTE) == row


@pytest.mark.parametrize("name", schedules())
def test_copies_add_up_their_gradients_at_the_end(name: str) -> None:
    made = schedule(name, 4, 8)
    for rank, row in enumerate(lower(made).rows):
        sums = [one for one in row if one.kind == REDUCE]
        assert row[len(row) - len(sums) :] == tuple(sums)
        assert {(one.stage, one.copy) for one in sums} == (
            set(made.holds[rank]) if made.copies > 1 else set()
        )


@pytest.mark.parametrize("name", schedules())
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_sends_follow_their_action_and_receives_come_ahead(name: str, ahead: int) -> None:
    for row in lower(schedule(name, 4, 8), "link", ahead).rows:
        before: list[Action] = []
        posted: dict[Action, int] = {}
        for at, action in enumerate(row):
            if action.kind in COMPUTE:
                letter = "F" if action.kind == "F" else "B"
                receive = action._replace(kind=f"RECV_{letter}")
                if action.kind != "W" and receive in row:
                    assert posted[receive] <= max(0, len(before) - ahead)
                before.append(action)
            elif action.kind.startswith("SEND"):
                sent = row[at - 1]
                assert sent[1:] == action[1:]
                assert sent.kind in ("F" if action.kind == "SEND_F" else "BI")
            elif action.kind.startswith("RECV"):
                posted[action] = len(before)


def seconds(lowered: Lowered, cost: StageCost, transfer: float) -> float:
    """The step where a transfer also waits for its receive: posted when the rank comes to it."""
    times = {"F": cost.forward, "B": cost.input + cost.weight, "I": cost.input, "W": cost.weight}
    now = [0.0] * len(lowered.rows)
    at = [0] * len(lowered.rows)
    posted: dict[Action, float] = {}
    free: dict[tuple[int, int], float] = defaultdict(float)
    arrived: dict[Action, float] = {}
    links: dict[tuple[int, int], list[Action]] = defaultdict(list)
    while any(place < len(row) for place, row in zip(at, lowered.rows, strict=True)):
        before = list(at)
        for rank, row in enumerate(lowered.rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                if action.kind in TRANSFER:
                    posted[action] = now[rank]
                    if action.kind.startswith("SEND"):
                        links[rank, lowered.peer(action)].append(action)
                elif action.kind in times:
                    letter = "F" if action.kind == "F" else "B"
                    receive = action._replace(kind=f"RECV_{letter}")
                    if action.kind != "W" and receive in row:
                        if receive not in arrived:
                            break
                        now[rank] = max(now[rank], arrived[receive])
                    now[rank] += times[action.kind]
                at[rank] += 1
        for link, sends in links.items():
            while sends:
                way = 1 if sends[0].kind == "SEND_F" else -1
                kind = sends[0].kind.replace("SEND", "RECV")
                receive = sends[0]._replace(kind=kind, stage=sends[0].stage + way)
                if receive not in posted:
                    break
                start = max(posted[sends.pop(0)], posted[receive], free[link])
                arrived[receive] = free[link] = start + transfer
        assert at != before or any(links.values())
    return max(now)


@pytest.mark.parametrize("name", schedules())
def test_transfers_overlap_with_computing(name: str) -> None:
    """One action ahead is enough: the step is as if every receive had always been posted."""
    made = schedule(name, 4, 8)
    for transfer in (0.25, 1.0):
        ideal = simulate(made, [StageCost()] * made.stages, [transfer] * (made.stages - 1)).seconds
        assert seconds(lower(made), StageCost(), transfer) == pytest.approx(ideal)


def test_receives_that_are_posted_late_do_not_overlap() -> None:
    made = schedule("eager_1f1b", 4, 16)
    late, early = (seconds(lower(made, "link", ahead), StageCost(), 1.0) for ahead in (0, 1))
    assert late > 1.1 * early


def test_one_queue_a_rank_cannot_take_receives_ahead() -> None:
    """Why there are two ways to lower: what overlaps on links stands still in one queue."""
    ahead = lower(schedule("1f1b", 3, 3), "link", 1)
    check(ahead)
    with pytest.raises(DeadlockError) as caught:
        check(replace(ahead, queue="rank"))
    text = str(caught.value)
    assert "the ranks 1, 2 wait for one another" in text
    assert "rank 1 waits for RECV_B1.0, but SEND_B2.0 on rank 2 waits for RECV_F2.1" in text
    assert "rank 2 waits for RECV_F2.1, but SEND_F1.1 on rank 1 waits for RECV_B1.0" in text


@pytest.mark.parametrize("queue", ["link", "rank"])
def test_ranks_that_wait_for_one_another_are_named(queue: Queue) -> None:
    made = schedule("1f1b", 2, 2)
    rows = (
        "F0.0 SEND_F0.0 RECV_B0.0 B0.0 F0.1 SEND_F0.1 RECV_B0.1 B0.1",
        "RECV_F1.0 F1.0 RECV_F1.1 F1.1 B1.0 SEND_B1.0 B1.1 SEND_B1.1",
    )
    computed = tuple(tuple(one for one in parse_row(row) if one.kind in COMPUTE) for row in rows)
    stuck = Lowered(replace(made, rows=computed), tuple(map(parse_row, rows)), queue)
    with pytest.raises(DeadlockError) as caught:
        check(stuck)
    assert "rank 0 at B0.0; rank 1 at F1.1" in str(caught.value)
    assert "SEND_B1.0 is not posted on rank 1, which stands at F1.1" in str(caught.value)
    assert "SEND_F0.1 is not posted on rank 0, which stands at B0.0" in str(caught.value)


def test_sums_in_different_orders_are_named() -> None:
    lowered = lower(schedule("chimera", 2, 2))
    first, second = lowered.rows
    turned = (*first[:-2], first[-1], first[-2])
    with pytest.raises(DeadlockError, match="0, 1 wait for one another") as caught:
        check(replace(lowered, rows=(turned, second)))
    assert "rank 0 waits in REDUCE1 for rank 1" in str(caught.value)
    with pytest.raises(ScheduleError, match="REDUCE1 cannot stand"):
        check(replace(lowered, rows=(first[:-1], second)))


def ends(lowered: Lowered) -> bool:
    """Whether what has to come before what, written as a graph, has no circle."""
    graph = networkx.DiGraph()
    links: dict[tuple[int, int], list[object]] = defaultdict(list)
    for rank, row in enumerate(lowered.rows):
        computed, batch, last = ("begin", rank), 0, ""
        for action in row:
            if action.kind in TRANSFER:
                send = action.kind.startswith("SEND")
                way = 1 if action.kind in ("SEND_F", "RECV_B") else -1
                sender = action.stage if send else action.stage + way
                pair = ("pair", action.kind[-1], sender, action.microbatch, action.copy)
                batch += last not in TRANSFER
                if lowered.queue == "rank":
                    graph.add_edge((rank, "batch", batch - 1, "done"), (rank, "batch", batch))
                    graph.add_edge((rank, "batch", batch), pair)
                    graph.add_edge(pair, (rank, "batch", batch, "done"))
                graph.add_edge(computed, pair)
                if send:
                    links[rank, lowered.peer(action)].append(pair)
            elif action.kind in COMPUTE:
                graph.add_edge(computed, action)
                letter, back = ("F", -1) if action.kind == "F" else ("B", 1)
                if action.kind != "W" and action._replace(kind=f"RECV_{letter}") in row:
                    pair = ("pair", letter, action.stage + back, action.microbatch, action.copy)
                    graph.add_edge(pair, action)
                computed = action
            last = action.kind
    for pairs in links.values():
        graph.add_edges_from(pairwise(pairs))
    return networkx.is_directed_acyclic_graph(graph)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["1f1b", "zb_h1", "zb_v", "interleaved_1f1b", "chimera"]),
    st.sampled_from(WAYS),
    st.sampled_from(["link", "rank"]),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1000)), max_size=6),
)
def test_the_judge_says_what_a_graph_of_all_that_waits_says(
    name: str, way: tuple[Queue, int], judged: Queue, swaps: list[tuple[int, int]]
) -> None:
    """Rows made for either queue are judged for either, after random swaps of neighbours."""
    lowered = lower(schedule(name, 4, 4), *way)
    rows = [list(row) for row in lowered.rows]
    for rank, at in swaps:
        row = rows[rank]
        transfers = [place for place in range(1, len(row)) if row[place].kind in TRANSFER]
        place = transfers[at % len(transfers)]
        row[place - 1], row[place] = row[place], row[place - 1]
    moved = replace(lowered, rows=tuple(map(tuple, rows)), queue=judged)
    try:
        check(moved)
    except DeadlockError:
        assert not ends(moved)
    except ScheduleError:
        return  # sends and receives in two orders, or before what is sent is there
    else:
        assert ends(moved)


def test_the_graph_sees_circles_too() -> None:
    ahead = lower(schedule("1f1b", 3, 3), "link", 1)
    assert ends(ahead)
    assert not ends(replace(ahead, queue="rank"))


def changed(lowered: Lowered, rank: int, old: str, new: str) -> Lowered:
    text = " ".join(map(str, lowered.rows[rank]))
    assert old in text
    rows = list(lowered.rows)
    rows[rank] = parse_row(text.replace(old, new))
    return replace(lowered, rows=tuple(rows))


@pytest.mark.parametrize(
    ("rank", "old", "new", "what"),
    [
        (0, "RECV_B0.1 ", "", "what it needs is neither computed nor received"),
        (1, "SEND_B1.1", "", "there is no SEND_B1.1 on rank 1"),
        (1, "RECV_F1.0", "RECV_F1.0 RECV_F1.0", "it is there twice"),
        (0, "F0.0 SEND_F0.0", "SEND_F0.0 F0.0", "what it sends has not been computed"),
        (0, " B0.0 ", " B0.0 SEND_B0.0 ", "no such transfer begins or ends there"),
        (0, " B0.0 ", " B0.0 SEND_F1.0 ", "no such transfer begins or ends there"),
        (0, " B0.0 ", " ", "do not compute what the schedule says"),
        (0, "F0.0 SEND_F0.0 F0.1 SEND_F0.1", "F0.0 F0.1 SEND_F0.1 SEND_F0.0", "meets RECV_F1.0"),
    ],
)
def test_rows_that_are_not_whole_are_refused(rank: int, old: str, new: str, what: str) -> None:
    lowered = lower(schedule("gpipe", 2, 2), "link", 0)
    check(lowered)
    with pytest.raises(ScheduleError) as caught:
        check(changed(lowered, rank, old, new))
    assert what in str(caught.value)


def test_unknown_ways_to_lower_are_refused() -> None:
    made = schedule("gpipe", 2, 2)
    for queue, ahead in (("pile", 1), ("link", -1)):
        with pytest.raises(ScheduleError, match="cannot lower gpipe"):
            lower(made, queue, ahead)


def test_peers_and_text() -> None:
    lowered = lower(schedule("zb_v", 2, 2))
    assert lowered.schedule.placement == ((0, 1, 1, 0),)
    transfers = parse_row("SEND_F0.0 RECV_F1.0 SEND_F2.0 SEND_B3.1 RECV_B2.1")
    assert [lowered.peer(one) for one in transfers] == [1, 0, 0, 1, 0]
    assert lowered == replace(lowered, rows=tuple(map(parse_row, rows_of(lowered))))


def rows_of(lowered: Lowered) -> list[str]:
    return [line.partition(": ")[2] for line in str(lowered).splitlines()]

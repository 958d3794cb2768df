"""Complete rows: sends and receives match, transfers overlap, and the checker detects failures."""

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
from autopar.inter_op.checkers.deadlock_checker import check
from autopar.inter_op.complete import complete
from autopar.inter_op.schedule import Schedule
from autopar.inter_op.schedule_time import StageCost, simulate
from autopar.inter_op.schedules import exact, schedule
from autopar.ir.action import COMPUTE, COPIES, SYNC, TRANSFER, UPDATE, Action, parse_row
from autopar.ir.pipeline_step import Edge, Queue, Step, Wiring

WAYS: tuple[tuple[Queue, int], ...] = (("link", 1), ("link", 0), ("link", 3), ("rank", 0))


def legal(name: str, ranks: range, microbatches: range) -> Iterator[Schedule]:
    for count, batches in product(ranks, microbatches):
        try:
            yield schedule(name, count, batches)
        except ScheduleError:
            continue


@pytest.mark.parametrize("name", exact())
def test_every_schedule_runs_to_its_end_however_calls_queue(name: str) -> None:
    for made in legal(name, range(1, 5), range(1, 10, 2 if name != "chimera" else 1)):
        for way in WAYS:
            check(complete(made, None, *way), made.rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", exact())
def test_every_size_runs_to_its_end_however_calls_queue(name: str) -> None:
    for made in legal(name, range(1, 9), range(1, 17)):
        for way in WAYS:
            check(complete(made, None, *way), made.rows)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", exact())
def test_what_crosses_ranks_is_sent_and_received_once(name: str, way: tuple[Queue, int]) -> None:
    made = schedule(name, 4, 8)
    step = complete(made, None, *way)
    expected: Counter[tuple[int, Action]] = Counter()
    for row in made.rows:
        for kind, stage, batch, copy in (action[:4] for action in row):
            to = stage + (1 if kind == "F" else -1)
            if kind == "W" or not 0 <= to < made.stages:
                continue
            ranks = made.placement[copy]
            if ranks[stage] != ranks[to]:
                letter = "F" if kind == "F" else "B"
                expected[ranks[stage], Action(f"SEND_{letter}", stage, batch, copy)] += 1
                expected[ranks[to], Action(f"RECV_{letter}", to, batch, copy)] += 1
    rows = enumerate(step.rows)
    there = Counter((rank, one) for rank, row in rows for one in row if one.kind in TRANSFER)
    assert there == expected
    for row, complete_row in zip(made.rows, step.rows, strict=True):
        assert tuple(one for one in complete_row if one.kind in COMPUTE) == row


@pytest.mark.parametrize("name", exact())
def test_a_step_ends_with_sums_and_updates_of_all_that_a_rank_holds(name: str) -> None:
    made = schedule(name, 4, 8)
    tied = (("wte",), *((),) * (made.stages - 2), ("wte",))
    wiring = replace(Wiring.chain(made.stages), tied=tied)
    for rank, row in enumerate(complete(made, wiring).rows):
        held = list(made.holds[rank])
        last = [one for one in row if one.kind in (SYNC, UPDATE)]
        assert row[len(row) - len(last) :] == tuple(last)
        own = [one for one in last if one.kind == SYNC and not one.over]
        copied = [one for one in last if one.over == COPIES]
        updates = [one for one in last if one.kind == UPDATE]
        assert last == own + copied + updates
        assert [one[1::2][:2] for one in own] == [one[1::2][:2] for one in updates] == held
        ends = [pair for pair in held if pair[0] in (0, made.stages - 1)]
        assert [(one.stage, one.copy) for one in copied] == (held if made.copies > 1 else ends)
        assert {one.names for one in copied} <= ({()} if made.copies > 1 else {("wte",)})


@pytest.mark.parametrize("name", exact())
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_sends_follow_their_action_and_receives_come_ahead(name: str, ahead: int) -> None:
    for row in complete(schedule(name, 4, 8), None, "link", ahead).rows:
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


def seconds(step: Step, cost: StageCost, transfer: float) -> float:
    """The step where a transfer also waits for its receive: posted when the rank comes to it."""
    times = {"F": cost.forward, "B": cost.input + cost.weight, "I": cost.input, "W": cost.weight}
    now = [0.0] * len(step.rows)
    at = [0] * len(step.rows)
    posted: dict[Action, float] = {}
    free: dict[tuple[int, int], float] = defaultdict(float)
    arrived: dict[Action, float] = {}
    links: dict[tuple[int, int], list[Action]] = defaultdict(list)
    while any(place < len(row) for place, row in zip(at, step.rows, strict=True)):
        before = list(at)
        for rank, row in enumerate(step.rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                if action.kind in TRANSFER:
                    posted[action] = now[rank]
                    if action.kind.startswith("SEND"):
                        links[rank, step.peer(action)].append(action)
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


@pytest.mark.parametrize("name", exact())
def test_transfers_overlap_with_computing(name: str) -> None:
    """One action ahead is enough: the step is as if every receive had always been posted."""
    made = schedule(name, 4, 8)
    for transfer in (0.25, 1.0):
        ideal = simulate(made, [StageCost()] * made.stages, [transfer] * (made.stages - 1)).seconds
        assert seconds(complete(made), StageCost(), transfer) == pytest.approx(ideal)


def test_receives_that_are_posted_late_do_not_overlap() -> None:
    made = schedule("eager_1f1b", 4, 16)
    late, early = (
        seconds(complete(made, None, "link", ahead), StageCost(), 1.0) for ahead in (0, 1)
    )
    assert late > 1.1 * early


def test_one_queue_a_rank_cannot_take_receives_ahead() -> None:
    """Why there are two ways to lower: what overlaps on links stands still in one queue."""
    ahead = complete(schedule("1f1b", 3, 3))
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
    stuck = Step(tuple(map(parse_row, rows)), made.placement, 2, Wiring.chain(2), queue)
    with pytest.raises(DeadlockError) as caught:
        check(stuck, computed)
    assert "rank 0 at B0.0; rank 1 at F1.1" in str(caught.value)
    assert "SEND_B1.0 is not posted on rank 1, which stands at F1.1" in str(caught.value)
    assert "SEND_F0.1 is not posted on rank 0, which stands at B0.0" in str(caught.value)


def test_sums_and_updates_for_which_nobody_comes_are_named() -> None:
    step = complete(schedule("chimera", 2, 2))
    assert (
        str(step)
        .splitlines()[0]
        .endswith("SYNC0 SYNC1' SYNC0/copies SYNC1'/copies UPDATE0 UPDATE1'")
    )
    first, second = ([*row] for row in step.rows)
    turned = (*first[:-4], *first[-2:], *first[-4:-2])
    with pytest.raises(DeadlockError, match="0, 1 wait for one another") as caught:
        check(replace(step, rows=(turned, tuple(second))))
    assert "rank 0 waits in UPDATE0 for rank 1" in str(caught.value)
    alone = (*first[:-3], *first[-2:])
    with pytest.raises(ScheduleError, match="SYNC1/copies is in the wrong place"):
        check(replace(step, rows=(alone, tuple(second))))
    early = (*first[:-6], *first[-2:], *first[-6:-2])
    with pytest.raises(ScheduleError, match="gradients of stage 0 are not synchronised"):
        check(replace(step, rows=(early, tuple(second))))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["1f1b", "zb_h1", "zb_v", "interleaved_1f1b", "chimera", "dualpipe_v"]),
    st.sampled_from(WAYS),
    st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7), st.booleans()), max_size=8),
)
def test_values_that_skip_stages_arrive_too(
    name: str, way: tuple[Queue, int], skips: set[tuple[int, int, bool]]
) -> None:
    made = schedule(name, 4, 8)
    edges = {(n, n + 1): True for n in range(made.stages - 1)}
    edges |= {(a, b): back for a, b, back in sorted(skips) if a < b < made.stages and b > a + 1}
    wiring = Wiring(tuple(Edge(*pair, back) for pair, back in edges.items()), ((),) * made.stages)
    step = complete(made, wiring, *way)
    check(step, made.rows)
    moved = [one for row in step.rows for one in row if one.kind in TRANSFER]
    crossing = sum(
        (1 + back) * (ranks[a] != ranks[b])
        for ranks in made.placement
        for (a, b), back in edges.items()
    )
    assert len(moved) == 2 * crossing * 8 / made.copies


def ends(step: Step) -> bool:
    """Returns whether the graph of which action must precede which has no cycle."""
    graph = networkx.DiGraph()
    links: dict[tuple[int, int], list[object]] = defaultdict(list)
    for rank, row in enumerate(step.rows):
        computed, batch, last = ("begin", rank), 0, ""
        for action in row:
            if action.kind in TRANSFER:
                send = action.kind.startswith("SEND")
                way = 1 if action.kind in ("SEND_F", "RECV_B") else -1
                sender = action.stage if send else action.stage + way
                pair = ("pair", action.kind[-1], sender, action.microbatch, action.copy)
                batch += last not in TRANSFER
                if step.queue == "rank":
                    graph.add_edge((rank, "batch", batch - 1, "done"), (rank, "batch", batch))
                    graph.add_edge((rank, "batch", batch), pair)
                    graph.add_edge(pair, (rank, "batch", batch, "done"))
                graph.add_edge(computed, pair)
                if send:
                    links[rank, step.peer(action)].append(pair)
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
def test_the_checker_agrees_with_a_graph_of_all_dependencies(
    name: str, way: tuple[Queue, int], judged: Queue, swaps: list[tuple[int, int]]
) -> None:
    """Rows made for either queue are checked for either, after random swaps of neighbours."""
    step = complete(schedule(name, 4, 4), None, *way)
    rows = [list(row) for row in step.rows]
    for rank, at in swaps:
        row = rows[rank]
        transfers = [place for place in range(1, len(row)) if row[place].kind in TRANSFER]
        place = transfers[at % len(transfers)]
        row[place - 1], row[place] = row[place], row[place - 1]
    moved = replace(step, rows=tuple(map(tuple, rows)), queue=judged)
    try:
        check(moved)
    except DeadlockError:
        assert not ends(moved)
    except ScheduleError:
        return  # sends and receives in two orders, or before what is sent is there
    else:
        assert ends(moved)


def test_the_graph_sees_circles_too() -> None:
    ahead = complete(schedule("1f1b", 3, 3))
    assert ends(ahead)
    assert not ends(replace(ahead, queue="rank"))


def changed(step: Step, rank: int, old: str, new: str) -> Step:
    text = " ".join(map(str, step.rows[rank]))
    assert old in text
    rows = list(step.rows)
    rows[rank] = parse_row(text.replace(old, new))
    return replace(step, rows=tuple(rows))


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
    step = complete(schedule("gpipe", 2, 2), None, "link", 0)
    computed = schedule("gpipe", 2, 2).rows
    check(step, computed)
    with pytest.raises(ScheduleError) as caught:
        check(changed(step, rank, old, new), computed)
    assert what in str(caught.value)


def test_unknown_queues_are_refused() -> None:
    made = schedule("gpipe", 2, 2)
    for queue, ahead in (("pile", 1), ("link", -1)):
        with pytest.raises(ScheduleError, match="cannot complete gpipe"):
            complete(made, None, queue, ahead)


def test_peers_and_text() -> None:
    step = complete(schedule("zb_v", 2, 2))
    assert step.placement == ((0, 1, 1, 0),)
    transfers = parse_row("SEND_F0.0 RECV_F1.0 SEND_F2.0 SEND_B3.1 RECV_B2.1")
    assert [step.peer(one) for one in transfers] == [1, 0, 0, 1, 0]
    assert step == replace(step, rows=tuple(map(parse_row, rows_of(step))))


def rows_of(step: Step) -> list[str]:
    return [line.partition(": ")[2] for line in str(step).splitlines()]

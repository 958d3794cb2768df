"""The engine against closed forms, and against a simulation in small time steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.kernel_tables import Host
from autopar.cost.model import Work
from autopar.errors import SimulationError
from autopar.ir.collective import Collective
from autopar.simulate import Task, Timeline, run
from autopar.simulate.task import Phase
from autopar.simulate.timeline import axes_of, cause_of, kind_of

SLOW = 1.25


class Plain:
    """A kernel takes as many seconds as it has FLOPs, a collective as many as bytes; a link an
    axis, but that "x" and "y" lie on one."""

    def compute(self, work: Work) -> float:
        return work.flops

    def collective(self, call: Collective, /) -> float:
        return float(call.nbytes)

    def resources(self, call: Collective, /) -> tuple[str, ...]:
        return tuple("xy" if axis in "xy" else axis for axis in call.axes)


def kernel(seconds: float, *after: int, **more: object) -> Task:
    what = (Work("mm", seconds, 0, "f32"),)
    return Task("kernel", "", "forward", "compute", what, after, **more)  # type: ignore[arg-type]


def send(seconds: int, axis: str, *after: int, **more: object) -> Task:
    what = Collective("all_reduce", (axis,), seconds)
    return Task("send", "", "forward", axis, what, after, **more)  # type: ignore[arg-type]


def simulate(*tasks: Task, slowdown: float = SLOW) -> Timeline:
    return run(tasks, Plain(), slowdown)


def times(timeline: Timeline) -> list[tuple[float, float]]:
    return [(span.start, span.end) for span in timeline.spans]


def test_a_chain_takes_the_sum() -> None:
    found = simulate(kernel(2), send(3, "a", 0), kernel(4, 1))
    assert times(found) == [(0, 2), (2, 5), (5, 9)]
    assert (found.seconds, found.computing, found.exposed) == (9, 6, 3)
    assert found.utilisation == 6 / 9


# A host's seconds for a kernel forwards and backwards, a collective and a kernel of the optimizer.
HOST = Host(operator=3, autograd=5, collective=2, optimizer=7)


def test_a_device_waits_for_a_slower_host_and_a_host_for_no_device() -> None:
    tasks = kernel(1), kernel(1), send(1, "a", 0), kernel(20), kernel(1)
    found = run(tasks, Plain(), SLOW, HOST)
    assert times(found) == [(3, 4), (6, 7), (8, 9), (11, 31), (31, 32)]
    assert run(tasks, Plain(), SLOW, Host()).spans == run(tasks, Plain(), SLOW).spans


def test_each_kind_of_work_is_issued_at_its_own_price() -> None:
    def of(phase: Phase, kernels: int) -> Task:
        return replace(kernel(0), phase=phase, what=(Work("mm", 0, 0, "f32"),) * kernels)

    tasks = of("forward", 2), of("backward", 3), send(0, "a"), of("optimizer", 1), of("forward", 0)
    found = run(tasks, Plain(), SLOW, HOST)
    assert [start for start, _ in times(found)] == [6, 21, 23, 30, 30]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_kernels_end_by_the_recurrence_of_two_stations(lengths: list[int]) -> None:
    """A host and a device are two stations in a row, which each kernel passes in turn."""
    found = run([kernel(length) for length in lengths], Plain(), SLOW, HOST)
    ended = 0.0
    for number, (length, (start, end)) in enumerate(zip(lengths, times(found), strict=True)):
        assert start == max(ended, 3 * (number + 1))
        ended = start + length
        assert end == ended


def test_a_fork_joins_at_the_longest_branch() -> None:
    tasks = kernel(1), send(5, "a", 0), send(2, "b", 0), kernel(1, 1, 2)
    assert simulate(*tasks).seconds == 1 + 5 + 1


def test_what_overlaps_in_whole_takes_the_slowdown() -> None:
    found = simulate(kernel(4), send(4, "a"))
    assert found.seconds == pytest.approx(4 * SLOW)
    assert found.exposed == 0


def test_what_overlaps_in_part_takes_the_slowdown_in_that_part() -> None:
    # Both slow while the kernel of 4 runs: it ends at 4 SLOW, with 4 of 10 sent; 6 are exposed.
    found = simulate(kernel(4), send(10, "a"))
    assert times(found) == [(0, pytest.approx(4 * SLOW)), (0, pytest.approx(4 * SLOW + 6))]
    assert found.exposed == pytest.approx(6)


@settings(deadline=None)
@given(seconds=st.lists(st.integers(0, 1000), min_size=1, max_size=6))
def test_links_are_shared_evenly_by_those_that_still_run(seconds: list[int]) -> None:
    """Played out: until the shortest is done all advance alike, then the others go on."""
    left, clock, ends = dict(enumerate(seconds)), 0.0, [0.0] * len(seconds)
    while left:
        step = min(left.values())
        clock += step * len(left)
        left = {name: rest - step for name, rest in left.items()}
        for name in [name for name, rest in left.items() if rest <= 0]:
            ends[name] = clock
            del left[name]
    calls = [Collective("all_reduce", ("x",), nbytes) for nbytes in seconds]
    found = simulate(
        *(Task("send", "", "forward", f"stream {i}", call) for i, call in enumerate(calls))
    )
    assert [span.end for span in found.spans] == pytest.approx(ends, rel=1e-6, abs=1e-6)


def test_collectives_on_one_link_take_as_long_as_one_after_the_other() -> None:
    found = simulate(send(3, "x"), send(3, "y"), send(2, "a"))
    assert times(found) == [(0, 6), (0, 6), (0, 2)]
    # The shorter one ends first, the longer one has the link to itself from then on.
    assert times(simulate(send(1, "x"), send(3, "y"))) == [(0, 2), (0, 4)]


def test_a_stream_runs_its_tasks_in_their_order() -> None:
    found = simulate(kernel(3), send(1, "a", 0), send(1, "a"))
    assert times(found)[1:] == [(3, 4), (4, 5)]


def test_exposed_seconds_by_kind_axes_and_cause() -> None:
    found = simulate(kernel(1), send(2, "a", 0, cause="gradient"), send(4, "b", 1), kernel(3, 1))
    assert found.communication(kind_of) == {"all_reduce": (pytest.approx(2 + 3 * SLOW + 1), 3)}
    assert found.communication(axes_of) == {
        "a": (2, 2),
        "b": (pytest.approx(3 * SLOW + 1), pytest.approx(1)),
    }
    assert set(found.communication(cause_of)) == {"gradient", ""}


def test_memory_counts_from_start_to_end() -> None:
    tasks = (
        kernel(1, allocates=(("a one", 5.0), ("b two", 2.0))),
        kernel(1, 0, allocates=(("b three", 7.0),), frees=("a one", "b three")),
        kernel(1, 1, allocates=(("b four", 1.0),)),
    )
    usage = simulate(*tasks).memory
    assert usage.curve == ((0, 7), (1, 14), (2, 2), (2, 3))
    assert (usage.peak, usage.time) == (14, 1)
    assert usage.buffers == (("b three", 7), ("a one", 5), ("b two", 2))
    assert usage.kinds == {"b": 9, "a": 5}


@pytest.mark.parametrize(
    ("tasks", "word"),
    [
        ((kernel(1, 0),), "waits for itself"),
        ((kernel(1, 7),), "waits for task 7"),
        ((kernel(1, 1), send(1, "a", 0)), "never begin"),
        ((kernel(1, 1), kernel(1)), "never begin"),
        ((kernel(1, frees=("a",)),), "freed but not allocated"),
        ((kernel(1, allocates=(("a", 1.0),)), kernel(1, allocates=(("a", 1.0),))), "twice"),
    ],
)
def test_tasks_that_cannot_be_simulated_are_refused(tasks: tuple[Task, ...], word: str) -> None:
    with pytest.raises(SimulationError, match=word):
        simulate(*tasks)


def test_a_speedup_by_overlap_is_refused() -> None:
    with pytest.raises(SimulationError, match="slowdown"):
        simulate(kernel(1), slowdown=0.9)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Task, ...]:
    tasks: list[Task] = []
    for position in range(draw(st.integers(1, 8))):
        after = draw(st.sets(st.integers(0, position - 1), max_size=2)) if position else ()
        seconds = draw(st.integers(0, 4))
        axis = draw(st.sampled_from(["", "", "x", "y", "a"]))
        tasks.append(send(seconds, axis, *after) if axis else kernel(seconds, *after))
    return tuple(tasks)


def by_small_steps(tasks: tuple[Task, ...], dt: float) -> list[float]:
    """The end of each task, late by a few steps at most."""
    model = Plain()
    left = [
        model.collective(t.what) if isinstance(t.what, Collective) else t.what[0].flops
        for t in tasks
    ]
    end: dict[int, float] = {}
    for step in range(10**7):
        running = []
        for stream in {task.stream for task in tasks}:
            waiting = [i for i, t in enumerate(tasks) if t.stream == stream and i not in end]
            if waiting and all(other in end for other in tasks[waiting[0]].after):
                running.append(waiting[0])
        if not running:
            return [end[i] for i in range(len(tasks))]
        kinds = ["compute" if tasks[i].stream == "compute" else "network" for i in running]
        for i in running:
            what = tasks[i].what
            rate = 1 / SLOW if "compute" in kinds and "network" in kinds else 1.0
            if isinstance(what, Collective):
                mine = set(model.resources(what))
                others = (tasks[j].what for j in running)
                rate /= sum(
                    bool(mine & set(model.resources(o)))
                    for o in others
                    if isinstance(o, Collective)
                )
            left[i] -= rate * dt
            if left[i] <= 1e-9:
                end[i] = step * dt
    raise AssertionError("it never ends")


@settings(max_examples=60, deadline=None)
@given(programs())
def test_the_engine_is_a_simulation_by_small_steps_in_the_limit(tasks: tuple[Task, ...]) -> None:
    dt = 0.01
    ends = [span.end for span in simulate(*tasks).spans]
    assert ends == pytest.approx(by_small_steps(tasks, dt), abs=4 * dt * (len(tasks) + 1))

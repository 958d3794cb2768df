"""Four processes without a launcher: if one fails, all end by themselves and name it.

No collective gives up before a process that hangs is killed, however busy the machine is.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from autopar.errors import RankFailedError
from autopar.runtime.ranks.failure import Failure, Watch
from tests.support.ranks import forking

Play = Callable[[int, Path], None]
COUNT = 4
RANKS = tuple(range(COUNT))
HANG = 600.0  # seconds without an end of a process, after which those that are left are killed
NEVER = timedelta(hours=2)  # of collectives; later than that


@dataclass(frozen=True)
class Ended:
    """How a process ended: status, and what it wrote to stderr."""

    status: int | None
    stderr: str


def start(rank: int, folder: str, store: str, port: int, play: Play) -> None:
    """A process: its stderr in a file, in a group that meets in a file or at a port.

    That is one of the test, which outlasts the ranks as a launcher does, or rank 0's.
    """
    with open(Path(folder) / f"{rank}.err", "w") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    method, shared = None, None
    if store == "file":
        method = f"file://{folder}/store"
    elif store == "launcher":
        shared = joined(port)
    else:
        shared = served_store(rank, Path(folder))
    dist.init_process_group(
        "gloo", init_method=method, store=shared, rank=rank, world_size=COUNT, timeout=NEVER
    )
    play(rank, Path(folder))


def served() -> TCPStore:
    """A store that this process serves, at a port the system chooses."""
    return TCPStore("127.0.0.1", 0, COUNT, True, NEVER, wait_for_workers=False)


def joined(port: int) -> Store:
    """A store that another process serves."""
    return TCPStore("127.0.0.1", port, COUNT, False, NEVER)


def served_store(rank: int, folder: Path) -> Store:
    """A store that rank 0 serves."""
    meeting = FileStore(str(folder / "meeting"), COUNT)
    if rank == 0:
        store = served()
        meeting.set("port", str(store.port))
        return store
    return joined(int(meeting.get("port")))


def run(play: Play, folder: Path, store: str) -> list[Ended]:
    """How the processes ended, in rank order.

    A process that plays on after its own failure waits for the file "over".

    Raises:
        AssertionError: one did not end.
    """
    server = served() if store == "launcher" else None
    port = 0 if server is None else server.port
    with forking() as context:
        processes = [
            context.Process(target=start, args=(rank, str(folder), store, port, play))
            for rank in RANKS
        ]
        for process in processes:
            process.start()
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running and (over := wait(list(running), HANG)):
        for sentinel in over:
            del running[sentinel]  # type: ignore[arg-type]
        if len(running) == 1:
            (folder / "over").touch()
    for process in processes:
        process.kill()
        process.join()
    said = [(folder / f"{rank}.err").read_text() for rank in RANKS]
    assert not running, "\n".join(f"rank {r} did not end:\n{said[r]}" for r in running.values())
    return [Ended(p.exitcode, text) for p, text in zip(processes, said, strict=True)]


def wait_until_over(folder: Path) -> None:
    """Returns once all other processes have ended."""
    while not (folder / "over").exists():
        time.sleep(0.02)


@pytest.fixture(scope="module")
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[Play, str], tuple[list[Ended], Path]]:
    """How the processes of each play ended, with its folder.

    Most of their time they wait, so all plays of the selected tests run at once.
    """
    plays = dict.fromkeys(
        (item.callspec.params["play"], item.callspec.params["store"])
        for item in request.session.items
        if item.parent is request.node and "played" in item.fixturenames  # type: ignore[attr-defined]
    )
    folders = [tmp_path_factory.mktemp("play") for _ in plays]
    with ThreadPoolExecutor(len(plays)) as pool:
        ends = pool.map(lambda each, folder: run(each[0], folder, each[1]), plays, folders)
        return dict(zip(plays, zip(ends, folders, strict=True), strict=True))


def boom() -> None:
    raise ValueError("boom at step 3")


def meet() -> int:
    """A collective of all ranks."""
    x = torch.ones(())
    dist.all_reduce(x)
    return int(x)


def fail_in_step(rank: int, folder: Path, who: int = 2) -> None:
    """Rank `who` raises and ends; the others wait for it in an all_reduce."""
    watch = Watch.over(RANKS)
    pace = watch.pace
    try:
        for step in range(5):
            with watch:
                if step == 3 and rank == who:
                    watch.pace = replace(pace, grace=HANG)  # the others read it, however late
                    boom()
                meet()
    finally:
        watch.pace = pace


def fail_in_nested_step(rank: int, folder: Path) -> None:
    watch = Watch.over(RANKS)
    with watch:
        try:
            with watch:
                raise KeyError("handled inside the step")
        except KeyError:
            meet()
        with watch:
            if rank == 2:
                boom()
            meet()


def first_fails(rank: int, folder: Path) -> None:
    """Rank 0, whose store goes with it."""
    fail_in_step(rank, folder, who=0)


def fail_and_live_on(rank: int, folder: Path) -> None:
    """Rank 2's sockets stay open: nothing but the watch can stop the others."""
    try:
        fail_in_step(rank, folder)
    except ValueError:
        wait_until_over(folder)
        raise


def fail_while_others_are_outside(rank: int, folder: Path) -> None:
    """The others wait for rank 2 where no step is running, as for a device's result."""
    watch = Watch.over(RANKS)
    watch.pace = replace(watch.pace, patience=3.0)
    with watch:
        meet()
    if rank == 2:
        try:
            with watch:
                boom()
        except ValueError:
            wait_until_over(folder)
            raise
    meet()


@pytest.mark.parametrize(
    ("play", "store", "failing"),
    [
        pytest.param(fail_in_step, "file", 2, marks=pytest.mark.slow),
        pytest.param(fail_in_nested_step, "launcher", 2, marks=pytest.mark.slow),
        (first_fails, "tcp", 0),
        (fail_and_live_on, "launcher", 2),
        pytest.param(fail_while_others_are_outside, "launcher", 2, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_end_and_name_the_one_that_failed(
    play: Play, store: str, failing: int, played: Any
) -> None:
    ended, _ = played[play, store]
    for rank, end in enumerate(ended):
        assert end.status == 1, end
        assert "ValueError: boom at step 3" in end.stderr
        told = f"rank {failing} failed: ValueError: boom at step 3" in end.stderr
        assert told == (rank != failing)
        # The line of the user's program that failed.
        assert 'raise ValueError("boom at step 3")' in end.stderr


def raise_at_once(rank: int, folder: Path) -> None:
    """The thread never looks; what remains is the exception of the collective itself."""
    watch = Watch.over(RANKS)
    watch.pace = replace(watch.pace, interval=2 * HANG)
    with watch:
        meet()
        if rank == 2:
            boom()
        meet()


@pytest.mark.parametrize(("play", "store"), [(raise_at_once, "launcher")])
def test_a_broken_collective_is_the_cause_of_the_error(play: Play, store: str, played: Any) -> None:
    """Where gloo notices first, RankFailedError is raised, chained to what gloo said."""
    ended, _ = played[play, store]
    for end in ended[:2] + ended[3:]:
        assert end.status == 1
        assert re.search(r"RuntimeError: .*\n(.*\n)*The above exception was the direct", end.stderr)
        assert "autopar.errors.RankFailedError: rank 2 failed: ValueError: boom" in end.stderr


def succeed(rank: int, folder: Path) -> None:
    watch = Watch.over(RANKS)
    for _ in range(3):
        with watch, watch:
            assert meet() == COUNT
    # What every rank refuses for itself, and survives, stops nobody later.
    for _ in range(2):
        with pytest.raises(ValueError, match="a batch nobody likes"), watch:
            raise ValueError("a batch nobody likes")
        threading.Event().wait(2 * watch.pace.interval)  # the thread has looked
        with watch:
            meet()
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("autopar-watch") == 1
    watch.close()
    assert "autopar-watch" not in [thread.name for thread in threading.enumerate()]
    if rank % 2:  # the others leave the thread to the end of the process
        with watch:
            pass
    with Watch.over(RANKS):  # knows nothing of the first one's failures
        meet()
    with Watch.over((1, 3)) as part:
        assert (part.world == 2) == (rank in (1, 3))
    dist.barrier()
    (folder / f"{rank}.done").touch()


@pytest.mark.parametrize("play", [succeed])
@pytest.mark.parametrize("store", [pytest.param("file", marks=pytest.mark.slow), "tcp"])
def test_nobody_fails(play: Play, store: str, played: Any) -> None:
    ended, folder = played[play, store]
    for rank, end in enumerate(ended):
        assert end.status == 0, end.stderr
        assert "rank" not in end.stderr
        assert (folder / f"{rank}.done").exists()


AT_THE_END = """
import threading
import torch.distributed as dist
from autopar.runtime.ranks.failure import Watch
from autopar.runtime.ranks.pace import Pace

store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
with Watch(store.clone(), 0, 2, pace=Pace(interval=1e-4)):
    threading.Event().wait(0.1)
print("done")
"""


def test_the_thread_does_not_disturb_the_end_of_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_END], capture_output=True, text=True, timeout=HANG
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


ITS_END = """
import threading
from multiprocessing.util import Finalize
import torch.distributed as dist
from autopar.runtime.ranks.failure import Watch
from autopar.runtime.ranks.pace import Pace

store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
watch = Watch(store.clone(), 0, 2, pace=Pace(interval=1e-4, grace=0.1))
watch.start()
thread = watch._thread
Finalize(None, lambda: print(thread.is_alive()), exitpriority=0)  # runs after that of the watch
"""


@pytest.mark.parametrize("last", [pytest.param("", marks=pytest.mark.slow), "del watch"])
def test_the_thread_ends_before_the_program(last: str) -> None:
    """A thread that returns from C++ after the interpreter has ended aborts the process."""
    done = subprocess.run(
        [sys.executable, "-c", ITS_END + last], capture_output=True, text=True, timeout=HANG
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_alone_there_is_nothing_to_watch() -> None:
    watch = Watch.over((0,))
    before = threading.active_count()
    with watch:
        assert threading.active_count() == before
    with pytest.raises(ValueError, match="mine"), watch:
        raise ValueError("mine")


def test_a_failure_shows_the_error_and_its_cause() -> None:
    try:
        try:
            raise KeyError("weight")
        except KeyError as cause:
            raise ValueError("no such weight") from cause
    except ValueError as error:
        failure = Failure.of(3, 0, error)
    raised = failure.error()
    assert isinstance(raised, RankFailedError)
    assert "rank 3 failed: ValueError: no such weight" in str(raised)
    assert "KeyError: 'weight'" in str(raised)

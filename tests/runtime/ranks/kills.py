"""Kills and stops random ranks at random moments, and prints how the other ranks end.

OMP_NUM_THREADS=1 python -m tests.runtime.ranks.kills --seed 0 --count 50
OMP_NUM_THREADS=1 python -m tests.runtime.ranks.kills --seed 1000 --count 20 --kind pipeline
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

import autopar
from tests.runtime.ranks.test_failure import HANG, NEVER, served_store
from tests.support import models
from tests.support.ranks import forking

COUNT = 4
MESH = "cpu[1GFLOP/s 64GiB 1GB/s]: x=2, y=2 @10GB/s 1us"
KINDS = {
    "data": {"pins": autopar.pins.data_parallel("x", "y")},
    "tensor": {"pins": {"layers.*.weight": "[8@y, 8]"}},
    "zero3": {"pins": autopar.pins.fsdp("x", "y")},
    "planned": {},
    "offload": {"offload": "optimizer"},
    "pipeline": {"stages": 2, "microbatches": 4},
    "interleaved": {"stages": 4, "microbatches": 4, "schedule": "interleaved_1f1b chunks=2"},
}
PIPELINES = ("pipeline", "interleaved")
# Of the process group: only those of a rank that is stopped end by it.
TIMEOUT = {signal.SIGKILL: NEVER, signal.SIGSTOP: timedelta(seconds=30)}


@dataclass(frozen=True)
class Kill:
    """A rank's end.

    Attributes:
        kind: of program.
        victim: the rank.
        how: the signal.
        steps: how many steps the victim makes first; -1 for a moment before the first.
        delay: seconds from then on.
        store: where the processes meet, "file" or at rank 0's port, "tcp".
    """

    kind: str
    victim: int
    how: signal.Signals
    steps: int
    delay: float
    store: str

    @classmethod
    def drawn(cls, seed: int, kinds: tuple[str, ...]) -> Kill:
        """The kill of a seed."""
        draw = random.Random(seed)
        early = draw.random() < 0.4
        return cls(
            draw.choice(kinds),
            draw.randrange(COUNT),
            signal.SIGSTOP if draw.random() < 0.2 else signal.SIGKILL,
            -1 if early else draw.randrange(6),
            draw.uniform(0, 4.0 if early else 0.3),
            draw.choice(("file", "tcp")),
        )


def train(rank: int, folder: str, kill: Kill) -> None:
    """A rank, which says where it is by the files started-RANK and step-RANK-NUMBER."""
    place = Path(folder)
    with open(place / f"{rank}.err", "w") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    shared = served_store(rank, place) if kill.store == "tcp" else None
    method = None if shared is not None else f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=method, store=shared, rank=rank, world_size=COUNT,
        timeout=TIMEOUT[kill.how],
    )  # fmt: skip
    dist.barrier()
    torch.manual_seed(0)
    model, batch = models.mlp((8, 8, 8, 8, 8))
    (place / f"started-{rank}").touch()
    program = autopar.compile(
        model,
        MESH,
        loss_fn=models.squared_error,
        example_inputs=batch,
        dump=place / "dump",
        **KINDS[kill.kind],  # type: ignore[arg-type]
    )
    for number in range(1_000_000):
        program.step(**batch)
        if number < 8:
            (place / f"step-{rank}-{number}").touch()


def until(file: Path, seconds: float) -> bool:
    """Returns whether a file is there in time."""
    end = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


@dataclass(frozen=True)
class Outcome:
    """Ends of the survivors of a kill; `wrong` says what is not as it should be."""

    seconds: float
    said: str
    dumps: int
    wrong: str


def play(kill: Kill, folder: Path) -> Outcome:
    """Make a kill and watch the survivors."""
    with forking() as context:
        ranks: list[BaseProcess] = [
            context.Process(target=partial(train, rank, str(folder), kill)) for rank in range(COUNT)
        ]
        for process in ranks:
            process.start()
    marker = f"started-{kill.victim}" if kill.steps < 0 else f"step-{kill.victim}-{kill.steps}"
    there = until(folder / marker, HANG)
    time.sleep(kill.delay)
    victim = ranks[kill.victim]
    assert victim.pid is not None
    if victim.is_alive():
        os.kill(victim.pid, kill.how)
    else:
        there = False
    began = time.monotonic()
    others = {rank: process for rank, process in enumerate(ranks) if rank != kill.victim}
    while any(process.is_alive() for process in others.values()):
        if time.monotonic() - began > HANG:
            break
        time.sleep(0.02)
    seconds = time.monotonic() - began
    wrong = [] if there else ["the victim did not get there"]
    said = ""
    for rank, process in others.items():
        text = (folder / f"{rank}.err").read_text()
        if process.is_alive():
            wrong.append(f"rank {rank} lives")
        elif process.exitcode == 0:
            wrong.append(f"rank {rank} ended with 0")
        lines = [line for line in text.splitlines() if re.search(r" lost|(did|has) not come", line)]
        named = [line for line in lines if f"{kill.victim}" in line and "rank" in line]
        said = said or (named[-1] if named else "")
        if not named:
            wrong.append(f"rank {rank} names nobody: {text[-300:]!r}")
    for process in ranks:
        process.kill()
        process.join()
    return Outcome(seconds, said, len(list(folder.glob("dump/rank-*.json"))), "; ".join(wrong))


def main() -> int:
    """Print a row for every kill; 1 if one went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--kind", choices=("any", "pipeline"), default="any")
    given = parser.parse_args()
    kinds = PIPELINES if given.kind == "pipeline" else tuple(k for k in KINDS if k not in PIPELINES)
    bad = 0
    for seed in range(given.seed, given.seed + given.count):
        kill = Kill.drawn(seed, kinds)
        with tempfile.TemporaryDirectory() as folder:
            outcome = play(kill, Path(folder))
        bad += bool(outcome.wrong)
        moment = "compile" if kill.steps < 0 else f"step {kill.steps + 1}"
        print(
            f"{seed:5} {kill.kind:11} {kill.how.name} rank {kill.victim} {moment:>8} "
            f"+{kill.delay:.2f} s {kill.store:4} {outcome.seconds:5.1f} s {outcome.dumps} dumps  "
            f"{outcome.wrong or outcome.said}",
            flush=True,
        )
    print(f"{given.count - bad} of {given.count} as they should be", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())

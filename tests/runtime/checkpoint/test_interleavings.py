"""Concurrent saves into one folder, and readers, in all orders of their disk operations.

python -m pytest tests/runtime/checkpoint/test_interleavings.py -m slow     # 1,300, two minutes
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import CheckpointError
from autopar.files import atomic
from autopar.runtime.checkpoint.boxes import Box
from autopar.runtime.checkpoint.dcp import write_parts
from autopar.runtime.checkpoint.index import MARKER
from autopar.runtime.checkpoint.plans import Part, SavePlanner, Snapshot
from autopar.runtime.checkpoint.safetensors_files import Writer
from tests.runtime.checkpoint.turns import Actor, Turns, stepping


def save(path: Path, number: int, rows: int = 3) -> None:
    """A checkpoint all of whose elements are `number`; of another model with other `rows`."""
    parts = [
        Part(f"model.{name}", torch.full((rows, 2), float(number)), Box.whole((rows, 2)), (rows, 2))
        for name in "ab"
    ]
    details = {"names": ["a", "b"], "tied": {}, "scheduler": None, "values": number, "random": ""}
    optimizer = {"kind": "SGD", "groups": [], "values": {}}
    snapshot = Snapshot(parts, details | {"optimizer": optimizer})
    write_parts(Writer(path), SavePlanner(snapshot), None)


def load(path: Path) -> tuple[int, int]:
    """The number, and of how many rows; -1 if there is nothing."""
    try:
        state = autopar.load_checkpoint(path)
    except CheckpointError as error:
        if "there is no checkpoint" in error.what:
            return -1, 0
        raise
    numbers = {float(x) for value in state.values() for x in value.flatten()}
    assert list(state) == ["a", "b"]
    assert len(numbers) == 1, "half of one, half of another"
    return int(numbers.pop()), len(state["a"])


def published(turns: Turns, path: Path, first: int) -> list[tuple[int, int]]:
    """When which number became the one to be read; `first` was there before."""
    marks = [(t, a.name) for t, a, name in turns.renames if name in (path, path / MARKER)]
    return [(0, first), *marks]


def readable(marks: list[tuple[int, int]], begin: int, end: int) -> set[int]:
    """What may be read by who begins and ends at these times."""
    ends = [*(time for time, _ in marks[1:]), math.inf]
    return {n for (t, n), until in zip(marks, ends, strict=True) if t <= end and until > begin}


def play(seed: int, folder: Path) -> None:
    """Two or three savers, one or two readers, some killed; over a checkpoint, or over nothing."""
    draw = random.Random(seed)
    path, turns = folder / "one", Turns(seed)
    first = 0 if draw.random() < 0.5 else -1
    if first == 0:
        save(path, 0)
    reads: list[tuple[int, int, int]] = []

    def read() -> None:
        for _ in range(2):
            begin = turns.time
            number, _ = load(path)
            reads.append((begin, turns.time, number))

    def deadline() -> int:
        return draw.randrange(1, 120) if draw.random() < 0.3 else -1

    savers = [
        Actor(lambda n=n: save(path, n), deadline(), n) for n in range(1, 1 + draw.choice((2, 3)))
    ]
    readers = [Actor(read, name=f"reader {n}") for n in range(draw.choice((1, 2)))]
    with stepping(turns):
        turns.run([*savers, *readers])
    for actor in (*savers, *readers):
        if actor.error is not None and not actor.dead:
            raise actor.error
    marks = published(turns, path, first)
    for begin, end, number in reads:
        assert number in readable(marks, begin, end)
    assert load(path)[0] == marks[-1][1]
    # A job that has just died while it made its folder is left alone for a day, which is over now.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic, "_DAY", -1.0)
        save(path, 9)
    assert load(path) == (9, 3)
    assert [entry.name for entry in folder.iterdir()] == ["one"]
    assert len(list(path.iterdir())) == 2
    assert len(list(path.rglob("*"))) == 3


def play_two_models(seed: int, folder: Path) -> None:
    """Jobs of two models: one model's checkpoints are there in the end, the other's are refused."""
    draw = random.Random(seed)
    path, turns = folder / "one", Turns(seed)
    rows = {n: draw.choice((3, 4)) for n in range(1, 4)}
    savers = [Actor(lambda n=n: save(path, n, rows[n]), name=n) for n in rows]
    with stepping(turns):
        turns.run(savers)
    for actor in savers:
        if actor.error is not None:
            assert isinstance(actor.error, CheckpointError)
            assert "another model" in actor.error.what
    marks = published(turns, path, -1)
    assert len({rows[n] for _, n in marks[1:]}) <= 1
    assert load(path)[0] == marks[-1][1]
    assert sum(actor.error is None for actor in savers) == len(marks) - 1


def several(play_one: Any, count: int, tmp_path: Path) -> None:
    for seed in range(count):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            play_one(seed, folder)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_savers_and_readers_take_turns(tmp_path: Path) -> None:
    several(play, 20, tmp_path)


def test_two_models_in_one_folder(tmp_path: Path) -> None:
    several(play_two_models, 10, tmp_path)


@pytest.mark.slow
def test_a_thousand_interleavings(tmp_path: Path) -> None:
    several(play, 1000, tmp_path)


@pytest.mark.slow
def test_two_models_in_many_orders(tmp_path: Path) -> None:
    several(play_two_models, 300, tmp_path)

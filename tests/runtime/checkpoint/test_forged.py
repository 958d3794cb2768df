"""Damaged and forged checkpoints are refused by name, or load exactly as saved.

python -m pytest tests/runtime/checkpoint/test_forged.py -m slow     # 4,000 mutations
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import resource
import shutil
import signal
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import autopar
from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.boxes import Box, tile
from autopar.runtime.checkpoint.values import decode
from tests.runtime.checkpoint.mutations import HOSTILE, mutated
from tests.runtime.checkpoint.test_checkpoint import contents, small, trained

SECONDS = 60  # for one load, on a busy machine
BYTES = 2**29  # that all loads may take


# Boxes -------------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor and boxes: a part of it cut and cut again, and sometimes one moved or lost."""
    shape = draw(SHAPES)
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        place, dim = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(shape) - 1))
        box = boxes[place]
        at = draw(st.integers(0, box.sizes[dim]))
        head = Box(box.offsets, (*box.sizes[:dim], at, *box.sizes[dim + 1 :]))
        tail = Box(box.offsets, (*box.sizes[:dim], box.sizes[dim] - at, *box.sizes[dim + 1 :]))
        boxes[place : place + 1] = [head, tail.shifted(dim, at)]
    if shape and draw(st.booleans()):
        place = draw(st.integers(0, len(boxes) - 1))
        moved = boxes[place].shifted(
            draw(st.integers(0, len(shape) - 1)), draw(st.sampled_from((-1, 1)))
        )
        boxes[place : place + 1] = draw(st.sampled_from([[], [moved], [moved, boxes[place]]]))
    return shape, boxes


@given(boxes_in())
@example(((0, 1), [Box((0, 0), (0, 0))]))
@settings(max_examples=150, deadline=None)
def test_boxes_tile_a_tensor_if_each_element_is_in_one(case: tuple[Any, list[Box]]) -> None:
    shape, boxes = case
    count = np.zeros(shape, int)
    for box in boxes:
        if box.inside(shape):
            count[box.slices] += 1
    expected = all(box.inside(shape) for box in boxes) and bool((count == 1).all())
    if not count.size:
        expected = boxes == [Box.whole(shape)]  # with no element to count, sizes must be its own
    elif not all(box.volume for box in boxes):
        expected = False  # a part without elements has nothing to say
    assert tile(boxes, shape) == expected


# Values ------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.sampled_from(HOSTILE) | st.integers() | st.text(max_size=3) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(("tensor", "tuple", "dict", "set", "float", "counter", "frozenset")),
            inner,
            max_size=1,
        )
    ),
    max_leaves=12,
)


@given(JSON)
@settings(max_examples=150, deadline=None)
def test_any_json_is_a_value_or_refused(value: Any) -> None:
    with contextlib.suppress(CheckpointError):
        decode(value)


# Folders -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Of a checkpoint with optimizer, averages and values."""
    program = small(ema=0.9)
    trained(program)
    path = tmp_path_factory.mktemp("saved") / "one"
    program.save_checkpoint(path, values={"epoch": 3, "pair": (1, 2.5)})
    return contents(path)


def laid_out(files: dict[str, bytes], folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@contextmanager
def in_time() -> Iterator[None]:
    """Inside, what hangs is interrupted."""

    def ring(*_: Any) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refused(folder: Path, program: autopar.Session) -> list[str]:
    """All ways to load it refuse it, by name, and leave the program as it was."""
    before = {k: v.clone() for k, v in program.state_dict().items()}
    said = []
    for load in (autopar.load_checkpoint, program.load_checkpoint, program.load_weights):
        with in_time(), pytest.raises(CheckpointError) as caught:
            load(folder)
        said.append(str(caught.value))
    torch.testing.assert_close(program.state_dict(), before, rtol=0, atol=0)
    return said


Content = dict[str, Any]
WEIGHT = "model.layers.0.weight"  # [5, 8]


def parts(content: Content, *rows: tuple[int, int]) -> None:
    """The weight is made of these rows."""
    file = content["tensors"][WEIGHT]["chunks"][0][2]
    content["tensors"][WEIGHT]["chunks"] = [
        [[a, 0], [b - a, 8], file, f"{WEIGHT}[{a}:{b}, 0:8]", 0] for a, b in rows
    ]


def chunk(place: int, value: Any) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        content["tensors"][WEIGHT]["chunks"][0][place] = value

    return change


def of_weight(key: str, value: Any) -> Callable[[Content], None]:
    return lambda content: content["tensors"][WEIGHT].update({key: value})


def detail(key: str, value: Any) -> Callable[[Content], None]:
    return lambda content: content["details"].update({key: value})


def huge(content: Content) -> None:
    stored = content["tensors"][WEIGHT]
    stored["shape"] = stored["chunks"][0][1] = [2**20, 2**20]


def twice(content: Content) -> None:
    """One tensor's bytes stand for another's."""
    stored = content["tensors"][WEIGHT]
    content["tensors"]["ema.layers.0.weight"] = stored


def update_values(*pairs: list[Any]) -> Callable[[Content], None]:
    return detail("update", {"dict": [["check", {"dict": list(pairs)}]]})


FORGED: dict[str, Callable[[Content], None]] = {
    "overlaps and leaves a gap": lambda c: parts(c, (0, 3), (1, 3)),
    "overlaps": lambda c: parts(c, (0, 3), (2, 5)),
    "leaves a gap": lambda c: parts(c, (0, 2), (3, 5)),
    "lies outside": lambda c: parts(c, (0, 3), (3, 6)),
    "another dtype of the same size": of_weight("dtype", "int32"),
    "another dtype": of_weight("dtype", "float64"),
    "unknown dtype": of_weight("dtype", "float128"),
    "no names": detail("names", []),
    "a name twice": detail("names", ["layers.0.weight"] * 2),
    "names that are no texts": detail("names", [1]),
    "huge": huge,
    "one tensor for another": twice,
    "too many dimensions": of_weight("shape", [1] * 1000),
    "a size that is a float": of_weight("shape", [5.0, 8]),
    "a size that is a truth": of_weight("shape", [True, 40]),
    "negative": chunk(0, [-1, 0]),
    "leads out": chunk(2, "../rank_0.safetensors"),
    "absolute": chunk(2, "/etc/passwd"),
    "null byte": chunk(2, "rank\0.safetensors"),
    "no checksum": chunk(4, None),
    "another key": chunk(3, "model.layers.0.bias"),
    "no optimizer": detail("optimizer", {}),
    "parameters of a group are replaced": lambda c: c["details"]["optimizer"]["groups"][0].update(
        {"options": {"dict": [["params", []]]}}
    ),
    "random numbers of no generator": detail("random", "AAAA"),
    "no base64": detail("random", "\u00e9"),
    "values that are none": detail("values", {"call": "print"}),
    "values of the update are missing": update_values(["steps", 1]),
    "values of the update have too many bits": update_values(["steps", 10**30], ["nonfinite", 0]),
    "an empty part": lambda c: parts(c, (0, 0), (0, 5)),
}


def rewritten(files: dict[str, bytes], change: Callable[[Content], None]) -> dict[str, bytes]:
    document = json.loads(files["checkpoint.json"])
    change(document["content"])
    document["checksum"] = zlib.crc32(json.dumps(document["content"], sort_keys=True).encode())
    return {**files, "checkpoint.json": json.dumps(document).encode()}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_index_is_refused(name: str, files: dict[str, bytes], tmp_path: Path) -> None:
    folder = laid_out(rewritten(files, FORGED[name]), tmp_path / "one")
    program = small(seed=1, ema=0.9)
    if not name.startswith(("parameters", "random", "no base64", "values")):
        refused(folder, program)
        return
    # What only a program reads.
    before = {k: v.clone() for k, v in program.state_dict().items()}
    with pytest.raises(CheckpointError):
        program.load_checkpoint(folder)
    torch.testing.assert_close(program.state_dict(), before, rtol=0, atol=0)


HEAD = b'{"format": "autopar checkpoint 1", "checksum": 1, "content": '
TEXTS = {
    "empty": b"",
    "deep": HEAD + b"[" * 100_000,
    "digits": HEAD + b"1" * 5_000 + b"}",
    "not a number": HEAD + b"NaN}",
    "infinite": HEAD + b"1e999}",
    "twice": HEAD + b'{"a": 1, "a": 2}}',
    "no text": HEAD + b"\xff\xfe",
    "another version": HEAD.replace(b" 1", b" 2", 1) + b"{}}",
    "a list": b"[]",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_that_is_none_is_refused(name: str, files: dict[str, bytes], tmp_path: Path) -> None:
    folder = laid_out({**files, "checkpoint.json": TEXTS[name]}, tmp_path / "one")
    refused(folder, small(seed=1))


def test_what_is_no_file_is_refused_at_once(files: dict[str, bytes], tmp_path: Path) -> None:
    """Pipes, folders, links that lead out, files of a terabyte with nothing in them."""
    program = small(seed=1, ema=0.9)
    elsewhere = tmp_path / "elsewhere"

    def pipe(path: Path) -> None:
        os.mkfifo(path)

    def terabyte(path: Path) -> None:
        path.touch()
        os.truncate(path, 2**40)

    def link(path: Path) -> None:
        elsewhere.write_bytes(files[str(path.relative_to(tmp_path / "one"))])
        path.symlink_to(elsewhere)

    for name in files:
        for replace in (pipe, terabyte, Path.mkdir, link):
            if name == "checkpoint.json" and replace is link:
                continue  # what it names lies where it is
            folder = laid_out(files, tmp_path / "one")
            (folder / name).unlink()
            replace(folder / name)
            refused(folder, program)


# Mutations ---------------------------------------------------------------------------------------


def fuzz(files: dict[str, bytes], tmp_path: Path, count: int) -> tuple[int, int]:
    """How many mutations were refused, and how many were loaded, exactly."""
    original = laid_out(files, tmp_path / "original")
    expected = autopar.load_checkpoint(original)
    means = autopar.load_checkpoint(original, average=True)
    program = small(seed=1, ema=0.9)
    before = {k: v.clone() for k, v in program.state_dict().items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tally = [0, 0]
    for seed in range(count):
        folder = laid_out(mutated(files, random.Random(seed)), tmp_path / "one")
        for load, values in (
            (autopar.load_checkpoint, expected),
            (functools.partial(autopar.load_checkpoint, average=True), means),
        ):
            try:
                with in_time():
                    found = load(folder)
            except CheckpointError:
                tally[0] += 1
                continue
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
            tally[1] += 1
            for name in expected:
                assert torch.equal(found[name], values[name]), f"seed {seed}: {name}"
            assert set(found) == set(expected), seed
        try:
            with in_time():
                program.load_checkpoint(folder)
        except CheckpointError:
            now = program.state_dict()
            assert all(torch.equal(now[k], v) for k, v in before.items()), f"seed {seed}"
        except BaseException as error:
            error.add_note(f"seed {seed}, a program")
            raise
        else:
            now = program.state_dict()
            assert all(torch.equal(now[k], v) for k, v in expected.items()), f"seed {seed}"
            program.load_state_dict(before)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown * 1024 < BYTES
    return tally[0], tally[1]


def test_mutations_are_refused_or_change_nothing(files: dict[str, bytes], tmp_path: Path) -> None:
    refusals, loads = fuzz(files, tmp_path, 120)
    assert refusals > 10 * loads


@pytest.mark.slow
def test_many_mutations(files: dict[str, bytes], tmp_path: Path) -> None:
    refusals, loads = fuzz(files, tmp_path, 4000)
    print(f"{refusals} loads refused, {loads} exact")
    assert refusals > 10 * loads
    assert loads

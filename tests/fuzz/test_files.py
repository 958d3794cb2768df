"""Damaged and hostile files of every kind are accepted, or refused quickly with a named error.

Reading them needs little memory. `python -m pytest tests/fuzz -m slow` tries 10,000 and more.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import resource
import signal
import stat
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from autopar.cost.calibration import Calibration
from autopar.errors import AutoparError, PlanError, ProblemError
from autopar.files.kinds import Kind
from autopar.intra_op.contest import read_problem
from autopar.plan import Plan
from autopar.zoo.loading import read_config
from tests.fuzz.formats import Format, formats
from tests.fuzz.mutations import changed, damaged, toml
from tests.support.ranks import forking

SECONDS, BYTES = 10.0, 800 * 2**20  # of one file; the processor's time
NAMES = (
    "plan.toml", "pipeline.toml", "graph.txt", "calibration.toml", "problem.json", "solution.json",
    "gpt2.json", "llama.json", "program.toml", "mesh.txt", "pins.txt",
    "collective.txt", "execution.json",
)  # fmt: skip


def mutated(form: Format, draw: random.Random) -> bytes:
    """The bytes of a damaged file."""
    if form.tree is None or draw.random() < 0.4:
        return damaged(form.sample.encode(), draw)
    tree = changed(form.tree, draw)
    text = toml(tree) if form.name.endswith(".toml") else json.dumps(tree)
    return text.encode("utf-8", "surrogatepass")


def attempt(form: Format, path: Path) -> str:
    """ "" if a file is read or refused by name, else what happens instead."""
    try:
        form.read(path)
    except AutoparError as error:
        whole = str(error)
        if not (error.what and (error.why or error.todo)):
            return f"an error without a reason: {whole}"
        return "" if len(whole) < 20_000 else f"an error of {len(whole)} characters"
    except BaseException:
        return traceback.format_exc()[-1500:]
    return ""


def _late(signum: int, frame: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def tried(names: Sequence[str], count: int, seed: int, folder: Path) -> list[str]:
    """Returns the failures of so many mutations of each format, in this process."""
    faults = []
    known = {form.name: form for form in formats()}
    for name in names:
        (folder / name).write_text(known[name].sample, encoding="utf-8")
        known[name].read(folder / name)  # imports what it needs, and the sample is good
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGPROF, _late)
    for name, number in itertools.product(names, range(seed, seed + count)):
        path = folder / name
        path.write_bytes(mutated(known[name], random.Random(number)))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        fault = attempt(known[name], path)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if fault:
            faults.append(f"seed {number} of {name}:\n{fault}")
    return faults


def in_a_process(names: Sequence[str], count: int, seed: int, folder: Path) -> None:
    with forking() as context, context.Pool(1) as pool:
        faults = pool.apply_async(tried, (names, count, seed, folder)).get()
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:5])


def test_a_few_damaged_files(tmp_path: Path) -> None:
    in_a_process(NAMES, 10, 0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_damaged_files(name: str, tmp_path: Path) -> None:
    in_a_process([name], 1000, 10_000, tmp_path)


def places(folder: Path) -> list[Path]:
    """Paths that are no ordinary files, or cannot be read."""
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    names = ["pipe", "folder", "loop", "missing", "x" * 300, "nul\0", "\ud800"]
    return [
        *(folder / name for name in names),
        Path("/dev/zero"),
        Path("/dev/full"),
        Path("/dev/tty"),
    ]


@pytest.mark.parametrize("read", [Plan.load, Calibration.load, read_problem, read_config])
def test_what_is_no_file_is_refused_at_once(read: Any, tmp_path: Path) -> None:
    signal.signal(signal.SIGALRM, _late)
    for path in places(tmp_path):
        signal.alarm(30)
        with pytest.raises(AutoparError) as caught:
            read(path)
        signal.alarm(0)
        assert caught.value.why


def test_a_bomb_of_gzip_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * 2**24) * 64)  # members unpack one after another
    assert path.stat().st_size < 1.5e6
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ProblemError, match="cannot read"):
        read_problem(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024


SMALL = Kind("the file", PlanError, limit=1000)


def test_files_beyond_their_limit_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "big"
    path.write_bytes(b"x" * 1001)
    with pytest.raises(PlanError, match="cannot read the file"):
        SMALL.text(path)
    path.write_bytes(b"x" * 1000)
    assert len(SMALL.text(path)) == 1000


@pytest.mark.parametrize("target", ["/dev/full", "/proc/version", "/nowhere/file", "FOLDER"])
def test_what_cannot_be_written_is_named(target: str, tmp_path: Path) -> None:
    path = tmp_path if target == "FOLDER" else Path(target)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(PlanError, match="cannot write the file") as caught:
        SMALL.write(path, "content")
    assert caught.value.why
    assert sorted(tmp_path.iterdir()) == before


def test_files_are_written_whole_and_devices_are_left_devices(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(path)
    SMALL.write(link, "one")
    assert link.is_symlink()
    assert path.read_text() == "one"
    with pytest.raises(PlanError):
        SMALL.write(path, "half \ud800")
    assert path.read_text() == "one"
    SMALL.write("/dev/null", "nothing")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "link"]

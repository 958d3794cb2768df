"""Graphs of models that were traced before, kept in the user's cache folder.

Graphs that `autopar prepare` traces are kept in the package's folder, for all of its users.

A model of the zoo or of `hf:` is data: its graph follows from its configuration, the sizes of its
batch, the options of capture, and the versions of torch, transformers and autopar. The name of an
entry is a hash of all of them, autopar's by the content of its sources, so a stale entry is never
found. Without a folder that can be written, nothing is kept. An entry that does not read back whole
is traced again. A model from the user's own code is always traced.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from importlib import metadata
from pathlib import Path

import autopar
from autopar.errors import AutoparError, ModelFileError
from autopar.files.kinds import MIB, Kind
from autopar.ir.graph import Graph
from autopar.ir.graph_text import format_graph, parse_graph
from autopar.plan_entries import ModelSpec
from autopar.planning.options import Options
from autopar.zoo import spec

ENTRY = Kind("a traced graph", ModelFileError, limit=256 * MIB)
MOST = 256 * MIB  # of all entries; the oldest go first
BESIDE = Path(autopar.__file__).parent / "__pycache__" / "graphs"  # like compiled code
_VERSIONS = ("torch", "transformers", "numpy")
_AHEAD: ContextVar[bool] = ContextVar("_AHEAD", default=False)


def cache_folder() -> Path | None:
    """Returns the folder of this user's cache, None if there is no home."""
    with contextlib.suppress(RuntimeError):  # no home is known
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar"
    return None


@contextlib.contextmanager
def kept_beside_package() -> Iterator[None]:
    """Returns a context that keeps new entries in the package's folder, if it is writable."""
    token = _AHEAD.set(True)
    try:
        yield
    finally:
        _AHEAD.reset(token)


def _folders() -> list[Path]:
    """Returns the folders of entries, the first of which gets new ones."""
    own = cache_folder()
    mine = [] if own is None else [own / "graphs"]
    ahead = _AHEAD.get() and os.access(Path(autopar.__file__).parent, os.W_OK)
    return [BESIDE] if ahead else [*mine, BESIDE]


def remembered(wanted: ModelSpec, options: Options, trace: Callable[[], Graph]) -> Graph:
    """Returns the graph of a model, traced only if no entry has it.

    Args:
        wanted: a model that is data, and its sizes.
        options: options of capture.
        trace: traces it.
    """
    text = remembered_text(
        {"graph": _identity(wanted), "options": _capture_options(options)},
        lambda: format_graph(trace()),
    )
    return parse_graph(text)


def depth_of(wanted: ModelSpec, count: Callable[[], int | None]) -> int | None:
    """Returns a model's number of blocks, counted only if no entry has it."""
    text = remembered_text({"depth": _identity(wanted)}, lambda: json.dumps(count()))
    number = json.loads(text)
    return number if isinstance(number, int) else None


def remembered_text(question: object, answer: Callable[[], str]) -> str:
    """Returns the answer to a question under these versions, from the cache or by `answer`."""
    name = hashlib.sha256(json.dumps([question, _versions()]).encode()).hexdigest()
    folders = _folders()
    for folder in folders:
        if (known := _read(folder / f"{name}.txt")) is not None:
            return known
    text, folder = answer(), folders[0]
    with contextlib.suppress(OSError, AutoparError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o755 if folder == BESIDE else 0o700)
        ENTRY.write(folder / f"{name}.txt", f"{_digest(text)}\n{text}")
        _shrink(folder)
    return text


def _read(path: Path) -> str | None:
    """Returns an entry, None if there is none, or not a whole one."""
    if not os.path.isfile(path):
        return None
    with contextlib.suppress(OSError, AutoparError):
        digest, _, text = ENTRY.text(path).partition("\n")
        if digest == _digest(text):
            return text
    return None


def _shrink(folder: Path) -> None:
    """Removes the oldest entries of a folder that has grown too large."""
    files = sorted(folder.glob("*.txt"), key=lambda path: path.stat().st_mtime, reverse=True)
    total = 0
    for path in files:
        total += path.stat().st_size
        if total > MOST:
            path.unlink()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _identity(wanted: ModelSpec) -> list[object]:
    """Returns values that identify a model by its content."""
    if wanted.source.startswith("hf:"):
        path = Path(wanted.source.removeprefix("hf:"))
        path = path / "config.json" if os.path.isdir(path) else path
        return ["hf", ENTRY.text(path), wanted.batch, wanted.seq, wanted.layers]
    usual = spec(wanted.source)
    sizes = [wanted.batch or usual.batch, wanted.seq or usual.seq, wanted.layers]
    return ["zoo", repr(usual), *sizes]


def _capture_options(options: Options) -> list[object]:
    """Returns the options on which a graph depends."""
    own = [options.expert_load, options.documents, options.update.mixes, options.counted]
    return [str(options.precision), list(options.fuse), *own]


@cache
def _versions() -> list[object]:
    """Returns the versions of all that turns a configuration into a graph."""
    found: list[object] = [sys.version, autopar.__file__]
    for name in _VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            package = metadata.distribution(name)
            found.append([name, package.version, str(package.locate_file(name))])
    return [*found, _sources()]


def _sources() -> str:
    """Returns a hash of autopar's own sources."""
    home = Path(autopar.__file__).parent
    total = hashlib.sha256()
    for path in sorted(home.rglob("*")):
        if path.suffix in (".py", ".toml") and "cli" not in path.relative_to(home).parts[:1]:
            total.update(f"{path.relative_to(home)}\n".encode() + path.read_bytes())
    return total.hexdigest()

"""The folder of a checkpoint: published whole or not at all, and read as one or the next.

checkpoint.json is the marker of `autopar.files.atomic`: every save writes into a draft of its own,
and the marker takes its place when all that it names is there. What is in the folder besides, a
user's notes say, is left alone.
"""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from autopar.errors import CheckpointError
from autopar.files import atomic
from autopar.files.atomic import Draft
from autopar.runtime.checkpoint.index import FORMAT, HEAD, MARKER, Index, from_json, to_json

Found = TypeVar("Found")
Value = TypeVar("Value")
_OLD_FILE = re.compile(r"rank_\d+\.safetensors")  # beside the marker, as they were once written
_LARGEST = 2**30  # bytes of a checkpoint.json
_READS = 100  # of a checkpoint that is replaced again and again


class GoneError(CheckpointError):
    """A file that checkpoint.json names is not there, perhaps since that was replaced."""


# Saving ------------------------------------------------------------------------------------------


def begin(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Draft:
    """Make room for a checkpoint at `path`.

    Args:
        path: absolute.
        shapes: of the model's state_dict; a checkpoint of another model is not replaced.

    Returns:
        The draft to write into.

    Raises:
        CheckpointError: something else is there, or another model is being saved there, or the
            folder cannot be made.
    """
    note = f"{zlib.crc32(repr(sorted(shapes.items())).encode()):08x}"
    with writable(path):
        draft = Draft(path, note)
    try:
        # Of two models' jobs that begin at once, one sees the other; what has ended has a marker.
        other = next((o for o in draft.others() if o.note not in ("", note)), None)
        if other is not None:
            raise CheckpointError(
                f"another model is being saved to {path}",
                why=f"process {other.process} on {other.host} is at it",
                todo="save to another place",
            )
        with writable(path):
            _check_place(path, shapes)
    except BaseException:
        draft.abandon()
        raise
    return draft


def commit(draft: Draft, index: Index) -> None:
    """Write checkpoint.json, and let it take its place once all is there that it names.

    Raises:
        CheckpointError: it cannot be written, or a rank's file is not there or not whole.
    """
    with writable(draft.target):
        check_files(draft.folder.parent, index)
        atomic.write_text(draft.folder / MARKER, to_json(index))
        if _parsed(draft.folder) != index:
            raise OSError(f"{MARKER} is not as it was written")
        draft.publish(MARKER)
    sweep(draft)


def sweep(draft: Draft) -> None:
    """Remove what is left of saves that have ended and of checkpoints that were replaced."""
    path = draft.target

    def named() -> Collection[str]:
        kept = {Path(file).parts[0] for file in _parsed(path).files}
        for name in os.listdir(path):
            if _OLD_FILE.fullmatch(name) and name not in kept:
                os.unlink(path / name)
        return kept

    with suppress(ValueError):  # the next save will do it
        draft.sweep(named)


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Inside, what the system does not let us write is a CheckpointError."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be written",
            why=str(error),
            todo="make room, or save to another place; a checkpoint that was there still is",
        ) from error


def _check_place(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse to replace anything but a checkpoint of the model with these shapes."""
    if not os.path.lexists(path):
        return
    what, todo = f"{path} is no checkpoint", "save to another place, or remove it"
    entries = os.listdir(path) if os.path.isdir(path) else [path.name]
    if all(map(atomic.is_draft, entries)):
        return
    if MARKER not in entries:
        raise CheckpointError(what, why="it would be replaced by one", todo=todo)
    if _content(path, len(HEAD)) != HEAD.encode():
        raise CheckpointError(what, why=f"its {MARKER} is no {FORMAT!r}", todo=todo)
    with suppress(ValueError):  # what is damaged may be replaced
        found = _parsed(path).model
        if found != dict(shapes):
            odd = sorted(name for name in {*found, *shapes} if found.get(name) != shapes.get(name))
            raise CheckpointError(
                f"{path} is a checkpoint of another model",
                why=f"it would be replaced; they differ in {', '.join(odd[:3])}",
                todo=todo,
            )


# Reading -----------------------------------------------------------------------------------------


def read(path: Path) -> Index:
    """What the checkpoint at `path` holds; files that it names are there and as long as it says.

    Raises:
        GoneError: one of the files is not there.
        CheckpointError: there is no checkpoint, it is not whole, or it is damaged.
    """
    with readable(path):
        if not os.path.isdir(path):
            raise CheckpointError(
                f"there is no checkpoint {path}",
                todo="pass the folder that save_checkpoint was given",
            )
        if not os.path.exists(path / MARKER):
            raise CheckpointError(
                f"{path} is no whole checkpoint",
                why=f"{MARKER}, which is written last, is missing: the save was interrupted, or "
                "the folder is another program's",
                todo="load an earlier one",
            )
        try:
            index = _parsed(path)
            while (missing := _missing(path, index)) is not None:
                again = _parsed(path)
                if again == index:
                    raise missing
                index = again  # it was replaced in the meantime
        except ValueError as error:
            raise damaged(path, MARKER, f"{type(error).__name__}: {error}") from error
    return index


def _missing(path: Path, index: Index) -> GoneError | None:
    try:
        check_files(path, index)
    except GoneError as error:
        return error
    return None


def reading(read: Callable[[], Found], use: Callable[[Found], Value]) -> Value:
    """Use what is read of a checkpoint; where that is replaced meanwhile, what is read then.

    Raises:
        CheckpointError: what either raises; a file is missing though nothing was replaced.
    """
    found = read()
    for _ in range(_READS):
        try:
            return use(found)
        except GoneError:
            again = read()
            if again == found:
                raise
            found = again
    raise CheckpointError(
        "the checkpoint is replaced faster than it can be read", todo="wait for who saves it"
    )


def damaged(path: Path, where: str, why: str) -> CheckpointError:
    """The error of a checkpoint that is not as it was saved."""
    return CheckpointError(
        f"the checkpoint {path} is damaged", where=where, why=why, todo="load an earlier one"
    )


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Inside, what the system does not let us read is a CheckpointError."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read", why=str(error)) from error


def check_files(folder: Path, index: Index) -> None:
    """Compare the files with what an index says of them: to be there, regular, and as long.

    Raises:
        GoneError: one is not there.
        CheckpointError: one is something else.
    """
    inside = os.path.join(os.path.realpath(folder), "")
    for name, size in index.files.items():
        if not os.path.realpath(folder / name).startswith(inside):
            raise damaged(folder, name, "it leads out of the folder")
        try:
            found = _tensor_bytes(folder / name)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise GoneError(
                f"the checkpoint {folder} is damaged",
                where=name,
                why="it is missing, or the rank that wrote it has another file system",
                todo="load an earlier one; save to a folder that all machines share",
            ) from error
        if found != size:
            why = f"it has {found} bytes of tensors, {MARKER} says {size}"
            raise damaged(folder, name, why)


def _tensor_bytes(path: Path) -> int:
    """Bytes of the tensors in a safetensors file, behind the length of its header and that."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            return -1
        return about.st_size - 8 - int.from_bytes(os.read(handle, 8), "little")
    finally:
        os.close(handle)


def _parsed(folder: Path) -> Index:
    """The marker in a folder; ValueError if it is none."""
    if _content(folder, len(HEAD)) != HEAD.encode():
        raise ValueError(f"its format is not {FORMAT!r}")
    return from_json(_content(folder).decode())


def _content(folder: Path, length: int = -1) -> bytes:
    """What the marker in a folder begins with; ValueError if it is no file, or too large."""
    handle = os.open(folder / MARKER, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_size > _LARGEST:
            raise ValueError(f"it is no file, or has {about.st_size} bytes")
        return file.read(length)

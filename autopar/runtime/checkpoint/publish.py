"""The folder of a checkpoint: published as a whole, and read consistently.

checkpoint.json is the marker of `autopar.files.atomic`: every save writes into its own draft, and
the marker is renamed into place once everything that it names exists. Other files in the folder,
such as a user's notes, are left alone.
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
_OLD_FILE = re.compile(r"rank_\d+\.safetensors")  # where older versions wrote them
_LARGEST = 2**30  # most bytes of a checkpoint.json
_READS = 100  # attempts to read a checkpoint that keeps being replaced


class GoneError(CheckpointError):
    """A file that checkpoint.json names is missing, perhaps because the checkpoint was replaced."""


# Saving ------------------------------------------------------------------------------------------


def begin(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Draft:
    """Creates a draft for a checkpoint at `path`.

    Args:
        path: absolute path.
        shapes: shapes of the model's state_dict; a checkpoint of another model is not replaced.

    Returns:
        The draft to write into.

    Raises:
        CheckpointError: something else is there, another model is being saved there, or the folder
            cannot be made.
    """
    note = f"{zlib.crc32(repr(sorted(shapes.items())).encode()):08x}"
    with writable(path):
        draft = Draft(path, note)
    try:
        # If two models' jobs begin at once, one sees the other; a finished save has a marker.
        other = next((o for o in draft.others() if o.note not in ("", note)), None)
        if other is not None:
            raise CheckpointError(
                f"another model is being saved to {path}",
                why=f"process {other.process} on {other.host} is saving",
                todo="save to another place",
            )
        with writable(path):
            _check_place(path, shapes)
    except BaseException:
        draft.abandon()
        raise
    return draft


def commit(draft: Draft, index: Index) -> None:
    """Writes checkpoint.json, and renames it into place once everything that it names exists.

    Raises:
        CheckpointError: it cannot be written, or a rank's file is missing or incomplete.
    """
    with writable(draft.target):
        check_files(draft.folder.parent, index)
        atomic.write_text(draft.folder / MARKER, to_json(index))
        if _parsed(draft.folder) != index:
            raise OSError(f"{MARKER} differs from what was written")
        draft.publish(MARKER)
    sweep(draft)


def sweep(draft: Draft) -> None:
    """Removes remains of saves that have ended and of checkpoints that were replaced."""
    path = draft.target

    def named() -> Collection[str]:
        kept = {Path(file).parts[0] for file in _parsed(path).files}
        for name in os.listdir(path):
            if _OLD_FILE.fullmatch(name) and name not in kept:
                os.unlink(path / name)
        return kept

    with suppress(ValueError):  # the next save will try again
        draft.sweep(named)


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Returns a context that raises CheckpointError for failed writes."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be written",
            why=str(error),
            todo="make room, or save to another place; an existing checkpoint is unchanged",
        ) from error


def _check_place(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses to replace anything but a checkpoint of a model with these shapes."""
    if not os.path.lexists(path):
        return
    what, todo = f"{path} is not a checkpoint", "save to another place, or remove it"
    entries = os.listdir(path) if os.path.isdir(path) else [path.name]
    if all(map(atomic.is_draft, entries)):
        return
    if MARKER not in entries:
        raise CheckpointError(what, why="it would be replaced by one", todo=todo)
    if _content(path, len(HEAD)) != HEAD.encode():
        raise CheckpointError(what, why=f"its {MARKER} is not {FORMAT!r}", todo=todo)
    with suppress(ValueError):  # a damaged one may be replaced
        present = _parsed(path).model
        if present != dict(shapes):
            odd = sorted(
                name for name in {*present, *shapes} if present.get(name) != shapes.get(name)
            )
            raise CheckpointError(
                f"{path} is a checkpoint of another model",
                why=f"it would be replaced; they differ in {', '.join(odd[:3])}",
                todo=todo,
            )


# Reading -----------------------------------------------------------------------------------------


def read(path: Path) -> Index:
    """Returns the contents of the checkpoint at `path`, whose files exist with the stated sizes.

    Raises:
        GoneError: one of the files is missing.
        CheckpointError: there is no checkpoint, it is incomplete, or it is damaged.
    """
    with readable(path):
        if not os.path.isdir(path):
            raise CheckpointError(
                f"there is no checkpoint {path}",
                todo="pass the folder that was passed to save_checkpoint",
            )
        if not os.path.exists(path / MARKER):
            raise CheckpointError(
                f"{path} is not a complete checkpoint",
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
    """Uses the contents of a checkpoint; reads them again if it was replaced meanwhile.

    Raises:
        CheckpointError: an error of either function, or a file that is missing though nothing was
            replaced.
    """
    contents = read()
    for _ in range(_READS):
        try:
            return use(contents)
        except GoneError:
            again = read()
            if again == contents:
                raise
            contents = again
    raise CheckpointError(
        "the checkpoint is replaced faster than it can be read", todo="wait until it is saved"
    )


def damaged(path: Path, where: str, why: str) -> CheckpointError:
    """Returns the error of a checkpoint that was changed after it was saved."""
    return CheckpointError(
        f"the checkpoint {path} is damaged", where=where, why=why, todo="load an earlier one"
    )


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Returns a context that raises CheckpointError for failed reads."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read", why=str(error)) from error


def check_files(folder: Path, index: Index) -> None:
    """Checks that the files of an index exist, are regular, and have the stated sizes.

    Raises:
        GoneError: a file is missing.
        CheckpointError: a file is something else.
    """
    inside = os.path.join(os.path.realpath(folder), "")
    for name, size in index.files.items():
        if not os.path.realpath(folder / name).startswith(inside):
            raise damaged(folder, name, "it leads out of the folder")
        try:
            nbytes = _tensor_bytes(folder / name)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise GoneError(
                f"the checkpoint {folder} is damaged",
                where=name,
                why="it is missing, or the rank that wrote it has another file system",
                todo="load an earlier one; save to a folder that all machines share",
            ) from error
        if nbytes != size:
            why = f"it has {nbytes} bytes of tensors, {MARKER} says {size}"
            raise damaged(folder, name, why)


def _tensor_bytes(path: Path) -> int:
    """Returns the bytes of tensors in a safetensors file: all after the header."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            return -1
        return about.st_size - 8 - int.from_bytes(os.read(handle, 8), "little")
    finally:
        os.close(handle)


def _parsed(folder: Path) -> Index:
    """Parses the marker in a folder; raises ValueError if it is malformed."""
    if _content(folder, len(HEAD)) != HEAD.encode():
        raise ValueError(f"its format is not {FORMAT!r}")
    return from_json(_content(folder).decode())


def _content(folder: Path, length: int = -1) -> bytes:
    """Returns the start of a folder's marker; raises ValueError if not a file, or too large."""
    handle = os.open(folder / MARKER, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_size > _LARGEST:
            raise ValueError(f"it is not a file, or has {about.st_size} bytes")
        return file.read(length)

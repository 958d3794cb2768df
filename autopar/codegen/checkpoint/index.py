"""checkpoint.json and the folder around it: written whole or not at all, checked when read.

A save writes into a folder beside the one it is to be, `.NAME.saving`. When every rank is done, the
first one writes checkpoint.json, which holds a checksum of itself and of every box of every tensor,
and renames. A checkpoint of the same name makes place under `.NAME.before` until then, so that at
every moment a whole one is there.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.codegen.checkpoint.boxes import Box
from autopar.codegen.checkpoint.values import DTYPES
from autopar.errors import CheckpointError

MARKER = "checkpoint.json"
_FORMAT = "autopar checkpoint 1"


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor in a file.

    Attributes:
        box: where it lies in the whole tensor.
        file: a name in the folder.
        key: the tensor's name in that file.
        checksum: CRC-32 of its bytes; None where nobody wrote one.
    """

    box: Box
    file: str
    key: str
    checksum: int | None = None


@dataclass(frozen=True)
class Stored:
    """A tensor in a folder: dtype (a key of DTYPES), shape, and the boxes that make it up."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def covered(self) -> bool:
        """Whether the boxes are inside and have as many elements as the tensor."""
        whole = Box.whole(self.shape).volume
        inside = all(chunk.box.inside(self.shape) for chunk in self.chunks)
        return inside and sum(chunk.box.volume for chunk in self.chunks) == whole


@dataclass(frozen=True)
class Index:
    """What a folder holds: tensors by name, and other values as JSON.

    `details` of a checkpoint: `names`, those of the state_dict in its order; `tied`, names of
    tensors that have another one as well; `optimizer`, its kind, groups and values that are no
    tensors; `scheduler`, `values`, `random`; `update`, the scale of the loss. Tensors are the
    `model`'s, as they are trained, `buffer`s, `ema`, averages of the former, and the `optimizer`'s.
    """

    tensors: Mapping[str, Stored]
    details: Mapping[str, Any]

    def under(self, prefix: str) -> dict[str, Stored]:
        """The tensors whose names begin with `prefix.`, without it."""
        start = f"{prefix}."
        return {k.removeprefix(start): v for k, v in self.tensors.items() if k.startswith(start)}

    def optimizer_state(self) -> dict[str, dict[str, Stored]]:
        """For each parameter's name the tensors of the optimizer's state, by theirs."""
        found: dict[str, dict[str, Stored]] = {}
        for name, stored in self.under("optimizer").items():
            parameter, _, key = name.rpartition(".")
            found.setdefault(parameter, {})[key] = stored
        return found


def saving_folder(path: Path) -> Path:
    """Where a save writes until it is done."""
    return path.with_name(f".{path.name}.saving")


def _before(path: Path) -> Path:
    return path.with_name(f".{path.name}.before")


def begin(path: Path) -> Path:
    """Make room for a checkpoint at `path`; the folder to write into.

    Raises:
        CheckpointError: something else is there, or the folder cannot be made.
    """
    try:
        if not path.exists() and (_before(path) / MARKER).exists():
            _before(path).rename(path)  # the last save stopped between its two renames
        if path.exists() and not (path / MARKER).exists() and not _empty(path):
            raise CheckpointError(
                f"{path} is no checkpoint",
                why="it would be replaced by one",
                todo="save to another place, or remove it",
            )
        part = saving_folder(path)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    except OSError as error:
        raise _cannot_write(path, error) from error
    return part


def _empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def commit(path: Path, index: Index) -> None:
    """Write checkpoint.json and let the new folder take its place.

    Raises:
        CheckpointError: it cannot be written, or a rank's file is not there.
    """
    part = saving_folder(path)
    try:
        for name in sorted({c.file for stored in index.tensors.values() for c in stored.chunks}):
            if not (part / name).exists():
                raise CheckpointError(
                    f"{name} is not there",
                    where=str(part),
                    why="the rank that wrote it has another file system",
                    todo="save to a folder that all machines share",
                )
        with open(part / MARKER, "w", encoding="utf-8") as file:
            file.write(to_json(index))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(part)
        shutil.rmtree(_before(path), ignore_errors=True)
        if path.exists():
            path.rename(_before(path))
        part.rename(path)
        sync_folder(path.parent)
        shutil.rmtree(_before(path), ignore_errors=True)
    except OSError as error:
        raise _cannot_write(path, error) from error


def abandon(path: Path) -> None:
    """Remove what a save that failed has left."""
    shutil.rmtree(saving_folder(path), ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Have the names in a folder written to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} cannot be written",
        why=str(error),
        todo="make room, or save to another place; a checkpoint that was there still is",
    )


def to_json(index: Index) -> str:
    """The text of checkpoint.json."""
    tensors = {
        name: {
            "dtype": stored.dtype,
            "shape": stored.shape,
            "chunks": [
                [chunk.box.offsets, chunk.box.sizes, chunk.file, chunk.key, chunk.checksum]
                for chunk in stored.chunks
            ],
        }
        for name, stored in index.tensors.items()
    }
    content = {"tensors": tensors, "details": dict(index.details)}
    return json.dumps({"format": _FORMAT, "checksum": _checksum(content), "content": content})


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Inside, what the system does not let us read is a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read", why=str(error)) from error


def read(path: Path) -> tuple[Path, Index]:
    """The checkpoint at `path`: the folder where it lies, and what it holds.

    Raises:
        CheckpointError: there is none, it is not whole, or its checkpoint.json is damaged.
    """
    with readable(path):
        return _read(path)


def _read(path: Path) -> tuple[Path, Index]:
    folder = path
    if not (path / MARKER).exists() and (_before(path) / MARKER).exists():
        folder = _before(path)  # a save stopped between its two renames
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no checkpoint {path}", todo="pass the folder that save_checkpoint was given"
        )
    if not (folder / MARKER).exists():
        raise CheckpointError(
            f"{path} is no whole checkpoint",
            why=f"{MARKER}, which is written last, is missing: the save was interrupted, or the "
            "folder is another program's",
            todo="load an earlier one",
        )
    try:
        document = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        if document["format"] != _FORMAT:
            raise ValueError(f"its format is {document['format']!r}, not {_FORMAT!r}")
        if document["checksum"] != _checksum(document["content"]):
            raise ValueError("its checksum differs")
        index = _parse(document["content"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint {path} is damaged",
            where=MARKER,
            why=f"{type(error).__name__}: {error}",
            todo="load an earlier one",
        ) from error
    return folder, index


def _parse(content: Any) -> Index:
    tensors = {}
    for name, item in content["tensors"].items():
        chunks = tuple(
            Chunk(Box(tuple(offsets), tuple(sizes)), _plain(file), key, checksum)
            for offsets, sizes, file, key, checksum in item["chunks"]
        )
        stored = Stored(item["dtype"], tuple(item["shape"]), chunks)
        if stored.dtype not in DTYPES or not stored.covered:
            raise ValueError(f"tensor {name!r} is not whole")
        tensors[name] = stored
    return Index(tensors, dict(content["details"]))


def _plain(file: str) -> str:
    """A name in the folder, which leads nowhere else."""
    if Path(file).name != file:
        raise ValueError(f"{file!r} is no name of a file")
    return file

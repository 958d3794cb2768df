"""Storage for torch.distributed.checkpoint: safetensors, and checkpoint.json for the pickle."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from autopar.errors import CheckpointError
from autopar.files import atomic
from autopar.runtime.checkpoint import publish
from autopar.runtime.checkpoint.boxes import Box
from autopar.runtime.checkpoint.index import Chunk, Index, Stored, key_of, model_of
from autopar.runtime.checkpoint.values import DTYPES, dtype_name

Value = TypeVar("Value")
# Their names in safetensors.
_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "complex64": "C64",
}  # fmt: skip


def checksum(tensor: Tensor) -> int:
    """Returns the CRC-32 of a contiguous host tensor's bytes."""
    content: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(content)


def _done(value: Value) -> Future[Value]:
    future: Future[Value] = Future()
    future.set_result(value)
    return future


class Writer(StorageWriter):
    """Writes a checkpoint folder, one file per rank.

    Args:
        path: the folder to publish.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.rank = path, 0
        self._draft: atomic.Draft | None = None

    def abandon(self) -> None:
        """Removes the remains of a failed save; the first rank made it and does so."""
        if self._draft is not None:
            self._draft.abandon()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing; the path is already set."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accepts any path."""
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Records whether this rank coordinates."""
        self.rank = int(kwargs.get("rank") or 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Returns the plans with the draft that the first rank creates for all."""
        shapes = {
            item.index.fqn.removeprefix("model."): tuple(item.tensor_data.size)
            for plan in plans
            for item in plan.items
            if item.tensor_data is not None and item.index.fqn.startswith("model.")
        }
        self._draft = publish.begin(self.path, model_of(plans[0].planner_data, shapes))
        return [replace(plan, storage_data=str(self._draft.folder)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's file."""
        draft = Path(plan.storage_data)
        name = f"{draft.name}/rank_{self.rank}.safetensors"
        tensors: dict[str, Tensor] = {}
        results = []
        for item in plan.items:
            data = item.tensor_data
            value = planner.resolve_data(item)
            assert data is not None
            assert isinstance(value, Tensor)
            box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            key = key_of(item.index.fqn, box, tuple(data.size))
            tensors[key] = value.detach().cpu().contiguous()
            dtype_name(value.dtype)  # raises for an unknown dtype
            chunk = Chunk(box, name, key, checksum(tensors[key]))
            results.append(WriteResult(item.index, tensors[key].nbytes, chunk))
        if tensors:
            self._write(draft.parent / name, tensors)
        return _done(results)

    def _write(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        try:
            save_file(dict(tensors), path)
            path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors restricts it
            atomic.sync(path)
            atomic.sync(path.parent)
            with safe_open(path, framework="pt") as opened:
                if {*opened.keys()} != {*tensors}:
                    raise OSError("the file differs from what was written")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the checkpoint {self.path} cannot be written",
                where=path.name,
                why=str(error),
                todo="make room, or save to another place, which all machines share; an existing "
                "checkpoint is unchanged",
            ) from error

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes checkpoint.json and publishes the folder."""
        chunks = {result.index: result.storage_data for part in results for result in part}
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            tensors[name] = Stored(
                dtype_name(stored.properties.dtype),
                tuple(stored.size),
                tuple(chunks[MetadataIndex(name, chunk.offsets)] for chunk in stored.chunks),
            )
        assert self._draft is not None
        publish.commit(self._draft, Index(tensors, metadata.planner_data))


class Reader(StorageReader):
    """Reads boxes of the tensors of a folder.

    Args:
        path: the folder.
        index: its contents.
        rank, world: select the checksums that this process checks before anything is read.

    Attributes:
        began: whether a tensor may have been overwritten.
    """

    def __init__(self, path: Path, index: Index, rank: int = 0, world: int = 1) -> None:
        self.path, self.index = path, index
        self.rank, self.world, self.began = rank, world, False
        self._chunks: dict[MetadataIndex, Chunk] = {
            MetadataIndex(name, chunk.box.offsets): chunk
            for name, stored in index.tensors.items()
            for chunk in stored.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing; the path is already set."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accepts any path."""
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the index as torch's metadata."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(DTYPES[stored.dtype]),
                    torch.Size(stored.shape),
                    [
                        ChunkStorageMetadata(torch.Size(c.box.offsets), torch.Size(c.box.sizes))
                        for c in stored.chunks
                    ],
                )
                for name, stored in self.index.tensors.items()
            },
            storage_meta=StorageMeta(str(self.path)),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Does nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Checks this rank's share of the files; all ranks stop here if one of them is damaged."""
        files: dict[str, list[tuple[Stored, Chunk]]] = {}
        for stored in self.index.tensors.values():
            for chunk in stored.chunks:
                files.setdefault(chunk.file, []).append((stored, chunk))
        for number, (file, chunks) in enumerate(files.items()):
            if number % self.world == self.rank:
                self._open(file, partial(self._check, chunks))
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads exactly the boxes that the plan lists."""
        self.began = True
        items: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(self._chunks[item.storage_index].file, []).append(item)
        for file, wanted in items.items():
            self._open(file, partial(self._read, wanted, planner))
        return _done(None)

    def _open(self, file: str, use: Callable[[Any], None]) -> None:
        try:
            with safe_open(self.path / file, framework="pt") as opened:
                use(opened)
        except FileNotFoundError as error:
            raise publish.GoneError(
                f"the checkpoint {self.path} is damaged",
                where=file,
                why="it is missing",
                todo="load an earlier one",
            ) from error
        except (OSError, SafetensorError, ValueError) as error:
            raise publish.damaged(self.path, file, str(error)) from error

    def _check(self, chunks: list[tuple[Stored, Chunk]], opened: Any) -> None:
        for stored, chunk in chunks:
            part, sizes = opened.get_slice(chunk.key), chunk.in_file(chunk.box).sizes
            alike = tuple(part.get_shape()) == sizes
            if not alike or part.get_dtype() != _DTYPES[stored.dtype]:
                actual = f"{part.get_dtype()}{list(part.get_shape())}"
                why = f"it is {actual} there, {stored.dtype} of {list(sizes)} by its index"
                raise publish.damaged(self.path, f"{chunk.key} in {chunk.file}", why)
            if chunk.checksum not in (None, checksum(opened.get_tensor(chunk.key))):
                why = "its bytes differ from those that were saved"
                raise publish.damaged(self.path, f"{chunk.key} in {chunk.file}", why)

    def _read(self, items: list[ReadItem], planner: LoadPlanner, opened: Any) -> None:
        for item in items:
            chunk = self._chunks[item.storage_index]
            box = chunk.in_file(Box(tuple(item.storage_offsets), tuple(item.lengths)))
            key = chunk.key
            # A tensor without dimensions cannot be sliced.
            part = opened.get_slice(key)[box.slices] if box.sizes else opened.get_tensor(key)
            target = planner.resolve_tensor(item)
            target.copy_(part)
            planner.commit_tensor(item, target)

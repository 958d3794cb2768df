"""torch.distributed.checkpoint's files: safetensors, and checkpoint.json in place of a pickle."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
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

from autopar.codegen.checkpoint import index as folder
from autopar.codegen.checkpoint.boxes import Box
from autopar.codegen.checkpoint.index import Chunk, Index, Stored
from autopar.codegen.checkpoint.values import DTYPES, dtype_name
from autopar.errors import CheckpointError

Value = TypeVar("Value")


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a contiguous host tensor's bytes."""
    content: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(content)


def _done(value: Value) -> Future[Value]:
    future: Future[Value] = Future()
    future.set_result(value)
    return future


class Writer(StorageWriter):
    """Writes a checkpoint folder, one file a rank.

    Args:
        path: the folder that it is to be.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.rank = path, 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Part of torch's interface; the place was given."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Make the folder, on the first rank."""
        self.rank = int(kwargs.get("rank") or 0)
        if is_coordinator:
            folder.begin(self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file."""
        name = f"rank_{self.rank}.safetensors"
        tensors: dict[str, Tensor] = {}
        results = []
        for item in plan.items:
            data = item.tensor_data
            value = planner.resolve_data(item)
            assert data is not None
            assert isinstance(value, Tensor)
            box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            key = _key(item.index.fqn, box, tuple(data.size))
            tensors[key] = value.detach().cpu().contiguous()
            dtype_name(value.dtype)  # raises where there is none
            chunk = Chunk(box, name, key, checksum(tensors[key]))
            results.append(WriteResult(item.index, tensors[key].nbytes, chunk))
        if tensors:
            self._write(name, tensors)
        return _done(results)

    def _write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        path = folder.saving_folder(self.path) / name
        try:
            path.parent.mkdir(exist_ok=True)  # of a machine that does not see the first rank's
            save_file(dict(tensors), path)
            path.chmod(path.parent.stat().st_mode & 0o666)  # as the others; safetensors hides it
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the checkpoint {self.path} cannot be written",
                where=name,
                why=str(error),
                todo="make room, or save to another place; a checkpoint that was there still is",
            ) from error

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write checkpoint.json and put the folder in its place."""
        chunks = {result.index: result.storage_data for part in results for result in part}
        tensors = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, TensorStorageMetadata)
            tensors[name] = Stored(
                dtype_name(stored.properties.dtype),
                tuple(stored.size),
                tuple(chunks[MetadataIndex(name, chunk.offsets)] for chunk in stored.chunks),
            )
        folder.commit(self.path, Index(tensors, metadata.planner_data))


def _key(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """A name in a file: the tensor's, with the range of each dimension where it is a part."""
    if box == Box.whole(shape):
        return name
    return f"{name}[{', '.join(f'{s.start}:{s.stop}' for s in box.slices)}]"


class Reader(StorageReader):
    """Reads boxes of the tensors of a folder.

    Args:
        path: the folder.
        index: what it holds.
        rank, world: which of the checksums this process checks, before anything is read.

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
        """Part of torch's interface; the place was given."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What there is, in torch's words."""
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
        """Nothing is to be set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check this rank's share of the files: all ranks stop here if one of them is damaged."""
        for number, (file, chunks) in enumerate(self._by_file(self._chunks.values()).items()):
            if number % self.world == self.rank:
                self._open(file, partial(self._check, chunks))
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan lists, and no more of any tensor."""
        self.began = True
        items: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(self._chunks[item.storage_index].file, []).append(item)
        for file, wanted in items.items():
            self._open(file, partial(self._read, wanted, planner))
        return _done(None)

    @staticmethod
    def _by_file(chunks: Any) -> dict[str, list[Chunk]]:
        found: dict[str, list[Chunk]] = {}
        for chunk in chunks:
            found.setdefault(chunk.file, []).append(chunk)
        return found

    def _open(self, file: str, use: Callable[[Any], None]) -> None:
        try:
            with safe_open(self.path / file, framework="pt") as opened:
                use(opened)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the checkpoint {self.path} is damaged",
                where=file,
                why=str(error),
                todo="load an earlier one",
            ) from error

    def _check(self, chunks: list[Chunk], opened: Any) -> None:
        for chunk in chunks:
            whole = tuple(opened.get_slice(chunk.key).get_shape()) == chunk.box.sizes
            if whole and chunk.checksum is not None:
                whole = chunk.checksum == checksum(opened.get_tensor(chunk.key))
            if not whole:
                raise CheckpointError(
                    f"the checkpoint {self.path} is damaged",
                    where=f"{chunk.key} in {chunk.file}",
                    why="its bytes are not those that were saved",
                    todo="load an earlier one",
                )

    def _read(self, items: list[ReadItem], planner: LoadPlanner, opened: Any) -> None:
        for item in items:
            key = self._chunks[item.storage_index].key
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            # A tensor without dimensions has no slices.
            part = opened.get_slice(key)[box.slices] if box.sizes else opened.get_tensor(key)
            target = planner.resolve_tensor(item)
            target.copy_(part)
            planner.commit_tensor(item, target)

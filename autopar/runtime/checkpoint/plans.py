"""Planners for torch.distributed.checkpoint: the boxes that this rank saves or loads.

torch's planners support plain tensors and DTensors, whose parts have equal sizes. Parts on this
rank may be uneven, split over several axes along one dimension, or a piece of a fused parameter, so
the items are made of boxes here. torch's own code removes duplicates, checks the parts for holes
and overlaps, and cuts the reads out of what was saved.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from autopar.errors import AutoparError, CheckpointError
from autopar.runtime.checkpoint.boxes import Box


@dataclass(frozen=True)
class Part:
    """A box of a tensor of a checkpoint, on this rank.

    Attributes:
        name: name of the tensor in the checkpoint.
        tensor: the elements of the box.
        box: place of the elements in the whole tensor.
        shape: shape of the whole tensor.
    """

    name: str
    tensor: Tensor
    box: Box
    shape: tuple[int, ...]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Returns the box as torch's metadata."""
        return ChunkStorageMetadata(torch.Size(self.box.offsets), torch.Size(self.box.sizes))


@dataclass(frozen=True)
class Snapshot:
    """One rank's contribution to a checkpoint.

    Attributes:
        parts: boxes of tensors.
        details: values for `Index`; of the optimizer, those of this rank's parameters.
    """

    parts: Sequence[Part]
    details: Mapping[str, Any]

    def copied(self) -> Snapshot:
        """Returns a copy with its own tensors, in host memory."""
        parts = [replace(p, tensor=p.tensor.detach().to("cpu", copy=True)) for p in self.parts]
        return replace(self, parts=parts)


class SavePlanner(DefaultSavePlanner):
    """Plans to save a snapshot, merging the optimizer details of all ranks.

    Args:
        snapshot: this rank's snapshot, or the error of making it, raised where all ranks learn of
            it.
    """

    def __init__(self, snapshot: Snapshot | AutoparError) -> None:
        super().__init__(flatten_state_dict=False)
        self._snapshot = snapshot
        self._parts: dict[MetadataIndex, Part] = {}

    def create_local_plan(self) -> SavePlan:
        """Returns an item for every part; pieces of one parameter share their scalars."""
        if isinstance(self._snapshot, AutoparError):
            raise self._snapshot
        for part in self._snapshot.parts:
            # A device without elements contributes nothing.
            if part.box.volume or not Box.whole(part.shape).volume:
                self._parts.setdefault(MetadataIndex(part.name, part.box.offsets), part)
        items = [
            WriteItem(
                index,
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    part.chunk, TensorProperties(part.tensor.dtype), torch.Size(part.shape)
                ),
            )
            for index, part in self._parts.items()
        ]
        self.plan = SavePlan(items, planner_data=self._snapshot.details)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assigns writers; the metadata has the `details` of the whole checkpoint."""
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = merged([plan.planner_data for plan in all_plans])
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Returns the part's tensor."""
        return self._parts[index].tensor


def merged(details: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the first rank's details, with the optimizers and loaders of all ranks.

    Raises:
        CheckpointError: some ranks pass a loader and others do not.
    """
    optimizer = _merged([each["optimizer"] for each in details])
    return {**details[0], "optimizer": optimizer, "loader": _loaders(details)}


def _loaders(details: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the states of loaders by the part that they read; ranks of one part share a state."""
    loaders = [each.get("loader") for each in details]
    lacking = [str(rank) for rank, states in enumerate(loaders) if states is None]
    if lacking and len(lacking) < len(loaders):
        raise CheckpointError(
            f"no loader is passed by rank {', '.join(lacking)}",
            why="other ranks pass one, and a checkpoint contains those of all",
            todo="pass loader= on every rank, or on none",
        )
    return {part: state for each in reversed(loaders) if each for part, state in each.items()}


def _merged(optimizers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the record of an optimizer that all ranks' records make up.

    Groups keep their order. A rank of a pipeline may hold no parameter of a group; the options are
    taken from ranks that hold one.
    """
    groups: dict[tuple[int, str], dict[str, Any]] = {}
    values: dict[str, Any] = {}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer["groups"]):
            key = number, json.dumps(group["options"])
            whole = groups.setdefault(key, {**group, "parameters": []})
            known = whole["parameters"]
            known += [name for name in group["parameters"] if name not in known]
        values |= optimizer["values"]
    held = {number for (number, _), group in groups.items() if group["parameters"]}
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    known_groups = [
        group for (number, _), group in ordered if group["parameters"] or number not in held
    ]
    return {**optimizers[0], "groups": known_groups, "values": values}


class ReadPlanner(LoadPlanner):
    """Plans to read the parts that this rank wants.

    Args:
        wanted: returns the list of parts; all ranks learn of its errors.
    """

    def __init__(self, wanted: Callable[[], Sequence[Part]]) -> None:
        self._wanted = wanted
        self._parts: dict[str, list[Part]] = {}
        self._metadata: Metadata | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Records the metadata."""
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Returns the boxes of stored tensors that make up each part."""
        assert self._metadata is not None
        for part in self._wanted():
            self._parts.setdefault(part.name, []).append(part)
        items: list[ReadItem] = []
        for name, parts in self._parts.items():
            stored = self._metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            for part in parts:
                if tuple(stored.size) != part.shape:
                    raise CheckpointError(
                        f"{name} is stored as {list(stored.size)}, not {list(part.shape)}"
                    )
            chunks = [part.chunk for part in parts]
            items += create_read_items_for_chunk_list(name, stored, chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans unchanged: every rank reads for itself."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Returns the plan unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuses bytes, as a checkpoint has none to unpickle."""
        raise CheckpointError(f"{read_item.storage_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Returns the destination of an item's elements."""
        number = read_item.dest_index.index
        part = self._parts[read_item.dest_index.fqn][0 if number is None else number]
        box = Box(tuple(read_item.dest_offsets), tuple(read_item.lengths))
        return part.tensor.detach()[box.slices]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Does nothing, as the elements are already in place."""

"""Reads published checkpoints whose names differ from those of transformers' models.

Transformers lists for each model how the names of its published checkpoints become its own:
renamings, and conversions such as the stacking of an expert's matrices. Here a stacked tensor is
not computed: the parts in the files become boxes of it, so that each rank reads its elements only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.boxes import Box
from autopar.runtime.checkpoint.index import Chunk, Stored

Tensors = Mapping[str, Stored]


@dataclass(frozen=True)
class PublishedNames:
    """The names and forms of tensors in published checkpoints of a model.

    Attributes:
        model: the user's model; only models of transformers have other published names.
    """

    model: nn.Module

    def __call__(self, stored: Tensors) -> Tensors:
        """Returns the tensors of a folder by the names of the model's state_dict.

        Args:
            stored: the tensors by their names in the folder; names of the model are kept.

        Raises:
            CheckpointError: a tensor of the model is computed from those of the folder otherwise
                than by stacking and joining them, or parts of it are missing.
        """
        known = self.model.state_dict().keys()
        of_transformers = any(hasattr(each, "base_model_prefix") for each in self.model.modules())
        if not of_transformers or stored.keys() <= known:
            return stored
        renamed, parts = dict[str, Stored](), dict[str, _Parts]()
        loading = import_module("transformers.core_model_loading")
        mapping = import_module("transformers.conversion_mapping")
        transforms = mapping.get_model_conversion_mapping(self.model)
        converters = [each for each in transforms if hasattr(each, "operations")]
        renamings = [each for each in transforms if not hasattr(each, "operations")]
        for name in sorted(stored, key=loading.dot_natural_key):
            own, pattern = loading.rename_source_key(
                name,
                renamings,
                converters,
                getattr(self.model, "base_model_prefix", "") or None,
                dict.fromkeys(known, True),
            )
            converter = next((each for each in converters if pattern in each.source_patterns), None)
            if name in known and (own != name or _keeps(converter)):
                renamed[name] = stored[name]  # the folder has the model's own names
            elif converter is None or own not in known:
                renamed[own if own in known else name] = stored[name]
            else:
                group = parts.setdefault(own, _Parts(own, converter, {}))
                group.tensors.setdefault(pattern, {})[name] = stored[name]
        return {**renamed, **{own: group.joined() for own, group in parts.items()}}


def _keeps(converter: Any) -> bool:
    """Returns whether a conversion leaves tensors with the model's shape unchanged."""
    return converter is None or all(
        getattr(each, "check_dims", False) for each in converter.operations
    )


@dataclass(frozen=True)
class _Parts:
    """The parts of one tensor of a model.

    Attributes:
        own: the tensor's name in the model.
        converter: transformers' description of how the parts become the tensor.
        tensors: pattern of names -> the parts in their order, by their names in the folder.
    """

    own: str
    converter: Any
    tensors: dict[str, dict[str, Stored]]

    def joined(self) -> Stored:
        """Returns the tensor, whose chunks are the parts; raises CheckpointError."""
        operations = [type(each).__name__ for each in self.converter.operations]
        places = [int(getattr(each, "dim", 0)) for each in self.converter.operations]
        stacked = operations[:1] == ["MergeModulelist"] and places[0] == 0
        joins = operations[stacked:]
        if joins not in ([], ["Concatenate"]) or len(self.converter.target_patterns) > 1:
            raise self._refused(f"transformers computes it by {', '.join(operations)}")
        if set(self.tensors) != set(self.converter.source_patterns):
            lacking = set(self.converter.source_patterns) - set(self.tensors)
            raise self._refused(f"the folder has no part {', '.join(sorted(lacking))}")
        columns = [[*self.tensors[name].items()] for name in self.converter.source_patterns]
        counts = {name: len(parts) for name, parts in self.tensors.items()}
        if len({*counts.values()}) > 1 or (not stacked and {*counts.values()} != {1}):
            raise self._refused(f"the folder has unequal numbers of its parts: {counts}")
        dim = places[-1] if joins else 0
        chunks, widths = list[Chunk](), list[int]()
        for column in columns:
            first = column[0][1]
            shape = (1, *first.shape) if stacked else first.shape
            for number, (name, part) in enumerate(column):
                if (part.shape, part.dtype) != (first.shape, columns[0][0][1].dtype):
                    raise self._refused(f"{name} is {part.dtype}{list(part.shape)}, unlike others")
                offsets = [0] * len(shape)
                offsets[0] = number if stacked else 0
                offsets[dim] += sum(widths) if joins else 0
                box = Box(tuple(offsets), shape)
                chunks += [Chunk(box, c.file, c.key, None, stacked) for c in part.chunks]
            widths.append(shape[dim])
        whole = [len(columns[0]), *columns[0][0][1].shape] if stacked else [*shape]
        if joins:
            whole[dim] = sum(widths)
        return Stored(columns[0][0][1].dtype, tuple(whole), tuple(chunks))

    def _refused(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.own} cannot be read from the published checkpoint",
            why=why,
            todo="load the folder with from_pretrained, and pass the model's state_dict() to "
            "load_weights",
        )

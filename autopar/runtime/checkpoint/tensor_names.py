"""Matches tensors of a folder with those of a program: names, tied names, shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.index import Stored

Shapes = Mapping[str, tuple[int, ...]]
Published = Callable[[Mapping[str, Stored]], Mapping[str, Stored]]


@dataclass(frozen=True)
class Names:
    """The names of a program's parameters and buffers.

    Attributes:
        persistent: names of the model's state_dict, in order.
        tied: further names of tensors -> the name in the program.
        others: buffers that a state_dict leaves out.
        published: returns the tensors of a folder that is not a checkpoint, by the model's names.
    """

    persistent: tuple[str, ...]
    tied: Mapping[str, str]
    others: frozenset[str] = frozenset()
    published: Published = dict

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.persistent)

    def all_of(self, name: str) -> tuple[str, ...]:
        """Returns all names of a tensor."""
        return (name, *(alias for alias, tied in self.tied.items() if tied == name))

    def kind(self, name: str) -> str:
        """Returns the prefix in a checkpoint: "model", "buffer", or "" for constants."""
        if any(n in self._known for n in self.all_of(name)):
            return "model"
        return "buffer" if name in self.others else ""

    def match(
        self,
        shapes: Shapes,
        stored: Mapping[str, Stored],
        where: str,
        *,
        strict: bool = True,
        partial: bool = False,
        rename: Callable[[str], str] = str,
    ) -> dict[str, str]:
        """Returns for each tensor of the program's state_dict the name it is stored under.

        Args:
            shapes: shapes of the program's tensors.
            stored: the stored tensors.
            where: the folder.
            strict: whether tensors unknown to the program are an error.
            partial: whether tensors of the program may be missing.
            rename: maps a name of the state_dict to the name in the folder.

        Raises:
            CheckpointError: names what is missing, unexpected or of another shape.
        """
        own = [n for n in shapes if n not in self.tied and self.kind(n) == "model"]
        matches: dict[str, str] = {}
        for name in own:
            spellings = [s for n in self.all_of(name) for s in (rename(n), n) if s in stored]
            if spellings:
                matches[name] = spellings[0]
        # The model may have tensors that the program does not use.
        aliases = {s for n in (*shapes, *self.persistent) for s in (rename(n), n)}
        faults = {
            "missing": [] if partial else [name for name in own if name not in matches],
            "unexpected": [n for n in stored if n not in aliases] if strict else [],
            "mis-shaped": [
                f"{name} {list(stored[spelling].shape)} instead of {list(shapes[name])}"
                for name, spelling in matches.items()
                if stored[spelling].shape != shapes[name]
            ],
        }
        if any(faults.values()):
            raise CheckpointError(
                "the checkpoint does not fit the model",
                where=where,
                why="; ".join(f"{k}: {_some(v)}" for k, v in faults.items() if v),
                todo="load a checkpoint of the model that was compiled",
            )
        return matches


def of_adapter(rename: Callable[[str], str]) -> Callable[[str], str]:
    """Returns `rename` for folders of PEFT, which leave out the adapter's name: `lora_A.weight`."""
    return lambda name: rename(re.sub(r"(\.lora_\w+)\.\w+(\.weight|\.bias|)$", r"\1\2", name))


def _some(names: Collection[str], most: int = 8) -> str:
    listed = ", ".join(list(names)[:most])
    return listed if len(names) <= most else f"{listed} and {len(names) - most} more"

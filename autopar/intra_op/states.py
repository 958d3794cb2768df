"""State shardings as users name them; a new name is one line of the table.

    "zero2"  "paro-iig"  "NIG"  "GGG+I"  "paro-iig over node"  "mics in groups of 8"

Behind `over` stand the mesh axes that lead from group to group, by default all but the last one;
"over none" makes one group of all devices.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass

from autopar.errors import StateError
from autopar.intra_op.options import behind, fits
from autopar.ir.mesh import Mesh
from autopar.ir.state import Groups, StateSharding
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout, TensorType

STATES: dict[str, StateSharding] = {
    name: StateSharding.parse(levels)
    for name, levels in {
        "ddp": "NNN",  # arXiv:2006.15704
        "zero1": "NNG",  # arXiv:1910.02054, as are the next two
        "zero2": "NGG",
        "zero3": "GGG",
        "zero++": "GGG+I",  # arXiv:2306.10209, without quantisation
        "hsdp": "III",  # arXiv:2304.11277, hybrid sharding
        "mics": "III",  # arXiv:2205.00119
        "paro-nig": "NIG",  # arXiv:2310.06003, as are the next two
        "paro-igg": "IGG",
        "paro-iig": "IIG",
    }.items()
}


def state(name: str) -> StateSharding:
    """The state sharding of that name, or the one that its letters tell ("NIG").

    Raises:
        StateError: neither; names the nearest known.
    """
    if name in STATES:
        return STATES[name]
    try:
        return StateSharding.parse(name)
    except StateError as error:
        near = difflib.get_close_matches(name, STATES) or list(STATES)
        raise StateError(
            f"{name!r} is not a state sharding",
            why=f"the nearest known are {', '.join(near)}",
            todo='use one of those, or three letters of N, I and G as in "NIG"',
        ) from error


@dataclass(frozen=True)
class StateChoice:
    """A state sharding on a mesh.

    Attributes:
        sharding: what is split how far.
        inter: the mesh axes that lead from group to group.
    """

    sharding: StateSharding
    inter: tuple[str, ...]

    @classmethod
    def read(cls, said: str | StateSharding, mesh: Mesh) -> StateChoice:
        """What a user says, on a mesh.

        Raises:
            StateError: there is no such sharding or axis, the sharding is not legal, or the mesh
                has no groups of such a size.
        """
        name, rest = str(said), ""
        if isinstance(said, str):
            name, rest = re.fullmatch(r"\s*(\S*)\s*(.*)", said).groups()  # type: ignore[union-attr]
        sharding = state(name)
        if not sharding.legal:
            raise StateError(
                f"{said} cannot be trained",
                why="a device updates what it has the optimizer state of, so that is split at "
                "least as far as parameters and gradients",
                todo="split the optimizer state further: the third letter",
            )
        over = re.fullmatch(r"over\s+(\w+(?:\s*,\s*\w+)*)", rest)
        size = re.fullmatch(r"in groups of (\d+)", rest)
        if over:
            names = [] if over[1] == "none" else re.split(r"\s*,\s*", over[1])
            return cls(sharding, _axes(names, mesh))
        if size:
            return cls(sharding, _leading(int(size[1]), mesh))
        if rest:
            raise StateError(
                f"cannot read {rest!r} of the state sharding {said!r}",
                todo='write e.g. "paro-iig over node" or "paro-iig in groups of 8"',
            )
        return cls(sharding, mesh.names[:-1])

    def __str__(self) -> str:
        return f"{self.sharding} over {', '.join(self.inter) or 'none'}"

    def storages(self, used: Layout, tensor: TensorType, mesh: Mesh) -> tuple[Storage, ...]:
        """Where the states of a parameter lie that is used as `used`.

        One that has no dimension for so many parts stays whole. Whether it is gathered again for
        the backward is left open, unless groups keep a second copy.
        """
        whole = Layout(used.dims)
        inside = tuple(axis for axis in used.varying if axis not in self.inter)
        outside = tuple(axis for axis in used.varying if axis in self.inter)
        everywhere = (*inside, *outside) if self.sharding.grouped else used.varying
        axes = {"N": (), "I": inside, "G": everywhere}
        levels = (self.sharding.params, self.sharding.grads, self.sharding.optimizer)
        found = []
        for dim in range(len(used.dims)):
            held, grads, updated = (behind(whole, dim, axes[level]) for level in levels)
            if fits(updated, tensor, mesh):
                second = behind(whole, dim, inside)
                for kept in (second,) if self.sharding.secondary else (whole, held):
                    found.append(Storage(used, held, grads, updated, kept))
        return tuple(dict.fromkeys(found)) or (Storage(used, whole, whole, whole, whole),)


def _axes(names: list[str], mesh: Mesh) -> tuple[str, ...]:
    strange = [name for name in names if name not in mesh.names]
    if strange:
        raise StateError(
            f"the mesh has no axis {strange[0]!r} to lead from group to group",
            why=f"its axes are {', '.join(mesh.names)}",
        )
    return tuple(name for name in mesh.names if name in names)


def _leading(size: int, mesh: Mesh) -> tuple[str, ...]:
    """The axes that lead from one group of `size` neighbours to the next."""
    Groups(mesh.size, size)
    sizes = [math.prod(mesh.shape[at:]) for at in range(len(mesh.shape) + 1)]
    if size not in sizes:
        raise StateError(
            f"no axes of the mesh make groups of {size}",
            why=f"its inner axes make groups of {', '.join(map(str, reversed(sizes)))}",
            todo="write the mesh with an axis of that size last",
        )
    return mesh.names[: sizes.index(size)]

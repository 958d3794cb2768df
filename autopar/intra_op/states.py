"""State shardings by name; a new name is one line of the table.

    "zero2"  "paro-iig"  "NIG"  "GGG+I"  "paro-iig over node"  "mics in groups of 8"

After `over` come the mesh axes that lead from group to group, by default all but the last one;
"over none" makes one group of all devices. Sharded parameters are kept whole for the backward or
gathered again for it, whichever is better for each, unless "zero3, kept" or "zero3, gathered again"
says so.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from dataclasses import dataclass, replace

from autopar.errors import PrecisionError, StateError
from autopar.intra_op.node_choices import AllowedStorages, behind, fits
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.ir.state_sharding import Groups, StateSharding
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout, TensorType

STATES: dict[str, StateSharding] = {
    name: StateSharding.parse(levels)
    for name, levels in {
        "ddp": "NNN",  # arXiv:2006.15704
        "zero1": "NNG",  # arXiv:1910.02054, as are the next two
        "zero2": "NGG",
        "zero3": "GGG",
        "zero++": "GGG+I",  # arXiv:2306.10209; int8 blocks are a matter of precision
        "hsdp": "III",  # arXiv:2304.11277, hybrid sharding
        "mics": "III",  # arXiv:2205.00119
        "paro-nig": "NIG",  # arXiv:2310.06003, as are the next two
        "paro-igg": "IGG",
        "paro-iig": "IIG",
    }.items()
}


_AGAIN = {"kept": False, "gathered again": True}


def state(name: str) -> StateSharding:
    """Returns the state sharding of that name, or of three letters such as "NIG".

    Raises:
        StateError: it is neither; names the nearest known.
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
        sharding: how far each state is split.
        inter: the mesh axes that lead from group to group.
        again: whether parameters are gathered again for the backward; None leaves that open.
        hops: whether a collective over all devices may take two hops, whatever the sharding. An
            all_to_all over nodes sends less the more has been summed inside them.
    """

    sharding: StateSharding
    inter: tuple[str, ...]
    again: bool | None = None
    hops: bool = False

    @classmethod
    def read(cls, said: str | StateSharding, mesh: Mesh) -> StateChoice:
        """Reads a user's description of a state sharding on a mesh.

        Raises:
            StateError: there is no such sharding or axis, the sharding is not legal, or the mesh
                has no groups of such a size.
        """
        text, comma, backward = str(said).rpartition(",")
        again = _AGAIN.get(backward.strip()) if comma else None
        parts = (str(said) if again is None else text).split(maxsplit=1)
        name, rest = (*parts, "", "")[:2]
        sharding = state(name.rstrip(","))
        if not sharding.legal:
            raise StateError(
                f"{said} cannot be trained",
                why="a device updates the parts whose optimizer state it has, so that the state is "
                "split at least as far as parameters and gradients",
                todo="split the optimizer state further: the third letter",
            )
        over = re.fullmatch(r"over\s+(\w+(?:\s*,\s*\w+)*)", rest)
        size = re.fullmatch(r"in groups of (\d+)", rest)
        if over:
            names = [] if over[1] == "none" else re.split(r"\s*,\s*", over[1])
            return cls(sharding, _axes(names, mesh), again)
        if size:
            return cls(sharding, _leading(int(size[1]), mesh), again)
        if rest:
            raise StateError(
                f"cannot read {rest!r} of the state sharding {said!r}",
                todo='write e.g. "paro-iig over node", "paro-iig in groups of 8" or "zero3, kept"',
            )
        return cls(sharding, mesh.names[:-1], again)

    def __str__(self) -> str:
        backward = next((f", {word}" for word, again in _AGAIN.items() if again is self.again), "")
        return f"{self.sharding} over {', '.join(self.inter) or 'none'}{backward}"

    def sending(self, precision: Precision) -> StateChoice:
        """Returns the choice for a precision that sends parameters or gradients in another dtype.

        Raises:
            PrecisionError: weights are to be sent as int8 blocks, but are not sent at all.
        """
        if precision.weights and self.sharding.params == "N":
            raise PrecisionError(
                f"weights cannot be sent as int8 blocks under the state sharding {self}",
                why="it gathers no parameters for the forward",
                todo='leave out "weights=int8", or pass state="zero++" or "zero3"',
            )
        return replace(self, hops=bool(precision.gradients))

    def storages(self, used: Layout, tensor: TensorType, mesh: Mesh) -> tuple[Storage, ...]:
        """Returns the storages of a parameter that is used as `used`.

        A parameter without a dimension for so many shards stays whole. Groups that keep a second
        copy gather from that for the backward.
        """
        whole = Layout(used.dims)
        inside = tuple(axis for axis in used.varying if axis not in self.inter)
        outside = tuple(axis for axis in used.varying if axis in self.inter)
        ways = [(*inside, *outside)] if self.sharding.grouped or self.hops else []
        ways += [] if self.sharding.grouped else [used.varying]
        levels = (self.sharding.params, self.sharding.grads, self.sharding.optimizer)
        storages = []
        for everywhere, dim in itertools.product(ways, range(len(used.dims))):
            axes = {"N": (), "I": inside, "G": everywhere}
            held, grads, updated = (behind(whole, dim, axes[level]) for level in levels)
            if fits(updated, tensor, mesh):
                copies = {None: (whole, held), False: (whole,), True: (held,)}[self.again]
                for kept in (behind(whole, dim, inside),) if self.sharding.secondary else copies:
                    storages.append(Storage(used, held, grads, updated, kept))
        return tuple(dict.fromkeys(storages)) or (Storage(used, whole, whole, whole, whole),)


def allowed_storages(
    state: str | StateSharding | None, precision: Precision, mesh: Mesh
) -> AllowedStorages | None:
    """Returns the function that restricts the storages of parameters, None if nothing does.

    Args:
        state: the user's state sharding.
        precision: dtypes of messages.
        mesh: the devices.

    Raises:
        StateError: the sharding is invalid.
        PrecisionError: something is to be sent as int8 blocks that the sharding does not send.
    """
    return None if state is None else StateChoice.read(state, mesh).sending(precision).storages


def _axes(names: list[str], mesh: Mesh) -> tuple[str, ...]:
    strange = [name for name in names if name not in mesh.names]
    if strange:
        raise StateError(
            f"the mesh has no axis {strange[0]!r} between groups",
            why=f"its axes are {', '.join(mesh.names)}",
        )
    return tuple(name for name in mesh.names if name in names)


def _leading(size: int, mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes that lead from one group of `size` neighbours to the next."""
    Groups(mesh.size, size)
    sizes = [math.prod(mesh.shape[at:]) for at in range(len(mesh.shape) + 1)]
    if size not in sizes:
        raise StateError(
            f"no axes of the mesh form groups of {size}",
            why=f"its inner axes form groups of {', '.join(map(str, reversed(sizes)))}",
            todo="write the mesh with an axis of that size last",
        )
    return mesh.names[: sizes.index(size)]

"""StateSharding: where parameters, gradients and optimizer state are kept, and what that costs.

Devices stand in groups, usually the nodes. Each of the three states is kept whole by every device
(N, none), split over the devices of a group and repeated in the others (I, intra), or split over
all of them (G, global): `StateSharding.parse("IIG")`. ZeRO's stages are NNG, NGG and GGG
(arXiv:1910.02054), MiCS and hybrid sharding are III (arXiv:2205.00119), the others are PaRO's
(arXiv:2310.06003); `memory` and `volume` are its Tables 2 and 3, the latter corrected.

A training step accumulates the gradients of `microbatches`. Before each forward and each backward
the parameters are gathered; after each backward the gradients are reduced as far as they are split;
at the end of the step the optimizer gets its part of the sum, and the parameters are gathered
again. Where a sharding knows groups, what goes over all devices goes in two hops, one inside the
groups and one between them; DDP and ZeRO use rings through all devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from autopar.errors import StateError
from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh

LEVELS = {"N": "none", "I": "intra", "G": "global"}
_ORDER = "NIG"


class Exchange(NamedTuple):
    """One collective of a step, as far as it is known without a model.

    Attributes:
        when: "forward", "backward", "accumulate" (each once a microbatch), "reduce" or "update".
        kind: all_gather, reduce_scatter or all_reduce.
        over: "intra", the devices of a group; "inter", those of one place in every group; "global".
        state: "params" or "grads".
        times: how often in a step.
    """

    when: str
    kind: str
    over: str
    state: str
    times: int


class Volume(NamedTuple):
    """Elements that all devices together send in a step, between groups and inside them."""

    inter: float
    intra: float


@dataclass(frozen=True)
class Groups:
    """`devices` in groups of `size`.

    Raises:
        StateError: the groups are not equal, or there is no device.
    """

    devices: int
    size: int

    def __post_init__(self) -> None:
        if min(self.devices, self.size) < 1 or self.devices % self.size:
            raise StateError(
                f"{self.devices} devices do not form groups of {self.size}",
                todo="use a group size that divides the number of devices",
            )

    @property
    def count(self) -> int:
        """Number of groups."""
        return self.devices // self.size

    def parts(self, level: str) -> int:
        """In how many parts a state of that level (a key of LEVELS) is split."""
        return {"N": 1, "I": self.size, "G": self.devices}[level]


@dataclass(frozen=True)
class StateSharding:
    """The levels of the three states; `str` gives what `parse` reads.

    `secondary` keeps a copy of globally split parameters in every group for the backward (ZeRO++,
    arXiv:2306.10209; its int8 blocks are told by a `Precision`), written "GGG+I".

    Raises:
        StateError: a level that is not one of LEVELS, or a secondary copy of parameters that are
            not split over all devices.
    """

    params: str
    grads: str
    optimizer: str
    secondary: bool = False

    def __post_init__(self) -> None:
        if any(level not in LEVELS for level in (self.params, self.grads, self.optimizer)):
            raise StateError(
                f"{self} is not a state sharding",
                why="each of parameters, gradients and optimizer state is one of "
                + ", ".join(f"{letter} ({word})" for letter, word in LEVELS.items()),
                todo='write e.g. "NGG" for ZeRO-2, or "GGG+I" for ZeRO++',
            )
        if self.secondary and self.params != "G":
            raise StateError(
                f"{self} has a second copy of parameters that a group holds anyway",
                todo='drop the "+I", or split the parameters over all devices ("G")',
            )

    @classmethod
    def parse(cls, text: str) -> StateSharding:
        """Read three letters for parameters, gradients and optimizer state, as "NIG".

        Raises:
            StateError: other letters, or more or fewer of them.
        """
        letters, plus, copy = text.partition("+")
        if len(letters) != 3 or copy != ("I" if plus else ""):
            raise StateError(
                f"{text!r} is not a state sharding",
                why="three letters are expected, for parameters, gradients and optimizer state",
                todo='write e.g. "NGG" for ZeRO-2, or "GGG+I" for ZeRO++',
            )
        return cls(letters[0], letters[1], letters[2], bool(plus))

    def __str__(self) -> str:
        return f"{self.params}{self.grads}{self.optimizer}{'+I' if self.secondary else ''}"

    @property
    def legal(self) -> bool:
        """PaRO's first principle: the optimizer state is split at least as far as the others.

        A device updates what it has the optimizer state of, so it must hold those gradients, and
        more parameters than it updates are gathered anyway. Of 27 shardings 14 remain.
        """
        finest = _ORDER.index(self.optimizer)
        return max(_ORDER.index(self.params), _ORDER.index(self.grads)) <= finest

    @property
    def grouped(self) -> bool:
        """Whether it knows groups, so that what goes over all devices goes in two hops."""
        return "I" in (self.params, self.grads, self.optimizer)

    def axes(self, state: str, mesh: Mesh, inter: tuple[str, ...]) -> tuple[str, ...]:
        """The mesh axes over which "params", "grads" or "optimizer" is split.

        Args:
            state: the name of a field.
            mesh: its other axes than `inter` lie inside a group.
            inter: the axes that lead from group to group.
        """
        level = getattr(self, state)
        inside = tuple(name for name in mesh.names if name not in inter)
        return {"N": (), "I": inside, "G": mesh.names}[level]

    def memory(
        self,
        params: float,
        groups: Groups,
        trainable: float | None = None,
        optimizer_bytes: float = 12,
    ) -> dict[str, float]:
        """Bytes per device of "params", "grads" and "optimizer" in mixed precision: PaRO, Table 2.

        Args:
            params: number of parameters, two bytes each.
            groups: the devices.
            trainable: how many of them have a gradient, of two bytes; None for all.
            optimizer_bytes: of a trainable parameter; 12 for Adam with f32 master weights.
        """
        trained = params if trainable is None else trainable
        parts = {name: groups.parts(getattr(self, name)) for name in ("params", "grads")}
        copy = 2 * params / groups.size if self.secondary else 0.0
        return {
            "params": 2 * params / parts["params"] + copy,
            "grads": 2 * trained / parts["grads"],
            "optimizer": optimizer_bytes * trained / groups.parts(self.optimizer),
        }

    def exchanges(self, microbatches: int = 1, whole_sum: bool = False) -> tuple[Exchange, ...]:
        """The collectives of one training step, in the order in which they first run.

        Args:
            microbatches: how many a step accumulates.
            whole_sum: whether gradients that are kept whole are summed whole (DeepSpeed's ZeRO-1,
                which PaRO counts) or only as far as the optimizer needs them (ZeRO's paper).

        Raises:
            StateError: not `legal`, or no microbatch.
        """
        if not self.legal or microbatches < 1:
            raise StateError(
                f"{self} has no training step of {microbatches} microbatches",
                why="the optimizer state is split at least as far as the other two, and a step has "
                "at least one microbatch",
            )
        return tuple(self._exchanges(microbatches, whole_sum))

    def _exchanges(self, microbatches: int, whole_sum: bool) -> Iterator[Exchange]:
        again = "I" if self.secondary else self.params
        for when, level in (("forward", self.params), ("backward", again)):
            for over in self._hops(level, "N"):
                yield Exchange(when, "all_gather", over, "params", microbatches)
        for over in reversed(self._hops(self.grads, "N")):
            yield Exchange("accumulate", "reduce_scatter", over, "grads", microbatches)
        whole = self.grads == "N" and (self.optimizer == "N" or (whole_sum and not self.grouped))
        if whole:
            yield Exchange("reduce", "all_reduce", "global", "grads", 1)
        else:
            for over in reversed(self._hops(self.optimizer, self.grads)):
                yield Exchange("reduce", "reduce_scatter", over, "grads", 1)
            if self.optimizer == "I":
                yield Exchange("reduce", "all_reduce", "inter", "grads", 1)
        for over in self._hops(self.optimizer, self.params):
            yield Exchange("update", "all_gather", over, "params", 1)

    def _hops(self, fine: str, coarse: str) -> tuple[str, ...]:
        """The all_gathers that lead from parts of level `fine` to those of `coarse`."""
        if fine == coarse:
            return ()
        if (fine, coarse) == ("G", "N") and not self.grouped:
            return ("global",)
        return ("inter",) * (fine == "G") + ("intra",) * (coarse == "N")

    def volume(
        self,
        params: float,
        groups: Groups,
        microbatches: int = 1,
        trainable: float | None = None,
        whole_sum: bool = False,
    ) -> Volume:
        """Elements that all devices together send in a step: PaRO, Table 3, corrected.

        As printed, IGG's reduce_scatter between groups is divided by the size of a group instead
        of the number of devices and its update repeated for each microbatch, and NIG's
        reduce_scatter inside the groups is not: against the paper's own text and Figure 5.

        Args:
            params, groups, trainable: as for `memory`.
            microbatches, whole_sum: as for `exchanges`.

        Raises:
            StateError: as for `exchanges`.
        """
        trained = params if trainable is None else trainable
        inter = intra = 0.0
        for call in self.exchanges(microbatches, whole_sum):
            frozen_too = call.state == "params" and call.when != "update"
            outside, inside = _sent(call, params if frozen_too else trained, groups)
            inter += call.times * outside
            intra += call.times * inside
        return Volume(inter, intra)

    def collectives(
        self,
        params: int,
        mesh: Mesh,
        inter: tuple[str, ...],
        microbatches: int = 1,
        element: int = 2,
        whole_sum: bool = False,
    ) -> tuple[tuple[Exchange, Collective], ...]:
        """`exchanges` as calls on a mesh, each with the payload that a device brings to it.

        Args:
            params: number of parameters, all trained.
            mesh, inter: as for `axes`.
            element: bytes of a parameter and of a gradient.
            microbatches, whole_sum: as for `exchanges`.

        Raises:
            StateError: as for `exchanges`.
            MeshError: an axis that the mesh does not have.
        """
        for name in inter:
            mesh.axis(name)
        outer = tuple(name for name in mesh.names if name in inter)
        inner = tuple(name for name in mesh.names if name not in inter)
        spans = {"intra": inner, "inter": outer, "global": mesh.names}
        found = []
        for call in self.exchanges(microbatches, whole_sum):
            # A hop between groups moves what is split inside them already.
            nbytes = params * element / (_size(mesh, inner) if call.over == "inter" else 1)
            if call.kind == "all_gather":
                nbytes /= _size(mesh, spans[call.over])
            found.append((call, Collective(call.kind, spans[call.over], round(nbytes))))
        return tuple(found)


def _size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.axis_size(name) for name in axes)


def _sent(call: Exchange, elements: float, groups: Groups) -> Volume:
    """What all devices send in one such collective over `elements`, by rings.

    A ring through n devices in g groups crosses from group to group g times and sends (n-1)/n of
    the elements over each of its links. Between groups, `size` rings send a part each. An
    all_reduce between groups is counted as PaRO counts that of MiCS: a ring through all devices
    with 2 (g-1)/g of the elements on each link.
    """
    n, m, g = groups.devices, groups.size, groups.count
    if call.over == "intra":
        return Volume(0.0, g * (m - 1) * elements)
    if call.over == "inter":
        if call.kind == "all_reduce":
            return Volume(2 * (g - 1) * elements, 2 * (g - 1) * (m - 1) * elements)
        return Volume((g - 1) * elements, 0.0)
    crossings = g if g > 1 else 0
    each = (2 if call.kind == "all_reduce" else 1) * (n - 1) / n * elements
    return Volume(crossings * each, (n - crossings) * each)


def shardings(legal: bool = True) -> tuple[StateSharding, ...]:
    """Every combination of levels, without second copies; only the legal ones unless told so."""
    every = (StateSharding(p, g, o) for p, g, o in product(_ORDER, repeat=3))
    return tuple(one for one in every if one.legal or not legal)

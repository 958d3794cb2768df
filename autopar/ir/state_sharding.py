"""StateSharding: how far parameters, gradients and optimizer state are split, and its traffic.

Devices form groups, usually the nodes. Each of the three states is whole on every device (N, none),
split over the devices of a group and replicated in the others (I, intra), or split over all devices
(G, global): `StateSharding.parse("IIG")`. ZeRO's stages are NNG, NGG and GGG (arXiv:1910.02054),
MiCS and hybrid sharding are III (arXiv:2205.00119), the others are PaRO's (arXiv:2310.06003);
`memory` and `volume` are its Tables 2 and 3, the latter corrected.

A training step accumulates the gradients of `microbatches`. Parameters are gathered before each
forward and each backward; gradients are reduced as far as they are split after each backward; at
the end of the step the optimizer gets its part of the sum, and the parameters are gathered again.
If a sharding uses groups, traffic over all devices takes two hops, one inside the groups and one
between them; DDP and ZeRO use rings through all devices.
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
    """One collective of a step, independent of the model.

    Attributes:
        when: "forward", "backward", "accumulate" (each once per microbatch), "reduce" or "update".
        kind: all_gather, reduce_scatter or all_reduce.
        over: "intra", the devices of a group; "inter", the devices with the same index in every
            group; or "global".
        state: "params" or "grads".
        times: number of runs in a step.
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
    """`devices` devices in groups of `size`.

    Raises:
        StateError: the groups are unequal, or there is no device.
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
        """Returns the number of parts of a state at that level (a key of LEVELS)."""
        return {"N": 1, "I": self.size, "G": self.devices}[level]


@dataclass(frozen=True)
class StateSharding:
    """The levels of the three states; prints and parses as text.

    `secondary` keeps a copy of globally split parameters in every group for the backward, written
    "GGG+I" (ZeRO++, arXiv:2306.10209; `Precision` selects its int8 blocks).

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
                f"{self} has a secondary copy of parameters that every group already holds",
                todo='drop the "+I", or split the parameters over all devices ("G")',
            )

    @classmethod
    def parse(cls, text: str) -> StateSharding:
        """Reads three letters for parameters, gradients and optimizer state, such as "NIG".

        Raises:
            StateError: other letters, or more or fewer than three.
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

        A device updates the parts whose optimizer state it has, so it must hold their gradients;
        other parameters are gathered anyway. Of 27 shardings, 14 are legal.
        """
        finest = _ORDER.index(self.optimizer)
        return max(_ORDER.index(self.params), _ORDER.index(self.grads)) <= finest

    @property
    def grouped(self) -> bool:
        """Returns whether it uses groups, so that traffic over all devices takes two hops."""
        return "I" in (self.params, self.grads, self.optimizer)

    def axes(self, state: str, mesh: Mesh, inter: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the mesh axes over which "params", "grads" or "optimizer" is split.

        Args:
            state: name of a field.
            mesh: a mesh whose axes other than `inter` lie inside a group.
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
        """Returns the bytes per device of each state in mixed precision (PaRO, Table 2).

        Args:
            params: number of parameters, two bytes each.
            groups: the devices.
            trainable: number of parameters with a gradient, two bytes each; None for all.
            optimizer_bytes: bytes per trainable parameter; 12 for Adam with f32 master weights.

        Returns:
            Bytes of "params", "grads" and "optimizer".
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
        """Returns the collectives of one training step, in the order in which they first run.

        Args:
            microbatches: number that a step accumulates.
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
        """Returns the all_gathers that lead from parts of level `fine` to those of `coarse`."""
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
        """Returns the elements that all devices together send in a step (PaRO, Table 3, corrected).

        As printed, IGG's reduce_scatter between groups is divided by the size of a group instead of
        the number of devices and its update is repeated for each microbatch, and NIG's
        reduce_scatter inside the groups is not; this contradicts the paper's own text and Figure 5.

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
        """Returns `exchanges` as calls on a mesh, each with its payload in bytes per device.

        Args:
            params: number of parameters, all trained.
            mesh, inter: as for `axes`.
            element: bytes of a parameter and of a gradient.
            microbatches, whole_sum: as for `exchanges`.

        Raises:
            StateError: as for `exchanges`.
            MeshError: the mesh has no such axis.
        """
        for name in inter:
            mesh.axis(name)
        outer = tuple(name for name in mesh.names if name in inter)
        inner = tuple(name for name in mesh.names if name not in inter)
        spans = {"intra": inner, "inter": outer, "global": mesh.names}
        calls = []
        for call in self.exchanges(microbatches, whole_sum):
            # A hop between groups moves parts that are already split inside them.
            nbytes = params * element / (_size(mesh, inner) if call.over == "inter" else 1)
            if call.kind == "all_gather":
                nbytes /= _size(mesh, spans[call.over])
            calls.append((call, Collective(call.kind, spans[call.over], round(nbytes))))
        return tuple(calls)


def _size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.axis_size(name) for name in axes)


def _sent(call: Exchange, elements: float, groups: Groups) -> Volume:
    """Returns the volume that all devices send in one such collective over `elements`, by rings.

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
    """Returns every combination of levels without second copies; by default only the legal ones."""
    every = (StateSharding(p, g, o) for p, g, o in product(_ORDER, repeat=3))
    return tuple(one for one in every if one.legal or not legal)

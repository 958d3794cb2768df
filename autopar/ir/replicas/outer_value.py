"""Outer: how independent replicas synchronise (local updates), as one line of text.

    "co2 over node, tau=12, beta=0.5"

Along the mesh axes that it names, replicas exchange no gradients: each takes tau independent steps
(a round), and then a method of `autopar/runtime/outer/methods/` combines their parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import OptionError
from autopar.ir.mesh import Mesh
from autopar.ir.replicas.tau import AUTO, Tau

_WORD = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)
ERROR, CONTINUE = "error", "continue"
_FORM = 'write e.g. "co2 over node, tau=12"'


@dataclass(frozen=True)
class Outer:
    """An outer method and its settings; `str(outer)` parses back to an equal value.

    Attributes:
        method: its name.
        axes: the independent axes of the mesh, outermost first.
        tau: steps of a round; see `autopar.ir.replicas.tau`.
        options: options of the method, by name, as texts.
        on_loss: "error" stops all replicas if a rank is lost; "continue" leaves its replica out of
            the averages from then on.

    Raises:
        OptionError: a name or tau cannot be read.
    """

    method: str
    axes: tuple[str, ...]
    tau: Tau = AUTO
    options: tuple[tuple[str, str], ...] = ()
    on_loss: str = ERROR

    def __post_init__(self) -> None:
        if self.on_loss not in (ERROR, CONTINUE):
            raise OptionError(
                f"on_loss is {self.on_loss[:100]!r}", why=f'"{ERROR}" or "{CONTINUE}" is expected'
            )
        names = (self.method, *self.axes, *(name for name, _ in self.options))
        bad = next((name for name in names if not _WORD.match(name)), None)
        if bad is not None or not self.axes or len(set(self.axes)) != len(self.axes):
            raise OptionError(
                f"the outer method {str(self)!r} cannot be read",
                why="a method, distinct axes of the mesh and options are expected"
                if bad is None
                else f"{bad!r} is no name",
                todo=_FORM,
            )

    @classmethod
    def of(cls, method: str, axis: str | tuple[str, ...], tau: Any, **options: Any) -> Outer:
        """Returns an outer method from Python values; options that are None are left out."""
        axes = (axis,) if isinstance(axis, str) else tuple(axis)
        given = tuple((k, _text(v)) for k, v in sorted(options.items()) if v is not None)
        return cls(method, axes, Tau.read(tau), given)

    def __str__(self) -> str:
        parts = [", ".join(self.axes), f"tau={self.tau}"]
        parts += [f"{name}={value}" for name, value in self.options]
        parts += [f"on_loss={self.on_loss}"] * self.goes_on
        return f"{self.method} over {', '.join(parts)}"

    @classmethod
    def parse(cls, text: str) -> Outer:
        """Reads a text such as "co2 over node, tau=12"; OptionError if it cannot be read."""
        method, over, rest = text.partition(" over ")
        parts = [part.strip() for part in rest.split(",")]
        axes = [part for part in parts if "=" not in part]
        pairs = [part.split("=", 1) for part in parts if "=" in part]
        given = {name.strip(): value.strip() for name, value in pairs}
        if not over or len(given) != len(pairs) or len(text) > 1000:
            raise OptionError(f"the outer method {text[:100]!r} cannot be read", todo=_FORM)
        tau, on_loss = given.pop("tau", "auto"), given.pop("on_loss", ERROR)
        options = tuple(sorted(given.items()))
        return cls(method.strip(), tuple(axes), Tau.read(tau), options, on_loss)

    @classmethod
    def read(cls, given: Outer | str | None) -> Outer | None:
        """Returns the value of a user's option; raises OptionError if it is invalid."""
        return cls.parse(given) if isinstance(given, str) else given

    @property
    def goes_on(self) -> bool:
        """Returns whether the other replicas continue if one is lost."""
        return self.on_loss == CONTINUE

    @property
    def given(self) -> Mapping[str, str]:
        """The options by name."""
        return dict(self.options)

    def check(self, mesh: Mesh) -> None:
        """OptionError unless the mesh has these axes."""
        for axis in self.axes:
            if axis not in mesh.names:
                raise OptionError(
                    f"{str(self)!r} names the axis {axis!r}",
                    why=f"the mesh {mesh} has {', '.join(mesh.names)}",
                    todo="name an axis of the mesh",
                )

    def replicas(self, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
        """Returns the ranks of every replica, each in the order of `within`."""
        return mesh.groups(tuple(name for name in mesh.names if name not in self.axes))

    def peers(self, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
        """Returns the groups of ranks that hold the same shards, one of each replica."""
        return mesh.groups(tuple(name for name in mesh.names if name in self.axes))

    def count(self, mesh: Mesh) -> int:
        """Returns the number of replicas."""
        return len(self.replicas(mesh))

    def within(self, mesh: Mesh) -> Mesh:
        """Returns the mesh of one replica: independent axes have one device."""
        axes = (replace(a, size=1) if a.name in self.axes else a for a in mesh.axes)
        return replace(mesh, axes=tuple(axes))


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)

"""Plans in terms of named dimensions, as in Mesh-TensorFlow (arXiv:1811.02084, section 3).

    autopar.layout({"batch": "node", "heads": "gpu", "vocab": "gpu"})

splits every parameter and value with such a dimension over the given axes, where a strategy of its
operator allows that. The names of `dim_names.py` are inferred from the graph; `autopar explain
plan.toml --dims` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import PinError
from autopar.intra_op.pins.pin_functions import Axes, PinContext, write
from autopar.ir.graph import Node


@dataclass(frozen=True)
class NamedLayout:
    """Names of dimensions, each with the mesh axes that split it.

    Calling it raises PinError if there is no dimension of that name, if it cannot be split that
    many ways, or if two dimensions of a value ask for the same axis; MeshError if there is no such
    axis.
    """

    split: tuple[tuple[str, Axes], ...]

    def __call__(self, context: PinContext) -> dict[str, str]:
        """Returns the pins for one model on one mesh."""
        wanted = {
            cls: (name, axes)
            for name, given in self.split
            if (axes := context.axes(given))
            for cls in self._classes(context, name, axes)
        }
        self._check_axes(context, wanted)
        pins, met = {}, set[str]()
        for node in (*context.parameters(), *context.operators()):
            split = _allowed(context, node, {cls: axes for cls, (_, axes) in wanted.items()})
            if split:
                pins[context.key(node)] = _pin(context, node, split)
            outer = context.dims.outer(node.name)
            if node.op != "param":
                met.update(name for cls, (name, _) in wanted.items() if cls in _led(outer, split))
        for name, _ in wanted.values():
            if name not in met:
                raise self._splits_nowhere(context, name)
        return pins

    def _classes(self, context: PinContext, name: str, axes: Axes) -> list[int]:
        """Returns the classes with a name that split that many ways."""
        classes = [cls for cls, own in enumerate(context.names) if name in (own, own.split(".")[0])]
        if not classes:
            known = dict.fromkeys(own.split(".")[0] for own in context.names)
            raise PinError(
                f"{context.graph.name} has no dimension {name!r}",
                where=str(self),
                why=f"its dimensions are {', '.join(known)}",
                todo="`autopar explain plan.toml --dims` shows where they are",
            )
        ways = context.ways(axes)
        fitting = [cls for cls in classes if context.dims.sizes[cls] >= ways]
        if not fitting:
            sizes = ", ".join(
                f"{context.names[cls]} has {context.dims.sizes[cls]}" for cls in classes
            )
            raise PinError(
                f"{name!r} does not split {ways} ways over {', '.join(axes)}",
                where=str(self),
                why=sizes,
                todo="name fewer axes for it, or another dimension",
            )
        return fitting

    def _check_axes(self, context: PinContext, wanted: dict[int, tuple[str, Axes]]) -> None:
        """Raises PinError if two names ask for the same axis in one value."""
        for node in (*context.parameters(), *context.operators()):
            taken: dict[str, str] = {}
            for cls in context.dims.outer(node.name):
                name, axes = wanted.get(-1 if cls is None else cls, ("", ()))
                for axis in axes:
                    if taken.setdefault(axis, name) != name:
                        raise PinError(
                            f"{taken[axis]!r} and {name!r} both ask for the axis {axis!r}",
                            where=f"{node.op} {context.key(node)}",
                            why="it has both dimensions, but an axis splits one of a value",
                            todo="give one of them another axis",
                        )

    def _splits_nowhere(self, context: PinContext, name: str) -> PinError:
        classes = {c for c, own in enumerate(context.names) if name in (own, own.split(".")[0])}
        kept = [one for one in context.dims.unsplit if one.cls in classes]
        reasons = [f"{one.op} (%{one.node}) {one.why}" for one in kept[:3]]
        return PinError(
            f"no operator splits {name!r}",
            where=str(self),
            why="; ".join(reasons) + (f"; and {len(kept) - 3} more" if len(kept) > 3 else "")
            or "no operator has it as the outermost part of a dimension",
            todo="name another dimension",
        )

    def __str__(self) -> str:
        rows = (f'"{name}": "{", ".join(axes)}"' for name, axes in self.split)
        return f"layout({{{', '.join(rows)}}})"


def layout(split: Mapping[str, str | Sequence[str]]) -> NamedLayout:
    """Returns a value for `pins=` that splits named dimensions over mesh axes.

    Args:
        split: name of a dimension -> one mesh axis, or several as a sequence or as "node, gpu".
            "heads" means all dimensions with that use, "heads.2" one of several.
    """
    rows = []
    for name, axes in split.items():
        given = axes.split(",") if isinstance(axes, str) else axes
        rows.append((name, tuple(axis.strip() for axis in given)))
    return NamedLayout(tuple(rows))


def _allowed(context: PinContext, node: Node, wanted: Mapping[int, Axes]) -> dict[int, Axes]:
    """Returns dimension -> axes, as far as a strategy of the node allows, in the given order."""
    split: dict[int, Axes] = {}
    for cls, axes in wanted.items():
        place = context.dims.place(node.name, cls)
        taken = {axis for given in split.values() for axis in given}
        if place is None or taken.intersection(axes):
            continue
        if not context.dims.cuts(node.name, place, context.ways(axes)):
            continue
        more = {**split, place: axes}
        if node.op == "param" or context.allows(node, _pin(context, node, more)):
            split = more
    return split


def _led(outer: tuple[int | None, ...], split: Mapping[int, Axes]) -> set[int | None]:
    """Returns the classes that lead the split dimensions."""
    return {outer[dim] for dim in split}


def _pin(context: PinContext, node: Node, split: Mapping[int, Axes]) -> str:
    used = {axis for axes in split.values() for axis in axes}
    return write(node.type.shape, split, context.axes(tuple(used)))

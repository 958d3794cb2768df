"""Translates the pins of a model into pins of its stages.

A layout by name means the same in a stage as in the model, and a stage keeps the pins whose names
it contains. A pin function (see `pin_functions.py`) looks at the model as a whole, in which it
finds streams and pairs of linears that a cut may separate. Its pins are then translated for each
stage, and for all equal blocks, to the stage's own names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.errors import PinError
from autopar.intra_op.pins.layout_pins import Pins, joined, naming
from autopar.intra_op.pins.pin_functions import PinFunction, resolve_pins
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.passes.alike_stages import preparing
from autopar.planning.options import Options


def stage_pins(
    graph: Graph, parts: Sequence[Graph], meshes: Sequence[Mesh], options: Options
) -> list[dict[str, str]]:
    """Returns the pins of each stage.

    Args:
        graph: the whole model, normalised, without shares and repeats.
        parts: its stages, prepared.
        meshes: the mesh of each stage.
        options: give the user's pins and the rules.

    Raises:
        PinError: a pin names nothing in any stage, or a pin function does not apply to the model.
        MeshError: a pin function names an axis that a stage's mesh does not have.
    """
    plain, functions = _split(options)
    if not plain and not functions:
        return [{} for _ in parts]
    whole = preparing()(graph) if functions else graph
    by_mesh: dict[Mesh, dict[str, str]] = {}
    result = []
    for part, mesh in zip(parts, meshes, strict=True):
        if mesh not in by_mesh:
            by_mesh[mesh] = resolve_pins(
                functions, whole, mesh, options.table, options.state is None
            )
        translated = _translated(by_mesh[mesh], whole, part)
        result.append(joined([naming(part, plain), translated]))
    missing = set(plain) - {key for pins in result for key in pins}
    if missing:
        raise PinError(
            f"pins that name nothing: {', '.join(sorted(missing))}",
            why="a pin names a parameter, an input, a module or a node of some stage",
            todo="take names from model.named_parameters(), model.named_modules() or the plan",
        )
    return result


Spoken = tuple[tuple[str, tuple[int, ...]], ...]


def spoken(graph: Graph, pins: Mapping[str, str]) -> Spoken:
    """Returns the texts of pins with the places of the nodes that they are on.

    These are equal for stages that differ only in names and are pinned alike.
    """
    if not pins:
        return ()
    known = Pins(graph, pins)
    place = {node.name: at for at, node in enumerate(graph.nodes)}
    return tuple(
        sorted(
            (
                str(pin),
                tuple(place[node.name] for node in graph.folded if known.speaks(key, pin, node)),
            )
            for key, pin in known.pins
        )
    )


def pins_of(graph: Graph, part: Graph, mesh: Mesh, options: Options) -> dict[str, str]:
    """Returns the pins of one stage, ignoring names that it does not contain.

    Arguments are as for `stage_pins`.
    """
    plain, functions = _split(options)
    if not functions:
        return joined([naming(part, plain), {}])
    whole = preparing()(graph)
    resolved = resolve_pins(functions, whole, mesh, options.table, options.state is None)
    return joined([naming(part, plain), _translated(resolved, whole, part)])


def _split(options: Options) -> tuple[dict[str, str], list[PinFunction]]:
    """Separates the user's pins into layouts by name and pin functions."""
    pins = options.pins or ()
    items = [pins] if isinstance(pins, Mapping) or callable(pins) else list(pins)
    plain = joined(item for item in items if isinstance(item, Mapping))
    return plain, [item for item in items if not isinstance(item, Mapping)]


def _translated(pins: Mapping[str, str], whole: Graph, part: Graph) -> dict[str, str]:
    """Translates pins of the whole model to the names of one stage."""
    targets: dict[str, list[str]] = {}
    for leaf in (*whole.leaves("param"), *whole.leaves("input")):
        targets.setdefault(leaf.target, []).append(leaf.name)
    blocks: dict[str, list[str]] = {}  # node of the first block -> the same node in all blocks
    for name, first in whole.template.items():
        blocks.setdefault(first, []).append(name)
    result: dict[str, str] = {}
    for key, text in pins.items():
        named = [key[1:]] if key.startswith("%") else targets.get(key, [])
        for name in named:
            for other in blocks.get(name, [name]):
                own = _own(whole, other, part)
                if own is not None:
                    result[own] = text
    return result


def _own(whole: Graph, name: str, part: Graph) -> str | None:
    """Returns the key in a stage of a node of the whole graph; None if it cannot be pinned."""
    node = whole[name]
    if node.op == "autopar.share":
        # A stage has shares of its own, with other names.
        value = node.inputs[0]
        if whole[value].op != "param" or value not in part or not part.users[value]:
            return None
        return _template(part, part.users[value][0])
    if name not in part or (node.op == "param" and not part.users[name]):
        return None
    if node.op != "param":
        return None if part[name].op == "received" else _template(part, name)
    pieces = [leaf for leaf in part.leaves("param") if leaf.target == node.target]
    return node.target if len(pieces) == 1 else _template(part, part.users[name][0])


def _template(part: Graph, name: str) -> str:
    """Returns the key of a node's template, whose layouts all equal blocks of a stage have."""
    return f"%{part.template[name]}"

"""What a user says of a model, as pins of its stages.

Layouts by name mean in a stage what they mean in the model, and a stage keeps those that name
something in it. A word (see `wordings.py`) looks at the model as a whole, where it finds
streams and pairs of linears that a cut may part; what it answers is then told to each stage, for
all equal blocks by their own names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.errors import PinError
from autopar.intra_op.pins.layout_pins import joined, naming
from autopar.intra_op.pins.wordings import Word, spell_out
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.passes.normalise import FINDING, prepare
from autopar.planning.options import Options


def stage_pins(
    graph: Graph, parts: Sequence[Graph], meshes: Sequence[Mesh], options: Options
) -> list[dict[str, str]]:
    """The pins of each stage.

    Args:
        graph: the whole model, normalised, without shares and repeats.
        parts: its stages, prepared.
        meshes: the mesh of each.
        options: what was said, and the rules.

    Raises:
        PinError: something names nothing in any stage, or a word does not apply to the model.
        MeshError: a word names an axis that a stage's mesh does not have.
    """
    plain, words = _said(options)
    if not plain and not words:
        return [{} for _ in parts]
    whole = prepare(graph, passes=FINDING) if words else graph
    spoken: dict[Mesh, dict[str, str]] = {}
    found = []
    for part, mesh in zip(parts, meshes, strict=True):
        if mesh not in spoken:
            spoken[mesh] = spell_out(words, whole, mesh, options.table, options.state is None)
        told = _told(spoken[mesh], whole, part)
        found.append(joined([naming(part, plain), told]))
    missing = set(plain) - {key for pins in found for key in pins}
    if missing:
        raise PinError(
            f"pins that name nothing: {', '.join(sorted(missing))}",
            why="a pin names a parameter, an input, a module or a node of some stage",
            todo="take names from model.named_parameters(), model.named_modules() or the plan",
        )
    return found


def pins_of(graph: Graph, part: Graph, mesh: Mesh, options: Options) -> dict[str, str]:
    """The pins of one stage, whatever names nothing in it; arguments as of `stage_pins`."""
    plain, words = _said(options)
    whole = prepare(graph, passes=FINDING) if words else graph
    said = spell_out(words, whole, mesh, options.table, options.state is None) if words else {}
    told = _told(said, whole, part) if words else {}
    return joined([naming(part, plain), told])


def _said(options: Options) -> tuple[dict[str, str], list[Word]]:
    """Layouts by name, and words."""
    said = options.pins or ()
    items = [said] if isinstance(said, Mapping) or callable(said) else list(said)
    plain = joined(item for item in items if isinstance(item, Mapping))
    return plain, [item for item in items if not isinstance(item, Mapping)]


def _told(pins: Mapping[str, str], whole: Graph, part: Graph) -> dict[str, str]:
    """A word's answer about the whole model in the names of one stage."""
    targets: dict[str, list[str]] = {}
    for leaf in (*whole.leaves("param"), *whole.leaves("input")):
        targets.setdefault(leaf.target, []).append(leaf.name)
    blocks: dict[str, list[str]] = {}  # node of the first block -> its counterparts, itself first
    for name, first in whole.template.items():
        blocks.setdefault(first, []).append(name)
    found: dict[str, str] = {}
    for key, text in pins.items():
        named = [key[1:]] if key.startswith("%") else targets.get(key, [])
        for name in named:
            for other in blocks.get(name, [name]):
                own = _own(whole, other, part)
                if own is not None:
                    found[own] = text
    return found


def _own(whole: Graph, name: str, part: Graph) -> str | None:
    """The key of a node of the whole graph in a stage; None if it is not there to be pinned."""
    node = whole[name]
    if node.op == "autopar.share":
        # A stage has shares of its own, called otherwise.
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
    """Equal blocks of a stage are planned alike, as the first."""
    return f"%{part.template[name]}"

"""What an operator allocates under each of its choices, in bytes; when is told by lifetimes.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.cost.memory import recipe
from autopar.intra_op.lifetimes import Role
from autopar.intra_op.options import Option
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh

Rows = dict[tuple[Role, int], list[float]]  # bytes of each choice, by what they are for
Dims = tuple[tuple[str, ...], ...]


def amounts(
    graph: Graph,
    node: Node,
    options: Sequence[Option],
    options_of: Callable[[str], Sequence[Option]],
    mesh: Mesh,
    accelerator: bool,
) -> Rows:
    """Bytes of one copy of everything that a node allocates, for each of its choices.

    Args:
        graph: prepared.
        node: no parameter.
        options: its choices.
        options_of: those of what makes a value, none where that is not known.
        mesh: the devices.
        accelerator: whether they are no CPUs.
    """
    if node.is_leaf:
        return {("leaf", -1): [float(o.results[0].local_bytes(node.type, mesh)) for o in options]}
    operands = tuple(graph[name] for name in node.inputs)
    used: dict[int, set[Dims]] = {}
    for place, name in enumerate(node.inputs):
        known = options_of(name)
        if known and known[0].stored is not None:
            used[place] = {option.results[0].dims for option in known}
    given = [graph.root(name).op in ("input", "buffer") for name in node.inputs]
    found: Rows = {}
    for option in options:
        into, out = option.operands, option.results
        made = recipe(node, operands, into, out, mesh, accelerator)
        sizes: dict[tuple[Role, int], float] = {
            ("value", -1): sum(made.results),
            ("owed", -1): sum(made.results) if out[0].partial else 0.0,
            ("waiting", -1): sum(made.results),
            ("extra", -1): sum(made.extra),
            ("scratch", -1): made.scratch,
            ("backward", -1): made.backward_scratch,
        }
        for place, nbytes in enumerate(made.gradients):
            sizes["new", place] = max(nbytes, 0.0)
        for place, (layout, read) in enumerate(zip(into, operands, strict=False)):
            sizes["value", place] = float(layout.local_bytes(read.type, mesh))
            # A parameter that is never used so is gathered, or split, for this operator.
            copied = place in used and layout.dims not in used[place]
            sizes["copy", place] = sizes["value", place] if copied else 0.0
        for place in made.saved:
            nbytes = made.results[0] if place < 0 else sizes["value", place]
            # An input or a buffer is there all the time, whole: kept so it is no copy.
            there = place >= 0 and given[place] and not into[place].sharded_axes
            sizes["kept", place] = 0.0 if there else nbytes
        for key, nbytes in sizes.items():
            aside = node.name in graph.aside  # no step computes it
            found.setdefault(key, []).append(0.0 if aside else nbytes)
    return found

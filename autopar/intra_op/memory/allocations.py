"""What an operator allocates under each of its choices, in bytes; when is told by lifetimes.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from autopar.cost.operator_memory import recipe
from autopar.intra_op.memory.lifetimes import Role
from autopar.intra_op.node_choices import Option
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh

Rows = dict[tuple[Role, int], list[float]]  # bytes of each choice, by what they are for
Dims = tuple[tuple[str, ...], ...]


class Around(NamedTuple):
    """What stands around an operator, by its operands.

    Attributes:
        used: of parameters the splits under which they may be used, of others None.
        given: whether it is the step's input or a buffer, which is there all the time.
    """

    used: tuple[frozenset[Dims] | None, ...]
    given: tuple[bool, ...]


def around(graph: Graph, node: Node, options_of: Callable[[str], Sequence[Option]]) -> Around:
    """What stands around an operator; `options_of` says what makes a value may choose from."""
    used = []
    for name in node.inputs:
        known = options_of(name)
        stored = known and known[0].stored is not None
        used.append(frozenset(o.results[0].dims for o in known) if stored else None)
    given = tuple(graph.root(name).op in ("input", "buffer") for name in node.inputs)
    return Around(tuple(used), given)


def amounts(
    graph: Graph,
    node: Node,
    options: Sequence[Option],
    near: Around,
    mesh: Mesh,
    accelerator: bool,
) -> Rows:
    """Bytes of one copy of everything that a node allocates, for each of its choices.

    Args:
        graph: prepared.
        node: no parameter.
        options: its choices.
        near: what stands around it.
        mesh: the devices.
        accelerator: whether they are no CPUs.
    """
    if node.is_leaf:
        return {("leaf", -1): [float(o.results[0].local_bytes(node.type, mesh)) for o in options]}
    operands = tuple(graph[name] for name in node.inputs)
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
            used = near.used[place]
            copied = used is not None and layout.dims not in used
            sizes["copy", place] = sizes["value", place] if copied else 0.0
        for place in made.saved:
            nbytes = made.results[0] if place < 0 else sizes["value", place]
            # An input or a buffer is there all the time, whole: kept so it is no copy.
            there = place >= 0 and near.given[place] and not into[place].sharded_axes
            sizes["kept", place] = 0.0 if there else nbytes
        for key, nbytes in sizes.items():
            aside = node.name in graph.aside  # no step computes it
            found.setdefault(key, []).append(0.0 if aside else nbytes)
    return found

"""Bytes that an operator allocates under each of its choices; `lifetimes.py` says for how long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cost.operator_memory import recipe
from autopar.intra_op.memory.lifetimes import Role
from autopar.intra_op.node_choices import Option
from autopar.intra_op.problem import Held
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh

Rows = dict[tuple[Role, int], list[float]]  # bytes of each choice, by role
Dims = tuple[tuple[str, ...], ...]


class OperandFacts(NamedTuple):
    """Facts about the operands of an operator.

    Attributes:
        used: for a parameter, the layouts in which it may be used; None for other operands.
        given: whether it is an input of the step or a buffer, which is always in memory.
    """

    used: tuple[frozenset[Dims] | None, ...]
    given: tuple[bool, ...]


def operand_facts(
    graph: Graph, node: Node, options_of: Callable[[str], Sequence[Option]]
) -> OperandFacts:
    """Returns facts about a node's operands; `options_of` gives the choices of their producers."""
    used = []
    for name in node.inputs:
        known = options_of(name)
        stored = known and known[0].stored is not None
        used.append(frozenset(o.results[0].dims for o in known) if stored else None)
    given = tuple(graph.root(name).op in ("input", "buffer") for name in node.inputs)
    return OperandFacts(tuple(used), given)


def amounts(
    graph: Graph,
    node: Node,
    options: Sequence[Option],
    facts: OperandFacts,
    mesh: Mesh,
    accelerator: bool,
) -> Rows:
    """Returns the bytes of one copy of each tensor that a node allocates, for each of its choices.

    Args:
        graph: prepared.
        node: any node but a parameter.
        options: its choices.
        facts: facts about its operands.
        mesh: the devices.
        accelerator: whether the devices are accelerators rather than CPUs.
    """
    if node.is_leaf:
        return {("leaf", -1): [float(o.results[0].local_bytes(node.type, mesh)) for o in options]}
    operands = tuple(graph[name] for name in node.inputs)
    rows: Rows = {}
    for option in options:
        into, out = option.operands, option.results
        memory = recipe(node, operands, into, out, mesh, accelerator, option.form)
        sizes: dict[tuple[Role, int], float] = {
            ("value", -1): sum(memory.results),
            ("owed", -1): sum(memory.results) if out[0].partial else 0.0,
            ("waiting", -1): sum(memory.results),
            ("extra", -1): sum(memory.extra),
            ("scratch", -1): memory.scratch,
            ("backward", -1): memory.backward_scratch,
        }
        for place, nbytes in enumerate(memory.gradients):
            sizes["new", place] = max(nbytes, 0.0)
        for place, (layout, read) in enumerate(zip(into, operands, strict=False)):
            sizes["value", place] = float(layout.local_bytes(read.type, mesh))
            # A parameter that is never used in this layout is gathered, or split, for this
            # operator.
            used = facts.used[place]
            copied = used is not None and layout.dims not in used
            sizes["copy", place] = sizes["value", place] if copied else 0.0
        for place in memory.saved:
            nbytes = memory.results[0] if place < 0 else sizes["value", place]
            # An input or a buffer is always in memory, whole; saving it in that layout makes no
            # copy.
            there = place >= 0 and facts.given[place] and not into[place].sharded_axes
            sizes["kept", place] = 0.0 if there else nbytes
        for key, nbytes in sizes.items():
            aside = node.name in graph.aside  # a training step does not compute it
            rows.setdefault(key, []).append(0.0 if aside else nbytes)
    return rows


def pieces_of(memory: NDArray[np.float64]) -> list[Held]:
    """Splits bytes at each point, shape (points, choices), into intervals of constant bytes."""
    ends = np.flatnonzero((memory[1:] != memory[:-1]).any(axis=1)) + 1
    bounds = [0, *ends.tolist(), len(memory)]
    return [
        ((begin, end), tuple(memory[begin].tolist()))
        for begin, end in pairwise(bounds)
        if memory[begin].any()
    ]

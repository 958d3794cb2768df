"""Seconds in which a host issues the kernels of a stage, for closed forms of its price.

How many kernels an operator is hardly depends on its layouts, so they are counted as on one device.
Collectives, of which there are few, are left to the simulation.
"""

from __future__ import annotations

from autopar.cost.kernel_tables import Host
from autopar.intra_op.node_choices import operand_types
from autopar.intra_op.rule import OpRule, resolve
from autopar.intra_op.work.kernel_work import node_work
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout

Issued = dict[str, tuple[float, float]]


def issuing(graph: Graph, mesh: Mesh, host: Host | None, table: dict[str, OpRule]) -> Issued:
    """Returns the seconds to issue each node of the folded graph, forwards and backwards.

    A node of a repeated block counts for all its runs.

    Args:
        graph: prepared.
        mesh: the devices.
        host: seconds for a kernel; None if work is issued at once.
        table: rules by operator.
    """
    found: Issued = {}
    for node in graph.folded if host is not None else ():
        if node.is_leaf:
            continue
        types, rule = operand_types(graph, node), table.get(node.op)
        signature = None if rule is None else resolve(rule, node, types, node.types)
        into, out = (
            [Layout.replicated(len(one.shape)) for one in side] for side in (types, node.types)
        )
        work = node_work(graph, node, into, out, signature, mesh)
        count = graph.multiplicity[node.name]
        assert host is not None
        found[node.name] = (
            count * host.operator * len(work.forward),
            count * host.autograd * len(work.backward),
        )
    return found

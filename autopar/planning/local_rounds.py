"""Prices of the rounds of local updates, for a plan that was made for one replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.model import AnalyticModel
from autopar.cost.round_price import RoundPrice, round_price
from autopar.ir.collective import Collective
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.replicas.outer_value import Outer
from autopar.ir.units import format_bytes
from autopar.plan import Plan
from autopar.runtime.outer.method import Method
from autopar.runtime.outer.methods import method_of
from autopar.stage_plan import StagePlan


@dataclass(frozen=True)
class Rounds:
    """The rounds of a plan.

    Attributes:
        outer: how replicas synchronise.
        replicas: number of replicas.
        shard_bytes: trained parameters of the device with most of them.
        state_bytes: bytes of the outer method's states on that device.
        price: price of a round.
        changes: a sentence on the difference from data parallelism.
    """

    outer: Outer
    replicas: int
    shard_bytes: float
    state_bytes: float
    price: RoundPrice
    changes: str

    @property
    def title(self) -> str:
        """Returns the text of the method, with the tau that is priced."""
        tau = "" if self.outer.tau.steps else f", which is {self.price.tau}"
        return f"{self.outer}{tau}"

    def text(self) -> str:
        """Returns a paragraph on seconds, memory, and the difference from data parallelism."""
        price = self.price
        where = "beside the next round" if price.hidden else "while devices wait"
        return (
            f"{self.outer}: {self.replicas} replicas, rounds of {price.tau} steps of "
            f"{1e3 * price.step_seconds:.4g} ms; {format_bytes(self.shard_bytes)} of each device "
            f"synchronise in {1e3 * price.sync_seconds:.4g} ms {where}, of which "
            f"{1e3 * price.exposed_seconds:.4g} ms a step are exposed: "
            f"{100 * price.efficiency:.3g} % of the throughput of replicas that never do. "
            f"It keeps {format_bytes(self.state_bytes)} more on a device. "
            f"What changes: {self.changes}."
        )


def with_local_rounds(plan: Plan, outer: Outer | None, mesh: Mesh) -> Plan:
    """Returns the plan of all replicas, given that of one, with the outer method's changes."""
    return plan if outer is None else plan.under(outer, mesh, method_of(outer).CHANGES)


def rounds_of(
    graphs: Sequence[Graph], plan: Plan, outer: Outer, method: Method, mesh: Mesh
) -> Rounds:
    """Returns the rounds of a plan of one replica.

    Args:
        graphs: graphs of the stages of a replica.
        plan: plan of a replica.
        outer, method: how replicas synchronise.
        mesh: all devices.

    Raises:
        CostError: the links of the mesh cannot be priced, or a step takes no time.
    """
    nbytes = max(_trained_bytes(g, stage) for g, stage in zip(graphs, plan.stages, strict=True))
    hidden = method.late or method.delay > 0
    copies = len(method.kept(outer.goes_on))
    call = Collective("all_reduce", outer.axes, int(nbytes))
    sync = AnalyticModel(mesh, in_step=True).collective(call)
    price = round_price(plan.predicted.step_seconds, sync, hidden, outer.tau.steps)
    return Rounds(outer, outer.count(mesh), nbytes, copies * nbytes, price, method.CHANGES)


def _trained_bytes(graph: Graph, plan: StagePlan) -> float:
    """Returns the bytes of trained parameters that a device updates."""
    nbytes = 0.0
    for node in graph.folded:
        if node.op == "param" and node.requires_grad and graph.users[node.name]:
            share = graph.template[graph.users[node.name][0]]
            own = plan.precision.updated(node.type, True)
            part = plan.storage(node.name, share).updated.local_bytes(own, plan.mesh)
            nbytes += graph.multiplicity[node.name] * part
    return nbytes

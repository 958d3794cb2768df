"""A graph with the layouts of a plan, as code generation and the simulator look them up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from autopar.cost.device import device
from autopar.cost.network import near
from autopar.errors import PlanMismatchError
from autopar.ir.collective import Collective
from autopar.ir.fusion.async_tensor_parallel import ASYNC, OverlappableLinears, Overlaps
from autopar.ir.graph import Graph, Node
from autopar.ir.recompute import selective_runs
from autopar.ir.resharding import Resharder, Reshardings
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout
from autopar.plan_entries import NodePlan
from autopar.stage_plan import StagePlan


@dataclass(frozen=True)
class Placed:
    """A graph with the layouts of a plan.

    Attributes:
        graph: the prepared graph with its repeats.
        plan: a layout for every node of the folded graph.
        price: predicts the seconds of one collective.
    """

    graph: Graph
    plan: StagePlan
    price: Callable[[Collective], float]

    @cached_property
    def resharder(self) -> Resharder:
        """Chooses the steps of resharding by price."""
        plan = self.plan
        known = Reshardings.of(plan.mesh, self.price)
        return known.resharder(plan.precision, plan.collectives)

    def planned(self, name: str) -> NodePlan:
        """Returns the plan's entry for a node of any block.

        Raises:
            PlanMismatchError: it has none.
        """
        return entry_of(self.plan, self.graph, name)

    def result(self, name: str, index: int = 0) -> Layout:
        """Returns the layout of a node's result."""
        return self.planned(name).results[index][1]

    def storage(self, leaf: Node) -> Storage:
        """Returns the storage of a parameter and its states.

        Raises:
            PlanMismatchError: the plan has none.
            LayoutError: it is impossible.
        """
        self.planned(leaf.name)
        (share,) = self.graph.users[leaf.name]
        self.planned(share)
        return self.plan.storage(self.graph.template[leaf.name], self.graph.template[share])

    @cached_property
    def overlaps(self) -> Overlaps:
        """Finds the collectives that overlap with linears."""
        plan = self.plan
        switched = ASYNC in plan.fuse
        return Overlaps(
            OverlappableLinears(self.graph, selective_runs(self.graph, plan.recompute)),
            self.resharder,
            near(plan.mesh, device(plan.mesh)) if switched else (),
            lambda name: [layout for _, layout in self.planned(name).operands],
            self.result,
            lambda name: bool(self.planned(name).form),
        )


def entry_of(plan: StagePlan, graph: Graph, name: str) -> NodePlan:
    """Returns the plan's entry for a node of any block.

    Raises:
        PlanMismatchError: it has none.
    """
    template = graph.template[name]
    if template not in plan.nodes:
        raise PlanMismatchError(
            f"the plan has no layout for %{template}",
            where=str(graph[name].source),
            todo="plan this model again",
        )
    return plan.nodes[template]

"""Planner: the fastest plan of a graph on a mesh within memory.

What does not depend on the memory is built and priced once for all plans of a graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from autopar.cost.device import device
from autopar.errors import PinError
from autopar.intra_op.assumptions import Assumptions
from autopar.intra_op.build import build, layouts
from autopar.intra_op.built_problem import Built
from autopar.intra_op.contest import format_problem
from autopar.intra_op.pins.wordings import spell_out
from autopar.intra_op.price_cache import Prices
from autopar.intra_op.problem import Problem, Solution
from autopar.intra_op.storage_choices import bucket_of
from autopar.ir.fusion import ASYNC, UPDATE
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint
from autopar.ir.mesh import Mesh
from autopar.ir.offload import Offload, left_of
from autopar.ir.recompute import Recompute
from autopar.plan import Plan
from autopar.plan_entries import SolverReport
from autopar.planning import offloading
from autopar.planning.fitting import ALIKE, EXACT, Fitted, fitting, solved
from autopar.planning.kernel_savings import applicable, packed, savings
from autopar.planning.options import Options
from autopar.planning.peak import simulated_peak
from autopar.planning.pipelines.repeated import Repeated
from autopar.planning.prices import calibration_of, cost_model, limit_of
from autopar.planning.recomputation import Branch, Key, cheapest, key_of
from autopar.planning.remedies import with_remedies
from autopar.planning.trace import Trace
from autopar.stage_plan import StagePlan


def make_plan(
    graph: Graph,
    mesh: Mesh,
    options: Options,
    trace: Trace,
    repeated: Repeated | None = None,
) -> StagePlan:
    """The cheapest plan within memory.

    Args:
        graph: prepared.
        mesh: the devices.
        options: what a user said.
        trace: keeps the problem and the plan.
        repeated: of a stage, how often it runs in a step; what the plan predicts is then of one
            microbatch, with its part in what a step does once.

    Raises:
        InfeasibleError: no plan fits into the memory.
        UnknownOperatorError: an operator without a rule is refused.
        UnknownDeviceError, CostError: the mesh's device or links cannot be priced.
        PinError: a pin names nothing, fits no choice or contradicts another, or a plan of
            `autopar.pins` does not apply.
    """

    def planned(options: Options, mesh: Mesh) -> StagePlan:
        planner = Planner(graph, mesh, options, trace, repeated)
        return planner.plan(limit_of(mesh, options))

    plan = planned(options, mesh) if repeated else with_remedies(planned, options, mesh)
    trace("plan.toml", lambda: str(Plan.of(plan)))
    return plan


class Planner:
    """Plans of a graph within any memory; what does not depend on that is done once.

    Arguments and errors are those of `make_plan`.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        options: Options,
        trace: Trace,
        repeated: Repeated | None = None,
    ) -> None:
        self.graph, self.mesh, self.options, self.trace = graph, mesh, options, trace
        self.repeated = repeated
        self.fuse = applicable(options.fuse, graph, options.precision)
        self.pins = spell_out(
            options.pins, graph, mesh, options.table, stored=options.state is None
        )
        self.prices = cost_model(mesh, options)
        self.known = Prices(mesh, self.prices)
        self.lies = options.lies(mesh)
        self._branches: dict[tuple[str, Key], Branch] = {}
        self._microbatches = options.microbatches if repeated is None else repeated.microbatches
        late = repeated is not None and repeated.late_loss
        self._late_loss = late and graph.loss is not None
        self._bucket = bucket_of(graph)

    def plan(self, limit: float) -> StagePlan:
        """The fastest plan of at most `limit` bytes a device; InfeasibleError if there is none."""
        graph, options = self.graph, self.options

        def planned(offload: Offload, within: float) -> StagePlan:
            return cheapest(graph, options.recompute, within, partial(self._branch, offload))

        host = device(self.mesh).host_memory
        plan = offloading.cheapest(
            graph, options.offload, limit, host, planned, lambda how: self._branch(how, {}).free()
        )
        return replace(plan, limit=limit)

    def _branch(self, offload: Offload, recompute: Mapping[str, Recompute]) -> Branch:
        """Planning with something in host memory and some blocks computed again."""
        left = left_of(self.graph, offload, recompute)
        key = (str(left), key_of(recompute))
        if key not in self._branches:
            self._branches[key] = self._built(left, recompute)
        return self._branches[key]

    def _build(self, offload: Offload, recompute: Mapping[str, Recompute]) -> Built:
        options = self.options
        given = Assumptions(
            state_bytes=options.state_bytes,
            unknown_ops=options.unknown_ops,
            slowdown=device(self.mesh).slowdown,
            recompute=recompute,
            microbatches=self._microbatches,
            lies=self.lies,
            bucket=self._bucket,
            precision=options.precision,
            offload=offload,
            fused_update=UPDATE in self.fuse,
            overlapped=ASYNC in self.fuse,
            late_loss=self._late_loss,
        )
        try:
            return build(
                self.graph, self.mesh, self.known, options.table, given,
                memory_limit=math.inf, pins=self.pins,
            )  # fmt: skip
        except PinError as error:
            if options.elementwise:
                raise
            raise PinError(
                error.what,
                where=error.where,
                why=f"{error.why}; parameters are whole, since the optimizer's update mixes the "
                "elements of a tensor",
                todo=error.todo or "use an elementwise optimizer (SGD, Adam, AdamW, Lion, ...)",
            ) from error

    def _built(self, offload: Offload, recompute: Mapping[str, Recompute]) -> Branch:
        options = self.options
        built = self._build(offload, recompute)
        if self.repeated is not None:
            built = self.repeated.of(built, self.graph, self.mesh)
        if not recompute and not offload:
            limited = replace(built.problem, memory_limit=max(limit_of(self.mesh, options), 0.0))
            self.trace("problem.json", lambda: format_problem(limited))

        def planned(gap: float, allowed: float, before: Fitted | None) -> Fitted:
            choice, solution = solved(built, options.solver, allowed, before, gap)
            found = StagePlan(
                fingerprint(self.graph),
                self.mesh,
                layouts(built, self.graph, choice),
                predicted=built.figures(choice),
                replicated=built.replicated_seconds(choice),
                pins=self.pins,
                solver=report(built.problem, solution),
                recompute=dict(recompute),
                microbatches=self._microbatches,
                bucket=self._bucket,
                state_bytes=options.state_bytes,
                asked=options.asked,
                calibration=calibration_of(self.prices),
                state="" if options.state is None else str(options.state),
                precision=options.precision,
                collectives=self.prices.chosen,
                fuse=self.fuse,
                offload=offload,
                late_loss=self._late_loss,
            )
            found = packed(self.graph, found, self.prices)
            found = replace(found, fused=savings(self.graph, found, options.table, self.prices))
            peak = simulated_peak(self.graph, found, options.table, self.prices, self.repeated)
            simulated = replace(found, predicted=replace(found.predicted, peak_bytes=peak))
            return Fitted(simulated, found.predicted.peak_bytes, choice)

        searches, exact = options.solver != "propagate", EXACT if self.repeated is None else ALIKE
        return Branch(
            lambda: planned(EXACT, math.inf, None).plan,
            lambda limit, gap: fitting(
                partial(planned, max(gap, exact)), built.problem, limit, searches
            ),
        )


def report(problem: Problem, solution: Solution) -> SolverReport:
    """How a plan was found."""
    return SolverReport(
        solution.solver,
        len(problem.nodes),
        solution.left,
        solution.gap,
        round(solution.seconds, 3),
    )

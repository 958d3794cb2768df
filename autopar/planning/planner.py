"""Planner: finds the fastest plan of a graph on a mesh within memory.

Everything that does not depend on the memory limit is built and priced once for all plans of a
graph.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

from autopar.cost.device import device
from autopar.cost.measured import MeasuredModel
from autopar.errors import InfeasibleError, PinError
from autopar.intra_op.assumptions import Assumptions
from autopar.intra_op.axis_runs import can_be_complete
from autopar.intra_op.build import build, layouts
from autopar.intra_op.built_problem import Built
from autopar.intra_op.contest import format_problem
from autopar.intra_op.pins.layout_pins import Pin, parts
from autopar.intra_op.pins.pin_functions import resolve_pins
from autopar.intra_op.price_cache import Prices
from autopar.intra_op.problem import Problem, Solution
from autopar.intra_op.storage_choices import bucket_by_price, bucket_of
from autopar.ir.fusion import ASYNC, UPDATE
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint
from autopar.ir.mesh import Mesh
from autopar.ir.offload import Offload, left_of
from autopar.ir.recompute import Recompute
from autopar.ir.storage import Storage
from autopar.plan import Plan
from autopar.plan_entries import SolverReport
from autopar.planning import offloading
from autopar.planning.kernel_savings import applicable, packed, savings
from autopar.planning.options import Options
from autopar.planning.peak import with_simulated
from autopar.planning.pipelines.repeated import Repeated
from autopar.planning.prices import (
    calibration_of,
    cost_model,
    limit_of,
    limit_of_plan,
    slowdown_of,
)
from autopar.planning.recomputation import Branch, Key, cheapest, key_of
from autopar.planning.remedies import with_remedies
from autopar.planning.trace import Trace
from autopar.planning.within_memory import (
    ALIKE,
    EXACT,
    Fitted,
    fitting,
    least_bytes,
    solved,
)
from autopar.simulate.optimizer_step import update_works, updated_in
from autopar.stage_plan import StagePlan

ONE_CALL = 2**50  # bytes of a bucket that holds all gradients


def make_plan(
    graph: Graph,
    mesh: Mesh,
    options: Options,
    trace: Trace,
    repeated: Repeated | None = None,
    known: Prices | None = None,
) -> StagePlan:
    """Returns the fastest plan within memory.

    Args:
        graph: the prepared graph.
        mesh: the devices.
        options: options of planning.
        trace: writes the problem and the plan.
        repeated: for a stage, how often it runs in a step; the plan's predictions are then those of
            one microbatch, with its share of what a step does once.
        known: prices of this mesh under these options that an earlier plan has looked up.

    Raises:
        InfeasibleError: no plan fits into memory.
        UnknownOperatorError: an operator has no rule, and the options refuse it.
        UnknownDeviceError, CostError: the mesh's device or links cannot be priced.
        PinError: a pin names nothing, fits no choice or contradicts another, or a plan of
            `autopar.pins` does not apply.
    """

    def planned(options: Options, devices: Mesh, known: Prices | None = None) -> StagePlan:
        planner = Planner(graph, devices, options, trace, repeated, known)
        return planner.plan(limit_of(devices, options))

    def within_memory(given: Options, devices: Mesh) -> StagePlan:
        if (given, devices) != (options, mesh):
            return planned(given, devices)
        try:
            return planned(options, mesh, known)
        except InfeasibleError:
            if not can_be_complete(mesh):
                raise
            trace.tell("nothing fits so far: all layouts of three axes")
            return planned(options, mesh, Prices(mesh, cost_model(mesh, options), complete=True))

    if repeated:
        plan = planned(options, mesh, known)
    else:
        plan = with_remedies(within_memory, options, mesh)
    trace("plan.toml", lambda: str(Plan.of(plan)))
    return plan


def plan_again(
    graph: Graph,
    plan: StagePlan,
    options: Options,
    trace: Trace,
    repeated: Repeated | None = None,
    known: Prices | None = None,
) -> StagePlan:
    """Returns the fastest plan under other pins than those of a plan.

    The same blocks are recomputed and offloaded as in the plan, which its search has found to be
    best, if a plan with them fits. Otherwise, and under another memory limit, these are searched
    for, too.

    Args:
        graph: the prepared graph.
        plan: the plan.
        options: options of planning, with the other pins.
        trace, repeated, known: as for `make_plan`.

    Raises:
        InfeasibleError: no plan fits into memory.
        PinError: the pins cannot be satisfied.
    """
    planner = Planner(graph, plan.mesh, options, trace, repeated, known, plan.graph)
    limit = limit_of(plan.mesh, options)
    if limit == limit_of_plan(plan):
        with suppress(InfeasibleError):
            return planner.plan_like(plan, limit)
    return planner.plan(limit)


class Planner:
    """Plans a graph within any memory; all that does not depend on memory is done once.

    Arguments and errors are those of `make_plan`; `named` is the graph's fingerprint, if known.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        options: Options,
        trace: Trace,
        repeated: Repeated | None = None,
        known: Prices | None = None,
        named: str = "",
    ) -> None:
        self.graph, self.mesh, self.options, self.trace = graph, mesh, options, trace
        self.repeated = repeated
        self.fuse = applicable(options.fuse, graph, options.precision)
        self.pins = resolve_pins(
            options.pins, graph, mesh, options.table, stored=options.state is None
        )
        _check_axes(self.pins, mesh)
        self.prices = cost_model(mesh, options)
        self.known = known or Prices(mesh, self.prices)
        self.allowed_storages = options.allowed_storages(mesh)
        self._branches: dict[tuple[str, Key], Branch] = {}
        self._updates: dict[Hashable, dict[Storage, float]] = {}
        self._microbatches = options.microbatches if repeated is None else repeated.microbatches
        self._in_update = self._microbatches if repeated is None else repeated.in_update
        late = repeated is not None and repeated.late_loss
        self._late_loss = late and graph.loss is not None
        measured = isinstance(self.prices, MeasuredModel)
        self._bucket = bucket_by_price(graph, mesh, self.prices) if measured else bucket_of(graph)
        if options.execution.together:
            self._bucket = ONE_CALL
        self._fingerprint = named or fingerprint(graph)

    def plan(self, limit: float) -> StagePlan:
        """Returns the fastest plan within `limit` bytes of a device.

        Raises:
            InfeasibleError: nothing fits.
        """
        graph, options = self.graph, self.options

        def planned(offload: Offload, within: float) -> StagePlan:
            return cheapest(graph, options.recompute, within, partial(self._branch, offload))

        host = device(self.mesh).host_memory
        plan = offloading.cheapest(
            graph, options.offload, limit, host, planned, lambda how: self._branch(how, {})
        )
        return replace(plan, limit=limit)

    def plan_like(self, plan: StagePlan, limit: float) -> StagePlan:
        """Returns the fastest plan with the same blocks recomputed and offloaded as in another.

        Raises:
            InfeasibleError: nothing fits.
        """
        fitting = self._branch(plan.offload, plan.recompute).fitting(limit, EXACT)
        host = device(self.mesh).host_memory
        return replace(offloading.within_host(fitting, host), limit=limit)

    def _branch(self, offload: Offload, recompute: Mapping[str, Recompute]) -> Branch:
        """Returns planning with an offload and some blocks recomputed."""
        left = left_of(self.graph, offload, recompute)
        key = (str(left), key_of(recompute))
        if key not in self._branches:
            self._branches[key] = self._built(left, recompute)
        return self._branches[key]

    def _build(self, offload: Offload, recompute: Mapping[str, Recompute]) -> Built:
        options = self.options
        given = Assumptions(
            update=options.update,
            unknown_ops=options.unknown_ops,
            slowdown=slowdown_of(self.mesh, options.execution),
            recompute=recompute,
            microbatches=self._in_update,
            allowed_storages=self.allowed_storages,
            bucket=self._bucket,
            precision=options.precision,
            offload=offload,
            fused_update=UPDATE in self.fuse,
            overlapped=ASYNC in self.fuse,
            stored=options.stored,
            execution=options.execution,
            late_loss=self._late_loss,
        )
        built = build(
            self.graph, self.mesh, self.known, options.table, given,
            memory_limit=math.inf, pins=self.pins,
        )  # fmt: skip
        return built if self.repeated else built.with_update(self._updated(built))

    def _updated(self, built: Built) -> dict[str, tuple[float, ...]]:
        """Returns the seconds of the update for each choice of each trained parameter.

        One kernel updates the parameters of all blocks of a run that have the same place in them.
        """
        graph, options, seconds = self.graph, self.options, dict[str, tuple[float, ...]]()
        for name, choices in zip(built.names, built.options, strict=True):
            if choices[0].storage is None or not graph[name].requires_grad:
                continue
            leaf, count = graph[graph[name].inputs[0]], graph.multiplicity[name]
            rule = options.update.rule(leaf.target, leaf.type.shape)
            known = self._updates.setdefault((leaf.type, rule, count), {})
            storages = [one.storage for one in choices if one.storage is not None]
            for storage in set(storages) - known.keys():
                part = updated_in(storage, leaf, self.mesh, options.precision, rule)
                moved = options.execution.optimizer
                works = update_works([part] * count, UPDATE in self.fuse, self._bucket, moved)
                known[storage] = math.fsum(map(self.known.compute, works)) / self._in_update
            seconds[name] = tuple(map(known.__getitem__, storages))
        return seconds

    def _built(self, offload: Offload, recompute: Mapping[str, Recompute]) -> Branch:
        options = self.options
        again = " and ".join(dict.fromkeys(map(str, recompute.values()))) or "nothing"
        self.trace.tell(f"strategies with {again} recomputed")
        built = self._build(offload, recompute)
        if self.repeated is not None:
            built = self.repeated.of(built, self.graph, self.mesh)
        if not recompute and not offload:
            limited = replace(built.problem, memory_limit=max(limit_of(self.mesh, options), 0.0))
            self.trace("problem.json", lambda: format_problem(limited))

        def chosen(gap: float, allowed: float, before: Fitted | None) -> Fitted:
            self.trace.tell(f"solve with {again} recomputed")
            choice, solution = solved(built, options.solver, allowed, before, gap)
            plan = StagePlan(
                self._fingerprint,
                self.mesh,
                layouts(built, self.graph, choice),
                predicted=built.figures(choice),
                replicated=built.replicated_seconds(choice),
                pins=self.pins,
                solver=report(built.problem, solution),
                recompute=dict(recompute),
                microbatches=self._microbatches,
                bucket=self._bucket,
                update=options.update,
                asked=options.asked,
                calibration=calibration_of(self.prices),
                state="" if options.state is None else str(options.state),
                precision=options.precision,
                collectives=self.prices.chosen,
                fuse=self.fuse,
                offload=offload,
                late_loss=self._late_loss,
            )
            return Fitted(plan, plan.predicted.peak_bytes, choice)

        def planned(gap: float, allowed: float, before: Fitted | None) -> Fitted:
            return self._simulated(chosen(gap, allowed, before))

        @cache
        def unlimited() -> Fitted:
            return chosen(EXACT, math.inf, None)

        searches, exact = options.solver != "propagate", EXACT if self.repeated is None else ALIKE
        return Branch(
            lambda: self._simulated(unlimited()).plan,
            lambda limit, gap: fitting(
                partial(planned, max(gap, exact)), built.problem, limit, searches
            ),
            lambda: unlimited().plan.predicted.step_seconds,
            least_bytes(built.problem),
        )

    def _simulated(self, chosen: Fitted) -> Fitted:
        """Returns a plan with the savings of its kernels, and with its simulated peak."""
        graph, rules = self.graph, self.options.table
        plan = packed(graph, chosen.plan, self.known)
        plan = replace(plan, fused=savings(graph, plan, rules, self.known))
        simulated = with_simulated(graph, plan, rules, self.known, self.repeated)
        return replace(chosen, plan=simulated)


def _check_axes(pins: Mapping[str, str], mesh: Mesh) -> None:
    """Raises PinError if a pin requires an axis that the mesh does not have."""
    for key, text in pins.items():
        for pin in map(Pin.parse, parts(text)):
            named = (axis for layout in (pin.layout, *pin.stored) for axis in layout.axes)
            missing = [axis for axis in named if axis not in mesh.names]
            if missing and not pin.other:
                raise PinError(
                    f"the pin {key!r} = {str(pin)!r} is along an axis that the mesh does not have",
                    why=f"{missing[0]!r} is no axis of {mesh}",
                    todo=f"name {' or '.join(mesh.names)}, or leave the pin out",
                )


def report(problem: Problem, solution: Solution) -> SolverReport:
    """Returns the solver's report for a plan."""
    return SolverReport(
        solution.solver,
        len(problem.nodes),
        solution.left,
        solution.gap,
        round(solution.seconds, 3),
        solution.ended,
    )

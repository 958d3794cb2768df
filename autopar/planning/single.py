"""Planning: a model is captured, priced and solved for; a graph and a plan come out.

What `compile` and the command line do before anything is emitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from autopar.capture.capture import Captured, capture
from autopar.capture.decompose import decompose_unknown
from autopar.capture.joint import joint
from autopar.cost.calibration import Calibration
from autopar.cost.device import device
from autopar.cost.measured import MeasuredModel
from autopar.cost.model import AnalyticModel, CostModel
from autopar.errors import PinError, PrecisionError, ProgramError
from autopar.intra_op.build import build, layouts
from autopar.intra_op.built import Built
from autopar.intra_op.contest import format_problem
from autopar.intra_op.options import Lies
from autopar.intra_op.pins.wordings import PinsLike, spell_out
from autopar.intra_op.price_cache import Prices
from autopar.intra_op.problem import Problem, Solution
from autopar.intra_op.proofs.own_function_rules import split_functions
from autopar.intra_op.rule import OpRule
from autopar.intra_op.rules import rules
from autopar.intra_op.solvers import find
from autopar.intra_op.states import lies_of
from autopar.intra_op.stored import bucket_of
from autopar.intra_op.table import table
from autopar.ir.fusion import ASYNC, EXPERTS, UPDATE
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint, format_graph
from autopar.ir.mesh import Mesh, parse_quantity
from autopar.ir.offload import Offload, left_of
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.recompute import Recompute
from autopar.ir.state_sharding import StateSharding
from autopar.ir.verify import verify
from autopar.operators.mixture import with_kernels
from autopar.outside import Kind
from autopar.passes.fusion import fuse
from autopar.passes.normalise import NORMALISING, PASSES, Pass, prepare
from autopar.passes.projections import split_fused
from autopar.plan import Plan
from autopar.planning import offloading
from autopar.planning.fitting import ALIKE, EXACT, Made, fitting, solved
from autopar.planning.kernel_savings import (
    applicable,
    fused,
    fused_exchange,
    fused_linears,
    fused_update,
    packed,
)
from autopar.planning.peak import simulated_peak
from autopar.planning.pipelines.repeated import Repeated
from autopar.planning.recomputation import Branch, Key, cheapest, key_of
from autopar.planning.remedies import with_remedies

FILE = Kind("the trace", ProgramError)


@dataclass(frozen=True)
class Options:
    """What a user may say beyond model and mesh; see `compile`.

    `elementwise` is whether the optimizer can update parts of a parameter; `whole` is the mesh of
    which the one to plan for is a part, which a calibration is of; `fuse` names the patterns in
    whose place kernels go (see `autopar.ir.fusion.choose`).
    """

    loss_fn: Callable[..., Tensor] | None = None
    memory: float | str | None = None
    unknown_ops: str = "replicate"
    trace: str | Path | None = None
    pins: PinsLike | None = None
    solver: str = "ilp"
    table: dict[str, OpRule] = field(default_factory=table)
    calibration: str | Path | None = None
    recompute: str = "auto"
    microbatches: int = 1
    state: str | StateSharding | None = None
    elementwise: bool = True
    whole: Mesh | None = None
    precision: Precision = AS_IS
    fuse: tuple[str, ...] = ()
    offload: str = "none"

    def __post_init__(self) -> None:
        find(self.solver)  # refuses a name that is none before anything is captured
        offloading.check(self.offload)

    def __getstate__(self) -> dict[str, Any]:
        """Sent to another process without the rules that are found there, too."""
        found = rules()
        own = {op: rule for op, rule in self.table.items() if found.get(op) is not rule}
        return {**vars(self), "table": own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, table={**rules(), **state["table"]})

    def lies(self, mesh: Mesh) -> Lies | None:
        """Where the states of parameters may lie, if not everywhere; see `lies_of`."""
        return lies_of(self.state, self.elementwise, self.precision, mesh)


class Trace:
    """Writes every value on the way as a numbered file, or nothing if there is no folder."""

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.count = 0

    def __call__(self, name: str, text: Callable[[], str]) -> None:
        """Keep one value, headed by what made it."""
        if self.folder is None:
            return
        self.count += 1
        file = self.folder / f"{self.count:02}_{name}"
        head = "" if file.suffix == ".json" else f"# Constructed by {file.stem[3:]}\n"
        content = head + text()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            FILE.write(file, content)
        except OSError as error:
            raise ProgramError(
                f"cannot write the trace to {self.folder}",
                why=str(error),
                todo="name a folder that can be written",
            ) from error


def capture_graph(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    trace: Trace,
    passes: tuple[Pass, ...] = PASSES,
) -> Captured:
    """The model's forward on a batch, normalised, annotated and with its repeated blocks.

    With other `passes` it is what these make of it. Kernels are placed behind those that normalise.

    Raises:
        CaptureError: the model cannot be traced.
        BatchError: the model does not take the batch.
    """
    captured = capture(
        model,
        args,
        kwargs,
        loss_fn=options.loss_fn,
        known=options.table,
        precision=options.precision,
    )
    trace("capture.txt", lambda: format_graph(captured.graph))
    graph = verify(
        split_functions(decompose_unknown(captured.graph, options.table), options.table, joint)
    )
    trace("decompose_unknown.txt", lambda: format_graph(graph))

    def keep(name: str, graph: Graph) -> None:
        trace(f"{name}.txt", lambda: format_graph(graph))

    if not options.elementwise:  # pieces of a parameter would be updated each by itself
        passes = tuple(step for step in passes if step is not split_fused)
    graph = prepare(graph, keep, tuple(step for step in passes if step in NORMALISING))
    if options.fuse:
        graph = with_kernels(graph) if EXPERTS in options.fuse else graph
        graph = verify(fuse(graph, options.fuse))
        keep("fuse", graph)
    finding = tuple(step for step in passes if step not in NORMALISING)
    return replace(captured, graph=prepare(graph, keep, finding))


def cost_model(mesh: Mesh, options: Options) -> AnalyticModel | MeasuredModel:
    """The prices to plan by: measured ones where there is a calibration, else closed forms.

    A calibration is of the mesh, or of that which it is a part of by the options.

    Raises:
        CalibrationError: the file cannot be read, or was measured on another device or mesh.
        UnknownDeviceError, CostError: the mesh's device or links cannot be priced.
        PrecisionError: the device has no such arithmetic.
    """
    refuse_what_device_lacks(mesh, options.precision)
    if options.calibration is None:
        return AnalyticModel(mesh)
    return MeasuredModel(mesh, Calibration.load(options.calibration), options.whole)


def refuse_what_device_lacks(mesh: Mesh, precision: Precision) -> None:
    """PrecisionError if a mesh's devices do not compute in the precision faster than in f32.

    Where the hardware lacks a format, devices.toml has the rate of the one that stands in for it.
    """
    known, compute = device(mesh), precision.compute
    if not compute or known.name.lower() == "cpu":
        return
    if compute in ("bf16", "f16") and known.rate(compute, True) <= known.rate("f32", True):
        raise PrecisionError(
            f"{known.name} does not compute in {compute}",
            why="it has no such arithmetic, so f32 stands in for it",
            todo='pass precision="fp16"' if compute == "bf16" else 'pass precision="fp32"',
        )


def calibration_of(prices: CostModel) -> str:
    """The fingerprint of the calibration behind some prices, "" of closed forms."""
    return prices.calibration.fingerprint if isinstance(prices, MeasuredModel) else ""


def make_plan(
    graph: Graph,
    mesh: Mesh,
    options: Options,
    trace: Trace,
    state_bytes: float = 2.0,
    repeated: Repeated | None = None,
) -> Plan:
    """The cheapest plan within memory.

    Args:
        graph: prepared.
        mesh: the devices.
        options: what a user said.
        trace: keeps the problem and the plan.
        state_bytes: optimizer state in units of a parameter's own bytes (AdamW: 2).
        repeated: of a stage, how often it runs in a step; what the plan predicts is then of one
            microbatch, with its part in what a step does once.

    Raises:
        InfeasibleError: no plan fits into the memory.
        UnknownOperatorError: an operator without a rule is refused.
        UnknownDeviceError, CostError: the mesh's device or links cannot be priced.
        PinError: a pin names nothing, fits no choice or contradicts another, or a plan of
            `autopar.pins` does not apply.
    """

    def planned(options: Options, mesh: Mesh) -> Plan:
        planner = Planner(graph, mesh, options, trace, state_bytes, repeated)
        return planner.plan(limit_of(mesh, options))

    made = planned(options, mesh) if repeated else with_remedies(planned, options, mesh)
    trace("plan.toml", made.to_toml)
    return made


def limit_of(mesh: Mesh, options: Options) -> float:
    """Bytes that a device may use."""
    limit = device(mesh).usable if options.memory is None else options.memory
    return parse_quantity(limit, "B") if isinstance(limit, str) else limit


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
        state_bytes: float = 2.0,
        repeated: Repeated | None = None,
    ) -> None:
        self.graph, self.mesh, self.options, self.trace = graph, mesh, options, trace
        self.state_bytes, self.repeated = state_bytes, repeated
        self.fuse = applicable(options.fuse, graph, options.precision)
        self.pins = spell_out(
            options.pins, graph, mesh, options.table, stored=options.state is None
        )
        self.prices = cost_model(mesh, options)
        self.known = Prices(mesh, self.prices)
        self.lies = options.lies(mesh)
        self._branches: dict[tuple[str, Key], Branch] = {}
        count = options.microbatches if repeated is None else repeated.microbatches
        self._step = {"microbatches": float(count)} if count > 1 else {}
        self._step["bucket"] = float(bucket_of(graph))

    def plan(self, limit: float) -> Plan:
        """The fastest plan of at most `limit` bytes a device; InfeasibleError if there is none."""
        graph, options = self.graph, self.options

        def planned(offload: Offload, within: float) -> Plan:
            return cheapest(graph, options.recompute, within, partial(self._branch, offload))

        host = device(self.mesh).host_memory
        made = offloading.cheapest(
            graph, options.offload, limit, host, planned, lambda how: self._branch(how, {}).free()
        )
        within = {"limit": limit} if limit < math.inf else {}
        return replace(made, memory=within | {"state": self.state_bytes})

    def _branch(self, offload: Offload, recompute: Mapping[str, Recompute]) -> Branch:
        """Planning with something in host memory and some blocks computed again."""
        left = left_of(self.graph, offload, recompute)
        key = (str(left), key_of(recompute))
        if key not in self._branches:
            self._branches[key] = self._built(left, recompute)
        return self._branches[key]

    def _build(self, offload: Offload, recompute: Mapping[str, Recompute]) -> Built:
        options = self.options
        try:
            return build(
                self.graph,
                self.mesh,
                self.prices,
                options.table,
                memory_limit=math.inf,
                state_bytes=self.state_bytes,
                unknown_ops=options.unknown_ops,
                pins=self.pins,
                slowdown=device(self.mesh).slowdown,
                recompute=recompute,
                microbatches=int(self._step.get("microbatches", 1)),
                lies=self.lies,
                bucket=bucket_of(self.graph),
                precision=options.precision,
                offload=offload,
                fused_update=UPDATE in self.fuse,
                overlapped=ASYNC in self.fuse,
                prices=self.known,
            )
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

        def planned(gap: float, allowed: float, before: Made | None) -> Made:
            choice, solution = solved(built, options.solver, allowed, before, gap)
            found = Plan(
                fingerprint(self.graph),
                self.mesh,
                layouts(built, self.graph, choice),
                built.figures(choice),
                replicated=built.replicated_seconds(choice),
                pins=self.pins,
                solver=found_by(built.problem, solution),
                recompute=dict(recompute),
                step=self._step,
                calibration=calibration_of(self.prices),
                state="" if options.state is None else str(options.state),
                precision=options.precision,
                fuse=self.fuse,
                offload=offload,
            )
            found = packed(self.graph, found, self.prices)
            found = replace(
                found,
                fused=fused(self.graph, found, options.table, self.prices)
                | fused_exchange(self.graph, found, self.prices)
                | fused_linears(self.graph, found, options.table, self.prices)
                | fused_update(self.graph, found, self.prices, self.state_bytes),
            )
            peak = simulated_peak(
                self.graph, found, options.table, self.prices, self.state_bytes, self.repeated
            )
            simulated = replace(found, predicted=found.predicted | {"peak_bytes": peak})
            return Made(simulated, found.predicted["peak_bytes"], choice)

        searches, exact = options.solver != "propagate", EXACT if self.repeated is None else ALIKE
        return Branch(
            lambda: planned(EXACT, math.inf, None).plan,
            lambda limit, gap: fitting(
                partial(planned, max(gap, exact)), built.problem, limit, searches
            ),
        )


def found_by(problem: Problem, solution: Solution) -> dict[str, str | float]:
    """What a plan tells of how it was found; see `Plan.solver`."""
    return {
        "name": solution.solver,
        "nodes": len(problem.nodes),
        **({} if solution.left is None else {"left": solution.left}),
        "gap": solution.gap,
        "seconds": round(solution.seconds, 3),
    }

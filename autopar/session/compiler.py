"""Compiler: captures a call of a model, plans it and emits its program."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn

from autopar.capture.capture import Captured
from autopar.capture.generation.calls import Sizes
from autopar.errors import BatchError, PlanMismatchError, ScheduleError
from autopar.generation_plan import GenerationPlan
from autopar.ir.mesh import Mesh
from autopar.ir.replicas.outer_value import Outer
from autopar.plan import Plan
from autopar.planning.capturing import Call
from autopar.planning.local_batches import capture_parts, stage_mesh
from autopar.planning.local_choice import asks_for_local, choose
from autopar.planning.local_rounds import with_local_rounds
from autopar.planning.options import GLOBAL, Options
from autopar.planning.pipelines.schedule_names import schedule_of
from autopar.planning.plan_model import plan_captured, plan_model
from autopar.planning.stored import plan_over
from autopar.planning.trace import Trace
from autopar.runtime.ranks.agreement import compare_ranks
from autopar.runtime.ranks.processes import from_first_rank
from autopar.session.call_texts import text_of_graph
from autopar.session.compiled import Compiled, groups_of
from autopar.session.generation.pair import compile_pair
from autopar.session.model_facts import facts_of

_ADVICE = "build the same model on every rank, and pass the same whole batch on every rank"


@dataclass(frozen=True)
class Compiler:
    """Compiles calls of a model for a mesh; all ranks of a process group call it.

    Attributes:
        mesh: the devices.
        options: options of the plan.
        plan: a plan to use instead of searching for one.
        outer: how replicas along independent axes synchronise; each runs a separate program on its
            part of the batch.
        generation: a plan to use for the first generation.
    """

    mesh: Mesh
    options: Options
    plan: Plan | None = None
    outer: Outer | None = None
    generation: GenerationPlan | None = None

    def __post_init__(self) -> None:
        if self.outer is not None:
            self.outer.check(self.mesh)

    @property
    def has_stages(self) -> bool:
        """Returns whether its programs have more than one stage."""
        if self.plan is not None:
            return len(self.plan.stages) > 1
        return self.options.stages != 1

    @property
    def is_pipeline(self) -> bool:
        """Returns whether its programs run a schedule of stages and microbatches."""
        return self.options.is_pipeline if self.plan is None else self.plan.is_pipeline

    def __call__(self, call: Call) -> Compiled:
        """Returns the compiled call, the same on every rank.

        Raises:
            CaptureError, InfeasibleError, PlanMismatchError: see `autopar.compile`.
            BatchError: the ranks captured different graphs.
        """
        if self.generation is not None:
            raise PlanMismatchError(
                "the plan is for a generation",
                why="it has a prefill and a decode, and no step of a training",
                todo="call program.generate first, or pass a plan of a training",
            )
        first = not dist.is_initialized() or dist.get_rank() == 0
        trace = Trace(self.options.trace if first else None)
        if self.plan is None and self.outer is None and asks_for_local(self.options.allow):
            plan = from_first_rank(lambda: choose(call, self.mesh, self.options, trace))
            update = plan.stages[0].update
            options = replace(self.options, update=update, trace=None)
            return Compiler(self.mesh, options, plan, plan.outer)(call)
        facts = facts_of(call.model)  # before the model runs, which may set attributes
        captured, plan = self._planned(self._of_replica(call, self.outer), trace)
        return Compiled.of(captured, plan.on(self.mesh), self.options, trace, facts, all_ranks=True)

    def variant(
        self, call: Call, first: Compiled, training: bool, count: int | None = None
    ) -> Compiled:
        """Returns the program of another call, which reads parameters in the layouts of `first`.

        Args:
            call: call of the same model, in another mode or with another batch.
            first: the program that stores the parameters.
            training: whether it trains. An evaluation without the arguments of the loss_fn has no
                loss.
            count: the number of microbatches, if the schedule supports it.

        Raises:
            CaptureError, InfeasibleError, StageError: see `autopar.compile`.
            BatchError: the ranks captured different graphs, or the schedule exists for no number of
                equal microbatches of the batch.
        """
        plan, call = first.plan.inner, self._of_replica(call, first.plan.outer)
        options = self.options
        if not training and not call.has_arguments_of(options.loss_fn):
            options = replace(options, loss_fn=None)
        if plan.is_pipeline:
            plan = replace(plan, microbatches=microbatches_for(plan, call.samples, count))
        sliced = plan.microbatches if plan.is_pipeline else None
        options = replace(options, whole_loss=plan.stages[0].asked.whole_loss)
        captured = capture_parts(call, plan.stages[0].mesh, options, Trace(None), sliced)
        compare_ranks({"the captured graph": text_of_graph(captured.graph)}, BatchError, _ADVICE)
        alike = text_of_graph(captured.graph) == text_of_graph(first.captured.graph)
        if alike and plan == first.plan.inner:
            return first
        graph, further = from_first_rank(
            lambda: plan_over(first.captured.graph, plan, captured.graph, options)
        )
        return Compiled.of(
            replace(captured, graph=graph),
            with_local_rounds(further, first.plan.outer, self.mesh).on(self.mesh),
            options,
            Trace(None),
            all_ranks=True,
        )

    def generating(
        self, model: nn.Module, sizes: Sizes, first: Compiled | None
    ) -> tuple[Compiled, Compiled]:
        """Returns a prefill and a decode; see `compile_pair`."""
        return compile_pair(self, model, sizes, first)

    def _of_replica(self, call: Call, outer: Outer | None) -> Call:
        """Returns a replica's part of a call with the batch of all replicas."""
        if outer is None or self.options.batches != GLOBAL:
            return call
        return call.part_of(outer.count(self.mesh))

    def _planned(self, call: Call, trace: Trace) -> tuple[Captured, Plan]:
        """Returns the captured model and its plan, the same on every rank."""
        plan, options, mesh = self.plan, self.options, self.mesh
        outer = self.outer
        inside = mesh if outer is None else outer.within(mesh)
        if plan is None and options.searches_stages:
            # Under a time limit, solvers may differ between ranks, so one rank plans for all.
            plan = from_first_rank(
                lambda: with_local_rounds(plan_model(call, inside, options, trace), outer, mesh)
            )
        if plan is not None:
            options = replace(options, whole_loss=plan.stages[0].asked.whole_loss)
        count = options.microbatches if plan is None else plan.microbatches
        staged = self.is_pipeline if plan is None else plan.is_pipeline
        sized = call if options.global_batch is None else call.sized(options.global_batch)
        part = stage_mesh(inside, options) if plan is None else plan.stages[0].mesh
        captured = capture_parts(sized, part, options, trace, count if staged else None)
        compare_ranks({"the captured graph": text_of_graph(captured.graph)}, BatchError, _ADVICE)
        if plan is None:
            plan = from_first_rank(
                lambda: with_local_rounds(
                    plan_captured(captured, inside, options, trace), outer, mesh
                )
            )
        else:
            plan.check(captured.graph, mesh)
        return captured, plan


def microbatches_for(plan: Plan, samples: int, wanted: int | None = None) -> int:
    """Returns the wanted number of microbatches, or else the largest, for a batch of this size."""
    if not plan.is_pipeline:
        return 1
    counts = list(range(plan.microbatches, 0, -1))
    if wanted is not None:
        counts.insert(0, wanted)
    for count in counts:
        if samples % count == 0:
            with suppress(ScheduleError):
                schedule_of(plan.schedule, groups_of(plan), count)
                return count
    return plan.microbatches


@dataclass(frozen=True)
class Loader:
    """Replaces a compiler if the first call has been compiled before.

    Attributes:
        first: the compiled call.
        compiler: compiles further calls.
    """

    first: Compiled
    compiler: Compiler

    def __call__(self, call: Call) -> Compiled:
        """Returns the compiled call."""
        return self.first

    def variant(
        self, call: Call, first: Compiled, training: bool, count: int | None = None
    ) -> Compiled:
        """Returns a further call over the parameters of the first; see `Compiler.variant`."""
        return self.compiler.variant(call, first, training, count)

    def generating(
        self, model: nn.Module, sizes: Sizes, first: Compiled | None
    ) -> tuple[Compiled, Compiled]:
        """Returns a prefill and a decode over the parameters of the first program."""
        return self.compiler.generating(model, sizes, first)

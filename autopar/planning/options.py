"""Options of planning: all that a user chooses besides the model and the mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import OptionError
from autopar.inter_op.schedules import check_allowed, computes_as_one
from autopar.intra_op.node_choices import AllowedStorages
from autopar.intra_op.pins.pin_functions import PinsLike
from autopar.intra_op.rule import OpRule
from autopar.intra_op.rule_table import table
from autopar.intra_op.solvers import check as check_solver
from autopar.intra_op.states import allowed_storages
from autopar.ir.chosen_algorithms import LIBRARY_ONLY, ChosenAlgorithms
from autopar.ir.executed.execution import AS_WRITTEN, Execution
from autopar.ir.mesh import Mesh
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.state_sharding import StateSharding
from autopar.ir.storage import Storage
from autopar.ir.update import ADAMW, Update
from autopar.operators.attention.document_lengths import UNKNOWN, DocumentLengths
from autopar.operators.expert_load import ExpertLoad
from autopar.plan_entries import SearchOptions
from autopar.planning import offloading
from autopar.stage_plan import StagePlan

if TYPE_CHECKING:
    from torch import Tensor

AUTO = "auto"
GLOBAL, LOCAL = "global", "local"  # of batches
SCHEDULE = "1f1b"


@dataclass(frozen=True)
class Options:
    """Options of planning; `autopar.compile` documents those that a user passes.

    Attributes:
        table: sharding rules by operator.
        update: states that the optimizer keeps, and its requirements on a parameter's layout.
        whole: the mesh that contains the planned one, and that the calibration is for.
        fuse: patterns to replace by kernels; see `autopar.ir.fusion.choose`.
        stages: number of pipeline stages, or "auto" to search for the fastest pipeline.
        microbatches: number of microbatches in a step.
        whole_loss: whether their losses add up to that of the whole batch; else a step has the mean
            of their losses.
        collectives: algorithms of collectives, or "auto" for the fastest ones.
        global_batch: samples in a step for stages="auto"; None for those of the example batch.
        batches: whether a rank passes the whole batch or its part; see `local_batches.py`.
        stored: storage of each parameter by its key, if another program has fixed it.
        expert_load: how often experts are chosen, for prices; see `ExpertLoad`.
        documents: lengths of documents in packed rows, for prices; see `DocumentLengths`.
        execution: how the kernels of a plan are run, for prices; see `Execution`.
        allow: "stale gradients" allows schedules that change the result of training.

    Raises:
        OptionError: options contradict one another.
        ProblemError: the solver is unknown.
        PlanError: `offload` cannot be parsed.
    """

    loss_fn: Callable[..., Tensor] | None = None
    memory: float | str | None = None
    unknown_ops: str = "replicate"
    trace: str | Path | None = None
    pins: PinsLike | None = None
    solver: str = "ilp"
    table: dict[str, OpRule] = field(default_factory=table)
    calibration: str | Path | None = None
    recompute: str = AUTO
    microbatches: int = 1
    whole_loss: bool = True
    state: str | StateSharding | None = None
    update: Update = ADAMW
    whole: Mesh | None = None
    precision: Precision = AS_IS
    fuse: tuple[str, ...] = ()
    offload: str = "none"
    stages: int | str = 1
    schedule: str = SCHEDULE
    global_batch: int | None = None
    allow: str = ""
    batches: str = GLOBAL
    expert_load: str = "equal"
    documents: str = UNKNOWN
    execution: Execution = AS_WRITTEN
    stored: Mapping[str, Storage] = field(default_factory=dict)
    collectives: ChosenAlgorithms | str = LIBRARY_ONLY

    def __post_init__(self) -> None:
        check_allowed(self.schedule, self.allow)
        check_solver(self.solver)  # refuses an unknown name before the model is captured
        offloading.check(self.offload)
        ExpertLoad.parse(self.expert_load)
        DocumentLengths.parse(self.documents)
        if isinstance(self.stages, str) and self.stages != AUTO:
            raise OptionError(
                f"stages is {self.stages!r}", why='a whole number or "auto" is expected'
            )
        if self.searches_stages and (self.microbatches, self.schedule) != (1, SCHEDULE):
            raise OptionError(
                'stages="auto" also chooses microbatches and schedule',
                why=f"microbatches={self.microbatches} and schedule={self.schedule!r} are given",
                todo="omit them, or pass the number of stages",
            )
        if self.searches_stages and self.offload not in ("none", "optimizer"):
            raise OptionError(
                f'stages="auto" does not support offload={self.offload!r}',
                why="which blocks are offloaded depends on the stages, which are not known yet",
                todo='pass offload="optimizer", or the number of stages',
            )
        if self.searches_stages and self.batches != GLOBAL:
            raise OptionError(
                "a search for a pipeline takes whole batches",
                why="how many parts a batch has depends on the stages that are searched for",
                todo="give the number of stages, or plan first and pass the plan",
            )
        if self.global_batch is not None and not self.searches_stages:
            raise OptionError(
                'global_batch needs stages="auto"',
                why=f"stages={self.stages} is given",
                todo='pass stages="auto", or omit global_batch',
            )

    @classmethod
    def like(cls, plan: StagePlan, **others: Any) -> Options:
        """Returns the options that a plan was made with, as far as the plan records them.

        Args:
            plan: the plan of a stage.
            **others: options that a plan does not record (rules, the calibration's file, the whole
                mesh), and overrides.
        """
        recorded = cls(
            memory=plan.limit,
            unknown_ops=plan.asked.unknown_ops,
            pins=plan.pins,
            solver=plan.asked.solver,
            recompute=plan.asked.recompute,
            microbatches=plan.microbatches,
            whole_loss=plan.asked.whole_loss or plan.microbatches == 1,
            state=plan.state or None,
            update=plan.update,
            precision=plan.precision,
            fuse=plan.fuse,
            offload=plan.asked.offload,
            collectives=plan.collectives,
            batches=plan.asked.batches,
            expert_load=plan.asked.expert_load,
            documents=plan.asked.documents,
            execution=Execution.read(plan.asked.execution),
        )
        if recorded.memory == math.inf:  # the plan records no limit
            others.setdefault("memory", None)
        return replace(recorded, **others)

    @property
    def asked(self) -> SearchOptions:
        """The options that a plan records besides its layouts."""
        names = [field.name for field in fields(SearchOptions)]
        given = {name: getattr(self, name) for name in names}
        own = {"execution": str(self.execution), "whole_loss": self.counted > 1}
        return SearchOptions(**{**given, **own})

    @property
    def counted(self) -> int:
        """Number of microbatches whose losses add up to that of the batch; 1 if they do not.

        Under a schedule with stale gradients every microbatch trains on its own loss.
        """
        adds_up = self.whole_loss and computes_as_one(self.schedule)
        return self.microbatches if adds_up else 1

    @property
    def searches_stages(self) -> bool:
        """Returns whether stages, microbatches and schedule are searched for together."""
        return self.stages == AUTO

    @property
    def is_pipeline(self) -> bool:
        """Returns whether the plan has a schedule of stages and microbatches."""
        return (self.stages, self.microbatches, self.schedule) != (1, 1, SCHEDULE)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out built-in rules, which the receiving process has too."""
        builtin = table()
        own = {op: rule for op, rule in self.table.items() if builtin.get(op) != rule}
        return {**vars(self), "table": own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, table={**table(), **state["table"]})

    def allowed_storages(self, mesh: Mesh) -> AllowedStorages | None:
        """Returns the function that restricts the storages of parameters; None allows all."""
        return allowed_storages(self.state, self.precision, mesh)

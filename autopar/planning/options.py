"""Options: what a user asks of a plan beside the model and the mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from autopar.errors import OptionError
from autopar.inter_op.schedules import check_allowed
from autopar.intra_op.node_choices import Lies
from autopar.intra_op.pins.wordings import PinsLike
from autopar.intra_op.rule import OpRule
from autopar.intra_op.rule_table import table
from autopar.intra_op.rules import rules
from autopar.intra_op.solvers import find
from autopar.intra_op.states import lies_of
from autopar.ir.chosen_algorithms import LIBRARY_ONLY, ChosenAlgorithms
from autopar.ir.mesh import Mesh
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.state_sharding import StateSharding
from autopar.ir.storage import Storage
from autopar.plan_entries import Asked
from autopar.planning import offloading
from autopar.stage_plan import STATE_BYTES, StagePlan

AUTO = "auto"
GLOBAL, LOCAL = "global", "local"  # of batches
SCHEDULE = "1f1b"


@dataclass(frozen=True)
class Options:
    """What a plan is searched under; `autopar.compile` describes those that a user passes.

    Attributes:
        table: sharding rules by operator.
        elementwise: whether the optimizer can update parts of a parameter.
        state_bytes: of the optimizer, in units of a parameter's own bytes (AdamW: 2).
        whole: the mesh of which the planned one is a part, and which the calibration is of.
        fuse: the patterns in whose place kernels go; see `autopar.ir.fusion.choose`.
        stages: into how many the model is cut, or "auto" for a search for the fastest pipeline.
        microbatches: of a step; "auto" chooses them.
        collectives: the algorithms of collectives, or "auto" for the cheapest ones.
        global_batch: samples of a step for such a search; None takes those of the example.
        batches: whether a rank passes the whole batch or its part; see `local_batches.py`.
        stored: the storage of each parameter by its key in the program, where another program has
            stored it already.
        allow: what schedules may change that one device would not compute so.

    Raises:
        OptionError: options that contradict one another.
        ProblemError: there is no such solver.
        PlanError: nothing is offloaded by these words.
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
    state: str | StateSharding | None = None
    elementwise: bool = True
    whole: Mesh | None = None
    precision: Precision = AS_IS
    fuse: tuple[str, ...] = ()
    offload: str = "none"
    state_bytes: float = STATE_BYTES
    stages: int | str = 1
    schedule: str = SCHEDULE
    global_batch: int | None = None
    allow: str = ""
    batches: str = GLOBAL
    stored: Mapping[str, Storage] = field(default_factory=dict)
    collectives: ChosenAlgorithms | str = LIBRARY_ONLY

    def __post_init__(self) -> None:
        check_allowed(self.schedule, self.allow)
        find(self.solver)  # refuses an unknown name before anything is captured
        offloading.check(self.offload)
        if isinstance(self.stages, str) and self.stages != AUTO:
            raise OptionError(
                f"stages is {self.stages!r}", why='a whole number or "auto" is expected'
            )
        if self.searches_stages and (self.microbatches, self.schedule) != (1, SCHEDULE):
            raise OptionError(
                'stages="auto" chooses microbatches and schedule, too',
                why=f"microbatches={self.microbatches} and schedule={self.schedule!r} are given",
                todo="leave them out, or give the number of stages",
            )
        if self.searches_stages and self.offload not in ("none", "optimizer"):
            raise OptionError(
                f"a search for a pipeline does not offload {self.offload!r}",
                why="of which blocks activations go depends on the stages that are searched for",
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
                "global_batch is for a search for the fastest pipeline",
                why=f"stages={self.stages} is given",
                todo='pass stages="auto", or leave global_batch out',
            )

    @classmethod
    def like(cls, plan: StagePlan, **others: Any) -> Options:
        """The options under which a plan was made, as far as it says them.

        Args:
            plan: of a model in one piece, or of one stage.
            **others: what a plan does not say (rules, a calibration's file, the whole mesh), and
                what shall be otherwise.
        """
        said = cls(
            memory=plan.limit,
            unknown_ops=plan.asked.unknown_ops,
            pins=plan.pins,
            solver=plan.asked.solver,
            recompute=plan.asked.recompute,
            microbatches=plan.microbatches,
            state=plan.state or None,
            elementwise=plan.asked.elementwise,
            precision=plan.precision,
            fuse=plan.fuse,
            offload=plan.asked.offload,
            collectives=plan.collectives,
            state_bytes=plan.state_bytes,
            batches=plan.asked.batches,
        )
        if said.memory == math.inf:  # the plan says no limit
            others.setdefault("memory", None)
        return replace(said, **others)

    @property
    def asked(self) -> Asked:
        """What a plan keeps of the options that its layouts do not show."""
        return Asked(
            self.recompute,
            self.offload,
            self.solver,
            self.unknown_ops,
            self.elementwise,
            self.batches,
        )

    @property
    def searches_stages(self) -> bool:
        """Whether stages, microbatches and schedule are chosen together."""
        return self.stages == AUTO

    @property
    def is_pipeline(self) -> bool:
        """Whether the plan has a schedule of stages and microbatches."""
        return (self.stages, self.microbatches, self.schedule) != (1, 1, SCHEDULE)

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

"""The parameters of all stages of a pipeline on one rank: shown whole, saved and loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.operators.interpret import TORCH_DTYPES
from autopar.runtime.calls.batches import Intake
from autopar.runtime.checkpoint.contents import Held, held_of
from autopar.runtime.cuda_graph import CudaGraph
from autopar.runtime.generated import Generated
from autopar.runtime.parameters.pieces import check_state_dict, whole
from autopar.runtime.pipeline.continuous import Continuous
from autopar.runtime.pipeline.routes import Placement
from autopar.runtime.pipeline.stage import Stage, Tensors
from autopar.runtime.pipeline.under_way import UnderWay
from autopar.runtime.ranks.channel import Channel
from autopar.runtime.ranks.failure import Watch
from autopar.runtime.ranks.shared import Peers
from autopar.runtime.update.update import Update


class PipelineState:
    """What the stages of a pipeline hold on this rank.

    Attributes:
        everywhere: all stages, also those of other ranks; `stages` those that are here.
        shapes: whole shapes by name.
        tied: further names of parameters.
        loaded: whether there are values.
        continuous: runs the steps of a schedule that does not flush.
    """

    everywhere: dict[tuple[int, int], Stage]
    stages: dict[tuple[int, int], Stage]
    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]
    update: Update
    watch: Watch
    _intake: Intake
    device: torch.device
    peers: Peers
    everyone: Channel | None
    loaded: bool
    continuous: Continuous | None
    graph: CudaGraph | None
    apart = None  # it is one replica
    placement: Placement
    modules: Sequence[Generated]

    def meet(self, call: str, drain: bool = True) -> None:
        """As `Executor.meet`; without `drain` what is under way stays so."""
        with self.watch:
            self._intake.meet(call)
            if drain:
                self.drain()
            self.update.check.settle(self._intake.differences)

    def settle(self) -> None:
        """Wait for calls that are under way between two steps."""
        if self.continuous is not None:
            with self.watch:
                self.continuous.settle()

    def drain(self) -> None:
        """Run what is under way to its end, where a schedule does not flush."""
        if self.continuous is not None:
            self.continuous.drain()

    @cached_property
    def streams(self) -> str:
        """See `Holder`."""
        if self.continuous is None:
            return ""
        facts = [str(self.placement), *(str(module.described) for module in self.modules)]
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]

    def under_way(self) -> tuple[Tensor, list[Tensor]] | None:
        """See `Holder`; where a forward cannot run again later, drains instead."""
        continuous = self.continuous
        if continuous is None or continuous.filling:
            return None
        halves = any(action.kind == "I" for row in self.placement.rows for action in row)
        if halves or any(module.stows for module in self.modules) or continuous.broken_off:
            continuous.drain()
            return None
        found = UnderWay()
        found.values = continuous.saved(found.put)
        return found.record, found.tensors

    def resume(self, record: Tensor, tensors: Sequence[Tensor]) -> None:
        """See `Holder`."""
        found = UnderWay.of(record, tensors)
        assert self.continuous is not None
        self.continuous.resume(found.values, found.get)

    @property
    def held(self) -> list[Held]:
        """What this rank holds; of copies, the first stage's are saved."""
        first: dict[str, tuple[int, int]] = {}
        for key, stage in self.everywhere.items():
            for name in stage.state.names:
                first.setdefault(name, key)
        found: list[Held] = []
        for key, stage in self.stages.items():
            own = {name for name in stage.state.names if first[name] == key}
            found += held_of(stage.state, stage.tensors, stage.weights, self.update, own)
        return found

    @property
    def optimizer(self) -> Optimizer:
        """Of what this device updates."""
        return self.update.optimizer

    def state_dict(self, average: bool = False) -> Tensors:
        """Every parameter and buffer by name, whole, on every rank; masters where there are.

        With `average` the averages of what is trained.
        """
        full: Tensors = {}
        for stage in self.everywhere.values():
            for name in stage.state.names:
                if name in full:
                    continue
                if stage.runtime.rank >= 0:
                    # A copy, as on the ranks that do not hold it.
                    value = self._whole(stage, name, average).clone()
                else:
                    parameters = stage.state.parameters
                    dtype = next(p.master.dtype for p in parameters if p.name == name)
                    value = torch.empty(
                        self.shapes[name], dtype=TORCH_DTYPES[dtype], device=self.device
                    )
                full[name] = self.peers.from_rank(stage.runtime.ranks[0], value)
        return full | {alias: full[name] for alias, name in self.tied.items()}

    def _whole(self, stage: Stage, name: str, average: bool) -> Tensor:
        """A tensor of a stage; its average if that is asked for, its master where it has one."""
        state, weights = stage.state, stage.weights
        if average and name in state.trained.names:
            return state.trained.whole(name, self.update.averages_of(weights.trained))
        if name in state.with_master:
            return state.trained.whole(name, weights.values)
        return state.whole(name, stage.tensors)

    def refresh(self) -> None:
        """Make what is held again of what the optimizer updates."""
        for stage in self.stages.values():
            stage.weights.cut()
            stage.weights.gather()
        self.update.settle()
        self._restart()

    @torch.no_grad()
    def load_state_dict(self, values: Mapping[str, Tensor]) -> None:
        """Take the parameters from a full or DTensor state_dict; StateError if it does not fit."""
        self._load(values)
        self.update.restart()
        self._restart()
        self.loaded = True

    def _restart(self) -> None:
        """Forgets what refers to the tensors before a load."""
        if self.continuous is not None:
            self.continuous.restart()
        if self.graph is not None:
            self.graph.reset()

    def _load(self, values: Mapping[str, Tensor], *, from_first: bool = False) -> None:
        """Deal out the values."""
        check_state_dict(values, self.shapes, self.tied)
        for name in self.shapes:
            names = [name, *(alias for alias, tied in self.tied.items() if tied == name)]
            full = whole(next(values[n] for n in names if n in values))
            if from_first:
                full = full.detach().to(self.device, copy=True)
                full = self.peers.from_rank(self.peers.ranks[0], full)
            for stage in self.stages.values():
                if name in stage.state.names:
                    stage.weights.take(stage.state, name, full)

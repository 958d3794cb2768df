"""Gathers, saves and loads the parameters of all stages of a pipeline on one rank."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.operators.interpret import TORCH_DTYPES
from autopar.runtime.calls.batches import Intake
from autopar.runtime.checkpoint.contents import LocalTensor, held_of
from autopar.runtime.cuda_graph import CudaGraph
from autopar.runtime.generated import Generated
from autopar.runtime.parameters.pieces import check_state_dict, whole
from autopar.runtime.pipeline.continuous import Continuous
from autopar.runtime.pipeline.in_flight_state import PackedValues
from autopar.runtime.pipeline.routes import Placement
from autopar.runtime.pipeline.stage import Stage, Tensors
from autopar.runtime.ranks.channel import Channel
from autopar.runtime.ranks.failure import Watch
from autopar.runtime.ranks.shared import Peers
from autopar.runtime.update.update import Update


class PipelineState:
    """The state of a pipeline's stages on this rank.

    Attributes:
        everywhere: all stages, including those of other ranks; `stages` lists the local ones.
        shapes: whole shapes by name.
        tied: additional names of parameters.
        loaded: whether values have been loaded.
        continuous: runs the steps of a schedule without flushes.
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
    independent = None  # a pipeline is one replica
    placement: Placement
    modules: Sequence[Generated]

    def meet(self, call: str, drain: bool = True) -> None:
        """Acts as `Executor.meet`; with `drain=False`, microbatches stay in flight."""
        with self.watch:
            self._intake.meet(call)
            if drain:
                self.drain()
            self.update.check.settle(self._intake.differences)

    def settle(self) -> None:
        """Waits for transfers in flight between two steps."""
        if self.continuous is not None:
            with self.watch:
                self.continuous.settle()

    def drain(self) -> None:
        """Completes the microbatches in flight under a schedule without flushes."""
        if self.continuous is not None:
            self.continuous.drain()

    @cached_property
    def streams(self) -> str:
        """Implements `Holder`."""
        if self.continuous is None:
            return ""
        facts = [str(self.placement), *(str(module.described) for module in self.modules)]
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]

    def under_way(self) -> tuple[Tensor, list[Tensor]] | None:
        """Implements `Holder`; drains the pipeline if a forward cannot be repeated later."""
        continuous = self.continuous
        if continuous is None or continuous.filling:
            return None
        halves = any(action.kind == "I" for row in self.placement.rows for action in row)
        if halves or any(module.stows for module in self.modules) or continuous.broken_off:
            continuous.drain()
            return None
        found = PackedValues()
        found.values = continuous.saved(found.put)
        return found.record, found.tensors

    def resume(self, record: Tensor, tensors: Sequence[Tensor]) -> None:
        """Implements `Holder`."""
        found = PackedValues.of(record, tensors)
        assert self.continuous is not None
        self.continuous.resume(found.values, found.get)

    @property
    def held(self) -> list[LocalTensor]:
        """Returns the state of this rank; of several copies, only the first stage's is saved."""
        first: dict[str, tuple[int, int]] = {}
        for key, stage in self.everywhere.items():
            for name in stage.state.names:
                first.setdefault(name, key)
        found: list[LocalTensor] = []
        for key, stage in self.stages.items():
            own = {name for name in stage.state.names if first[name] == key}
            found += held_of(stage.state, stage.tensors, stage.weights, self.update, own)
        return found

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the parameters that this device updates."""
        return self.update.optimizer

    def state_dict(self, average: bool = False) -> Tensors:
        """Returns every parameter and buffer by name, whole, on every rank.

        Parameters with a master are given by it. With `average`, trained parameters are replaced by
        their averages.
        """
        full = dict(self.wholes(tuple(self.shapes), average))
        return full | {alias: full[name] for alias, name in self.tied.items()}

    def wholes(self, names: Collection[str], average: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yields tensors of `state_dict`, whole and on every rank, one at a time.

        Args:
            names: those to yield, by the names under which they are stored.
            average: as for `state_dict`.
        """
        done = set[str]()
        for stage in self.everywhere.values():
            for name in stage.state.names:
                if name in done or name not in names:
                    continue
                done.add(name)
                if stage.runtime.rank >= 0:
                    # a copy; ranks without it skip it, too
                    value = self._whole(stage, name, average).clone()
                else:
                    parameters = stage.state.parameters
                    dtype = next(p.master.dtype for p in parameters if p.name == name)
                    value = torch.empty(
                        self.shapes[name], dtype=TORCH_DTYPES[dtype], device=self.device
                    )
                yield name, self.peers.from_rank(stage.runtime.ranks[0], value)

    def _whole(self, stage: Stage, name: str, average: bool) -> Tensor:
        """Returns a whole tensor of a stage: its average if requested, else its master if any."""
        state, weights = stage.state, stage.weights
        if average and name in state.trained.names:
            return state.trained.whole(name, self.update.averages_of(weights.trained))
        if name in state.with_master:
            return state.trained.whole(name, weights.values)
        return state.whole(name, stage.tensors)

    def refresh(self) -> None:
        """Updates the stored parameters from the tensors that the optimizer updates."""
        for stage in self.stages.values():
            stage.weights.cut()
            stage.weights.gather()
        self.update.settle()
        self._restart()

    @torch.no_grad()
    def load_state_dict(self, values: Mapping[str, Tensor]) -> None:
        """Loads a full or DTensor state_dict; raises StateError if it does not fit."""
        self._load(values)
        self.update.restart()
        self._restart()
        self.loaded = True

    def _restart(self) -> None:
        """Drops references to the current tensors before a load."""
        if self.continuous is not None:
            self.continuous.restart()
        if self.graph is not None:
            self.graph.reset()

    def _load(self, values: Mapping[str, Tensor], *, from_first: bool = False) -> None:
        """Distributes the values to the stages."""
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

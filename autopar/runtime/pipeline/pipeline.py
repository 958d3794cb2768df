"""Runs a pipeline: every rank executes its complete row of a step, action by action.

Microbatches are equal slices of the batch along the first dimension. `interpreter.py` executes
computations and transfers; `stage.py` stores the state of a stage. Gradients are accumulated over
the microbatches and synchronised once; the loss is the mean over the microbatches. Batch norms see
one microbatch at a time, as with gradient accumulation on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from autopar.cost.programs.row_check import checked
from autopar.errors import StateError
from autopar.ir.action import COPIES, Row
from autopar.ir.pipeline_step import ahead, in_update
from autopar.runtime.calls.batches import TOKEN, Intake
from autopar.runtime.calls.evaluated import Evaluated
from autopar.runtime.calls.input_parts import Part
from autopar.runtime.cuda_graph import CudaGraph, Results, refuse
from autopar.runtime.generated import Generated
from autopar.runtime.parameters.gradients import Gradients
from autopar.runtime.parameters.pieces import State
from autopar.runtime.pipeline.continuous import Continuous
from autopar.runtime.pipeline.interpreter import losses_to, phase_of
from autopar.runtime.pipeline.messages import Wires
from autopar.runtime.pipeline.pipeline_program import PipelineProgram
from autopar.runtime.pipeline.refusals import refuse_what_cannot_stream
from autopar.runtime.pipeline.routes import Placement
from autopar.runtime.pipeline.stage import Stage, Tensors
from autopar.runtime.pipeline.state import PipelineState
from autopar.runtime.pipeline.sums import names_sums
from autopar.runtime.pipeline.tied_copies import Copies
from autopar.runtime.ranks.failure import Watch
from autopar.runtime.ranks.shared import Peers
from autopar.runtime.runtime import Runtime
from autopar.runtime.step_parts import PHASE
from autopar.runtime.trainable import check_trainable
from autopar.runtime.update.step_check import StepPart
from autopar.runtime.update.update import Training, Update


class Pipeline(PipelineState):
    """Runs one rank's part of a pipeline.

    Args:
        modules: the loaded program of every stage.
        placement: ranks and rows of the stages.
        inputs: types of the inputs of one microbatch by name, "i64[8, 16]".
        device: the device of this process.
        values: every parameter and buffer by name, whole; all ranks take the first rank's.
        training: how the local parameters are updated.
        tied: additional names of parameters.
        peers: the processes that run the pipeline, by default all.
        cuda_graph: whether to capture the step of a single stage and replay it.

    Raises:
        StateError: `values` does not fit the program.
        ProgramError: the optimizer cannot work on shards, or a step cannot be captured.
    """

    def __init__(
        self,
        modules: Sequence[Generated],
        placement: Placement,
        inputs: Mapping[str, str],
        device: torch.device,
        values: Mapping[str, Tensor],
        training: Training,
        *,
        tied: Mapping[str, str] | None = None,
        peers: Peers | None = None,
        cuda_graph: bool = False,
    ) -> None:
        self.modules, self.placement, self.device = modules, placement, device
        self.tied = dict(tied or {})
        peers = self.peers = Peers.here() if peers is None else peers
        self.rank, self.everyone = peers.rank, peers.everyone
        self.wires = Wires(peers, not placement.flushes) if peers.world > 1 else None
        # All ranks create all meshes, because creating a process group is collective.
        runtimes: dict[tuple[str, tuple[int, ...]], Runtime] = {}
        self.everywhere: dict[tuple[int, int], Stage] = {}
        for copy, ranks in enumerate(placement.ranks):
            for number, (module, members) in enumerate(zip(modules, ranks, strict=True)):
                key = (str(module.mesh), members)
                if key not in runtimes:
                    runtimes[key] = Runtime(module.mesh, device, members, number, peers)
                    runtimes[key].widened = module.widened
                    runtimes[key].chosen = checked(module.collectives, module.mesh)
                state = State(runtimes[key], module.stored)
                self.everywhere[number, copy] = Stage(module, runtimes[key], number, copy, state)
        self.stages = {
            key: stage for key, stage in self.everywhere.items() if stage.runtime.rank >= 0
        }
        self.main = PipelineProgram(
            modules, placement, inputs, self.stages, peers, self.wires, device
        )
        self.routes, self.row = self.main.routes, self.main.row
        self.shapes = {
            name: stage.state.shapes[name]
            for stage in self.everywhere.values()
            for name in stage.state.names
        }
        self.loaded = not any(value.is_meta for value in values.values())
        for stage in self.stages.values():
            stage.make_room(device)
        if self.loaded:
            self._load(values, from_first=True)
        named = [pair for stage in self.stages.values() for pair in stage.weights.named]
        buckets = [stage.module.host_bucket for stage in self.stages.values()]
        away = max((bucket for bucket in buckets if bucket is not None), default=None)
        held = {k: v for stage in self.stages.values() for k, v in stage.weights.rounded.items()}
        fused = modules[0].fused_update
        scattered = [k for stage in self.stages.values() for k in stage.weights.scattered]
        precision, rounded = modules[0].precision, held if fused else None
        weights = [stage.weights for stage in self.stages.values()]
        self.update = Update(training, precision, named, device, away, rounded, scattered, weights)
        rounds = in_update([self.row])
        # Sums that the rows name take the gradients that autograd has accumulated.
        overlaps = not any(names_sums(action) for row in placement.rows for action in row)
        for stage in self.stages.values():
            if stage.runtime.gradients is None:
                count, order = rounds[stage.number, stage.copy], self.update.order
                stage.runtime.gradients = Gradients(
                    stage.weights, device, count, order, self.update.room, overlaps
                )
            stage.runtime.gradients.weights |= stage.weights.moving
            stage.runtime.fetch.add(stage.weights.all, stage.weights.bucket)
        self.update.compare()
        self.copies = Copies(self.everywhere, self.rank, self.wires, device, self.everyone)
        self.grad_norm: Tensor | None = None
        self.watch = Watch.over(peers.ranks)
        self.watch.start()
        self._intake = Intake(device, self.everyone, self.part)
        self.graph = self._graphed() if cuda_graph else None
        self.continuous: Continuous | None = None
        if not placement.flushes:
            holders, owners = self.copies.holders, self.update.owners
            refuse_what_cannot_stream(modules, placement, training, holders, owners)
            self._intake.overlaps = True
            if ahead(placement.rows, placement.microbatches):
                self._intake.compared = 1
            self._interpreter = self.main.interpreter(self.main.post(), [])
            given = placement, self.row, self._interpreter, self.update, self.copies
            self.continuous = Continuous(self.stages, *given, self._intake.differences)

    @property
    def part(self) -> Part:
        """Returns the part of a batch that this rank passes."""
        return self.main.part

    @property
    def types(self) -> Mapping[str, str]:
        """Returns the types of the inputs of all microbatches by name."""
        return self.main.types

    def close(self) -> None:
        """Completes work in flight that other ranks wait for, and releases threads and groups."""
        try:
            if self.continuous is not None and not self.continuous.broken_off:
                with self.watch:
                    self.continuous.drain()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        self.watch.leave()
        for stage in self.everywhere.values():
            stage.runtime.close()
        if self.wires is not None:
            self.wires.close()

    # One step ------------------------------------------------------------------------------------

    def step(self, batch: Mapping[str, Tensor], program: PipelineProgram | None = None) -> Tensor:
        """Runs forward and backward of all microbatches and an optimizer step.

        Args:
            batch: the same whole batch on every rank.
            program: the program to run, by default the first; asynchronous schedules run no
                other.

        Returns:
            The mean of the microbatches' losses, a scalar, the same on every rank.

        Raises:
            BatchError: the batch differs from the captured one in structure, or between ranks.
            NonFiniteError: loss or gradients are not finite; nothing is updated.
            RanksDifferError: other ranks made another call or passed other options.
            ProgramError: the program has no loss, or gradients are disabled.
            RankFailedError: another rank failed.
        """
        check_trainable(any(module.loss is not None for module in self.modules))
        part, program = self.peers.recorder.part, program or self.main
        with self.watch, self.peers.recorder.step():
            with part(PHASE, "batch"):
                options = self.update.options()
                compared = options if self.update.compared else {}
                inputs = self._prepare(program, batch, "step", compared)
                self.update.begin(options)
            run: Callable[[Tensors], Results] = partial(self._flushed, program, program.row)
            if self.graph is not None and program is self.main:
                run = self.graph
            if self.continuous is not None:
                first = self.placement.first
                if first is None or self.update.check.steps > first[0]:
                    return self._continued(self.continuous, inputs)
                row = first[1][self.placement.row_of(self.rank)]
                run = partial(self._flushed, program, row)
            loss, self.grad_norm = run(inputs)
            self.update.check.end(self._intake.differences)
        return loss

    def _flushed(self, program: PipelineProgram, row: Row, inputs: Mapping[str, Tensor]) -> Results:
        """Runs a row that ends with an update of all stages; returns loss and norm."""
        part, losses, norm = self.peers.recorder.part, list[Tensor](), None
        self.update.check.keep(program.written)
        self.update.forget()
        for stage in program.stages.values():
            stage.forget()
            if stage.runtime.gradients is not None:
                stage.runtime.gradients.drop()
        with program.random_states(row) as enter:
            interpreter = program.interpreter(program.post(), losses)
            share = self.update.scale / program.placement.microbatches
            interpreter.begin(program.parts(inputs), 0, enter, lambda stage: share)
            for phase, actions in groupby(row, key=phase_of):
                with part(PHASE, phase):
                    if phase == "microbatches":
                        for action in actions:
                            interpreter.do(action)
                    elif phase == "gradients":
                        self._synchronise(program, tuple(actions))
                    else:
                        seen = self._seen(program.share(losses), inputs)
                        total, norm = self.update.step(self._squares, seen)
            interpreter.post.finish()
        return total.to(seen.loss.dtype), norm

    def _graphed(self) -> CudaGraph:
        """Returns the object that captures and replays a step; raises ProgramError as `refuse`."""
        kernel = self.update.kernel
        refuse(
            self.device,
            random=any(module.random for module in self.modules),
            offloaded=self.update.away is not None or any(m.stows for m in self.modules),
            counted=kernel is not None,
        )
        assert kernel is not None
        return CudaGraph(partial(self._flushed, self.main, self.row), kernel.refresh)

    def _continued(self, continuous: Continuous, inputs: Tensors) -> Tensor:
        """Runs one period of rows without flushes and returns the loss."""
        part, losses = self.peers.recorder.part, list[Tensor]()
        self._interpreter.results = losses_to(losses)
        # Equal generators stay equal, and ranks in different steps cannot compare them.
        alike = bool(continuous.ahead) and not continuous.filling
        main = self.main
        with main.random_states(self.row, alike) as enter, part(PHASE, "microbatches"):
            parts = main.parts(inputs)
            loss = continuous.step(parts, enter, lambda: (main.share(losses), inputs[TOKEN]))
        self.grad_norm = continuous.grad_norm
        main.settle()
        return torch.tensor(loss, dtype=main.share([]).dtype, device=self.device)

    def _synchronise(self, program: PipelineProgram, actions: Row) -> None:
        """Reduces gradients of consecutive sum actions, over replicas and then over copies."""
        program.settle()
        for action in actions:
            gradients = self.stages[action.stage, action.copy].runtime.gradients
            if action.over != COPIES and gradients is not None:
                gradients.collect()
        copied = [action for action in actions if action.over == COPIES]
        if copied:
            named = all(action.names for action in copied)
            names = [name for action in copied for name in action.names]
            self.copies.add_up(names if named else ())

    def _seen(self, share: Tensor, inputs: Mapping[str, Tensor]) -> StepPart:
        """Returns this rank's observations of a step except for gradients."""
        return StepPart(
            share,
            inputs[TOKEN],
            inputs,
            self.peers.world,
            self._add_up,
            self._intake.differences,
            self._intake.gather,
        )

    def _add_up(self, part: Tensor) -> Tensor:
        """Sums a tensor over all ranks in place and returns it."""
        if self.everyone is not None:
            self.everyone.all_reduce(part)
        return part

    def _squares(self) -> Tensor:
        """Returns this rank's part of the sum of squared gradients, each counted once."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for stage in self.stages.values():
            own = stage.weights.gradients
            elsewhere = self.copies.counted_elsewhere(stage)
            total += stage.state.squares(own, elsewhere, self.update.squares)
        return total

    def _prepare(
        self,
        program: PipelineProgram,
        batch: Mapping[str, Tensor],
        call: str,
        options: Mapping[str, str] | None = None,
    ) -> Tensors:
        """Checks the batch and returns it on this device."""
        if not self.loaded:
            raise StateError(
                "the program has no weights",
                why="it was compiled from a model on the meta device, or a load broke off",
                todo="call program.load_state_dict(...) first",
            )
        taken = self._intake.take(batch, program.types, call, options, program.parted)
        return program.counted(taken)

    # Without gradients ---------------------------------------------------------------------------

    def forward(
        self, batch: Mapping[str, Tensor], program: PipelineProgram | None = None
    ) -> Evaluated:
        """Runs a forward without changing state; raises the errors of `step`.

        Args:
            batch: the tensors by name.
            program: the program to run, by default the first.
        """
        program = program or self.main
        with self.watch, self.peers.recorder.within("evaluation"):
            inputs = self._prepare(program, batch, "forward")
            self.drain()
            self.update.check.settle(self._intake.differences)
            return program.forward(inputs)

    def add(
        self,
        modules: Sequence[Generated],
        placement: Placement,
        inputs: Mapping[str, str],
        values: Mapping[str, Tensor],
    ) -> PipelineProgram:
        """Adds programs of all stages that share the parameters; every rank must call it.

        Args:
            modules: the loaded program of every stage.
            placement: ranks and rows of the stages.
            inputs: types of the inputs of one microbatch by name.
            values: whole buffers and constants by name that only these programs read.

        Raises:
            ProgramError: a program stores a parameter in another layout.
        """
        with self.watch:
            stages = {
                (number, copy): stage.with_program(modules[number], values)
                for (number, copy), stage in self.stages.items()
            }
        return replace(
            self.main, modules=modules, placement=placement, inputs=inputs, stages=stages
        )

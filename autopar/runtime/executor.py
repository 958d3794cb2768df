"""Runs a generated program on one device: its parameters, its optimizer and its steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.cost.programs.row_check import checked
from autopar.errors import StateError
from autopar.operators.expert_load import ExpertLoad
from autopar.runtime.calls.batches import TOKEN, Intake
from autopar.runtime.calls.evaluated import Evaluated
from autopar.runtime.calls.input_parts import part_of
from autopar.runtime.calls.variant import Caches, Variant, variant_of, variant_over
from autopar.runtime.checkpoint.contents import LocalTensor, held_of
from autopar.runtime.cuda_graph import CudaGraph, Results, refuse
from autopar.runtime.generated import Generated
from autopar.runtime.parameters.gradients import Gradients
from autopar.runtime.parameters.pieces import State
from autopar.runtime.parameters.shards import Weights
from autopar.runtime.random import synchronised
from autopar.runtime.ranks.failure import Watch
from autopar.runtime.runtime import Runtime
from autopar.runtime.step_parts import PHASE
from autopar.runtime.trainable import check_trainable
from autopar.runtime.update.step_check import StepPart
from autopar.runtime.update.update import Training, Update


class Executor:
    """One device's part of a program.

    `state.parameters`, `tensors` and `weights.updated` have the same order: the program's
    parameters, this device's shards of them, and the parts that its optimizer updates.

    Args:
        program: the loaded program.
        runtime: the mesh.
        values: every parameter and buffer by name, whole; all ranks take the first rank's.
        training: how the local parameters are updated.
        tied: additional names of parameters.
        cuda_graph: whether to capture a step and replay it.

    Raises:
        StateError: `values` does not fit the program.
        ProgramError: the optimizer cannot work on shards, or a step cannot be captured.
    """

    independent = None  # it is one replica

    def __init__(
        self,
        program: Generated,
        runtime: Runtime,
        values: Mapping[str, Tensor],
        training: Training,
        *,
        tied: Mapping[str, str] | None = None,
        cuda_graph: bool = False,
    ) -> None:
        self.program, self.runtime = program, runtime
        runtime.widened = program.widened
        runtime.chosen = checked(program.collectives, program.mesh)
        self.state = State(runtime, program.stored, tied)
        self.loaded = not any(value.is_meta for value in values.values())
        shards = self.state.empty(runtime.device)
        self.tensors = [
            nn.Parameter(shard) if parameter.trainable else shard
            for parameter, shard in zip(self.state.parameters, shards, strict=True)
        ]
        self.named = {
            parameter.key: tensor
            for parameter, tensor in zip(self.state.parameters, self.tensors, strict=True)
        }
        self.part = part_of(program.inputs, runtime)
        self._caches: Caches = {}
        self.main = variant_over(program, runtime, self.named, self._caches)
        self.variants = [self.main]
        self.weights = Weights(runtime, self.state.parameters, self.tensors, program.bucket)
        if self.loaded:
            self._load(values, broadcast=True)
        self.update = Update(
            training,
            program.precision,
            self.weights.named,
            runtime.device,
            program.host_bucket,
            self.weights.rounded if program.fused_update else None,
            self.weights.scattered,
            [self.weights],
        )
        self.update.compare()
        self.grad_norm: Tensor | None = None
        self.gradients = runtime.gradients = Gradients(
            self.weights, runtime.device, 1, self.update.order, self.update.room
        )
        runtime.fetch.add(self.weights.all, self.weights.bucket)
        self.watch = Watch.over(runtime.ranks)
        self.watch.start()
        self._everyone = everyone = runtime.group(runtime.mesh.names)
        self._graphs = cuda_graph
        if cuda_graph:
            self.main.graph = self._graphed(self.main)
        self._intake = Intake(runtime.device, everyone.channel, self.part)

    def add(self, program: Generated, values: Mapping[str, Tensor]) -> Variant:
        """Adds a further program over the same parameters; every rank calls it.

        Args:
            program: the loaded program.
            values: whole buffers and constants by name that only this program reads.

        Returns:
            The variant, for `step` and `forward`.

        Raises:
            ProgramError: it stores a parameter in another way.
        """
        with self.watch:
            stored = self.state.parameters
            added = variant_of(program, self.runtime, stored, self.named, values, self._caches)
        if self._graphs and program.loss is not None:
            added.graph = self._graphed(added)
        self.variants.append(added)
        return added

    def _graphed(self, variant: Variant) -> CudaGraph:
        """Returns the object that captures and replays a step; raises ProgramError as `refuse`."""
        program, kernel = variant.program, self.update.kernel
        refuse(
            self.runtime.device,
            random=program.random,
            offloaded=self.update.away is not None or program.stows,
            counted=kernel is not None,
        )
        assert kernel is not None
        return CudaGraph(partial(self._step, variant), kernel.refresh)

    @property
    def types(self) -> Mapping[str, str]:
        """The types of the inputs of its first program, by name."""
        return self.main.types

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of this device's parameters."""
        return self.update.optimizer

    def step(self, batch: Mapping[str, Tensor], variant: Variant | None = None) -> Tensor:
        """Runs forward, backward and optimizer step on a batch.

        Args:
            batch: the tensors by name.
            variant: the program to run, by default the first.

        Returns:
            The loss, a scalar, the same on every rank. `grad_norm` is then the norm of the
            gradients before clipping.

        Raises:
            BatchError: the batch differs from the captured one in type, or between ranks in value.
            NonFiniteError: loss or gradients are not finite; nothing is updated.
            RanksDifferError: other ranks make another call, or have other options.
            ProgramError: the program has no loss, or gradients are switched off.
            RankFailedError: another rank failed.
        """
        chosen = variant or self.main
        check_trainable(chosen.program.loss is not None)
        recorder = self.runtime.peers.recorder
        with self.watch, recorder.step():
            with recorder.part(PHASE, "batch"):
                options = self.update.options()
                compared = options if self.update.compared else {}
                inputs = self._prepare(chosen, batch, "step", compared)
                self.update.begin(options)
            run = chosen.graph or partial(self._step, chosen)
            loss, self.grad_norm = run(inputs)
            self.update.check.end(self._intake.differences)
        return loss

    def _step(self, variant: Variant, inputs: Mapping[str, Tensor]) -> Results:
        """Runs a step on inputs on the device; returns the loss and the norm of the gradients."""
        part = self.runtime.peers.recorder.part
        self.update.forget()
        self.gradients.drop()  # of a step that failed
        self.update.check.keep(variant.written)
        variant.writes.drop()
        with part(PHASE, "forward"), self.runtime.saving(self.weights, inputs.values()):
            loss = self._forward(variant, inputs, outputs=False)[variant.program.loss or ""]
        with part(PHASE, "backward"):
            torch.autograd.backward(loss, torch.ones_like(loss) * self.update.scale)
            self.runtime.fetch.drop()
            self.gradients.collect()
            variant.writes.settle()
        with part(PHASE, "optimizer"):
            everyone = self._everyone
            seen = StepPart(
                loss / everyone.size,
                inputs[TOKEN],
                inputs,
                everyone.size,
                everyone.reduce,
                self._intake.differences,
                self._intake.gather,
            )
            _, norm = self.update.step(self._squares, seen)
        return loss.detach(), norm

    def _squares(self) -> Tensor:
        return self.state.squares(self.weights.gradients, add=self.update.squares)

    @property
    def streams(self) -> str:
        """Returns "": a step ends before the next one begins, see `Holder`."""
        return ""

    def settle(self) -> None:
        """Does nothing: there is no work in flight between two steps."""

    def drain(self) -> None:
        """Does nothing: there is no work in flight between two steps."""

    def under_way(self) -> None:
        """Returns None: there is no work in flight between two steps."""

    def resume(self, record: Tensor, tensors: Sequence[Tensor]) -> None:
        """Never runs, because a program with its fingerprint has no work in flight."""

    def meet(self, call: str, drain: bool = True) -> None:
        """Compares a call with the calls of the other ranks, and waits for earlier steps.

        Raises:
            RanksDifferError: other ranks make another call.
            NonFiniteError, BatchError: of an earlier step, whose check the host had not read yet.
        """
        with self.watch:
            self._intake.meet(call)
            self.update.check.settle(self._intake.differences)

    @torch.no_grad()
    def forward(self, batch: Mapping[str, Tensor], variant: Variant | None = None) -> Evaluated:
        """Runs a forward that changes nothing; raises the errors of `step`.

        Args:
            batch: the tensors by name.
            variant: the program to run, by default the first.
        """
        chosen = variant or self.main
        with self.watch, self.runtime.peers.recorder.within("evaluation"):
            inputs = self._prepare(chosen, batch, "forward")
            self.update.check.settle(self._intake.differences)
            chosen.writes.drop()
            shards = self._forward(chosen, inputs)
            chosen.writes.settle(chosen.caches)
        held = chosen.program.outputs

        def gather() -> dict[str, Tensor]:
            with self.watch, torch.no_grad():
                return {
                    name: self.runtime.unshard(value, held[name][2], held[name][1])
                    for name, value in shards.items()
                }

        layouts = {
            name: f"{dtype}{layout.format(shape)}" for name, (dtype, shape, layout) in held.items()
        }
        return Evaluated(shards, layouts, gather)

    def expert_load(self, evaluate: Callable[[], Evaluated]) -> list[ExpertLoad]:
        """Returns how often the experts of each mixture are chosen in a forward.

        Args:
            evaluate: runs the forward; its errors are raised.
        """
        self.runtime.seen = seen = list[Tensor]()
        try:
            evaluate()
        finally:
            self.runtime.seen = None
        # Along an axis that does not split tokens, every device has counted the same ones.
        counts = [self._everyone.reduce(count) for count in seen]
        shares = [(count / count.sum()).tolist() for count in counts]
        return [ExpertLoad(measured=tuple(share)) for share in shares]

    def _forward(
        self, variant: Variant, batch: Mapping[str, Tensor], outputs: bool = True
    ) -> dict[str, Tensor]:
        """Returns the loss and other outputs; without `outputs`, only outputs that cost nothing."""
        program = variant.program
        self.runtime.chosen = variant.chosen
        given = self.runtime.given(variant.writes.given)
        random = synchronised(self.runtime) if program.random else nullcontext()
        with self.runtime.writing(variant.writes), random:
            return program.forward(self.runtime, given, batch, outputs)

    def _prepare(
        self,
        variant: Variant,
        batch: Mapping[str, Tensor],
        call: str,
        options: Mapping[str, str] | None = None,
    ) -> dict[str, Tensor]:
        """Checks a batch and moves it to this device."""
        if not self.loaded:
            raise StateError(
                "the program has no weights",
                why="it was compiled from a model on the meta device, or loading was interrupted",
                todo="call program.load_state_dict(...) first",
            )
        return self._intake.take(batch, variant.types, call, options, variant.parted)

    def close(self) -> None:
        """Releases threads, descriptors and process groups; no call works afterwards."""
        self.watch.leave()
        self.runtime.close()

    @property
    def held(self) -> list[LocalTensor]:
        """This rank's shards of every parameter and buffer, for checkpoints."""
        return held_of(self.state, self.tensors, self.weights, self.update)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shapes by name."""
        return self.state.shapes

    def state_dict(self, average: bool = False) -> dict[str, Tensor]:
        """Returns every parameter (its master, if any) and buffer by name, whole, on every rank.

        Args:
            average: whether to return averages of trained parameters.
        """
        weights, state = self.weights, self.state
        if average:
            means = self.update.averages_of(weights.trained)
            return state.state_dict(self.tensors, means, state.trained.names)
        return state.state_dict(self.tensors, weights.values, state.with_master)

    def wholes(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields whole parameters (their masters, if any) and buffers one by one, on every rank.

        Args:
            names: those to yield, by the names under which they are stored.
        """
        state, values = self.state, self.weights.values
        yield from state.gathered(self.tensors, values, state.with_master, names)

    def refresh(self) -> None:
        """Recomputes the stored parameters from the tensors that the optimizer updates."""
        self.weights.cut()
        self.weights.gather()
        self.update.settle()
        self._reset_graphs()

    def _reset_graphs(self) -> None:
        for variant in self.variants:
            if variant.graph is not None:
                variant.graph.reset()

    def load_state_dict(self, values: Mapping[str, Tensor]) -> None:
        """Loads a full or DTensor state_dict; raises StateError if it does not fit."""
        self._load(values)
        self.update.restart()
        self._reset_graphs()
        self.loaded = True

    def _load(self, values: Mapping[str, Tensor], broadcast: bool = False) -> None:
        device = self.runtime.device
        for name, full in self.state.wholes(values, device, broadcast=broadcast):
            self.weights.take(self.state, name, full)

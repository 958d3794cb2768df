"""LocalUpdates: a program whose replicas train independently along some axes of the mesh.

Every replica runs a separate program, planned for the other axes, on its part of each batch. An
outer method synchronises the parameters. A step communicates only within the replica.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from autopar.errors import BatchError
from autopar.ir.mesh import Mesh
from autopar.ir.replicas.outer_value import Outer
from autopar.ir.tensor import Layout, TensorType
from autopar.runtime.calls.batches import Intake
from autopar.runtime.calls.evaluated import Evaluated
from autopar.runtime.calls.input_parts import Part
from autopar.runtime.checkpoint.contents import LocalTensor
from autopar.runtime.executor import Executor
from autopar.runtime.outer.buckets import buckets_of
from autopar.runtime.outer.method import ANCHOR
from autopar.runtime.outer.methods import method_of
from autopar.runtime.outer.replica_state import ReplicaState
from autopar.runtime.outer.rounds import Report, Rounds
from autopar.runtime.outer.survivors import Survivors
from autopar.runtime.parameters.shards import Weights
from autopar.runtime.pipeline.pipeline import Pipeline
from autopar.runtime.ranks.channel import Channel
from autopar.runtime.ranks.failure import Watch
from autopar.runtime.ranks.shared import Lease, Peers
from autopar.runtime.runtime import typed
from autopar.runtime.step_parts import PHASE
from autopar.runtime.update.update import Update

Step = Callable[[Mapping[str, Tensor]], Tensor]
Forward = Callable[[Mapping[str, Tensor]], Evaluated]


class LocalUpdates:
    """One device's part of a program with independent replicas.

    Args:
        program: the program of this device's replica.
        outer: how replicas synchronise.
        mesh: all devices.
        peers: peers of the replica; see `Peers.within`.
        sliced: whether every rank passes the batch of all replicas instead of its own part.
        evaluate: ANCHOR, AVERAGE, or "" for the anchor if the method has one.

    Raises:
        OptionError: an anchor is to be evaluated, and the method has none.

    Attributes:
        replicas: number of replicas.
        index: number of this device's replica.
        watch: stops this rank if another fails.
        independent: the additional state that replicas save and load.
    """

    watch: Watch
    _paused = False

    def __init__(
        self,
        program: Executor | Pipeline,
        outer: Outer,
        mesh: Mesh,
        peers: Peers,
        sliced: bool = True,
        evaluate: str = "",
    ) -> None:
        self._sliced = sliced
        self.program, self.outer, self.mesh, self.peers = program, outer, mesh, peers
        self.replicas = outer.count(mesh)
        self.method = method_of(outer)
        self._evaluates_anchor = self.method.evaluates_anchor(evaluate)
        everyone = Peers.here()
        groups = outer.peers(mesh)
        self._lease: Lease = everyone.shared("outer", groups)
        own = next(n for n, ranks in enumerate(groups) if everyone.rank in ranks)
        channel = self._lease.channels[own] if len(groups[own]) > 1 else None
        self.index = groups[own].index(everyone.rank)
        self._device = program.device if isinstance(program, Pipeline) else program.runtime.device
        self._intake = Intake(self._device, everyone.everyone)
        self.independent = ReplicaState(self)
        self._survivors = Survivors.of(outer, mesh, self._lease)
        alone = self._survivors is not None  # then ranks watch their own replica only
        self.watch = program.watch if alone else Watch.over(range(mesh.size))
        self.watch.start()
        if program.loaded:
            self._alike(channel)
        separate = _copied(program) if isinstance(program, Pipeline) else frozenset()
        buckets = buckets_of(self._weights, self.method, self._device, separate)
        self.rounds = Rounds(
            self.method, outer.tau, buckets, channel, self._slowest, self._gather, self._survivors
        )

    @property
    def _channel(self) -> Channel | None:
        """Returns the channel of this rank's peers, None for a single replica."""
        return self.rounds.channel

    @property
    def _weights(self) -> list[Weights]:
        program = self.program
        if isinstance(program, Executor):
            return [program.weights]
        return [stage.weights for stage in program.stages.values()]

    @property
    def _tensors(self) -> list[Tensor]:
        """Returns the local parameters and buffers."""
        program = self.program
        stages = [program] if isinstance(program, Executor) else program.stages.values()
        return [tensor for stage in stages for tensor in stage.tensors]

    @torch.no_grad()
    def _alike(self, channel: Channel | None) -> None:
        """Copies the first replica's values to all replicas."""
        if channel is None:
            return
        masters = [place for weights in self._weights for place in weights.masters.values()]
        updated = [tensor for weights in self._weights for tensor in weights.updated]
        for tensor in (*self._tensors, *updated, *masters):
            value = tensor.detach().to(self._device).contiguous()
            channel.broadcast(value, channel.ranks[0])
            tensor.detach().copy_(value)
        self.program.update.restart()

    def _gather(self) -> None:
        """Updates the stored parameters from the tensors that changed."""
        for weights in self._weights:
            weights.gather()

    def _slowest(self, seconds: Tensor) -> Tensor:
        if self.peers.everyone is not None:
            self.peers.everyone.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds

    # One step ------------------------------------------------------------------------------------

    def step(self, batch: Mapping[str, Tensor], step: Step | None = None) -> Tensor:
        """Runs a local step on this replica's part of a batch, and synchronises if it is due.

        Args:
            batch: the tensors by name.
            step: the replica's own step, by default of its first program.

        Returns:
            The replica's loss, a scalar, equal on its ranks. `report.loss` averages over replicas.

        Raises:
            BatchError: a tensor of the batch does not divide among the replicas.
            AutoparError: as `Executor.step`; an error in a replica is a RankFailedError elsewhere.
        """
        self._pause(False)
        try:
            with self.watch:
                loss = (step or self.program.step)(self._part(batch))
                with self.peers.recorder.part(PHASE, "synchronisation"):
                    self.rounds.step(loss, float(self.optimizer.param_groups[0]["lr"]))
        except BaseException:
            self._pause(True)
            raise
        return loss

    def _pause(self, paused: bool) -> None:
        """Says whether this rank's steps continue, to replicas that continue without it."""
        self._paused = paused
        if self._survivors is not None:
            self._survivors.pause(paused)

    def _part(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns this replica's rows of every tensor; scalars are passed whole."""
        if not self._sliced:
            return dict(batch)
        return {name: self._rows(name, value) for name, value in batch.items()}

    def _rows(self, name: str, value: Tensor) -> Tensor:
        if not value.dim():
            return value
        rows, rest = divmod(value.shape[0], self.replicas)
        if rest:
            raise BatchError(
                f"the input {name!r} does not divide into {self.replicas} replicas",
                why=f"its shape is {list(value.shape)}; every replica takes an equal slice along "
                "the first dimension",
                todo="pass a batch whose size is a multiple of the number of replicas",
            )
        return value.narrow(0, self.index * rows, rows)

    @property
    def report(self) -> Report:
        """The report of the last round."""
        return self.rounds.report

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the parameters that this device updates."""
        return self.program.optimizer

    @property
    def update(self) -> Update:
        """The update of a local step."""
        return self.program.update

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the replica's gradients in the last step."""
        return self.program.grad_norm

    @property
    def held(self) -> Sequence[LocalTensor]:
        """The state of this rank's replica on this rank."""
        return self.program.held

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shapes by name."""
        return self.program.shapes

    def refresh(self) -> None:
        """Acts as `Executor.refresh`."""
        self.program.refresh()

    @property
    def loaded(self) -> bool:
        """Returns whether values have been loaded."""
        return self.program.loaded

    @loaded.setter
    def loaded(self, value: bool) -> None:
        self.program.loaded = value

    streams = ""  # work in flight in a replica completes before a checkpoint

    def settle(self) -> None:
        """Acts as `Executor.settle`."""
        self.program.settle()

    def drain(self) -> None:
        """Acts as `Executor.drain`."""
        self.program.drain()

    def under_way(self) -> None:
        """Completes all work in flight, so that a checkpoint need not contain it."""
        self.program.drain()

    def resume(self, record: Tensor, tensors: Sequence[Tensor]) -> None:
        """Never runs, because checkpoints contain no work in flight."""

    def meet(self, call: str, drain: bool = True) -> None:
        """Compares a call with those of all ranks and completes the preceding steps."""
        with self.watch:
            if self._survivors is None:
                self._intake.meet(f"{call} after step {self.rounds.steps}")
            elif not call.endswith("state_dict"):
                self._survivors.refuse(call)
            self.program.meet(call)
            self.rounds.settle()

    @torch.no_grad()
    def forward(self, batch: Mapping[str, Tensor], forward: Forward | None = None) -> Evaluated:
        """Runs a forward with the common parameters of the replicas; changes nothing.

        Every replica computes its part of the batch. Outputs are concatenated along their first
        dimension; scalars are averaged.

        Args:
            batch: the tensors by name.
            forward: the replica's own forward, by default of its first program.
        """
        with self.watch:
            part = self._part(batch)
            with self.together(self._evaluates_anchor):
                own = (forward or self.program.forward)(part)
            shards = {n: v if v.dim() else self._joined(v) for n, v in own.shards.items()}

        def gather() -> dict[str, Tensor]:
            with self.watch, torch.no_grad():
                return {name: self._joined(value) for name, value in own.gather().items()}

        return Evaluated(shards, {n: self._whole(t) for n, t in own.layouts.items()}, gather)

    def _whole(self, text: str) -> str:
        """Returns the layout of an output over all replicas, given the layout in one replica."""
        dtype, shape, layout = typed(text)
        if not shape:
            return text
        dims = ((*self.outer.axes, *layout.dims[0]), *layout.dims[1:])
        whole = Layout(dims, layout.partial, layout.varying)
        return f"{dtype}{whole.format((shape[0] * self.replicas, *shape[1:]))}"

    @property
    def part(self) -> Part:
        """Returns the part of a batch that this rank passes."""
        own = self.program.part
        if self._sliced:
            return own
        return Part(self.index * own.world + own.rank, self.replicas * own.world)

    @property
    def types(self) -> Mapping[str, str]:
        """Returns the types of the inputs that this rank passes, by name."""
        return self.types_of(self.program.types)

    def types_of(self, types: Mapping[str, str]) -> Mapping[str, str]:
        """Returns the types of the inputs that a rank passes, given those of a replica."""
        if not self._sliced:
            return types
        own = {name: TensorType.parse(text) for name, text in types.items()}
        shapes = {n: (t.shape[0] * self.replicas, *t.shape[1:]) for n, t in own.items() if t.shape}
        return {n: str(TensorType(t.dtype, shapes.get(n, ()))) for n, t in own.items()}

    def _joined(self, value: Tensor) -> Tensor:
        if self._channel is None:
            return value
        value, left = value.contiguous(), self.rounds.count
        if value.dim() and self._survivors is not None:
            self._survivors.refuse("a whole output")
        joined = value.new_empty((left, *value.shape))
        self._channel.all_gather(joined.view(-1), value.view(-1))
        return joined.flatten(0, 1) if value.dim() else joined.sum() / left

    @contextmanager
    def together(self, anchor: bool = True) -> Iterator[None]:
        """Sets common parameters on all replicas in this context: anchors, or averages."""
        self.rounds.settle()
        buckets = self.rounds.buckets
        kept = [bucket.values() for bucket in buckets]
        written = self._written()
        before = [tensor.clone() for tensor in written]
        for bucket in buckets:
            known = bucket.states.get(ANCHOR) if anchor else None
            bucket.give(self._mean(bucket.values()) if known is None else known)
        for tensor in written:
            tensor.copy_(self._mean(tensor.clone()))
        self._gather()
        try:
            yield
        finally:
            for bucket, values in zip(buckets, kept, strict=True):
                bucket.give(values)
            for tensor, value in zip(written, before, strict=True):
                tensor.copy_(value)
            self._gather()

    def _mean(self, values: Tensor) -> Tensor:
        """Returns the mean of a floating tensor over the replicas; overwrites the tensor."""
        if self._channel is not None and values.is_floating_point():
            self._channel.all_reduce(values)
            values.div_(len(self._channel.ranks))
        return values

    def _written(self) -> Sequence[Tensor]:
        """Returns floating-point buffers, such as running statistics; they differ by replica."""
        return [t for t in self._tensors if not t.requires_grad and t.is_floating_point()]

    def state_dict(self, average: bool = False) -> dict[str, Tensor]:
        """Acts as `Executor.state_dict` on the common parameters of the replicas."""
        if average:
            own = self.program.state_dict(average=True)
            return {name: self._mean(value.clone()) for name, value in own.items()}
        with torch.no_grad(), self.together(self._evaluates_anchor):
            return {name: value.clone() for name, value in self.program.state_dict().items()}

    def wholes(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Acts as `Executor.wholes` on the common parameters of the replicas."""
        with torch.no_grad(), self.together(self._evaluates_anchor):
            yield from self.program.wholes(names)

    def load_state_dict(self, values: Mapping[str, Tensor]) -> None:
        """Acts as `Executor.load_state_dict`; all replicas restart from these values."""
        self.program.load_state_dict(values)
        self.rounds.restart()

    def close(self) -> None:
        """Waits for messages in flight and releases threads and process groups."""
        try:
            if self._survivors is None or not self._paused:  # else others do not wait for this rank
                self.rounds.settle()
        finally:
            self.watch.leave()
            self.program.close()
            if self._survivors is not None:
                self._survivors.close()
            self._lease.close()


def _copied(pipeline: Pipeline) -> frozenset[str]:
    """Returns the names of parameters that several stages hold."""
    holders = pipeline.copies.holders.values()
    return frozenset(parameter.name for held in holders for parameter in held.values())

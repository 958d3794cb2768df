"""Combines the programs of all stages into one, for training or evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from autopar.errors import BatchError
from autopar.ir.action import Action, Row
from autopar.ir.pipeline_step import forwards
from autopar.ir.tensor import TensorType
from autopar.operators.interpret import TORCH_DTYPES, tensor_type
from autopar.runtime.calls.evaluated import Evaluated
from autopar.runtime.calls.input_parts import Part, local_types, part_of, parted_names
from autopar.runtime.generated import Generated
from autopar.runtime.pipeline.batch_counts import WholeCounts
from autopar.runtime.pipeline.interpreter import Interpreter, losses_to
from autopar.runtime.pipeline.messages import Post, Wires
from autopar.runtime.pipeline.random_states import random_states
from autopar.runtime.pipeline.routes import Placement, Routes
from autopar.runtime.pipeline.stage import Stage, Tensors
from autopar.runtime.ranks.shared import Peers
from autopar.runtime.runtime import Runtime, typed


@dataclass(frozen=True)
class PipelineProgram:
    """The programs of all stages on this rank.

    Attributes:
        modules: the loaded program of every stage.
        placement: ranks and rows of the stages.
        inputs: dtype, global shape and layout of one microbatch's inputs by name,
            "i64[8@data, 16]".
        stages: stages of this rank by number and copy.
        peers, wires: the other ranks and the channels to them.
        device: device of this rank.
    """

    modules: Sequence[Generated]
    placement: Placement
    inputs: Mapping[str, str]
    stages: Mapping[tuple[int, int], Stage]
    peers: Peers
    wires: Wires | None
    device: torch.device

    @cached_property
    def routes(self) -> Routes:
        """The routes of values between stages."""
        return Routes.of(self.modules, self.placement)

    @cached_property
    def row(self) -> Row:
        """The actions of this rank in a step."""
        return self.placement.rows[self.placement.row_of(self.peers.rank)]

    @property
    def _runtime(self) -> Runtime:
        """The mesh of a stage of this rank."""
        return next(iter(self.stages.values())).runtime

    @property
    def part(self) -> Part:
        """Returns the part of a batch that this rank passes."""
        return part_of(self.inputs, self._runtime)

    @cached_property
    def parted(self) -> frozenset[str]:
        """Returns the names of the inputs of which ranks pass parts."""
        return parted_names(self.inputs)

    @cached_property
    def _sizes(self) -> dict[str, TensorType]:
        return local_types(self.inputs, self._runtime)

    @cached_property
    def types(self) -> dict[str, str]:
        """Returns the types of this rank's inputs of all microbatches by name."""
        count = self.placement.microbatches
        whole = {
            name: TensorType(t.dtype, (t.shape[0] * count, *t.shape[1:])) if t.shape else t
            for name, t in self._sizes.items()
        }
        return {name: str(type) for name, type in whole.items()}

    @cached_property
    def counts(self) -> WholeCounts:
        """The inputs that are added up over microbatches."""
        return WholeCounts.of(self.modules)

    def counted(self, inputs: Tensors) -> Tensors:
        """Returns a checked batch with the counts of the whole batch; every rank must call it."""
        if not self.counts.graphs:
            return inputs
        return inputs | self.counts(self.parts(inputs), self.part.world > 1, self.peers)

    def parts(self, inputs: Mapping[str, Tensor]) -> list[Tensors]:
        """Returns the inputs of each microbatch by name."""
        whole = {name: inputs[name] for name in self.counts.graphs if name in inputs}
        return [
            {name: self._slice(name, inputs[name], number) for name in self._sizes} | whole
            for number in range(self.placement.microbatches)
        ]

    def _slice(self, name: str, value: Tensor, number: int) -> Tensor:
        shape = self._sizes[name].shape
        return value.narrow(0, number * shape[0], shape[0]) if shape else value

    def post(self) -> Post:
        """Returns a post for the messages of one step."""
        return Post(self.routes.ways, self.peers.rank, self.device, self.wires)

    @property
    def written(self) -> list[Tensor]:
        """Returns the buffers that a forward writes."""
        return [s.named[key] for s in self.stages.values() for key in s.module.written]

    @property
    def caches(self) -> list[Tensor]:
        """Returns the caches of a program that generates."""
        return [s.named[cache.key] for s in self.stages.values() for cache in s.module.caches]

    def interpreter(self, post: Post, losses: list[Tensor]) -> Interpreter:
        """Returns an interpreter that appends this rank's losses to `losses`."""
        interpreter = Interpreter(self.stages, self.routes, post, self.peers.recorder)
        interpreter.results = losses_to(losses)
        return interpreter

    def random_states(
        self, row: Row, alike: bool = False
    ) -> AbstractContextManager[Callable[[Action], None]]:
        """Returns `random_states`; `alike` states that the generators of all ranks are equal."""
        count, everyone = self.placement.microbatches, None if alike else self.peers.everyone
        return random_states(row, self.modules, count, self._runtime, everyone)

    def settle(self) -> None:
        """Copies the buffers that the last microbatch computed into the stored ones."""
        for stage in self.stages.values():
            stage.writes.settle()

    def share(self, losses: Sequence[Tensor]) -> Tensor:
        """Returns this rank's part of the mean of all microbatches' losses."""
        if losses and any(stage.reports_loss for stage in self.stages.values()):
            return torch.stack(list(losses)).sum() / self.placement.microbatches
        (dtype,) = {m.outputs[m.loss][0] for m in self.modules if m.loss is not None}
        return torch.zeros((), dtype=TORCH_DTYPES[dtype], device=self.device)

    @torch.no_grad()
    def forward(self, inputs: Mapping[str, Tensor]) -> Evaluated:
        """Returns the outputs, whole and on every rank; changes nothing.

        Outputs of the microbatches are concatenated along their first dimension; of scalars,
        floating ones are averaged and integers, which count, are added.

        Raises:
            BatchError: a flag differs between microbatches.
        """
        row, found = forwards(self.row), dict[tuple[str, int], Tensor]()

        def result(stage: Stage, action: Action, made: Tensors) -> None:
            for name, value in made.items():
                if not name.startswith("%"):
                    _, shape, layout = stage.module.outputs[name]
                    found[name, action.microbatch] = stage.runtime.unshard(value, layout, shape)

        post = self.post()
        with self.random_states(row) as enter:
            interpreter = self.interpreter(post, [])
            interpreter.begin(self.parts(inputs), 0, enter, lambda stage: 1.0)
            interpreter.results = result
            for action in row:
                interpreter.do(action)
        post.finish()
        for stage in self.stages.values():
            stage.writes.settle({cache.key for cache in stage.module.caches})
        outputs = self._everywhere(found)
        layouts = {name: str(tensor_type(value)) for name, value in outputs.items()}
        return Evaluated(outputs, layouts, lambda: outputs)

    def _everywhere(self, found: Mapping[tuple[str, int], Tensor]) -> Tensors:
        """Returns the combined outputs of all microbatches on every rank."""
        outputs: Tensors = {}
        for number, module in enumerate(self.modules):
            for name, (dtype, shape, _) in module.outputs.items():
                if name.startswith("%"):
                    continue
                pieces = []
                for microbatch in range(self.placement.microbatches):
                    value = found.get((name, microbatch))
                    if value is None:
                        value = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=self.device)
                    pieces.append(self.peers.from_rank(self._speaker(number, microbatch), value))
                if shape:
                    outputs[name] = self._in_order(torch.cat(pieces), shape[0])
                else:
                    outputs[name] = _scalar(name, pieces)
        return outputs

    def _in_order(self, value: Tensor, rows: int) -> Tensor:
        """Returns an output of all microbatches with its rows in the order of the ranks' parts.

        A microbatch has rows of every rank's part of the batch.

        Args:
            value: the microbatches' outputs one after the other.
            rows: rows of one of them.
        """
        world = self.part.world
        split = [
            shape[0] for _, shape, layout in map(typed, self.inputs.values()) if layout.sharded_axes
        ]
        if world == 1 or rows not in split:
            return value
        count = self.placement.microbatches
        parts = value.view(count, world, rows // world, *value.shape[1:])
        return torch.flatten(parts.transpose(0, 1), 0, 2)

    def _speaker(self, stage: int, microbatch: int) -> int:
        """Returns the first rank that runs the forward of a stage on a microbatch."""
        copy = next(
            action.copy
            for row in self.placement.rows
            for action in row
            if action[:3] == ("F", stage, microbatch)
        )
        return self.placement.ranks[copy][stage][0]


def _scalar(name: str, values: Sequence[Tensor]) -> Tensor:
    """Returns a scalar output of the whole batch from those of the microbatches."""
    first = values[0]
    if first.dtype is torch.bool:
        if any(bool(value != first) for value in values):
            raise BatchError(
                f"the output {name!r} is true in some microbatches and false in others",
                why="whether it is true of the whole batch does not follow from them",
                todo="return it for every sample, or return a count",
            )
        return first
    total = torch.stack(list(values)).sum(dtype=first.dtype)
    return total / len(values) if first.is_floating_point() or first.is_complex() else total

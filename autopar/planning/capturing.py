"""Capturing a call of a model: the graph that is planned, of a whole batch or of a microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.capture import Captured, capture
from autopar.capture.decompose import decompose_unknown
from autopar.capture.joint import joint
from autopar.capture.structure import Structure
from autopar.errors import BatchError
from autopar.intra_op.proofs.own_function_rules import split_functions
from autopar.ir.fusion import EXPERTS
from autopar.ir.graph import Graph
from autopar.ir.graph_text import format_graph
from autopar.operators.mixture import with_kernels
from autopar.passes.fusion import fuse
from autopar.passes.normalise import NORMALISING, PASSES, Pass, prepare
from autopar.passes.projections import split_fused
from autopar.passes.verify import verify
from autopar.planning.options import Options
from autopar.planning.trace import Trace


@dataclass(frozen=True)
class Call:
    """A call of a model.

    Attributes:
        model: the model.
        args, kwargs: a batch.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module, example_inputs: Any) -> Call:
        """The call with an example batch: a tuple or a mapping of arguments, or one tensor."""
        if isinstance(example_inputs, Mapping):
            return cls(model, (), dict(example_inputs))
        if isinstance(example_inputs, (tuple, list)):
            return cls(model, tuple(example_inputs), {})
        return cls(model, (example_inputs,), {})

    def microbatch(self, count: int) -> Call:
        """The call with the first of `count` equal slices along the batch's first dimension.

        Tensors without dimensions belong to every slice.

        Raises:
            BatchError: a tensor does not divide; names it.
        """

        def first(name: str, value: Tensor) -> Tensor:
            if value.shape[0] % count:
                raise BatchError(
                    f"the input {name.partition('.')[2]!r} does not divide into {count}"
                    " microbatches",
                    why=f"its shape is {list(value.shape)}; every microbatch is an equal slice"
                    " along the first dimension",
                    todo="pass a batch whose size is a multiple of the number of microbatches",
                )
            return value[: value.shape[0] // count]

        return self._mapped(first)

    def part_of(self, replicas: int) -> Call:
        """The call with one replica's slice of the batch; BatchError if it does not divide."""

        def first(name: str, value: Tensor) -> Tensor:
            if value.shape[0] % replicas:
                raise BatchError(
                    f"the input {name.partition('.')[2]!r} does not divide into {replicas}"
                    " replicas",
                    why=f"its shape is {list(value.shape)}; every replica takes an equal slice"
                    " along the first dimension",
                    todo="pass a batch whose size is a multiple of the number of replicas",
                )
            return value[: value.shape[0] // replicas]

        return self._mapped(first)

    @property
    def samples(self) -> int:
        """The size of the batch: of the first dimension of its first tensor that has one.

        Raises:
            BatchError: no tensor has a dimension.
        """
        for value in self._tensors().values():
            if value.dim():
                return int(value.shape[0])
        raise BatchError(
            "the size of the batch is not known",
            why="no tensor of it has a dimension",
            todo="pass tensors whose first dimension is the batch",
        )

    def sized(self, samples: int) -> Call:
        """The call with a batch of another size, whose samples repeat those that there are.

        Raises:
            BatchError: a tensor's first dimension does not scale with the batch; names it.
        """
        present = self.samples

        def scaled(name: str, value: Tensor) -> Tensor:
            rows, rest = divmod(value.shape[0] * samples, present)
            if rest:
                raise BatchError(
                    f"the input {name.partition('.')[2]!r} has no size for {samples} samples",
                    why=f"its shape is {list(value.shape)} for {present} samples",
                    todo="pass tensors whose first dimension is the batch",
                )
            places = torch.arange(rows, device=value.device) % max(value.shape[0], 1)
            return value.index_select(0, places)

        return self if samples == present else self._mapped(scaled)

    def _tensors(self) -> dict[str, Tensor]:
        return self._structure().flatten(self._arguments())

    def _arguments(self) -> dict[str, Any]:
        return {"args": self.args, "kwargs": self.kwargs}

    def _structure(self) -> Structure:
        return Structure.of(self._arguments(), "", constants=True)

    def _mapped(self, change: Callable[[str, Tensor], Tensor]) -> Call:
        """The call with every tensor that has a dimension changed."""
        values = {
            name: change(name, value) if value.dim() else value
            for name, value in self._tensors().items()
        }
        rebuilt = self._structure().rebuild(values)
        return replace(self, args=rebuilt["args"], kwargs=rebuilt["kwargs"])


def capture_call(
    call: Call, options: Options, trace: Trace, microbatches: int | None = None
) -> Captured:
    """The model's forward on a batch, or, normalised only, on one of so many microbatches.

    Raises:
        CaptureError: the model cannot be traced.
        BatchError: the model does not take the batch, or it does not divide.
    """
    if microbatches is None:
        return capture_graph(call.model, call.args, call.kwargs, options, trace)
    part = call.microbatch(microbatches)
    return capture_graph(part.model, part.args, part.kwargs, options, trace, NORMALISING)


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

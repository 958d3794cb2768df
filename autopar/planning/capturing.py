"""Captures a call of a model as the graph to plan, for a whole batch or for a microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.capture import Captured, capture, missing_arguments
from autopar.capture.decompose import decompose_unknown
from autopar.capture.generation.cached_call import CachedCall
from autopar.capture.joint import joint
from autopar.capture.structure import Structure
from autopar.errors import BatchError, CaptureError
from autopar.intra_op.pins.dims import without_samples
from autopar.intra_op.proofs.own_function_rules import split_functions
from autopar.ir.fusion import EXPERTS
from autopar.ir.graph import Graph
from autopar.ir.graph_text import format_graph
from autopar.operators.attention.document_lengths import UNKNOWN, DocumentLengths, with_documents
from autopar.operators.expert_load import ExpertLoad, with_load
from autopar.operators.mixture import with_kernels
from autopar.passes.fusion import fuse
from autopar.passes.loss.whole_counts import count_whole_batch
from autopar.passes.normalise import NORMALISING, PASSES, prepare
from autopar.passes.projections import split_fused
from autopar.passes.verify import Pass, verify
from autopar.planning.options import Options
from autopar.planning.trace import Trace


@dataclass(frozen=True)
class Call:
    """A call of a model.

    Attributes:
        model: the model.
        args, kwargs: arguments of a batch.
        caches: calls the model with caches, to generate; None to call it as it is.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    caches: CachedCall | None = None

    @classmethod
    def of(cls, model: nn.Module, example_inputs: Any) -> Call:
        """Returns the call with an example batch: a tuple or mapping of arguments, or a tensor."""
        if isinstance(example_inputs, Mapping):
            return cls(model, (), dict(example_inputs))
        if isinstance(example_inputs, (tuple, list)):
            return cls(model, tuple(example_inputs), {})
        return cls(model, (example_inputs,), {})

    def has_arguments_of(self, loss_fn: Callable[..., Tensor] | None) -> bool:
        """Returns whether the call has the arguments of a loss_fn that have no default."""
        return not missing_arguments(self.model, loss_fn, self.args, self.kwargs)

    def microbatch(self, count: int) -> Call:
        """Returns the call with the first of `count` equal slices along the first dimension.

        Every slice gets tensors without dimensions whole.

        Raises:
            BatchError: a tensor does not divide into `count` slices; names it.
        """
        return self._slice(count, "microbatches")

    def part_of(self, replicas: int) -> Call:
        """The call with one replica's slice of the batch; BatchError if it does not divide."""
        return self._slice(replicas, "replicas")

    def _slice(self, count: int, what: str) -> Call:
        """Returns the call with the first of `count` equal slices of every tensor.

        Raises:
            BatchError: a tensor does not divide, or has no whole number of rows for each sample, as
                a mask that all samples share; a slice of it would be broadcast.
        """
        samples = self.samples if count > 1 else 1

        def first(name: str, value: Tensor) -> Tensor:
            known = name.partition(".")[2]
            if value.shape[0] % count:
                raise BatchError(
                    f"the input {known!r} does not divide into {count} {what}",
                    why=f"its shape is {list(value.shape)}; each of the {what} gets an equal slice"
                    " along the first dimension",
                    todo=f"pass a batch whose size is a multiple of the number of {what}",
                )
            if value.shape[0] % samples:
                raise BatchError(
                    f"the input {known!r} does not belong to the batch",
                    why=f"its shape is {list(value.shape)}, and the batch has {samples} samples; "
                    f"each of the {what} would get a slice of it",
                    todo="pass it with a row for each sample, x.expand(samples, ...), or make it a "
                    "buffer of the model",
                )
            return value[: value.shape[0] // count]

        return self._mapped(first)

    @property
    def samples(self) -> int:
        """The size of the batch: that of the first dimension of its first tensor with dimensions.

        Raises:
            BatchError: no tensor has dimensions.
        """
        for value in self._tensors().values():
            if value.dim():
                return int(value.shape[0])
        raise BatchError(
            "the size of the batch is unknown",
            why="none of its tensors has a dimension",
            todo="pass tensors whose first dimension is the batch",
        )

    def refuse_empty(self) -> None:
        """Raises BatchError if the batch has no samples; nothing could be divided between ranks."""
        first = next(((n, v) for n, v in self._tensors().items() if v.dim()), None)
        if first is not None and first[1].shape[0] == 0:
            raise BatchError(
                "the batch has no samples",
                why=f"its input {first[0].partition('.')[2]!r} is {list(first[1].shape)}",
                todo="leave out empty batches on every rank",
            )

    def sized(self, samples: int) -> Call:
        """Returns the call with a batch of another size, which repeats the samples of this one.

        Raises:
            BatchError: a tensor's first dimension does not scale with the batch; names it.
        """
        present = self.samples

        def scaled(name: str, value: Tensor) -> Tensor:
            rows, rest = divmod(value.shape[0] * samples, present)
            if rest:
                raise BatchError(
                    f"the input {name.partition('.')[2]!r} does not scale to {samples} samples",
                    why=f"its shape is {list(value.shape)} for {present} samples",
                    todo="pass tensors whose first dimension is the batch",
                )
            places = torch.arange(rows, device=value.device) % max(value.shape[0], 1)
            return value.index_select(0, places)

        return self if samples == present else self._mapped(scaled)

    def repeated(self, count: int) -> Call:
        """The call with `count` times as many samples.

        Only tensors with the first dimension of the first tensor grow; other tensors, such as a
        mask that all samples share, are unchanged.

        Raises:
            BatchError: no tensor has a dimension.
        """
        present = self.samples

        def grown(name: str, value: Tensor) -> Tensor:
            return value.repeat(count, *[1] * (value.dim() - 1)) if len(value) == present else value

        return self._mapped(grown)

    def _tensors(self) -> dict[str, Tensor]:
        return self._structure().flatten(self._arguments())

    def _arguments(self) -> dict[str, Any]:
        return {"args": self.args, "kwargs": self.kwargs}

    def _structure(self) -> Structure:
        return Structure.of(self._arguments(), "", constants=True)

    def _mapped(self, change: Callable[[str, Tensor], Tensor]) -> Call:
        """Returns the call with `change` applied to every tensor that has dimensions."""
        values = {
            name: change(name, value) if value.dim() else value
            for name, value in self._tensors().items()
        }
        rebuilt = self._structure().rebuild(values)
        return replace(self, args=rebuilt["args"], kwargs=rebuilt["kwargs"])


def capture_call(
    call: Call, options: Options, trace: Trace, microbatches: int | None = None
) -> Captured:
    """Captures a model's forward for a batch, or for one microbatch.

    Args:
        call: the model and a batch.
        options: options of planning.
        trace: writes the graph after each pass.
        microbatches: None to prepare the graph of the whole batch; a number to normalise the graph
            of one microbatch, without shares and repeats.

    Raises:
        CaptureError: the model cannot be traced.
        BatchError: the model does not take the batch, or the batch does not divide, or is empty.
    """
    call.refuse_empty()
    if microbatches is None:
        return capture_graph(call.model, call.args, call.kwargs, options, trace, caches=call.caches)
    part = call.microbatch(microbatches)
    stages = 1 if options.searches_stages else options.stages
    options = replace(options, stages=stages, microbatches=microbatches, global_batch=None)
    given = part.model, part.args, part.kwargs, options, trace, NORMALISING, part.caches
    try:
        return capture_graph(*given)
    except CaptureError as error:
        raise _of_part(error, part.samples, call.samples) from error


def _of_part(error: CaptureError, samples: int, batch: int) -> CaptureError:
    """Returns the error of tracing a microbatch; torch's own error may be due to its size."""
    if samples == batch or "Error: " not in error.why:
        return error
    size = f"this is a microbatch of {samples} of the batch's {batch} samples"
    todo = f"{error.todo}; if the whole batch works, read sizes from inputs: len(x), not {batch}"
    return type(error)(error.what, where=error.where, why=f"{error.why}; {size}", todo=todo)


def capture_graph(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    trace: Trace,
    passes: tuple[Pass, ...] = PASSES,
    caches: CachedCall | None = None,
) -> Captured:
    """Captures a model's forward for a batch and applies passes to the graph.

    Args:
        model: the model.
        args, kwargs: arguments of a batch.
        options: options of planning.
        trace: writes the graph after each pass.
        passes: to apply, by default all; kernels are fused after the normalising ones.
        caches: calls the model with caches; None to call it as it is.

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
        caches=caches,
    )
    trace("capture.txt", lambda: format_graph(captured.graph))
    graph = verify(
        split_functions(decompose_unknown(captured.graph, options.table), options.table, joint)
    )
    trace("decompose_unknown.txt", lambda: format_graph(graph))

    def keep(name: str, graph: Graph) -> None:
        trace(f"{name}.txt", lambda: format_graph(graph))

    def scaled(factor: int) -> Graph:
        call = Call(model, args, kwargs, caches)
        call = call.sized(factor * call.samples)
        alone = replace(options, microbatches=1, fuse=(), expert_load="equal")
        given = call.args, call.kwargs, alone, Trace(None), NORMALISING, call.caches
        return capture_graph(model, *given).graph

    if options.update.mixes:  # such an optimizer must see a parameter whole
        passes = tuple(step for step in passes if step is not split_fused)
    graph = prepare(graph, keep, tuple(step for step in passes if step in NORMALISING))
    if options.counted > 1:
        without = partial(without_samples, options.table)
        graph = verify(count_whole_batch(graph, options.counted, scaled, without))
        keep("whole_counts", graph)
    if options.fuse:
        graph = with_kernels(graph) if EXPERTS in options.fuse else graph
        graph = verify(fuse(graph, options.fuse))
        keep("fuse", graph)
    if options.expert_load != "equal":
        graph = with_load(graph, ExpertLoad.parse(options.expert_load))
    if options.documents != UNKNOWN:
        graph = with_documents(graph, DocumentLengths.parse(options.documents))
    graph = replace(graph, execution=options.execution)
    finding = tuple(step for step in passes if step not in NORMALISING)
    return replace(captured, graph=prepare(graph, keep, finding))

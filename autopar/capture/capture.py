"""Captures a torch model as a Graph. The only file that uses torch.export."""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Callable, Container
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from autopar.capture.advice import explain
from autopar.capture.attributes import CHANGES, changed, set_to
from autopar.capture.dtypes.cast import computing_in
from autopar.capture.flat_model import FlatModel, loss_parameters
from autopar.capture.generation.cached_call import CACHES, CachedCall, frozen
from autopar.capture.generation.extended_caches import extend_caches
from autopar.capture.lowering import Lowering
from autopar.capture.nonpersistent_buffers import computed
from autopar.capture.structure import Inputs, Structure
from autopar.capture.watch import innermost, refuse_hooks
from autopar.capture.wrapped_models import refuse_wrapped
from autopar.errors import AutoparError, CaptureError
from autopar.ir.graph import Graph
from autopar.ir.precision import AS_IS, Precision
from autopar.operators.assume import tie
from autopar.operators.interpret import TORCH_DTYPES


@dataclass(frozen=True)
class Captured:
    """A captured model.

    Attributes:
        graph: the forward.
        buffers: leaf target -> tensor, for the model's buffers and constants (not copied).
        parameter_names: every name of every parameter -> the leaf target that holds it.
        inputs: flattens a batch into values of the input leaves.
        output: rebuilds the model's output from the graph's named outputs.
    """

    graph: Graph
    buffers: dict[str, Tensor]
    parameter_names: dict[str, str]
    inputs: Inputs
    output: Structure


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    name: str = "",
    known: Container[str] | None = None,
    precision: Precision = AS_IS,
    caches: CachedCall | None = None,
) -> Captured:
    """Captures the model's forward on a batch like `model(*args, **kwargs)`.

    The loss is the returned scalar, `output.loss`, `output["loss"]` or a tuple's first floating
    scalar. With a loss_fn it is `loss_fn(output, ...)`, called with the arguments of the batch that
    its parameters name (with all arguments, if it takes **keywords). Arguments that the model does
    not take are passed to the loss_fn only.

    Nothing is computed: only shapes, dtypes and constants of the batch are used. Results of the
    model other than tensors (caches) are dropped. If `known` operators are given, other operators
    are decomposed where torch defines them by operators that are known. With a `precision`, the
    model is traced as if its parameters had the compute dtype; floating tensors of the batch are
    cast to it for the model, but not for the loss_fn. Losses are float32, unless the precision is
    pure. With `caches`, the traced call is `caches(model, *args, **kwargs)`, in evaluation mode,
    without gradients and without the loss_fn.

    Raises:
        CaptureError: torch.export cannot trace the model, or an operation cannot be part of a
            Graph.
        BatchError: model and loss_fn together do not accept the batch.
        PrecisionError: the model has nothing to compute in the precision.
    """
    refuse_wrapped(model)
    loss_fn = loss_fn if caches is None else None
    with computing_in(model, precision), nullcontext() if caches is None else frozen(model):
        dtype = TORCH_DTYPES.get(precision.compute)
        wrapped = partial(
            FlatModel, model, loss_fn, dtype=dtype, pure=precision.pure, caches=caches
        )
        signature = _signature(model, loss_fn) if caches is None else caches.signature
        inputs = Inputs.of(signature, args, kwargs or {})
        batch = inputs.flatten(args, kwargs or {})

        def traced() -> tuple[Captured, FlatModel]:
            wrapper = wrapped(inputs)
            return _captured(model, wrapper, batch, name, known), wrapper

        captured, wrapper = traced()
        _refuse_state(model, captured, wrapper, traced)
        return captured


def _refuse_state(
    model: nn.Module,
    captured: Captured,
    wrapper: FlatModel,
    traced: Callable[[], tuple[Captured, FlatModel]],
) -> None:
    """Raises CaptureError if what a call sets is a state for the next one, which a program loses.

    Numbers are none if the next call sets nothing and computes the same, as where a model fits a
    window to the size of an image. Tensors are none if the next call does not read them, as results
    that are only kept to be looked at, or sets no other ones, as tables that are computed once.

    Args:
        model, captured, wrapper: the model, and the trace of the first call.
        traced: traces a call.
    """
    if numbers := wrapper.seen.numbers:
        with set_to(model, numbers):
            after, more = traced()
        one, other = captured.buffers, after.buffers
        alike = captured.graph == after.graph and one.keys() == other.keys()
        if more.seen.numbers or not alike or not all(one[k].equal(other[k]) for k in one):
            path, name = next(iter(more.seen.numbers or numbers))
            raise changed(model.get_submodule(path), name)
    if tensors := wrapper.seen.tensors:
        with set_to(model, tensors):
            try:
                traced()  # refuses a tensor that it reads and sets
            except CaptureError as error:
                if error.what.startswith(CHANGES):
                    raise


def _captured(
    model: nn.Module,
    wrapper: FlatModel,
    batch: dict[str, Tensor],
    name: str,
    known: Container[str] | None,
) -> Captured:
    device = next((t.device for t in (*model.parameters(), *model.buffers())), None)
    # Distinct tensors, since export would alias one tensor that is passed as two inputs.
    examples = tuple(torch.empty_like(tensor, device=device) for tensor in batch.values())
    refuse_hooks(model)
    program = _export(wrapper, examples)
    lowering = Lowering(known)
    first: dict[int, str] = {}
    names = {k: first.setdefault(id(v), k) for k, v in _tensors(model).items()}
    buffers = _place_leaves(lowering, program, wrapper, names)
    for name in wrapper.seen.replaced & set(buffers):  # read, then set for the next step
        path, _, attribute = name.rpartition(".")
        raise changed(model.get_submodule(path), attribute)
    lowering.run(program.graph)
    seen = wrapper.seen
    results: Any = program.graph.output_node().args[0]
    values = [lowering.read(node).name for node in results[: len(seen.labels)]]
    outputs = dict(zip(seen.labels, values, strict=True))
    assigned = zip(seen.assigned, results[len(values) :], strict=True)
    lowering.finish({names[name]: node for name, node in assigned})
    graph = Graph(
        name or type(model).__name__,
        tuple(sorted(lowering.nodes, key=lambda node: not node.is_leaf)),
        tuple(sorted(outputs.items(), key=lambda item: item[0] != seen.loss)),
        outputs.get(seen.loss or ""),
    )
    graph = graph if wrapper.caches is None else extend_caches(graph)
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = computed(model, buffers)
    renamed = {k: names[k] for k, _ in parameters}
    return Captured(tie(graph), buffers, renamed, wrapper.inputs, seen.output)


def _traced(wrapper: FlatModel, examples: tuple[Tensor, ...]) -> ExportedProgram:
    with warnings.catch_warnings():
        # Layers like nn.LSTM list their weights in an attribute. Where one keeps a state, capture
        # refuses it by itself.
        warnings.filterwarnings("ignore", "The tensor attributes? .* during export", UserWarning)
        return torch.export.export(wrapper, examples, strict=False)


_LOST_CONSTANT = "fake tensor in the exported program constant"


def _export(wrapper: FlatModel, examples: tuple[Tensor, ...]) -> ExportedProgram:
    """Returns the traced wrapper; raises CaptureError at the user's line if it cannot be traced."""
    collects = gc.isenabled()
    gc.disable()  # destructors of collected programs may call operators, which would be traced
    try:
        try:
            return _traced(wrapper, examples)
        except RuntimeError as error:
            # On a busy machine, one trace in thousands loses a constant; a second trace does not.
            if _LOST_CONSTANT not in str(error):
                raise
            return _traced(wrapper, examples)
    except AutoparError as error:
        error.where = error.where or innermost(error.__traceback__)
        raise
    except Exception as error:
        watch = wrapper.watch
        hints = watch.failed, watch.opaque, watch.differentiated, watch.transformed
        raise explain(error, *hints) from error
    finally:
        if collects:
            gc.enable()


def _signature(model: nn.Module, loss_fn: Callable[..., Tensor] | None) -> inspect.Signature:
    """Returns the arguments of a batch: the model's parameters, then those of the loss_fn alone."""
    taken = inspect.signature(model.forward).parameters
    ranked = {kind: [p for p in taken.values() if p.kind is kind] for kind in _KINDS}
    place = _KINDS[3] if ranked[_KINDS[2]] else _KINDS[1]
    for parameter in loss_parameters(loss_fn):
        if parameter.name not in taken and parameter.kind not in (_KINDS[2], _KINDS[4]):
            # A parameter after one with a default needs one too; it is never used.
            late = any(p.default is not p.empty for p in ranked[place])
            default = None if late else parameter.default
            ranked[place].append(parameter.replace(kind=place, default=default))
    return inspect.Signature([p for kind in _KINDS for p in ranked[kind]])


def missing_arguments(
    model: nn.Module,
    loss_fn: Callable[..., Tensor] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> set[str]:
    """Returns the arguments of a loss_fn without defaults that a batch lacks."""
    try:
        given = _signature(model, loss_fn).bind_partial(*args, **kwargs).arguments
    except TypeError:  # the capture says why
        return set()
    needed = (p for p in loss_parameters(loss_fn) if p.default is p.empty)
    return {p.name for p in needed if p.kind not in (_KINDS[2], _KINDS[4])} - given.keys()


_KINDS = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY,
    inspect.Parameter.VAR_KEYWORD,
)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers under each of their names."""
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return {**named, **dict(model.named_buffers(remove_duplicate=False))}


def _place_leaves(
    lowering: Lowering, program: ExportedProgram, wrapper: FlatModel, names: dict[str, str]
) -> dict[str, Tensor]:
    """Places the leaves; returns the tensors of buffers and constants by leaf target.

    Args:
        lowering: the graph being written.
        program: the exported wrapper.
        wrapper: the module that was exported.
        names: every name of a parameter or buffer -> the name of its leaf.
    """
    tensors, inputs = _tensors(wrapper.model), iter(wrapper.inputs.names)
    buffers: dict[str, Tensor] = {}
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(nodes, program.graph_signature.input_specs, strict=True):
        if spec.kind.name == "USER_INPUT":
            target = next(inputs)
            if target in names:
                raise CaptureError(
                    f"the input {target!r} has the name of a parameter or buffer",
                    why="values of a graph are identified by name",
                    todo="rename the argument of forward",
                )
            lowering.leaf(node, "input", target)
            continue
        assert spec.target is not None  # only inputs have none
        target = spec.target.removeprefix("model.")
        target = names.get(target, target)
        if spec.kind.name == "PARAMETER":
            if target not in tensors:
                raise CaptureError(
                    f"loss_fn holds the parameter {target!r}", todo="let the model hold it"
                )
            lowering.leaf(node, "param", target, tensors[target].requires_grad)
        elif target.startswith(CACHES):
            lowering.leaf(node, "buffer", target)  # it has no values yet
        else:
            lowering.leaf(node, "buffer", target)
            buffers[target] = tensors.get(target, program.constants.get(spec.target))
    return buffers

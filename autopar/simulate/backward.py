"""The backward of a simulated step: what the forward wrote on its tape, played from the end.

Autograd runs what was computed last first. A gradient that arrives where one is already waiting is
added in place if nobody else holds one of the two. An operator lets go of what it saved when its
backward has run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.cost.model import NodeWork, Work
from autopar.cost.operator_memory import Recipe, Transfer
from autopar.ir.collective import Collective
from autopar.simulate.buffers import Buffer, Recorder, Value
from autopar.simulate.kept_on_host import Stowed
from autopar.simulate.parameter import Used
from autopar.simulate.parameter_tasks import Weights
from autopar.simulate.task import Cause


@dataclass(frozen=True)
class Operator:
    """What is alike for an operator in all blocks.

    `asks` is what it sends in each direction, in all of its `turns` but the last, beside kernels.
    """

    recipe: Recipe
    work: NodeWork
    asks: tuple[tuple[Collective, ...], tuple[Collective, ...]]
    turns: int = 1


@dataclass(eq=False, slots=True)
class Ran:
    """An operator on the tape."""

    name: str
    operator: Operator
    operands: list[Value]
    result: Value
    saved: list[Buffer]


@dataclass(frozen=True)
class Products:
    """Kernels that run beside a collective, but for their last part; `share` is that before it."""

    works: tuple[Work, ...]
    share: float


@dataclass(eq=False, slots=True)
class Moved:
    """A layout change on the tape, and what is multiplied while it is undone."""

    name: str
    call: Collective | None
    transfer: Transfer
    cause: Cause
    source: Value
    target: Value
    beside: Products | None = None


@dataclass(eq=False, slots=True)
class Met:
    """Where gradients of several readers have been added."""

    name: str
    what: tuple[Work, ...]
    value: Value


@dataclass(eq=False, slots=True)
class Block:
    """A block that is computed again in the backward.

    Attributes:
        arguments: what entered it, kept until its backward is done.
        results: what came of it.
        again: computes it again; its tape, and its results on that.
    """

    arguments: list[Value]
    results: list[Value]
    again: Callable[[], tuple[list[Entry], list[Value]]]


Entry = Ran | Moved | Used | Met | Block | Stowed


def backward(
    tape: list[Entry], ends: Sequence[Value], recorder: Recorder, weights: Weights
) -> None:
    """Play `tape` from its end and leave every parameter its gradient; the tape is used up.

    Args:
        tape: what the forward wrote.
        ends: the loss, or the values whose gradients a stage of a pipeline is sent.
        recorder: takes the tasks.
        weights: the parameters that are exchanged.
    """
    recorder.phase = "backward"
    recorder.compute("backward", "", ())
    for end in ends:
        title = f"gradient of {end.buffer.name}"
        end.gradient = recorder.hold(recorder.allocate("temporary", title, end.buffer.nbytes))
    _play(tape, recorder, weights)
    weights.finish()
    recorder.compute("end of backward", "", (), recorder.pending)


def _play(tape: list[Entry], recorder: Recorder, weights: Weights) -> None:
    while tape:
        entry = tape.pop()
        if isinstance(entry, Met):
            if entry.value.gradient is not None:
                needs = [entry.value.gradient_ready]
                recorder.compute(f"{entry.name} backward", entry.name, entry.what, needs)
        elif isinstance(entry, Moved):
            _move(entry, recorder, weights)
        elif isinstance(entry, Used):
            weights.give(entry)
        elif isinstance(entry, Stowed):
            entry.come(recorder, weights.accelerator)
        elif isinstance(entry, Ran):
            _compute(entry, recorder, weights)
        else:
            _again(entry, recorder, weights)


def _again(entry: Block, recorder: Recorder, weights: Weights) -> None:
    """Compute a block again, then play its backward."""
    if any(value.gradient is not None for value in entry.results):
        tape, results = entry.again()
        for outer, inner in zip(entry.results, results, strict=True):
            inner.gradient, inner.gradient_ready = outer.gradient, outer.gradient_ready
            outer.gradient = None
        _play(tape, recorder, weights)
    for value in entry.arguments:
        recorder.drop(value.buffer)


def _compute(entry: Ran, recorder: Recorder, weights: Weights) -> None:
    made, value = entry.operator.recipe, entry.result
    gradient, ready = value.gradient, value.gradient_ready
    if gradient is None:
        for operand, size in zip(entry.operands, made.gradients, strict=False):
            operand.readers -= size >= 0
        for buffer in entry.saved:
            recorder.drop(buffer)
        return
    fetched = weights.fetch(entry.saved)
    work = entry.operator.work.backward
    if work or any(size > 0 for size in made.gradients):
        needs = [ready, *(there for _, there in fetched)]
        title, turns = f"{entry.name} backward", entry.operator.turns
        if turns > 1:
            recorder.in_turns(title, entry.name, entry.operator.asks[1], work, needs)
        else:
            recorder.compute(title, entry.name, work, needs)
        recorder.scratch("temporary", f"of {entry.name} backward", made.backward_scratch)
        ready = -1
    given: list[tuple[Value, Buffer]] = []
    for operand, size in zip(entry.operands, made.gradients, strict=False):
        if size > 0:
            label = f"gradient of {operand.buffer.name}"
            new = recorder.allocate("temporary", label, size)
            given.append((operand, recorder.hold(new)))
        elif size == 0:
            given.append((operand, recorder.hold(gradient)))
    for call in entry.operator.asks[1] if entry.operator.turns == 1 else ():
        title = f"{call.kind} in {entry.name} backward"
        recorder.collective(title, entry.name, call, "exchange")
    recorder.drop(gradient)
    value.gradient = None
    for buffer in (*entry.saved, *(buffer for buffer, _ in fetched)):
        recorder.drop(buffer)
    for operand, buffer in given:
        _give(operand, buffer, ready, recorder, weights)


def _move(entry: Moved, recorder: Recorder, weights: Weights) -> None:
    source, target = entry.source, entry.target
    gradient, ready = target.gradient, target.gradient_ready
    if gradient is None:
        source.readers -= 1
        return
    title = f"gradient of {entry.name}"
    if entry.call is not None:
        name = f"{entry.call.kind} of {title}"
        share = 1.0 if entry.beside is None else 1 - entry.beside.share
        recorder.collective(name, entry.name, entry.call, entry.cause, [ready], share)
        ready = -1
    elif entry.transfer.result is not None:
        recorder.compute(title, entry.name, (), [ready])
        ready = -1
    if entry.transfer.result is not None:
        made = recorder.hold(recorder.allocate("temporary", title, entry.transfer.result))
        recorder.scratch("communication", title, entry.transfer.staging)
    else:
        made = recorder.hold(gradient)
    if entry.beside is not None and entry.call is not None:
        works, share = entry.beside.works, entry.beside.share
        recorder.side_by_side(name, entry.name, entry.call, entry.cause, works, share)
    recorder.drop(gradient)
    target.gradient = None
    _give(source, made, ready, recorder, weights)


def _give(value: Value, buffer: Buffer, ready: int, recorder: Recorder, weights: Weights) -> None:
    """Add a gradient to what has arrived; in place where nobody else holds one of the two."""
    old, value.readers = value.gradient, value.readers - 1
    value.gradient_ready = max(value.gradient_ready, ready)
    if old is None:
        value.gradient = buffer
    elif old.holders == 1:
        recorder.drop(buffer)
    elif buffer.holders == 1:
        recorder.drop(old)
        value.gradient = buffer
    else:
        total = recorder.allocate("temporary", old.name, max(old.nbytes, buffer.nbytes))
        value.gradient = recorder.hold(total)
        recorder.drop(old)
        recorder.drop(buffer)
    if not value.readers and value.buffer.kind == "parameter" and value.gradient is not None:
        value.gradient.kind = "gradient"
        value.gradient.name = value.buffer.name
        weights.arrived(value)

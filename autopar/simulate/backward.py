"""The backward of a simulated step: runs the tape of the forward in reverse.

Autograd runs the backward of the last operator first. A second gradient of a value is added to the
first in place if one of the two has no other holder. An operator frees its saved tensors after its
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.cost.model import NodeWork, Work
from autopar.cost.operator_memory import Recipe, Transfer
from autopar.ir.collective import Collective
from autopar.simulate.activation_offload import OffloadedBlock
from autopar.simulate.buffers import Buffer, Recorder, Value
from autopar.simulate.parameter import Used
from autopar.simulate.parameter_tasks import Weights
from autopar.simulate.task import Cause


@dataclass(frozen=True)
class Operator:
    """Properties of an operator that are the same in all blocks.

    Attributes:
        recipe: the buffers that it allocates and saves.
        work: its kernels in each direction.
        asks: its own collectives in each direction.
        turns: in all of them but the last it sends during its kernels.
        alone: number of its first collectives in each direction that no kernels overlap with.
    """

    recipe: Recipe
    work: NodeWork
    asks: tuple[tuple[Collective, ...], tuple[Collective, ...]]
    turns: int = 1
    alone: tuple[int, int] = (0, 0)


@dataclass(eq=False, slots=True)
class Computed:
    """An operator on the tape."""

    name: str
    operator: Operator
    operands: list[Value]
    result: Value
    saved: list[Buffer]


@dataclass(frozen=True)
class Products:
    """Kernels that overlap with a collective.

    Attributes:
        works: the kernels.
        share: the fraction of them that overlaps.
    """

    works: tuple[Work, ...]
    share: float


@dataclass(eq=False, slots=True)
class Resharded:
    """A resharding on the tape, with the products that overlap with its backward."""

    name: str
    call: Collective | None
    transfer: Transfer
    cause: Cause
    source: Value
    target: Value
    overlapped: Products | None = None


@dataclass(eq=False, slots=True)
class Summed:
    """A sum of the gradients of several readers."""

    name: str
    what: tuple[Work, ...]
    value: Value


@dataclass(eq=False, slots=True)
class Block:
    """A block that is recomputed in the backward.

    Attributes:
        arguments: its inputs, kept until its backward is done.
        results: its outputs.
        again: recomputes it; returns the new tape and the results on it.
        kept: results of products that are not recomputed. The runtime keeps all of them until the
            block's backward is done, as the halves of a split backward need them twice.
    """

    arguments: list[Value]
    results: list[Value]
    again: Callable[[], tuple[list[Entry], list[Value]]]
    kept: tuple[Buffer, ...] = ()


Entry = Computed | Resharded | Used | Summed | Block | OffloadedBlock


def backward(
    tape: list[Entry],
    ends: Sequence[tuple[Value, Sequence[Collective]]],
    recorder: Recorder,
    weights: Weights,
) -> None:
    """Runs `tape` from its end, which empties it and computes the gradient of every parameter.

    Args:
        tape: the tape of the forward.
        ends: the loss, or the values whose gradients a stage of a pipeline receives, each with the
            collectives that gather its gradient.
        recorder: records the tasks.
        weights: the parameters with collectives.
    """
    recorder.phase = "backward"
    recorder.compute("backward", "", ())
    for end, calls in ends:
        title = f"gradient of {end.buffer.name}"
        end.gradient = recorder.hold(recorder.allocate("temporary", title, end.buffer.nbytes))
        recorder.gather(title, calls)
    _play(tape, recorder, weights)
    weights.finish()
    recorder.compute("end of backward", "", (), recorder.pending)


def _play(tape: list[Entry], recorder: Recorder, weights: Weights) -> None:
    while tape:
        entry = tape.pop()
        if isinstance(entry, Summed):
            if entry.value.gradient is not None:
                needs = [entry.value.gradient_ready]
                recorder.compute(f"{entry.name} backward", entry.name, entry.what, needs)
        elif isinstance(entry, Resharded):
            _move(entry, recorder, weights)
        elif isinstance(entry, Used):
            weights.give(entry)
        elif isinstance(entry, OffloadedBlock):
            entry.come(recorder, weights.accelerator)
        elif isinstance(entry, Computed):
            _compute(entry, recorder, weights)
        else:
            _again(entry, recorder, weights)


def _again(entry: Block, recorder: Recorder, weights: Weights) -> None:
    """Recomputes a block, then runs its backward."""
    if any(value.gradient is not None for value in entry.results):
        tape, results = entry.again()
        for outer, inner in zip(entry.results, results, strict=True):
            inner.gradient, inner.gradient_ready = outer.gradient, outer.gradient_ready
            outer.gradient = None
        _play(tape, recorder, weights)
    for buffer in (*(value.buffer for value in entry.arguments), *entry.kept):
        recorder.drop(buffer)


def _compute(entry: Computed, recorder: Recorder, weights: Weights) -> None:
    memory, value = entry.operator.recipe, entry.result
    gradient, ready = value.gradient, value.gradient_ready
    if gradient is None:
        for operand, size in zip(entry.operands, memory.gradients, strict=False):
            operand.readers -= size >= 0
        for buffer in entry.saved:
            recorder.drop(buffer)
        return
    fetched = weights.fetch(entry.saved)
    work = entry.operator.work.backward
    if work or any(size > 0 for size in memory.gradients):
        # Operands of an operator that is not recomputed may be gathered for its backward only.
        needs = [ready, *(there for _, there in fetched), *(x.ready for x in entry.operands)]
        title, turns = f"{entry.name} backward", entry.operator.turns
        if turns > 1:
            calls, alone = entry.operator.asks[1], entry.operator.alone[1]
            recorder.in_turns(title, entry.name, calls, work, needs, alone)
        else:
            recorder.compute(title, entry.name, work, needs)
        recorder.scratch("temporary", f"of {entry.name} backward", memory.backward_scratch)
        ready = -1
    given: list[tuple[Value, Buffer]] = []
    for operand, size in zip(entry.operands, memory.gradients, strict=False):
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


def _move(entry: Resharded, recorder: Recorder, weights: Weights) -> None:
    source, target = entry.source, entry.target
    gradient, ready = target.gradient, target.gradient_ready
    if gradient is None:
        source.readers -= 1
        return
    title = f"gradient of {entry.name}"
    if entry.call is not None:
        name = f"{entry.call.kind} of {title}"
        share = 1.0 if entry.overlapped is None else 1 - entry.overlapped.share
        recorder.collective(name, entry.name, entry.call, entry.cause, [ready], share)
        ready = -1
    elif entry.transfer.result is not None:
        recorder.compute(title, entry.name, (), [ready])
        ready = -1
    if entry.transfer.result is not None:
        moved = recorder.hold(recorder.allocate("temporary", title, entry.transfer.result))
        recorder.scratch("communication", title, entry.transfer.staging)
    else:
        moved = recorder.hold(gradient)
    if entry.overlapped is not None and entry.call is not None:
        works, share = entry.overlapped.works, entry.overlapped.share
        recorder.side_by_side(name, entry.name, entry.call, entry.cause, works, share)
    recorder.drop(gradient)
    target.gradient = None
    _give(source, moved, ready, recorder, weights)


def _give(value: Value, buffer: Buffer, ready: int, recorder: Recorder, weights: Weights) -> None:
    """Adds a gradient to an earlier one, in place if one of the two has no other holder."""
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

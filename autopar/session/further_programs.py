"""Variants of a session: programs for evaluation and for batches of new shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from autopar.capture.capture import Captured
from autopar.capture.generation.calls import Sizes
from autopar.errors import BatchError, CaptureError, ProgramError
from autopar.ir.tensor import TensorType
from autopar.operators.interpret import tensor_type
from autopar.planning.capturing import Call
from autopar.runtime.calls.batches import OF_SHAPE
from autopar.runtime.calls.evaluated import Evaluated
from autopar.runtime.executor import Executor
from autopar.runtime.outer.local_updates import LocalUpdates
from autopar.runtime.trained import Program
from autopar.session.compiled import Compiled, Running

EVALUATED = 8  # at most this many evaluation programs, each for batches of one shape


class Compiles(Protocol):
    """Compiles calls of a model; see `compiler.py`."""

    def __call__(self, call: Call) -> Compiled:
        """Compiles the first call."""

    def variant(
        self, call: Call, first: Compiled, training: bool, count: int | None = None
    ) -> Compiled:
        """Compiles a further call; its program reads parameters where the first stores them."""

    def generating(
        self, model: nn.Module, sizes: Sizes, first: Compiled | None
    ) -> tuple[Compiled, Compiled]:
        """Compiles a prefill and a decode over the parameters of the first program, if any."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Sets all modules to evaluation mode, as `model.eval()` does, and restores them after."""
    before = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in before:
            module.training = False
        yield
    finally:
        for module, training in before:
            module.training = training


@dataclass(frozen=True)
class Runnable:
    """A program of a session.

    Attributes:
        compiled: the compiled call.
        types: dtypes and shapes of its inputs by name, "i64[8, 16]".
        step: trains on a batch.
        forward: evaluates a batch.
    """

    compiled: Compiled
    types: Mapping[str, str]
    step: Callable[[Mapping[str, Tensor]], Tensor]
    forward: Callable[[Mapping[str, Tensor]], Evaluated]

    @property
    def captured(self) -> Captured:
        """The call that was compiled."""
        return self.compiled.captured

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor] | None:
        """Returns the inputs of a batch by name; None if its structure or shape differs."""
        try:
            inputs = self.captured.inputs.flatten(args, kwargs)
        except BatchError:
            return None
        alike = self.types == {name: str(tensor_type(value)) for name, value in inputs.items()}
        return inputs if alike else None


@dataclass
class Variants:
    """The programs of one session, which share parameters and optimizer.

    Args:
        model: the user's model.
        first: the first compiled program.
        executor: runs the programs.
        compiler: compiles further calls.
        running: the options of execution.
    """

    model: nn.Module
    first: Compiled
    executor: Program
    compiler: Compiles
    running: Running
    _programs: dict[bool, list[Runnable]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        executor = self.executor
        self.main = Runnable(self.first, executor.types, executor.step, executor.forward)
        unchanged = not any(module.training for module in self.model.modules())
        self._programs = {True: [self.main], False: [self.main] if unchanged else []}

    def find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
    ) -> tuple[Runnable, dict[str, Tensor]] | None:
        """Returns the program for a batch, and the batch by name; None if none fits yet."""
        for program in self._programs[training]:
            inputs = program.takes(args, kwargs)
            if inputs is not None:
                return program, inputs
        return None

    def announcement(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> str:
        """Returns the text by which ranks compare a call that needs a new program."""
        given = {f"argument {n}": value for n, value in enumerate(args)} | kwargs
        tensors = ((name, value) for name, value in given.items() if isinstance(value, Tensor))
        types = ", ".join(f"{name} {tensor_type(value)}" for name, value in sorted(tensors))
        return f"{'step' if training else 'forward'}{OF_SHAPE}{types}"

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Runnable:
        """Compiles the program for a batch; every rank must call it.

        Raises:
            BatchError: the session has compiled as many shapes as it may.
            CaptureError, InfeasibleError: see `autopar.compile`.
        """
        programs = self._programs[training]
        most = self.running.shapes if training else EVALUATED
        if training and self.first.plan.is_pipeline and not self.first.placement.flushes:
            raise BatchError(
                f"the schedule {self.first.plan.schedule!r} trains on batches of one shape",
                why="microbatches of earlier batches are still in flight when the next one comes",
                todo="pad the batch, drop the last one (drop_last=True), or use a synchronous "
                "schedule such as 1f1b",
            )
        if len(programs) >= most:
            raise BatchError(
                f"the batch has a shape beyond the {most} that the program is compiled for",
                why="each shape needs its own plan and program",
                todo="pad batches to fewer shapes"
                + (f", or pass shapes={2 * most} to compile" if training else ""),
            )
        call = Call(self.model, args, kwargs)
        with nullcontext() if training else evaluating(self.model):
            try:
                count = self._microbatches(args, kwargs, training)
                compiled = self.compiler.variant(call, self.first, training, count)
            except CaptureError as error:
                raise self._misfit(args, kwargs, error) from error
        self._refuse_other_dtypes(compiled)
        added = self.main if compiled is self.first else self._loaded(compiled)
        programs.append(added)
        return added

    def _microbatches(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
    ) -> int | None:
        """Returns the number of microbatches on which the loss of a batch depends; None if on none.

        A mean of microbatches' losses depends on their rows: those of a step have as many as those
        of the first batch, and an evaluation is not divided, so that its loss is that of the batch.
        """
        plan = self.first.plan.inner
        if not plan.is_pipeline or plan.stages[0].asked.whole_loss:
            return None
        if not training:
            return 1
        for name, value in self.first.captured.inputs.flatten(args, kwargs).items():
            if value.dim():
                rows = TensorType.parse(self.main.types[name]).shape[0]
                count, rest = divmod(len(value) * plan.microbatches, rows)
                return max(count, 1) if not rest or not count else None
        return None

    def _refuse_other_dtypes(self, compiled: Compiled) -> None:
        """Raises BatchError if dtypes differ from the first batch; tracing may not detect it."""
        first = {leaf.target: leaf.type for leaf in self.first.captured.graph.leaves("input")}
        for leaf in compiled.captured.graph.leaves("input"):
            known = first.get(leaf.target, leaf.type)
            if known.dtype != leaf.type.dtype:
                raise BatchError(
                    f"the input {leaf.target!r} is {leaf.type}",
                    why=f"the program was compiled for {known}",
                    todo="pass batches of one dtype",
                )

    def _misfit(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], error: CaptureError
    ) -> BatchError:
        """Returns the error for a batch on which the model cannot be captured.

        Raises:
            BatchError: the batch has another structure than the first.
        """
        inputs = self.first.captured.inputs.flatten(args, kwargs)
        given = ", ".join(f"{name} {tensor_type(value)}" for name, value in inputs.items())
        wanted = ", ".join(f"{name} {type}" for name, type in self.first.inputs.items())
        return BatchError(
            f"the model does not take the batch {given}",
            where=error.where,
            why=f"{error.why or error.what}; the first batch was {wanted}",
            todo="pass batches like the first; only the number of rows may differ",
        )

    def _loaded(self, compiled: Compiled) -> Runnable:
        modules, executor = compiled.modules(self.running.backend), self.executor
        values = {
            name: value
            for name, value in compiled.captured.buffers.items()
            if name not in executor.shapes
        }
        saved = set(values) & set(self.model.state_dict())
        if saved:  # loading weights would not update it
            raise ProgramError(
                f"evaluation reads the buffer {min(saved)!r}, but training does not",
                why="a session stores only buffers that training reads",
                todo="use it in training too, or register it with persistent=False",
            )
        inner = executor.program if isinstance(executor, LocalUpdates) else executor
        if isinstance(inner, Executor):
            variant = inner.add(modules[0], values)
            own = Runnable(
                compiled,
                variant.types,
                partial(inner.step, variant=variant),
                partial(inner.forward, variant=variant),
            )
        else:
            placement = compiled.placement.on(inner.peers.ranks)
            program = inner.add(modules, placement, compiled.inputs, values)
            step = partial(inner.step, program=program)
            forward = partial(inner.forward, program=program)
            own = Runnable(compiled, program.types, step, forward)
        if not isinstance(executor, LocalUpdates):
            return own
        return replace(
            own,
            types=executor.types_of(own.types),
            step=partial(executor.step, step=own.step),
            forward=partial(executor.forward, forward=own.forward),
        )

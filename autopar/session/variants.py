"""Variants of a session: programs for evaluation and for batches of other shapes, as they come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from autopar.capture.capture import Captured
from autopar.errors import BatchError
from autopar.operators.interpret import tensor_type
from autopar.planning.capturing import Call
from autopar.runtime.executor import Executor
from autopar.runtime.variant import Variant
from autopar.session.compiled import Compiled, Running

EVALUATED = 8  # programs of a session that evaluate, each for batches of one shape


class Compiles(Protocol):
    """Compiles calls of a model; see `compiler.py`."""

    def __call__(self, call: Call) -> Compiled:
        """Returns the first call, compiled."""

    def variant(self, call: Call, first: Compiled) -> Compiled:
        """Returns a further call whose program reads parameters where the first stores them."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, all modules are in evaluation, as after `model.eval()`."""
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
        captured: the call that it is for.
        variant: the loaded program; None for the session's first.
    """

    captured: Captured
    variant: Variant | None = None

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor] | None:
        """Returns a batch as inputs by name, None if it is of another structure or shape."""
        try:
            inputs = self.captured.inputs.flatten(args, kwargs)
        except BatchError:
            return None
        wanted = {leaf.target: str(leaf.type) for leaf in self.captured.graph.leaves("input")}
        alike = wanted == {name: str(tensor_type(value)) for name, value in inputs.items()}
        return inputs if alike else None


@dataclass
class Variants:
    """The programs of one session, which share parameters and optimizer.

    Args:
        model: the user's.
        first: what the session began with.
        executor: runs them.
        compiler: compiles a further one.
        running: how they run.
    """

    model: nn.Module
    first: Compiled
    executor: Executor
    compiler: Compiles
    running: Running
    _programs: dict[bool, list[Runnable]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        main = Runnable(self.first.captured)
        unchanged = not any(module.training for module in self.model.modules())
        self._programs = {True: [main], False: [main] if unchanged else []}

    def find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
    ) -> tuple[Runnable, dict[str, Tensor]] | None:
        """Returns the program for a batch, and the batch by name; None if there is none yet."""
        for program in self._programs[training]:
            inputs = program.takes(args, kwargs)
            if inputs is not None:
                return program, inputs
        return None

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> Runnable:
        """Compiles the program for a batch; every rank calls it.

        Raises:
            BatchError: there are programs for as many shapes as there may be.
            CaptureError, InfeasibleError: see `autopar.compile`.
        """
        programs = self._programs[training]
        most = self.running.shapes if training else EVALUATED
        if len(programs) >= most:
            raise BatchError(
                f"the batch has a shape beyond the {most} that the program is compiled for",
                why="every shape is planned and compiled by itself",
                todo="pad batches to fewer shapes"
                + (f", or pass shapes={2 * most} to compile" if training else ""),
            )
        call = Call(self.model, args, kwargs)
        with nullcontext() if training else evaluating(self.model):
            compiled = self.compiler.variant(call, self.first)
        if compiled is self.first:
            added = Runnable(self.first.captured)
        else:
            added = Runnable(compiled.captured, self._loaded(compiled))
        programs.append(added)
        return added

    def _loaded(self, compiled: Compiled) -> Variant:
        (module,) = compiled.modules(self.running.backend)
        return self.executor.add(module, compiled.captured.buffers)

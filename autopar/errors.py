"""Every error a user can meet, by name: what happened, where, why, and what to do next.

Each class carries the same four sentences, so that a message always reads the same way:

>>> print(MeshError("mesh has 8 devices", why="the process group has 4 ranks",
...                 todo="start 8 processes or write a mesh of 4"))
mesh has 8 devices
  why:  the process group has 4 ranks
  todo: start 8 processes or write a mesh of 4
"""

from __future__ import annotations


class AutoparError(Exception):
    """Base of all errors raised on purpose; `str()` gives the whole message.

    Args:
        what: one sentence, what happened.
        where: the user's source line, node, file or rank.
        why: the reason, with figures.
        todo: the next thing to try.
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", todo: str = "") -> None:
        self.what, self.where, self.why, self.todo = what, where, why, todo
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        for label, text in (("where", self.where), ("why", self.why), ("todo", self.todo)):
            if text:
                lines.append(f"  {label + ':':<5} {text}")
        return _plain("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        """Errors cross process borders (multiprocessing), keywords included."""
        keywords = {"where": self.where, "why": self.why, "todo": self.todo}
        return (_rebuild, (type(self), self.what, keywords))


def _plain(text: str) -> str:
    """A text of several lines without characters that steer a terminal or are none (surrogates)."""
    return "".join(
        sign if sign.isprintable() or sign in "\n\t" else sign.encode("unicode_escape").decode()
        for sign in text
    )


def _rebuild(kind: type[AutoparError], what: str, keywords: dict[str, str]) -> AutoparError:
    return kind(what, **keywords)


class MeshError(AutoparError):
    """A mesh that cannot be read, or does not fit the processes that are there.

    >>> raise MeshError("cannot read mesh 'gpu:4'", todo='write it as "H100: node=2, gpu=4"')
    Traceback (most recent call last):
    autopar.errors.MeshError: cannot read mesh 'gpu:4'
      todo: write it as "H100: node=2, gpu=4"
    """


class UnknownDeviceError(MeshError):
    """A device that is neither in devices.toml nor described in the mesh text."""


class LayoutError(AutoparError):
    """A layout that cannot be read, or does not fit its tensor or mesh."""


class GraphError(AutoparError):
    """A graph whose text cannot be read or that breaks an invariant of the IR."""


class CaptureError(AutoparError):
    """torch.export cannot trace the model; names the user's line and what to change."""


class AssumptionError(AutoparError):
    """A batch for which the model would have raised, or taken another branch than was captured."""


class AnnotationError(AutoparError):
    """An `autopar.shard` that cannot be obeyed; names the user's line."""


class UnknownOperatorError(AutoparError):
    """An operator without a sharding rule, where `unknown_ops="error"` refuses it."""


class RuleError(AutoparError):
    """A sharding rule that cannot be read, or two rules for one operator."""


class ProblemError(AutoparError):
    """A malformed strategy problem: empty choices, wrong sizes, NaN."""


class InfeasibleError(AutoparError):
    """No plan meets the memory limit or the pins; says how much is missing."""


class CostError(AutoparError):
    """A price that is NaN, negative or infinite; names the calibration entry."""


class CollectiveError(AutoparError):
    """A collective's program that is damaged, computes something else, or cannot end."""


class CalibrationError(CostError):
    """A calibration that cannot be read, is nonsense, or was measured on another machine."""


class PlanError(AutoparError):
    """A plan file that is damaged, not a plan, or names layouts that are not legal."""


class PinError(PlanError):
    """A pin that fits nothing or contradicts another, or a plan by name that does not apply."""


class PlanMismatchError(PlanError):
    """A plan for another model or another mesh; shows what differs."""


class BatchError(AutoparError):
    """A batch that does not fit the shapes that were captured, or differs between ranks."""


class StateError(AutoparError):
    """A state_dict whose names or shapes differ from the model's, or weights that are missing."""


class CheckpointError(StateError):
    """A checkpoint that cannot be written, is not whole, or is another model's."""


class RanksDifferError(AutoparError):
    """Ranks that were not called alike; names the rank, the argument and both values.

    >>> raise RanksDifferError("the ranks differ in clip_norm", where="rank 2",
    ...                        why="rank 0 has 1.0, rank 2 has 0.5",
    ...                        todo="call compile alike on every rank")
    Traceback (most recent call last):
    autopar.errors.RanksDifferError: the ranks differ in clip_norm
      where: rank 2
      why:  rank 0 has 1.0, rank 2 has 0.5
      todo: call compile alike on every rank
    """


class NonFiniteError(AutoparError):
    """A loss or gradients with NaN or infinite values; nothing was updated."""


class RankFailedError(AutoparError):
    """Another rank failed in a step; carries that rank's own error."""


class DumpError(AutoparError):
    """A dump of what ranks did last that cannot be written or read."""


class PrecisionError(AutoparError):
    """A precision that is none, or that the device cannot compute in."""


class ProgramError(AutoparError):
    """A generated program that cannot be loaded or written."""


class OptionError(ProgramError):
    """An argument of a wrong type or out of its range; says what is accepted."""


class SimulationError(AutoparError):
    """Tasks that cannot be simulated: one waits for itself, or for a task that never ends.

    >>> raise SimulationError("task 'b' waits for itself", why="after = (1,) and it is task 1")
    Traceback (most recent call last):
    autopar.errors.SimulationError: task 'b' waits for itself
      why:  after = (1,) and it is task 1
    """


class ScheduleError(AutoparError):
    """A pipeline schedule that its sizes do not allow, or one that is not whole or not readable."""


class DeadlockError(ScheduleError):
    """A pipeline schedule in which actions wait for one another; names them.

    >>> raise DeadlockError("the schedule cannot end",
    ...                     why="F0.1 waits for B0.0, which waits for F0.1",
    ...                     todo="move one of them")
    Traceback (most recent call last):
    autopar.errors.DeadlockError: the schedule cannot end
      why:  F0.1 waits for B0.0, which waits for F0.1
      todo: move one of them
    """


class StageError(AutoparError):
    """A model that cannot be cut into stages in that way."""


class UnknownModelError(AutoparError):
    """A model name that is not in the table of published configurations."""


class ModelFileError(AutoparError):
    """A model file that is missing, has no such function, or fails when called."""


class MissingDependencyError(AutoparError):
    """An optional package that this call needs is not installed."""

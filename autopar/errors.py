"""All errors that users can meet: what happened, where, why, and what to do next.

Every class has the same four parts, so that all messages have the same form:

>>> print(MeshError("mesh has 8 devices", why="the process group has 4 ranks",
...                 todo="start 8 processes or write a mesh of 4"))
mesh has 8 devices
  why:  the process group has 4 ranks
  todo: start 8 processes or write a mesh of 4
"""

from __future__ import annotations

_LONGEST = 4000  # characters of a part of an error


class AutoparError(Exception):
    """Base of all errors that autopar raises on purpose; `str()` gives the whole message.

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
        lines = [_short(_plain(self.what))]
        for label, text in (("where", self.where), ("why", self.why), ("todo", self.todo)):
            if text:
                lines.append(f"  {label + ':':<5} {_short(_plain(text))}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles an error with its keywords, to send it to another process."""
        keywords = {"where": self.where, "why": self.why, "todo": self.todo}
        return (_rebuild, (type(self), self.what, keywords))


def _short(text: str) -> str:
    """Shortens a long text by its middle."""
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]} ... {len(text) - 2 * half} more characters ... {text[-half:]}"


def _plain(text: str) -> str:
    """Escapes control characters and surrogates in a text of several lines."""
    return "".join(
        sign if sign.isprintable() or sign in "\n\t" else sign.encode("unicode_escape").decode()
        for sign in text
    )


def _rebuild(kind: type[AutoparError], what: str, keywords: dict[str, str]) -> AutoparError:
    return kind(what, **keywords)


class MeshError(AutoparError):
    """A mesh that cannot be parsed, or does not fit the processes.

    >>> raise MeshError("cannot read mesh 'gpu:4'", todo='write it as "H100: node=2, gpu=4"')
    Traceback (most recent call last):
    autopar.errors.MeshError: cannot read mesh 'gpu:4'
      todo: write it as "H100: node=2, gpu=4"
    """


class UnknownDeviceError(MeshError):
    """A device that is neither in devices.toml nor described in the mesh text.

    >>> from autopar.cost.device import device
    >>> from autopar.ir.mesh import Mesh
    >>> device(Mesh.parse("H1000: gpu=8"))
    Traceback (most recent call last):
    autopar.errors.UnknownDeviceError: device 'H1000' is not known
      where: H1000: gpu=8
      why:  the nearest known devices are H100, V100, H200
      todo: use one of those, or describe the device by its 16-bit matmul peak, memory and
            memory bandwidth: "H1000[400TFLOP/s 64GiB 1.6TB/s]: gpu=8"
    """


class LayoutError(AutoparError):
    """A layout that cannot be parsed, or does not fit its tensor or mesh.

    >>> from autopar.ir.tensor import Layout
    >>> Layout.parse("[8@data, 64@data]")
    Traceback (most recent call last):
    autopar.errors.LayoutError: layout '[8@data, 64@data]' names an axis twice
      why:  an axis may appear only once
    """


class GraphError(AutoparError):
    """A graph whose text cannot be parsed, or that violates an invariant of the IR.

    >>> from autopar.ir.graph_text import parse_graph
    >>> parse_graph("%y = aten.relu(%x) : f32[8]")
    Traceback (most recent call last):
    autopar.errors.GraphError: the text has no line `graph 'name'`
      todo: begin with e.g. graph 'mlp'
    """


class CaptureError(AutoparError):
    """torch.export cannot trace the model; names the user's line and what to change.

    >>> raise CaptureError("torch.export cannot trace the model: it chooses by values",
    ...                    where="train.py:12  if x.sum() > 0:",
    ...                    why="values are not known when a model is captured",
    ...                    todo="choose between values with torch.where or a mask")
    Traceback (most recent call last):
    autopar.errors.CaptureError: torch.export cannot trace the model: it chooses by values
      where: train.py:12  if x.sum() > 0:
      why:  values are not known when a model is captured
      todo: choose between values with torch.where or a mask
    """


class AssumptionError(AutoparError):
    """A batch for which the model would raise, or take another branch than the captured one.

    >>> raise AssumptionError("a batch takes another branch than the one that was captured",
    ...                       where="train.py:12  if x.sum() > 0:",
    ...                       why="the model was captured where the condition holds")
    Traceback (most recent call last):
    autopar.errors.AssumptionError: a batch takes another branch than the one that was captured
      where: train.py:12  if x.sum() > 0:
      why:  the model was captured where the condition holds
    """


class AnnotationError(AutoparError):
    """An `autopar.shard` that cannot be satisfied; names the user's line.

    >>> raise AnnotationError("autopar.shard names an axis that the mesh does not have",
    ...                       where="train.py:9  x = autopar.shard(x, '[8@gpus, 64]')",
    ...                       why="the mesh has data, gpu", todo="write one of these")
    Traceback (most recent call last):
    autopar.errors.AnnotationError: autopar.shard names an axis that the mesh does not have
      where: train.py:9  x = autopar.shard(x, '[8@gpus, 64]')
      why:  the mesh has data, gpu
      todo: write one of these
    """


class UnknownOperatorError(AutoparError):
    """An operator without a sharding rule, under `unknown_ops="error"`.

    >>> raise UnknownOperatorError("mylib.mystery has no sharding rule",
    ...                            where="train.py:9  y = mystery(x)",
    ...                            todo='add a rule, or pass unknown_ops="replicate"')
    Traceback (most recent call last):
    autopar.errors.UnknownOperatorError: mylib.mystery has no sharding rule
      where: train.py:9  y = mystery(x)
      todo: add a rule, or pass unknown_ops="replicate"
    """


class RuleError(AutoparError):
    """A sharding rule that cannot be parsed, or two rules for one operator.

    >>> from autopar.intra_op.rule import OpRule, collect
    >>> relu = OpRule("aten.relu", "... -> ...", "f32[4, 6]")
    >>> collect([relu, relu])
    Traceback (most recent call last):
    autopar.errors.RuleError: two rules for aten.relu
      why:  ... -> ..., ... -> ...
    """


class ProblemError(AutoparError):
    """A malformed strategy problem: empty choices, wrong sizes, NaN.

    >>> from autopar.intra_op.solvers import find
    >>> find("simplex")
    Traceback (most recent call last):
    autopar.errors.ProblemError: there is no solver 'simplex'
      why:  the solvers are annealing, auto, brute_force, ...
      todo: name one of these
    """


class InfeasibleError(AutoparError):
    """No plan meets the memory limit or the pins; says how much is missing.

    >>> import autopar, torch
    >>> layer = torch.nn.Linear(4, 4)
    >>> autopar.plan(layer, "H100: gpu=2", example_inputs=torch.ones(2, 4), memory=100)
    Traceback (most recent call last):
    autopar.errors.InfeasibleError: no plan fits into 100 B a device
      why:  the smallest needs 232 B, 132 B more; largest: %weight_share 160 B, %bias_share 40
            B, %input 32 B
      todo: use more devices, a smaller batch, a lower precision or a leaner optimizer
    """


class CostError(AutoparError):
    """A price that is NaN, negative or infinite; names the calibration entry.

    >>> raise CostError("a price is nan", where="all_reduce over gpu, 64 MiB",
    ...                 why="prices are finite and not negative",
    ...                 todo="measure again with autopar calibrate")
    Traceback (most recent call last):
    autopar.errors.CostError: a price is nan
      where: all_reduce over gpu, 64 MiB
      why:  prices are finite and not negative
      todo: measure again with autopar calibrate
    """


class CollectiveError(AutoparError):
    """A collective's program that is malformed, computes a wrong result, or cannot end.

    >>> from autopar.cost.programs.collective_program import CollectiveProgram
    >>> CollectiveProgram.parse("nonsense")
    Traceback (most recent call last):
    autopar.errors.CollectiveError: cannot read the head 'nonsense' of a collective
      todo: write e.g. "all_reduce by flat_ring over 2x4 in 8 chunks"
    """


class CalibrationError(CostError):
    """A calibration that cannot be read, is invalid, or was measured on another machine.

    >>> from autopar.cost.calibration import Calibration
    >>> Calibration.load("none.json")
    Traceback (most recent call last):
    autopar.errors.CalibrationError: cannot read the calibration none.json
      why:  No such file or directory
      todo: run `autopar calibrate -o FILE` first
    """


class PlanError(AutoparError):
    """A file that is damaged, is not a plan, or has layouts that the rules do not allow.

    >>> from autopar.ir.recompute import Recompute
    >>> Recompute("sometimes", 3)
    Traceback (most recent call last):
    autopar.errors.PlanError: sometimes 3 is not a valid recomputation
      why:  a kind and a number of blocks are expected: selective, full, core, or save and operators
      todo: write e.g. "full 8" or "save linear:2 attention 8"
    """


class PinError(PlanError):
    """A pin that fits nothing or contradicts another, or a published plan that does not apply.

    >>> import autopar, torch
    >>> layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    >>> autopar.plan(layer, "H100: gpu=2", example_inputs=x, pins={"weigth": "[4@gpu, 4]"})
    Traceback (most recent call last):
    autopar.errors.PinError: pins that name nothing: weigth
      why:  a pin names a parameter, an input, a module or a node
      todo: take names from model.named_parameters(), model.named_modules() or the plan
    """


class PlanMismatchError(PlanError):
    """A plan for another model or another mesh; shows what differs.

    >>> raise PlanMismatchError("the plan is for another mesh", where="plan.toml",
    ...                         why="it is for H100: gpu=8, the processes make H100: gpu=4",
    ...                         todo="plan again for this mesh")
    Traceback (most recent call last):
    autopar.errors.PlanMismatchError: the plan is for another mesh
      where: plan.toml
      why:  it is for H100: gpu=8, the processes make H100: gpu=4
      todo: plan again for this mesh
    """


class BatchError(AutoparError):
    """A batch that does not fit the captured shapes, or differs between ranks.

    >>> raise BatchError("the batch does not fit what was captured", where="input_ids",
    ...                  why="it is i64[4, 512], captured was i64[8, 512]",
    ...                  todo="give batches of one shape, or compile again")
    Traceback (most recent call last):
    autopar.errors.BatchError: the batch does not fit what was captured
      where: input_ids
      why:  it is i64[4, 512], captured was i64[8, 512]
      todo: give batches of one shape, or compile again
    """


class StateError(AutoparError):
    """A state_dict whose names or shapes differ from the model's, or weights that are missing.

    >>> raise StateError("the state_dict does not fit the model",
    ...                  why="missing: h.0.ln_1.weight; unexpected: h.0.norm.weight",
    ...                  todo="load the state of the model that was compiled")
    Traceback (most recent call last):
    autopar.errors.StateError: the state_dict does not fit the model
      why:  missing: h.0.ln_1.weight; unexpected: h.0.norm.weight
      todo: load the state of the model that was compiled
    """


class CheckpointError(StateError):
    """A checkpoint that cannot be written, is incomplete, or is another model's.

    >>> import autopar
    >>> autopar.load_checkpoint("none")
    Traceback (most recent call last):
    autopar.errors.CheckpointError: there is no checkpoint ...none
      todo: pass the folder that was passed to save_checkpoint
    """


class RanksDifferError(AutoparError):
    """Ranks with different arguments; names the rank, the argument and both values.

    >>> raise RanksDifferError("the ranks differ in clip_norm", where="rank 2",
    ...                        why="rank 0 has 1.0, rank 2 has 0.5",
    ...                        todo="pass the same arguments on every rank")
    Traceback (most recent call last):
    autopar.errors.RanksDifferError: the ranks differ in clip_norm
      where: rank 2
      why:  rank 0 has 1.0, rank 2 has 0.5
      todo: pass the same arguments on every rank
    """


class NonFiniteError(AutoparError):
    """A loss or gradients with NaN or infinite values; nothing was updated.

    >>> raise NonFiniteError("the loss of step 812 is nan", where="ranks 0, 3",
    ...                      why="nothing was updated",
    ...                      todo="lower the learning rate, or look at the batch")
    Traceback (most recent call last):
    autopar.errors.NonFiniteError: the loss of step 812 is nan
      where: ranks 0, 3
      why:  nothing was updated
      todo: lower the learning rate, or look at the batch
    """


class RankFailedError(AutoparError):
    """Another rank failed in a step; contains that rank's own error.

    >>> raise RankFailedError("rank 3 failed: ValueError: no such weight", where="step 812",
    ...                       todo="look at the error of rank 3; this one has only waited for it")
    Traceback (most recent call last):
    autopar.errors.RankFailedError: rank 3 failed: ValueError: no such weight
      where: step 812
      todo: look at the error of rank 3; this one has only waited for it
    """


class DumpError(AutoparError):
    """A dump of the ranks' last calls that cannot be written or read.

    >>> raise DumpError("cannot write the dump", where="/dumps/rank_0.json",
    ...                 why="No space left on device", todo="name another folder in dump=")
    Traceback (most recent call last):
    autopar.errors.DumpError: cannot write the dump
      where: /dumps/rank_0.json
      why:  No space left on device
      todo: name another folder in dump=
    """


class PrecisionError(AutoparError):
    """A precision that does not exist, or that the device does not support.

    >>> from autopar.ir.precision import Precision
    >>> Precision.read("f8")
    Traceback (most recent call last):
    autopar.errors.PrecisionError: there is no precision 'f8'
      why:  compute is one of bf16, fp16, fp32, fp64
      todo: pass precision="bf16", "fp16" or "fp32", or an autopar.Precision
    """


class ProgramError(AutoparError):
    """A generated program that cannot be loaded or written.

    >>> from autopar.ir.fusion import choose
    >>> choose(["softmax"])
    Traceback (most recent call last):
    autopar.errors.ProgramError: there is no pattern 'softmax' to fuse
      why:  the patterns are gated, ...
      todo: pass True, False, a list of these, or a mapping of them to True or False
    """


class OptionError(ProgramError):
    """An argument of a wrong type or out of its range; says what is accepted.

    >>> import autopar, torch
    >>> layer = torch.nn.Linear(4, 4)
    >>> autopar.plan(layer, "H100: gpu=2", example_inputs=torch.ones(2, 4), microbatches=0)
    Traceback (most recent call last):
    autopar.errors.OptionError: microbatches is 0
      why:  a whole number from 1 to 1048576 is expected
    """


class SimulationError(AutoparError):
    """Tasks that cannot be simulated: one waits for itself, or for a task that never ends.

    >>> raise SimulationError("task 'b' waits for itself", why="after = (1,) and it is task 1")
    Traceback (most recent call last):
    autopar.errors.SimulationError: task 'b' waits for itself
      why:  after = (1,) and it is task 1
    """


class ScheduleError(AutoparError):
    """A pipeline schedule that does not exist for its sizes, is incomplete, or cannot be parsed.

    >>> from autopar.inter_op.schedules import schedule
    >>> schedule("1f2b", 4, 8)
    Traceback (most recent call last):
    autopar.errors.ScheduleError: there is no schedule '1f2b'
      why:  the schedules are 1f1b, ...
      todo: name one of these
    """


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
    """A model that cannot be cut into stages in that way.

    >>> import autopar, torch
    >>> layer = torch.nn.Linear(4, 4)
    >>> autopar.plan(layer, "H100: gpu=2", example_inputs=torch.ones(2, 4), stages=2)
    Traceback (most recent call last):
    autopar.errors.StageError: Linear cannot be cut into 2 stages
      why:  of its 1 operators 0 may end a stage
      todo: ask for fewer stages
    """


class UnknownModelError(AutoparError):
    """A model name that is not in the table of published configurations.

    >>> from autopar.zoo import spec
    >>> spec("gpt-2")
    Traceback (most recent call last):
    autopar.errors.UnknownModelError: no model is named 'gpt-2'
      why:  near matches: gpt2, gpt2-xl, gpt-1.3b
      todo: use one of these, 'hf:path/to/config.json' or 'file.py:function'
    """


class ModelFileError(AutoparError):
    """A model file that is missing, has no such function, or fails when called.

    >>> from autopar.zoo import load
    >>> load("none.py:model")
    Traceback (most recent call last):
    autopar.errors.ModelFileError: there is no such file
      where: none.py
      todo: correct the path
    """


class MissingDependencyError(AutoparError):
    """An optional package that this call needs is not installed.

    >>> raise MissingDependencyError("transformers is not installed", where="gpt2",
    ...                              why="models of the zoo are made by it",
    ...                              todo="pip install autopar[hf]")
    Traceback (most recent call last):
    autopar.errors.MissingDependencyError: transformers is not installed
      where: gpt2
      why:  models of the zoo are made by it
      todo: pip install autopar[hf]
    """

"""What a user calls: options in, a plan or a program out.

program = autopar.compile(model, mesh)
loss = program.step(**batch)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar import pipelined
from autopar.arguments import texts_of
from autopar.errors import OptionError, PlanMismatchError
from autopar.fields import FLAG, NOTHING, Check, Number, Of, Or, Text, Whole, checked
from autopar.intra_op.pins.wordings import PinsLike
from autopar.intra_op.rule import OpRule
from autopar.intra_op.table import table
from autopar.ir.fusion import Fuse, choose
from autopar.ir.precision import Precision
from autopar.ir.state_sharding import StateSharding
from autopar.pipeline_plan import PipelinePlan
from autopar.pipelined import Request
from autopar.plan import Plan
from autopar.planning.single import Options, Trace, capture_graph, make_plan
from autopar.program import WHOLE, Program
from autopar.runtime.ranks.agreement import compare_ranks
from autopar.runtime.ranks.dumps import Dump
from autopar.runtime.ranks.processes import (
    MeshLike,
    accelerator,
    as_mesh,
    check_processes,
    join_processes,
)
from autopar.runtime.ranks.shared import Peers
from autopar.runtime.update.groups import GroupsLike, options_of
from autopar.runtime.update.optimizer import OptimizerFactory, elementwise, fusable
from autopar.runtime.update.update import Training, state_bytes_of

_CALLED = Of((Callable,), "a function")  # type: ignore[arg-type]
_PATH = Or((Text(4096), Of((Path,), "a path")))
_STAGED = Of((Plan, PipelinePlan), "a plan of autopar.plan or autopar.Plan.load")
_WORD = Text(1000)
# The kinds of the arguments of `plan` and `compile`. What texts say is read where it is used.
_CHECKS: dict[str, Check] = {
    "model": Of((nn.Module,), "a torch.nn.Module"),
    "loss_fn": Or((NOTHING, _CALLED)),
    "plan": Or((NOTHING, _STAGED)),
    "memory": Or((NOTHING, _WORD, Number(0, 1e30))),
    "unknown_ops": _WORD,
    "trace": Or((NOTHING, _PATH)),
    "pins": Or((NOTHING, Of((Mapping, list, tuple), "a mapping or a list of pins"), _CALLED)),
    "clip_norm": Or((NOTHING, Number(-1e30, 1e30))),
    "rules": Of((list, tuple), "a list of rules"),
    "solver": _WORD,
    "calibration": Or((NOTHING, _PATH)),
    "recompute": _WORD,
    "stages": Whole(1, 2**20),
    "microbatches": Whole(1, 2**20),
    "schedule": _WORD,
    "state": Or((NOTHING, _WORD, Of((StateSharding,), "an autopar.StateSharding"))),
    "precision": Or((NOTHING, _WORD, Of((Precision,), "an autopar.Precision"))),
    "groups": Or((NOTHING, _CALLED)),
    "ema": Or((NOTHING, Number(-1e30, 1e30))),
    "fuse": Or((FLAG, _WORD, Of((Mapping, list, tuple), "a list or a mapping of patterns"))),
    "offload": Or((NOTHING, _WORD)),
    "backend": _WORD,
    "on_nonfinite": _WORD,
    "dump": Or((NOTHING, _PATH, Of((Dump,), "an autopar.Dump"))),
    "cuda_graph": FLAG,
}


def _check(arguments: Mapping[str, Any]) -> None:
    """OptionError unless every argument is of its kind."""
    checked(OptionError, **{n: (arguments[n], c) for n, c in _CHECKS.items() if n in arguments})


def plan(
    model: nn.Module,
    mesh: MeshLike,
    *,
    example_inputs: Any,
    loss_fn: Callable[..., Tensor] | None = None,
    optimizer: OptimizerFactory = torch.optim.AdamW,
    memory: float | str | None = None,
    unknown_ops: str = "replicate",
    trace: str | Path | None = None,
    pins: PinsLike | None = None,
    rules: Sequence[OpRule] = (),
    solver: str = "ilp",
    calibration: str | Path | None = None,
    recompute: str = "auto",
    stages: int = 1,
    microbatches: int = 1,
    schedule: str = "1f1b",
    state: str | StateSharding | None = None,
    precision: str | Precision | None = None,
    ema: float | None = None,
    fuse: Fuse = False,
    offload: str | None = None,
) -> Plan | PipelinePlan:
    """Plan without a process group, a GPU or weights; arguments as of `compile`."""
    _check(locals())
    known = table(rules, accelerator())
    options = Options(
        loss_fn,
        memory,
        unknown_ops,
        trace,
        pins,
        solver,
        known,
        calibration,
        recompute,
        state=state,
        elementwise=elementwise(optimizer),
        precision=Precision.read(precision),
        fuse=fusable(optimizer, choose(fuse)),
        offload=offload or "none",
    )
    tracer = Trace(trace)
    args, kwargs = split_inputs(example_inputs)
    made, nbytes = as_mesh(mesh), state_bytes_of(Training(optimizer, ema=ema))
    request = Request(stages, microbatches, schedule)
    if request != WHOLE:
        captured = pipelined.capture_microbatch(model, args, kwargs, microbatches, options, tracer)
        return pipelined.plan_evenly(captured, made, request, options, tracer, nbytes)
    graph = capture_graph(model, args, kwargs, options, tracer).graph
    return make_plan(graph, made, options, tracer, nbytes)


def compile(
    model: nn.Module,
    mesh: MeshLike,
    *,
    optimizer: OptimizerFactory = torch.optim.AdamW,
    plan: Plan | PipelinePlan | None = None,
    example_inputs: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    memory: float | str | None = None,
    unknown_ops: str = "replicate",
    trace: str | Path | None = None,
    pins: PinsLike | None = None,
    clip_norm: float | None = None,
    rules: Sequence[OpRule] = (),
    solver: str = "ilp",
    calibration: str | Path | None = None,
    recompute: str = "auto",
    stages: int = 1,
    microbatches: int = 1,
    schedule: str = "1f1b",
    state: str | StateSharding | None = None,
    precision: str | Precision | None = None,
    groups: GroupsLike | None = None,
    ema: float | None = None,
    fuse: Fuse = False,
    offload: str | None = None,
    backend: str = "eager",
    cuda_graph: bool = False,
    on_nonfinite: str = "raise",
    dump: str | Path | Dump | None = None,
) -> Program:
    """A program that trains `model` in parallel on `mesh`.

    Every process calls it alike; they compare what they were called with. The model is not
    changed; the first rank's weights count.

    Args:
        model: any module that torch.export can trace.
        mesh: a DeviceMesh, a Mesh or its text, "H100: node=2, gpu=8".
        optimizer: makes a torch optimizer of parameters; it sees local shards.
        plan: a plan to use instead of searching for one.
        example_inputs: a batch like those to come: a tuple of positional or a mapping of keyword
            arguments, or one tensor. Without it the first batch decides.
        loss_fn: the loss of the model's output and of those arguments of a batch that it names,
            such as labels that the model does not take. Without it the model returns its loss.
        memory: bytes per device or text such as "64GiB", a hard limit; by default all there is.
        unknown_ops: "replicate" runs operators without a sharding rule whole, "error" refuses.
        trace: a folder to which the first rank writes every intermediate value.
        pins: what is fixed beforehand: layouts by name (see
            `autopar/intra_op/pins/layout_pins.py`), plans of `autopar.pins`, `autopar.layout`, or a
            list of these.
        clip_norm: bound of the global norm of the gradients.
        rules: sharding rules of the user's own operators, made with `autopar.rule`; they are
            proved on their examples first, and come before those that autopar has.
        solver: "ilp" searches for the cheapest plan; "propagate" follows pins and the annotations
            of `autopar.shard`. Others are for comparison; see `autopar/intra_op/solvers/`.
        calibration: a file that `autopar calibrate` wrote on machines like these.
        recompute: which repeated blocks compute their activations again in the backward: "auto"
            as few as memory asks for, chosen with the layouts; "none"; "full" or "selective" all of
            them; "full 8" the first eight. Selective keeps results of products and attention.
        stages: into how many stages the model is cut; each runs on a part of the mesh.
        microbatches: into how many equal slices a batch is cut, along the first dimension of all
            its tensors. Gradients are those of the mean of their losses; batch norms see one
            microbatch at a time, under any schedule but those with two copies of a stage.
        schedule: in which order stages and microbatches run, with its options if it takes any:
            "1f1b", "gpipe", "interleaved_1f1b chunks=2"; see `autopar/inter_op/schedules/`.
        state: how far parameters, gradients and optimizer state are split where devices hold
            replicas: "ddp", "zero1", "zero2", "zero3", "mics", "paro-iig over node", "NIG"; by
            default that is chosen for each parameter. See `autopar/intra_op/states.py`.
        precision: "bf16" or "fp16": the model computes and is held in it, and the optimizer updates
            a master in float32 where its state lies; gradients are sent and added up in float32.
            "fp32" leaves the model as it is, and None does what the plan says. With "fp16" the
            loss is scaled; see `Program.scaler`. "bf16 weights=int8 gradients=int8", or without
            the "bf16", sends these as int8 blocks, which changes numerics. For others see
            `autopar.Precision`.
        groups: options of the optimizer by parameter: `autopar.groups({"*.bias": {"weight_decay":
            0.0}})`, or a function of a name and a parameter that returns them.
        ema: keeps an average of the parameters, of which every step keeps this part, 0.999; see
            `Program.ema_state_dict`.
        fuse: whether kernels take the place of operators that a model writes out: all or none of
            the patterns of `autopar/ir/fusion/patterns/` and "adamw", the optimizer's step, a list
            of their names, or a mapping that switches some off. On CPUs, where their references
            run, they are no faster. "async_tensor_parallel", collectives of sequence parallelism
            beside linears, is on only where it is named. A given plan says it by itself.
        offload: what lies in host memory while nothing needs it: "optimizer" its state, which comes
            to the device bucket by bucket for the update, "activations" those that blocks keep for
            their backward, "optimizer+activations", "activations 8" of the first eight blocks that
            are not computed again, "auto" what memory asks for, or nothing. Numerics stay.
        backend: "eager", or "inductor" to have torch.compile compile what lies between two calls of
            the mesh, kernels opaque inside; "aot_eager" does all of that but generate code.
        cuda_graph: whether the step is captured after a few and replayed from then on, which saves
            the time that the host takes to launch kernels. On CUDA devices under NCCL, with AdamW
            as a kernel (`fuse=["adamw"]`), and where no line of the step waits for the host.
        on_nonfinite: what becomes of a step with a loss or gradients that are NaN or infinite, or
            whose norm is: "raise" a NonFiniteError on every rank, "skip" it, or "continue", as
            torch does. A step that raises or is left out changes neither parameters nor optimizer,
            average or buffers. See `Program.nonfinite_steps`.
        dump: a folder to which every rank writes what it did last where one fails, by default one
            for temporary files that the error names, or an `autopar.Dump`, which can say a signal
            that asks for it. `autopar doctor FOLDER` compares them.

    Raises:
        DumpError: `dump` is a file, or names no signal.
        MeshError: the mesh does not fit the processes.
        RanksDifferError: the ranks are called with different arguments; names the first one.
        ScheduleError, StageError: there is no such schedule for these sizes, or no such cut.
        PlanError: nothing can be offloaded or computed again as it is said.
        RuleError: one of `rules` is wrong; names the strategy that computes something else.
        ProblemError: there is no such solver.
        ProgramError: there is no such pattern to fuse, no such backend for this program, or its
            step cannot be a CUDA graph. A step raises it where a backend cannot compile, for want
            of a compiler say.
        StateError: there is no such state sharding on this mesh, or none for this optimizer.
        PrecisionError: there is no such precision, or the device does not compute in it.
        ProgramError: the optimizer, its groups or the average are nonsense.
        OptionError: an argument is of another type, or a number out of its range.
        CalibrationError: see `cost_model`.
        CaptureError, BatchError, InfeasibleError, UnknownOperatorError, UnknownDeviceError,
        PlanError, PlanMismatchError: see `capture_graph`, `make_plan` and `Plan.check`; with
            example_inputs at once, otherwise at the first batch.
    """
    given = dict(locals())
    _check(given)
    made = as_mesh(mesh)
    join_processes(made)
    compare_ranks(texts_of(given), todo="call compile alike on every rank")
    check_processes(made)  # and this process has a device of its own
    known = table(rules, accelerator())
    options = Options(
        loss_fn,
        memory,
        unknown_ops,
        trace,
        pins,
        solver,
        known,
        calibration,
        recompute,
        state=state,
        elementwise=elementwise(optimizer),
        precision=precision_of(plan, precision),
        fuse=fusable(optimizer, choose(fuse)) if plan is None else fused_by(plan),
        offload=offload or "none",
    )
    request = Request(stages, microbatches, schedule)
    Peers.here().dumps.configure(Dump.read(dump))
    training = Training(optimizer, clip_norm, options_of(model, groups), ema, on_nonfinite)
    program = Program(model, made, training, plan, options, request, backend, cuda_graph)
    if example_inputs is not None:
        program.prepare(*split_inputs(example_inputs))
    return program


def precision_of(plan: Plan | PipelinePlan | None, wanted: str | Precision | None) -> Precision:
    """The precision of a plan, or what is wanted without one.

    Raises:
        PlanMismatchError: the two differ.
        PrecisionError: there is no such precision.
    """
    if plan is None or wanted is None:
        return Precision.read(wanted) if plan is None else plan.precision
    if Precision.read(wanted) != plan.precision:
        raise PlanMismatchError(
            f"the plan's precision is {str(plan.precision) or 'that of the model'}",
            why=f"precision={str(wanted)!r} is asked for",
            todo="leave out the precision, or plan again",
        )
    return plan.precision


def fused_by(plan: Plan | PipelinePlan) -> tuple[str, ...]:
    """The patterns in whose place a plan has kernels."""
    return plan.fuse if isinstance(plan, Plan) else plan.stages[0].plan.fuse


def split_inputs(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of an example batch."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}

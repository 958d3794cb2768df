"""The keyword arguments of `autopar.plan`, `compile` and `load`: their meaning and their checks.

Those that belong together become one frozen value: `Options` of the plan, `Training` of the update,
`Running` of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor, nn

from autopar.errors import OptionError, PlanMismatchError
from autopar.files.checked_values import (
    FLAG,
    NOTHING,
    Check,
    Number,
    Of,
    Or,
    Row,
    Text,
    Whole,
    checked,
)
from autopar.intra_op.pins.wordings import PinsLike
from autopar.intra_op.rule import OpRule
from autopar.intra_op.rule_table import table
from autopar.ir.chosen_algorithms import ChosenAlgorithms
from autopar.ir.fusion import Fuse, choose
from autopar.ir.outer import Outer
from autopar.ir.precision import Precision
from autopar.ir.state_sharding import StateSharding
from autopar.plan import Plan
from autopar.planning.options import AUTO, GLOBAL, Options
from autopar.runtime.ranks.dumps import Dump
from autopar.runtime.ranks.processes import accelerator
from autopar.runtime.update.groups import GroupsLike, options_of
from autopar.runtime.update.observation import observed
from autopar.runtime.update.optimizer import OptimizerFactory, fusable
from autopar.runtime.update.update import Training
from autopar.session.compiled import Running


class AverageKeywords(TypedDict, total=False):
    """Averages of parameters, which planning makes room for.

    Attributes:
        ema: keeps an average of the parameters, of which every step keeps this part, 0.999; see
            `Session.ema_state_dict`.
    """

    ema: float | None


class PlanKeywords(AverageKeywords, total=False):
    """What is planned; all are optional.

    Attributes:
        loss_fn: the loss of the model's output and of those arguments of a batch that it names,
            such as labels that the model does not take. Without it the model returns its loss.
        memory: bytes per device or text such as "64GiB", a hard limit; by default all there is.
        unknown_ops: "replicate" runs operators without a sharding rule whole, "error" refuses.
        pins: what is fixed beforehand: layouts by name (see
            `autopar/intra_op/pins/layout_pins.py`), plans of `autopar.pins`, `autopar.layout`,
            or a list of these.
        rules: sharding rules of the user's own operators, made with `autopar.rule`; they are
            proved on their examples first, and come before those that autopar has.
        solver: "ilp" searches for the cheapest plan; "propagate" follows pins and the
            annotations of `autopar.shard`. Others are for comparison; see
            `autopar/intra_op/solvers/`.
        calibration: a file that `autopar calibrate` wrote on machines like these.
        recompute: which repeated blocks compute their activations again in the backward: "auto"
            as few as memory asks for, chosen with the layouts; "none"; "full" or "selective"
            all of them; "full 8" the first eight. Selective keeps results of products and
            attention.
        stages: into how many stages the model is cut, each on a part of the mesh; "auto"
            searches for the fastest stages, sub-meshes, microbatches and schedule together.
        microbatches: into how many equal slices a batch is cut, along the first dimension of
            all its tensors. Gradients are those of the mean of their losses; batch norms see
            one microbatch at a time, under any schedule but those with two copies of a stage.
        schedule: in which order stages and microbatches run, with its options if it takes any:
            "1f1b", "gpipe", "interleaved_1f1b chunks=2"; see `autopar/inter_op/schedules/`.
        global_batch: samples of a step, for `stages="auto"`; by default those of the example.
        allow: "stale gradients" lets a schedule, or the search for one, update weights while
            microbatches are under way: "2bw", "pipedream", "pipemare", "ampnet". That changes what
            is computed.
        state: how far parameters, gradients and optimizer state are split where devices hold
            replicas: "ddp", "zero1", "zero2", "zero3", "mics", "paro-iig over node", "NIG"; by
            default that is chosen for each parameter. See `autopar/intra_op/states.py`.
        precision: "bf16" or "fp16": the model computes and is held in it, and the optimizer
            updates a master in float32 where its state lies; gradients are sent and added up in
            float32. "fp32" leaves the model as it is, and None does what the plan says. With
            "fp16" the loss is scaled; see `Session.scaler`. "bf16 weights=int8", or without the
            "bf16", gathers these as int8 blocks, which changes numerics. For others see
            `autopar.Precision`.
        gradients: how gradients are compressed where that sends fewer bytes, which changes
            numerics: "int8", "int4 blocks", "1-bit", "top-k 1 %" or "powersgd rank 4"; all but
            the first add what they leave out to the next gradients. A part of the precision.
        fuse: whether kernels take the place of operators that a model writes out: all or none
            of the patterns of `autopar/ir/fusion/patterns/` and "adamw", the optimizer's step,
            a list of their names, or a mapping that switches some off. On CPUs, where their
            references run, they are no faster. "async_tensor_parallel", collectives of sequence
            parallelism beside linears, is on only where it is named. A given plan says it by
            itself.
        offload: what lies in host memory while nothing needs it: "optimizer" its state, which
            comes to the device bucket by bucket for the update, "activations" those that blocks
            keep for their backward, "optimizer+activations", "activations 8" of the first eight
            blocks that are not computed again, "auto" what memory asks for, or nothing.
            Numerics stay.
        collectives: the algorithms that run collectives: None leaves them to the library;
            "auto" takes for each call, by its size and axes, the cheapest of all, the library's
            own included; rows say it: ["all_reduce over node, gpu from 65536: 2d_torus"]. Sums
            are made in the same dtype, in another order.
        batches: "global" if every rank passes the same whole batch; "local" if every rank passes
            its own part, as a DistributedSampler gives it; "local over data" if ranks that differ
            along other axes pass the same part. See `Session.data_rank`.
        expert_load: how often the experts of mixtures are chosen, which prices assume: "equal",
            "zipf 0.8", or a share for each expert, as `Session.expert_load` measures them.
        outer: how replicas along independent axes of the mesh, which train apart, synchronise:
            `autopar.outer.co2("node", tau="auto")` or its text, "co2 over node, tau=12"; see
            `autopar/outer.py`. That changes what is computed. Every replica takes its part of a
            batch. A given plan says it by itself.
        trace: a folder to which the first rank writes every intermediate value.
    """

    loss_fn: Callable[..., Tensor] | None
    memory: float | str | None
    unknown_ops: str
    pins: PinsLike | None
    rules: Sequence[OpRule]
    solver: str
    calibration: str | Path | None
    recompute: str
    stages: int | str
    microbatches: int
    schedule: str
    global_batch: int | None
    allow: str
    state: str | StateSharding | None
    precision: str | Precision | None
    gradients: str | None
    fuse: Fuse
    offload: str | None
    collectives: str | Sequence[str] | None
    batches: str
    expert_load: str
    outer: Outer | str | None
    trace: str | Path | None


class TrainKeywords(AverageKeywords, total=False):
    """How a program trains and runs; all are optional.

    Attributes:
        clip_norm: bound of the global norm of the gradients.
        groups: options of the optimizer by parameter: `autopar.groups({"*.bias":
            {"weight_decay": 0.0}})`, or a function of a name and a parameter that returns them.
        on_nonfinite: what becomes of a step with a loss or gradients that are NaN or infinite,
            or whose norm is: "raise" a NonFiniteError on every rank, "skip" it, or "continue",
            as torch does. A step that raises or is left out changes neither parameters nor
            optimizer, average or buffers. See `Session.nonfinite_steps`.
        backend: "eager", or "inductor" to have torch.compile compile what lies between two
            calls of the mesh, kernels opaque inside; "aot_eager" does all of that but generate
            code.
        cuda_graph: whether the step is captured after a few and replayed from then on, which
            saves the time that the host takes to launch kernels. On CUDA devices under NCCL,
            with AdamW as a kernel (`fuse=["adamw"]`), and where no line of the step waits for
            the host.
        shapes: for how many shapes of batches programs are compiled, as they come, over the same
            parameters and optimizer; see `docs/how-to/data.md`. By default a batch of
            another shape than the first is refused.
    """

    clip_norm: float | None
    groups: GroupsLike | None
    on_nonfinite: str
    backend: str
    cuda_graph: bool
    shapes: int


class CompileKeywords(PlanKeywords, TrainKeywords, total=False):
    """What is planned, how it is trained, and how it runs: those of both; all are optional."""


_CALLED = Of((Callable,), "a function")  # type: ignore[arg-type]
_PATH = Or((Text(4096), Of((Path,), "a path")))
_WORD = Text(1000)
# The kinds of all arguments. What texts say is read where it is used.
_CHECKS: dict[str, Check] = {
    "model": Of((nn.Module,), "a torch.nn.Module"),
    "loss_fn": Or((NOTHING, _CALLED)),
    "plan": Or((NOTHING, Of((Plan,), "a plan of autopar.plan or autopar.Plan.load"))),
    "memory": Or((NOTHING, _WORD, Number(0, 1e30))),
    "unknown_ops": _WORD,
    "trace": Or((NOTHING, _PATH)),
    "pins": Or((NOTHING, Of((Mapping, list, tuple), "a mapping or a list of pins"), _CALLED)),
    "clip_norm": Or((NOTHING, Number(-1e30, 1e30))),
    "rules": Of((list, tuple), "a list of rules"),
    "solver": _WORD,
    "calibration": Or((NOTHING, _PATH)),
    "recompute": _WORD,
    "stages": Or((Whole(1, 2**20), Text(known=(AUTO,)))),
    "microbatches": Whole(1, 2**20),
    "schedule": _WORD,
    "global_batch": Or((NOTHING, Whole(1, 2**31))),
    "allow": _WORD,
    "state": Or((NOTHING, _WORD, Of((StateSharding,), "an autopar.StateSharding"))),
    "precision": Or((NOTHING, _WORD, Of((Precision,), "an autopar.Precision"))),
    "gradients": Or((NOTHING, _WORD)),
    "groups": Or((NOTHING, _CALLED)),
    "ema": Or((NOTHING, Number(-1e30, 1e30))),
    "fuse": Or((FLAG, _WORD, Of((Mapping, list, tuple), "a list or a mapping of patterns"))),
    "offload": Or((NOTHING, _WORD)),
    "collectives": Or((NOTHING, Text(known=(AUTO,)), Row(Text(1000)))),
    "expert_load": Text(2**20),
    "backend": _WORD,
    "batches": _WORD,
    "on_nonfinite": _WORD,
    "dump": Or((NOTHING, _PATH, Of((Dump,), "an autopar.Dump"))),
    "cuda_graph": FLAG,
    "shapes": Whole(1, 2**10),
    "outer": Or((NOTHING, Text(1000), Of((Outer,), "one of autopar.outer"))),
}
DEFAULTS: CompileKeywords = {
    "loss_fn": None, "memory": None, "unknown_ops": "replicate", "trace": None, "pins": None,
    "rules": (), "solver": "ilp", "calibration": None, "recompute": AUTO, "stages": 1,
    "microbatches": 1, "schedule": "1f1b", "global_batch": None, "allow": "", "state": None,
    "precision": None, "gradients": None, "fuse": False, "offload": None, "collectives": None,
    "ema": None, "expert_load": "equal", "clip_norm": None, "groups": None,
    "on_nonfinite": "raise", "backend": "eager", "cuda_graph": False, "shapes": 1,
    "batches": GLOBAL, "outer": None,
}  # fmt: skip


def check(arguments: Mapping[str, Any], known: type) -> None:
    """Refuse keywords that are unknown, and arguments of another kind.

    Args:
        arguments: all of them by name.
        known: the TypedDict of the keywords.

    Raises:
        TypeError: there is no such keyword.
        OptionError: an argument is of another kind.
    """
    keywords = _keywords_of(known)
    for name in arguments:
        if name not in keywords and name not in _BESIDE:
            raise TypeError(f"there is no option {name!r}; there are {', '.join(sorted(keywords))}")
    checked(OptionError, **{n: (v, _CHECKS[n]) for n, v in arguments.items() if n in _CHECKS})


_BESIDE = ("model", "mesh", "example_inputs", "optimizer", "plan", "dump")


def _keywords_of(known: type) -> frozenset[str]:
    return frozenset(known.__required_keys__ | known.__optional_keys__)  # type: ignore[attr-defined]


def planning_options(
    given: Mapping[str, Any],
    optimizer: OptimizerFactory,
    model: nn.Module,
    plan: Plan | None = None,
) -> Options:
    """What is planned.

    Args:
        given: keywords by name; those left out have their defaults.
        optimizer: of the training.
        model: that is trained.
        plan: one that is given, which says its precision and kernels by itself.

    Raises:
        PlanMismatchError: the plan has another precision, or other algorithms of collectives, than
            are asked for.
        CollectiveError: a row of algorithms cannot be read.
        OptionError, PrecisionError, ProblemError, ProgramError, PlanError: an option is nonsense.
    """
    said = {**DEFAULTS, **given}
    fuse = fusable(optimizer, choose(said["fuse"])) if plan is None else plan.fuse
    rules, precision = said["rules"], _precision(plan, said["precision"], said["gradients"])
    trained = training(model, optimizer, given)
    same = (
        "loss_fn", "memory", "unknown_ops", "trace", "pins", "solver", "calibration", "recompute",
        "stages", "microbatches", "schedule", "global_batch", "allow", "state",
        "expert_load",
    )  # fmt: skip
    return Options(
        **{name: said[name] for name in same},
        table=table(rules, accelerator()),
        precision=precision,
        fuse=fuse,
        offload=said["offload"] or "none",
        batches=_batches(plan, said["batches"]),
        collectives=_collectives(plan, said["collectives"]),
        update=observed(optimizer, trained.options, trained.ema is not None),
    )


def training(model: nn.Module, optimizer: OptimizerFactory, given: Mapping[str, Any]) -> Training:
    """How the parameters are updated; ProgramError if that is nonsense."""
    said = {**DEFAULTS, **given}
    groups = options_of(model, said["groups"], getattr(optimizer, "roles", None))
    return Training(optimizer, said["clip_norm"], groups, said["ema"], said["on_nonfinite"])


def running(given: Mapping[str, Any]) -> Running:
    """How the program runs."""
    said = {**DEFAULTS, **given}
    return Running(said["backend"], said["cuda_graph"], said["shapes"])


def outer_of(given: Mapping[str, Any], plan: Plan | None = None) -> Outer | None:
    """How replicas synchronise; what a plan says where one is given.

    Raises:
        OptionError: a text cannot be read.
        PlanMismatchError: the plan says another method.
    """
    wanted = Outer.read({**DEFAULTS, **given}["outer"])
    if plan is None or wanted in (None, plan.outer):
        return wanted if plan is None else plan.outer
    raise PlanMismatchError(
        f"the plan's outer method is {plan.outer or 'none'}",
        why=f"outer={str(wanted)!r} is asked for",
        todo="leave out outer, or plan again",
    )


def _collectives(plan: Plan | None, wanted: str | Sequence[str] | None) -> ChosenAlgorithms | str:
    """What a plan says, "auto", or the rows that are wanted."""
    if plan is None:
        return wanted if isinstance(wanted, str) else ChosenAlgorithms.parse(wanted or ())
    said = plan.stages[0].collectives
    if wanted is not None and (isinstance(wanted, str) or ChosenAlgorithms.parse(wanted) != said):
        raise PlanMismatchError(
            "the plan says by itself which algorithms run its collectives",
            why=f"collectives={wanted!r} is asked for, and it has {len(said.rows)} rows",
            todo="leave out collectives, or plan again",
        )
    return said


def _batches(plan: Plan | None, wanted: str) -> str:
    """Returns who passes what of a batch: what a plan records, or what is wanted without one."""
    if plan is None:
        return wanted
    recorded = plan.stages[0].asked.batches
    if wanted not in (GLOBAL, recorded):
        raise PlanMismatchError(
            f"the plan is for {recorded} batches",
            why=f"batches={wanted!r} is asked for",
            todo="leave out batches, or plan again",
        )
    return recorded


def _precision(
    plan: Plan | None, wanted: str | Precision | None, gradients: str | None
) -> Precision:
    """The precision of a plan, or what is wanted without one."""
    base = Precision.read(wanted) if plan is None or wanted is not None else plan.precision
    asked = base if gradients is None else replace(base, gradients=gradients)
    if plan is not None and asked != plan.precision:
        raise PlanMismatchError(
            f"the plan's precision is {str(plan.precision) or 'that of the model'}",
            why=f"{str(asked) or 'that of the model'} is asked for",
            todo="leave out precision and gradients, or plan again",
        )
    return asked

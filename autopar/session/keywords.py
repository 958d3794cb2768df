"""The keyword arguments of `autopar.plan`, `compile` and `load`: documentation and checks.

Related arguments become one frozen value: `Options` of the plan, `Training` of the update,
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
    AnyOf,
    Check,
    Instance,
    Integer,
    Number,
    Row,
    Text,
    checked,
)
from autopar.generation_plan import GenerationPlan
from autopar.intra_op.pins.pin_functions import PinsLike
from autopar.intra_op.rule import OpRule
from autopar.intra_op.rule_table import table
from autopar.ir.executed.execution import Execution
from autopar.ir.fusion import Fuse, choose
from autopar.ir.precision import Precision
from autopar.ir.replicas.outer_value import Outer
from autopar.ir.state_sharding import StateSharding
from autopar.plan import Plan
from autopar.planning.options import AUTO, GLOBAL, Options
from autopar.runtime.outer.method import ANCHOR, AVERAGE
from autopar.runtime.outer.methods import method_of
from autopar.runtime.ranks.dumps import Dump
from autopar.runtime.ranks.processes import accelerator
from autopar.runtime.update.groups import GroupsLike, options_of
from autopar.runtime.update.observation import observed
from autopar.runtime.update.optimizer import OptimizerFactory, fusable
from autopar.runtime.update.update import Training
from autopar.session.compiled import Running
from autopar.session.padding import Padding, padding_of
from autopar.session.plan_conflicts import (
    batches_of,
    collectives_of,
    microbatches_of,
    precision_of,
)


class AverageKeywords(TypedDict, total=False):
    """Averages of parameters, for which planning reserves memory.

    Attributes:
        ema: decay of an exponential moving average of the parameters, such as 0.999; see
            `Session.ema_state_dict`.
    """

    ema: float | None


class PlanKeywords(AverageKeywords, total=False):
    """Options of the plan; all are optional.

    Attributes:
        loss_fn: a function of the model's output and of arguments of the batch that it names, such
            as labels that the model does not take; returns the loss. Without it, the model must
            return its loss.
        memory: limit per device in bytes or as text, "64GiB"; by default the usable memory.
        unknown_ops: "replicate" runs operators without a sharding rule whole; "error" refuses them.
        pins: layouts to fix: by name (see `autopar/intra_op/pins/layout_pins.py`), by published
            plans of `autopar.pins`, by `autopar.layout`, or by a list of these.
        rules: sharding rules for your own operators, made with `autopar.rule`; they are first
            proved on their examples, and override built-in rules.
        solver: "ilp" searches for the fastest plan; "propagate" follows pins and the annotations of
            `autopar.shard`. Others are for comparison; see `autopar/intra_op/solvers/`.
        calibration: a file that `autopar calibrate` wrote on such machines.
        recompute: which repeated blocks recompute their activations in the backward: "auto" as few
            as memory requires, chosen together with the layouts; "none"; "full" or "selective" all
            of them; "full 8" the first eight. Selective recomputation keeps the results of products
            and attention.
        stages: number of pipeline stages, each on a part of the mesh; "auto" searches for the
            fastest stages, sub-meshes, microbatches and schedule together.
        microbatches: number of equal slices of a batch, along the first dimension of all its
            tensors. Batch norms see one microbatch at a time, except under schedules with two
            copies of a stage.
        accumulate: without stages, the number of microbatches whose gradients are added up before
            one update.
        whole_loss: whether the loss of a step is that of the whole batch, the default: a mean over
            labels or a mask divides by the count of all microbatches. A loss for which this is
            not possible is refused. With False, the loss is the mean of the microbatches' losses.
        schedule: order of stages and microbatches, with its options: "1f1b", "gpipe",
            "interleaved_1f1b chunks=2"; see `autopar/inter_op/schedules/`.
        global_batch: samples in a step, for `stages="auto"`; by default those of the example batch.
        allow: what may differ from training on one device. "stale gradients" allows schedules
            that update weights while microbatches are in flight: "2bw", "pipedream", "pipemare",
            "ampnet". "local updates" also considers independent replicas, by every method of
            `outer`, and takes the fastest plan, which says what it changes. Join both by a comma.
        state: sharding of parameters, gradients and optimizer state over replicas: "ddp", "zero1",
            "zero2", "zero3", "mics", "paro-iig over node", "NIG"; by default it is chosen for each
            parameter. See `autopar/intra_op/states.py`.
        precision: "bf16" or "fp16": the model computes and is stored in it, the optimizer updates a
            float32 master with the layout of its state, and gradients are sent and summed in
            float32. "fp32" leaves the model as it is, and None follows the plan. With "fp16" the
            loss is scaled; see `Session.scaler`. "bf16 weights=int8", with or without "bf16",
            gathers weights as int8 blocks, which changes numerics. For further options see
            `autopar.Precision`.
        gradients: compression of gradients where that sends fewer bytes, which changes numerics:
            "int8", "int4 blocks", "1-bit", "top-k 1 %" or "powersgd rank 4"; all but the first add
            the omitted part to the next gradients. It is part of the precision.
        fuse: which fused kernels replace groups of operators: True or False for all or none, a list
            of names, or a mapping that switches some off. The names are the patterns of
            `autopar/ir/fusion/patterns/` and "adamw", the optimizer's step. On CPUs, reference
            implementations run, which are no faster. "async_tensor_parallel", collectives that
            overlap with linears, is on only if named. A given plan keeps its own fusions.
        offload: tensors to keep in host memory while they are not needed: "optimizer", the
            optimizer's state, which is copied to the device bucket by bucket for the update;
            "activations", those that blocks save for their backward; "optimizer+activations";
            "activations 8", those of the first eight blocks that are not recomputed; "auto", as
            memory requires; None, nothing. Results do not change.
        collectives: algorithms of collectives: None uses the library's; "auto" takes the fastest
            one for each call, by its size and axes, including the library's own; or rows such as
            ["all_reduce over node, gpu from 65536: 2d_torus"]. Sums may change in their last bits.
        batches: "global" if every rank passes the same whole batch; "local" if every rank passes
            its own part, as from a DistributedSampler; "local over data" if ranks that differ along
            other axes pass the same part. See `Session.data_rank`.
        expert_load: the assumed frequency of each expert: "equal", "zipf 0.8", or their shares.
        documents: lengths of the documents that are packed into a row, for predicted times of
            attention under their mask: a sample such as "4096 512 512 128", or "unknown".
        execution: how your system runs kernels, for predicted times: "compiled=blocks merged
            host=compiled"; see `autopar/ir/executed/execution.py`. By default every operator is one
            kernel. "linears=float8" and "linears=float8-rows" also run, which changes numerics.
        outer: how replicas along independent axes of the mesh, which train separately,
            synchronise: `autopar.outer.co2("node", tau="auto")` or its text, "co2 over node,
            tau=12"; see `autopar/outer.py`. It changes the trained weights. Every replica takes its
            part of a batch. A given plan states its own method.
        on_loss: with `outer`, the reaction to a lost rank: "continue" excludes its replica from the
            averages, with a warning; "error", the default, stops all. It is part of `outer`.
        trace: a folder to which the first rank writes the result of every planning step.
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
    accumulate: int
    whole_loss: bool
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
    documents: str
    execution: str | Execution
    outer: Outer | str | None
    on_loss: str | None
    trace: str | Path | None


class TrainKeywords(AverageKeywords, total=False):
    """Options of training and running; all are optional.

    Attributes:
        clip_norm: bound on the global norm of the gradients.
        groups: options of the optimizer by parameter: `autopar.groups({"*.bias": {"weight_decay":
            0.0}})`, or a function of a name and a parameter that returns them.
        on_nonfinite: treatment of a step whose loss, gradients or gradient norm are NaN or
            infinite: "raise" raises NonFiniteError on every rank, "skip" skips it, "continue"
            updates anyway, as torch does. A step that raises or is skipped changes neither
            parameters nor optimizer, average or buffers. See `Session.nonfinite_steps`.
        backend: "eager", or "inductor" to compile the code between calls of the mesh with
            torch.compile, with opaque kernels; "aot_eager" does the same without generating code.
        cuda_graph: whether to capture the step after a few warm-up steps and replay it, which saves
            the host's time for launching kernels. It needs CUDA devices with NCCL, AdamW as a
            kernel (`fuse=["adamw"]`), and a step that never waits for the host.
        shapes: number of batch shapes for which programs are compiled as they occur, with the same
            parameters and optimizer; see `docs/how-to/data.md`. By default, a batch of
            another shape than the first is refused.
        pad_to: lengths such as [128, 256, 512], to the next of which every batch is padded, at the
            end of its second dimension. Each length has its own program. Labels are padded with
            -100, which the loss ignores, and the attention mask with zeros. For other inputs, an
            `autopar.Padding` says with what.
        evaluate: with `outer`, whether evaluation and `state_dict` use the outer method's "anchor"
            or the "average" of the replicas' parameters; by default the anchor, if there is one.
    """

    clip_norm: float | None
    groups: GroupsLike | None
    on_nonfinite: str
    backend: str
    cuda_graph: bool
    shapes: int
    pad_to: Sequence[int] | Padding | None
    evaluate: str | None


class CompileKeywords(PlanKeywords, TrainKeywords, total=False):
    """Options of the plan, of training and of running; all are optional."""


_CALLED = Instance((Callable,), "a function")  # type: ignore[arg-type]
_PATH = AnyOf((Text(4096), Instance((Path,), "a path")))
_PLAN = Instance((Plan, GenerationPlan), "a plan of autopar.plan or autopar.Plan.load")
_NAMED = (Mapping, list, tuple)
_WORD = Text(1000)
_CHECKS: dict[str, Check] = {
    "model": Instance((nn.Module,), "a torch.nn.Module"),
    "loss_fn": AnyOf((NOTHING, _CALLED)),
    "plan": AnyOf((NOTHING, _PLAN)),
    "memory": AnyOf((NOTHING, _WORD, Number(0, 1e30))),
    "unknown_ops": _WORD,
    "trace": AnyOf((NOTHING, _PATH)),
    "pins": AnyOf((NOTHING, Instance(_NAMED, "a mapping or a list of pins"), _CALLED)),
    "clip_norm": AnyOf((NOTHING, Number(-1e30, 1e30))),
    "rules": Instance((list, tuple), "a list of rules"),
    "solver": _WORD,
    "calibration": AnyOf((NOTHING, _PATH)),
    "recompute": _WORD,
    "stages": AnyOf((Integer(1, 2**20), Text(known=(AUTO,)))),
    "microbatches": Integer(1, 2**20),
    "accumulate": Integer(1, 2**20),
    "whole_loss": FLAG,
    "schedule": _WORD,
    "global_batch": AnyOf((NOTHING, Integer(1, 2**31))),
    "allow": _WORD,
    "state": AnyOf((NOTHING, _WORD, Instance((StateSharding,), "an autopar.StateSharding"))),
    "precision": AnyOf((NOTHING, _WORD, Instance((Precision,), "an autopar.Precision"))),
    "gradients": AnyOf((NOTHING, _WORD)),
    "groups": AnyOf((NOTHING, _CALLED)),
    "ema": AnyOf((NOTHING, Number(-1e30, 1e30))),
    "fuse": AnyOf((FLAG, _WORD, Instance(_NAMED, "a list or a mapping of patterns"))),
    "offload": AnyOf((NOTHING, _WORD)),
    "collectives": AnyOf((NOTHING, Text(known=(AUTO,)), Row(Text(1000)))),
    "expert_load": Text(2**20),
    "documents": Text(2**20),
    "execution": AnyOf((_WORD, Instance((Execution,), "an autopar.Execution"))),
    "backend": _WORD,
    "batches": _WORD,
    "on_nonfinite": _WORD,
    "dump": AnyOf((NOTHING, _PATH, Instance((Dump,), "an autopar.Dump"))),
    "cuda_graph": FLAG,
    "shapes": Integer(1, 2**10),
    "pad_to": AnyOf((NOTHING, Row(Integer(1, 2**30)), Instance((Padding,), "an autopar.Padding"))),
    "evaluate": AnyOf((NOTHING, Text(known=(ANCHOR, AVERAGE)))),
    "outer": AnyOf((NOTHING, Text(1000), Instance((Outer,), "one of autopar.outer"))),
    "on_loss": AnyOf((NOTHING, Text(known=("error", "continue")))),
}
DEFAULTS: CompileKeywords = {
    "loss_fn": None, "memory": None, "unknown_ops": "replicate", "trace": None, "pins": None,
    "rules": (), "solver": "ilp", "calibration": None, "recompute": AUTO, "stages": 1,
    "microbatches": 1, "accumulate": 1, "whole_loss": True, "schedule": "1f1b",
    "global_batch": None, "allow": "", "state": None, "precision": None, "gradients": None,
    "fuse": False, "offload": None, "collectives": None, "ema": None, "expert_load": "equal",
    "documents": "unknown",
    "clip_norm": None, "groups": None,
    "on_nonfinite": "raise", "backend": "eager", "cuda_graph": False, "shapes": 1,
    "pad_to": None, "batches": GLOBAL, "outer": None, "execution": "", "evaluate": None,
    "on_loss": None,
}  # fmt: skip


def check(arguments: Mapping[str, Any], known: type) -> None:
    """Refuses unknown keywords, and arguments of wrong types.

    Args:
        arguments: all arguments by name.
        known: the TypedDict of the keywords.

    Raises:
        TypeError: a keyword is unknown.
        OptionError: an argument has the wrong type.
    """
    keywords = _keywords_of(known)
    for name in arguments:
        if name not in keywords and name not in _BESIDE:
            raise TypeError(
                f"there is no option {name!r}; options are {', '.join(sorted(keywords))}"
            )
    checked(OptionError, **{n: (v, _CHECKS[n]) for n, v in arguments.items() if n in _CHECKS})


_BESIDE = ("model", "mesh", "example_inputs", "optimizer", "plan", "dump")


def _keywords_of(known: type) -> frozenset[str]:
    return frozenset(known.__required_keys__ | known.__optional_keys__)  # type: ignore[attr-defined]


def of_a_plan(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `compile` that `plan` also takes, and all unknown arguments."""
    others = _keywords_of(TrainKeywords) - _keywords_of(PlanKeywords) | {"dump"}
    return {name: value for name, value in arguments.items() if name not in others}


def planning_options(
    given: Mapping[str, Any],
    optimizer: OptimizerFactory,
    model: nn.Module,
    plan: Plan | None = None,
) -> Options:
    """Returns the options of the plan.

    Args:
        given: keywords by name; missing ones have their defaults.
        optimizer: optimizer of the training.
        model: the model to train.
        plan: a given plan, which keeps its own precision and kernels.

    Raises:
        PlanMismatchError: the plan's precision or algorithms of collectives differ from the
            options.
        CollectiveError: a row of algorithms cannot be parsed.
        OptionError, PrecisionError, ProblemError, ProgramError, PlanError: an option is invalid.
    """
    options = {**DEFAULTS, **given}
    fuse = fusable(optimizer, choose(options["fuse"])) if plan is None else plan.fuse
    rules = options["rules"]
    precision = precision_of(plan, options["precision"], options["gradients"])
    trained, outer = training(model, optimizer, given), outer_of(given, plan)
    update = observed(optimizer, trained.options, trained.ema is not None)
    same = (
        "loss_fn", "memory", "unknown_ops", "trace", "pins", "solver", "calibration", "recompute",
        "stages", "schedule", "global_batch", "allow", "state",
        "expert_load", "documents",
    )  # fmt: skip
    return Options(
        **{name: options[name] for name in same},
        **microbatches_of(
            plan, options["microbatches"], options["accumulate"], options["whole_loss"]
        ),
        table=table(rules, accelerator()),
        precision=precision,
        fuse=fuse,
        offload=options["offload"] or "none",
        batches=batches_of(plan, options["batches"]),
        execution=Execution.read(options["execution"]),
        collectives=collectives_of(plan, options["collectives"]),
        update=update if outer is None else method_of(outer).added_to(update, outer.goes_on),
    )


def training(model: nn.Module, optimizer: OptimizerFactory, given: Mapping[str, Any]) -> Training:
    """Returns how the parameters are updated; raises ProgramError if an option is invalid."""
    options = {**DEFAULTS, **given}
    groups = options_of(model, options["groups"], getattr(optimizer, "roles", None))
    return Training(
        optimizer, options["clip_norm"], groups, options["ema"], options["on_nonfinite"]
    )


def running(given: Mapping[str, Any]) -> Running:
    """Returns how the program runs; raises OptionError if `pad_to` is invalid."""
    options = {**DEFAULTS, **given}
    padding = padding_of(options["pad_to"])
    return Running(
        options["backend"],
        options["cuda_graph"],
        max(options["shapes"], len(padding.lengths) if padding else 1),
        options["evaluate"] or "",
        padding,
    )


def outer_of(given: Mapping[str, Any], plan: Plan | None = None) -> Outer | None:
    """Returns how replicas synchronise; a given plan states it.

    Raises:
        OptionError: a text cannot be read.
        PlanMismatchError: the plan has another method.
    """
    options = {**DEFAULTS, **given}
    wanted = Outer.read(options["outer"])
    if wanted is not None and options["on_loss"] is not None:
        wanted = replace(wanted, on_loss=options["on_loss"])
    if plan is None or wanted in (None, plan.outer):
        return wanted if plan is None else plan.outer
    raise PlanMismatchError(
        f"the plan's outer method is {plan.outer or 'none'}",
        why=f"outer={str(wanted)!r} is passed",
        todo="omit outer, or plan again",
    )

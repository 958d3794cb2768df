"""The user's functions: from a model and a mesh to a plan, a compiled program or a session.

session = autopar.compile(model, mesh)
loss = session.step(**batch)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor, nn

from autopar.errors import OptionError
from autopar.generation_plan import GenerationPlan
from autopar.plan import Plan
from autopar.planning.capturing import Call
from autopar.planning.frontier import fastest_together
from autopar.planning.generation.stage_search import plan_generation
from autopar.planning.local_choice import asks_for_local, choose
from autopar.planning.local_rounds import with_local_rounds
from autopar.planning.options import GLOBAL, Options
from autopar.planning.plan_model import plan_model
from autopar.planning.prices import check_prices, limit_of
from autopar.planning.trace import Trace
from autopar.runtime.ranks.agreement import compare_ranks
from autopar.runtime.ranks.dumps import Dump
from autopar.runtime.ranks.processes import (
    MeshLike,
    as_mesh,
    check_processes,
    from_first_rank,
    join_processes,
)
from autopar.runtime.ranks.shared import Peers
from autopar.runtime.update.optimizer import OptimizerFactory
from autopar.session.call_texts import texts_of
from autopar.session.compiled import Compiled, refuse_graphs_of_stages
from autopar.session.compiler import Compiler, Loader
from autopar.session.generation.pair import refuse_outer
from autopar.session.generation.sizes import sizes_of
from autopar.session.keywords import (
    DEFAULTS,
    CompileKeywords,
    PlanKeywords,
    TrainKeywords,
    check,
    of_a_plan,
    outer_of,
    planning_options,
    running,
    training,
)
from autopar.session.session import Session


@overload
def plan(
    model: nn.Module,
    mesh: MeshLike,
    *,
    example_inputs: Any,
    optimizer: OptimizerFactory = ...,
    task: Literal["train"] = ...,
    **options: Unpack[PlanKeywords],
) -> Plan: ...


@overload
def plan(
    model: nn.Module,
    mesh: MeshLike,
    *,
    task: Literal["generate"],
    batch: int,
    prompt: int,
    new_tokens: int,
    **options: Unpack[PlanKeywords],
) -> GenerationPlan: ...


def plan(
    model: nn.Module,
    mesh: MeshLike,
    *,
    example_inputs: Any = None,
    optimizer: OptimizerFactory = torch.optim.AdamW,
    task: str = "train",
    batch: int | None = None,
    prompt: int | None = None,
    new_tokens: int | None = None,
    **options: Unpack[PlanKeywords],
) -> Plan | GenerationPlan:
    """Plans a model without a process group, a GPU or weights.

    Args:
        model, mesh, example_inputs, optimizer: as for `compile`.
        task: "train", or "generate" for a prefill and a decode over the same parameters.
        batch, prompt, new_tokens: with "generate", the number of sequences, of tokens of each
            prompt and of tokens that follow.
        **options: see `autopar.session.keywords.PlanKeywords`.

    Returns:
        The fastest plan within memory.

    Raises:
        AutoparError: see `compile`.
    """
    check({"model": model, "optimizer": optimizer, **options}, PlanKeywords)
    asked = planning_options(options, optimizer, model)
    sizes = sizes_of(task, batch, prompt, new_tokens, example_inputs)
    if sizes is not None:
        refuse_outer(outer_of(options))
        return plan_generation(model, as_mesh(mesh), asked, sizes)
    call, devices, outer = Call.of(model, example_inputs), as_mesh(mesh), outer_of(options)
    if outer is None:
        find = choose if asks_for_local(asked.allow) else plan_model
        return find(call, devices, asked, Trace(asked.trace))
    outer.check(devices)
    part, inside = call, outer.within(devices)
    if asked.batches == GLOBAL:
        part = call.part_of(outer.count(devices))
    return with_local_rounds(plan_model(part, inside, asked, Trace(asked.trace)), outer, devices)


def plan_together(
    models: Mapping[str, Mapping[str, Any]],
    mesh: MeshLike,
    *,
    memory: float | str | None = None,
    calls: Mapping[str, float] | None = None,
) -> dict[str, Plan]:
    """Plans several models that share devices and take turns, as actor and critic do.

    The parameters and optimizer states of all models are in memory at the same time; activations
    are not, because no two models run at once. If the fastest plans do not fit together, models get
    plans with less memory where that costs the least time. In a process group, every rank calls it
    with the same arguments, and one rank plans for all.

    Args:
        models: name -> the arguments of `compile` without the mesh and the memory: model,
            example_inputs, optimizer and options. Parameters without requires_grad have neither
            gradients nor states.
        mesh: the devices.
        memory: limit per device for all models, in bytes or as text; by default the usable memory.
        calls: number of steps that a model makes for each step of the others; 1 by default.

    Returns:
        A plan for each model, to be passed to `compile` with the same arguments.

    Raises:
        InfeasibleError: the models do not fit together; says what each of them needs.
        OptionError: `calls` names another model.
        AutoparError: see `compile`.
    """
    devices, often = as_mesh(mesh), dict(calls or {})
    if not often.keys() <= models.keys():
        raise OptionError(
            f"calls names {', '.join(sorted(often.keys() - models.keys()))}",
            why=f"the models are {', '.join(models)}",
        )
    limit = limit_of(devices, replace(Options(), memory=memory))

    def planner(arguments: Mapping[str, Any]) -> Callable[[float], Plan]:
        stated = of_a_plan(arguments)
        return lambda most: plan(mesh=devices, memory=most, **stated)

    plans = {name: planner(arguments) for name, arguments in models.items()}
    return from_first_rank(lambda: fastest_together(plans, often, limit))


def compile_together(
    models: Mapping[str, Mapping[str, Any]],
    mesh: MeshLike,
    *,
    memory: float | str | None = None,
    calls: Mapping[str, float] | None = None,
) -> dict[str, Session]:
    """Returns sessions of several models that share devices and take turns.

    Args:
        models, mesh, memory, calls: as for `plan_together`.

    Returns:
        A session for each model, which has started.

    Raises:
        InfeasibleError, OptionError: see `plan_together`.
        AutoparError: see `compile`.
    """
    devices = as_mesh(mesh)
    join_processes(devices)
    plans = plan_together(models, devices, memory=memory, calls=calls)
    return {name: compile(mesh=devices, plan=plans[name], **models[name]) for name in models}


def emit(
    model: nn.Module,
    mesh: MeshLike,
    *,
    example_inputs: Any,
    optimizer: OptimizerFactory = torch.optim.AdamW,
    plan: Plan | None = None,
    **options: Unpack[PlanKeywords],
) -> Compiled:
    """Plans and emits a program without devices, to save and `load`, or for `Session.adopt`.

    In a process group, every rank calls it with the same arguments, and one rank plans for all.

    Args:
        model, mesh, example_inputs, optimizer, plan: as for `compile`.
        **options: see `autopar.session.keywords.PlanKeywords`.

    Returns:
        Graph, plan and the source of every stage, as one value.

    Raises:
        AutoparError: see `compile`.
    """
    given = {"model": model, "optimizer": optimizer, "plan": plan, **options}
    check(given, PlanKeywords)
    asked = planning_options(options, optimizer, model, plan)
    compiler = Compiler(as_mesh(mesh), asked, plan, outer_of(options, plan))
    return compiler(Call.of(model, example_inputs))


def load(
    folder: str | Path,
    model: nn.Module,
    *,
    optimizer: OptimizerFactory = torch.optim.AdamW,
    loss_fn: Callable[..., Tensor] | None = None,
    dump: str | Path | Dump | None = None,
    **options: Unpack[TrainKeywords],
) -> Session:
    """Returns a session that trains `model` with a program that was compiled before.

    Every process calls it with the same arguments. Nothing is traced or planned, and all ranks
    start from the first rank's weights.

    Args:
        folder: the folder that `Compiled.save` wrote. Its sources are code, so load a folder only
            if you would run a script of its author.
        model: must equal the compiled model in class, shapes, modes and attributes.
        optimizer, dump: as for `compile`.
        loss_fn: the loss_fn with which the program was compiled, for evaluations and other shapes.
        **options: see `autopar.session.keywords.TrainKeywords`.

    Returns:
        The session, which has started.

    Raises:
        ProgramError: the folder is missing, damaged or edited, or is for another model or another
            version of torch; says what differs.
        MeshError: the program is for another number of devices.
        RanksDifferError: the ranks load different programs, or pass different options.
        AutoparError: see `compile`. For a batch that the program does not fit, `step` raises
            BatchError.
    """
    given = {"model": model, "optimizer": optimizer, "dump": dump, **options}
    check(given, TrainKeywords)
    check({"loss_fn": loss_fn}, PlanKeywords)
    compiled = Compiled.load(folder, model)
    join_processes(compiled.plan.mesh)
    compare_ranks(texts_of({**DEFAULTS, **given}), todo="call load alike on every rank")
    Peers.here().dumps.configure(Dump.read(dump))
    trained = training(model, optimizer, options)
    plan = compiled.plan
    asked = Options.like(plan.stages[0], loss_fn=loss_fn)
    loader = Loader(compiled, Compiler(plan.mesh, asked, plan))
    session = Session(model, plan.mesh, trained, running(options), loader)
    session.adopt(compiled)
    return session


def compile(
    model: nn.Module,
    mesh: MeshLike,
    *,
    example_inputs: Any = None,
    optimizer: OptimizerFactory = torch.optim.AdamW,
    plan: Plan | GenerationPlan | None = None,
    dump: str | Path | Dump | None = None,
    **options: Unpack[CompileKeywords],
) -> Session:
    """Returns a session that trains `model` in parallel on `mesh`.

    Every process calls it with the same arguments, which the ranks compare. The model is not
    changed; all ranks start from the first rank's weights.

    Args:
        model: any module that torch.export can trace.
        mesh: a DeviceMesh, a Mesh or its text, "H100: node=2, gpu=8".
        example_inputs: a batch with the types of later batches: a tuple of positional or a mapping
            of keyword arguments, or one tensor. If it is None, the first step captures its batch.
        optimizer: a function that makes a torch optimizer for parameters, which are local shards.
        plan: a plan to use instead of searching for one; with one of a generation, call `generate`.
        dump: a folder to which every rank writes its last calls if one fails, by default a
            temporary folder that the error names; or an `autopar.Dump`, which can also set a signal
            that requests it. `autopar doctor FOLDER` compares the dumps.
        **options: options of the plan, of training and of running; see
            `autopar.session.keywords.CompileKeywords`.

    Returns:
        The session; with `example_inputs`, it has started.

    Raises:
        DumpError: `dump` is a file, or names no signal.
        MeshError: the mesh does not fit the processes.
        RanksDifferError: the ranks pass different arguments; names the first one.
        ScheduleError, StageError: the schedule does not exist for these sizes, or the model cannot
            be cut into such stages.
        PlanError: `offload` or `recompute` cannot be parsed.
        RuleError: one of `rules` is wrong; names the strategy that computes something else.
        ProblemError: the solver is unknown.
        ProgramError: a pattern to fuse or the backend is unknown, the step cannot be a CUDA graph,
            or the optimizer, its groups or the average are invalid. A step raises it if the backend
            cannot compile, for example without a compiler.
        StateError: the state sharding does not exist on this mesh or for this optimizer.
        PrecisionError: the precision is unknown, or the device does not support it.
        OptionError: an argument has the wrong type, or a number is out of range.
        CalibrationError, CollectiveError: see `cost_model`.
        CaptureError, BatchError, InfeasibleError, UnknownOperatorError, UnknownDeviceError,
            PlanError, PlanMismatchError: see `autopar.planning`; raised at once with
            example_inputs, otherwise by the first step.
    """
    given = {"model": model, "mesh": mesh, "example_inputs": example_inputs, "plan": plan}
    given |= {"optimizer": optimizer, "dump": dump, **options}
    check(given, CompileKeywords)
    generation = plan if isinstance(plan, GenerationPlan) else None
    plan = plan if isinstance(plan, Plan) else None
    devices = as_mesh(mesh)
    join_processes(devices)
    compare_ranks(texts_of({**DEFAULTS, **given}), todo="pass the same arguments on every rank")
    check_processes(devices)  # every process must have a device of its own
    stated = plan if generation is None else generation.decode
    asked = planning_options(options, optimizer, model, stated)
    Peers.here().dumps.configure(Dump.read(dump))
    trained, how = training(model, optimizer, options), running(options)
    compiler = Compiler(devices, asked, plan, outer_of(options, plan), generation)
    if how.cuda_graph and compiler.has_stages:
        refuse_graphs_of_stages()
    # refuses bad options before the model is captured
    check_prices(devices, asked, compiler.has_stages)
    session = Session(model, devices, trained, how, compiler)
    if example_inputs is not None:
        call = Call.of(model, example_inputs)
        session.prepare(call.args, call.kwargs)
    return session

"""What a user calls: a model and a mesh in, a plan, a compiled program or a session out.

session = autopar.compile(model, mesh)
loss = session.step(**batch)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from autopar.plan import Plan
from autopar.planning.capturing import Call
from autopar.planning.plan_model import plan_model
from autopar.planning.prices import cost_model
from autopar.planning.trace import Trace
from autopar.runtime.outer.methods import method_of
from autopar.runtime.ranks.agreement import compare_ranks
from autopar.runtime.ranks.dumps import Dump
from autopar.runtime.ranks.processes import MeshLike, as_mesh, check_processes, join_processes
from autopar.runtime.ranks.shared import Peers
from autopar.runtime.update.optimizer import OptimizerFactory
from autopar.session.call_texts import texts_of
from autopar.session.compiled import Compiled, refuse_graphs_of_stages
from autopar.session.compiler import Compiler
from autopar.session.keywords import (
    DEFAULTS,
    CompileKeywords,
    PlanKeywords,
    TrainKeywords,
    check,
    outer_of,
    planning_options,
    running,
    training,
)
from autopar.session.session import Session


def plan(
    model: nn.Module,
    mesh: MeshLike,
    *,
    example_inputs: Any,
    optimizer: OptimizerFactory = torch.optim.AdamW,
    **options: Unpack[PlanKeywords],
) -> Plan:
    """Plan without a process group, a GPU or weights.

    Args:
        model, mesh, example_inputs, optimizer: as of `compile`.
        **options: see `autopar.session.keywords.PlanKeywords`.

    Returns:
        The fastest plan within memory.

    Raises:
        AutoparError: see `compile`.
    """
    check({"model": model, "optimizer": optimizer, **options}, PlanKeywords)
    asked = planning_options(options, optimizer)
    call, devices, outer = Call.of(model, example_inputs), as_mesh(mesh), outer_of(options)
    if outer is None:
        return plan_model(call, devices, asked, Trace(asked.trace))
    method_of(outer)
    outer.check(devices)
    part, inside = call.part_of(outer.count(devices)), outer.within(devices)
    return plan_model(part, inside, asked, Trace(asked.trace)).under(outer, devices)


def emit(
    model: nn.Module,
    mesh: MeshLike,
    *,
    example_inputs: Any,
    optimizer: OptimizerFactory = torch.optim.AdamW,
    plan: Plan | None = None,
    **options: Unpack[PlanKeywords],
) -> Compiled:
    """Plan and emit without devices, to save and `load`, or for `Session.adopt`.

    In a process group every rank calls it alike, and one plans for all.

    Args:
        model, mesh, example_inputs, optimizer, plan: as of `compile`.
        **options: see `autopar.session.keywords.PlanKeywords`.

    Returns:
        Graph, plan and the source of every stage, as one value.

    Raises:
        AutoparError: see `compile`.
    """
    given = {"model": model, "optimizer": optimizer, "plan": plan, **options}
    check(given, PlanKeywords)
    asked = planning_options(options, optimizer, plan)
    compiler = Compiler(as_mesh(mesh), asked, plan, outer_of(options, plan))
    return compiler(Call.of(model, example_inputs))


def load(
    folder: str | Path,
    model: nn.Module,
    *,
    optimizer: OptimizerFactory = torch.optim.AdamW,
    dump: str | Path | Dump | None = None,
    **options: Unpack[TrainKeywords],
) -> Session:
    """A session that trains `model` by a program that was compiled before.

    Every process calls it alike. Nothing is traced or planned; the first rank's weights count.

    Args:
        folder: what `Compiled.save` wrote. Its sources are code, so load none whose author you
            would not let run a script.
        model: built as the compiled one was: its class, shapes, modes and attributes are compared.
        optimizer, dump: as of `compile`.
        **options: see `autopar.session.keywords.TrainKeywords`.

    Raises:
        ProgramError: the folder is missing, damaged or edited, or is for another model or another
            version of torch; says what differs.
        MeshError: the program is for another number of devices.
        RanksDifferError: the ranks load different programs, or with different options.
        AutoparError: see `compile`. A batch that the program is not for is a BatchError of `step`.
    """
    given = {"model": model, "optimizer": optimizer, "dump": dump, **options}
    check(given, TrainKeywords)
    compiled = Compiled.load(folder, model)
    join_processes(compiled.plan.mesh)
    compare_ranks(texts_of({**DEFAULTS, **given}), todo="call load alike on every rank")
    Peers.here().dumps.configure(Dump.read(dump))
    trained = training(model, optimizer, options)
    session = Session(model, compiled.plan.mesh, trained, running(options), lambda _: compiled)
    session.adopt(compiled)
    return session


def compile(
    model: nn.Module,
    mesh: MeshLike,
    *,
    example_inputs: Any = None,
    optimizer: OptimizerFactory = torch.optim.AdamW,
    plan: Plan | None = None,
    dump: str | Path | Dump | None = None,
    **options: Unpack[CompileKeywords],
) -> Session:
    """A session that trains `model` in parallel on `mesh`.

    Every process calls it alike; they compare what they were called with. The model is not
    changed; the first rank's weights count.

    Args:
        model: any module that torch.export can trace.
        mesh: a DeviceMesh, a Mesh or its text, "H100: node=2, gpu=8".
        example_inputs: a batch like those to come: a tuple of positional or a mapping of
            keyword arguments, or one tensor. Without it the first batch decides.
        optimizer: makes a torch optimizer of parameters; it sees local shards.
        plan: a plan to use instead of searching for one.
        dump: a folder to which every rank writes what it did last where one fails, by default
            one for temporary files that the error names, or an `autopar.Dump`, which can say a
            signal that asks for it. `autopar doctor FOLDER` compares them.
        **options: what is planned, how it is trained and how it runs; see
            `autopar.session.keywords.CompileKeywords`.

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
        CalibrationError, CollectiveError: see `cost_model`.
        CaptureError, BatchError, InfeasibleError, UnknownOperatorError, UnknownDeviceError,
        PlanError, PlanMismatchError: see `autopar.planning`; with
            example_inputs at once, otherwise at the first batch.
    """
    given = {"model": model, "mesh": mesh, "example_inputs": example_inputs, "plan": plan}
    given |= {"optimizer": optimizer, "dump": dump, **options}
    check(given, CompileKeywords)
    devices = as_mesh(mesh)
    join_processes(devices)
    compare_ranks(texts_of({**DEFAULTS, **given}), todo="call compile alike on every rank")
    check_processes(devices)  # and this process has a device of its own
    asked = planning_options(options, optimizer, plan)
    Peers.here().dumps.configure(Dump.read(dump))
    trained, how = training(model, optimizer, options), running(options)
    compiler = Compiler(devices, asked, plan, outer_of(options, plan))
    if how.cuda_graph and compiler.is_pipeline:
        refuse_graphs_of_stages()
    cost_model(devices, asked)  # refused, if at all, before anything is captured
    session = Session(model, devices, trained, how, compiler)
    if example_inputs is not None:
        call = Call.of(model, example_inputs)
        session.prepare(call.args, call.kwargs)
    return session

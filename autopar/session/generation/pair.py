"""A pair of programs, a prefill and a decode, over the parameters of a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from autopar.capture.capture import Captured
from autopar.capture.generation.calls import Sizes
from autopar.errors import BatchError, PlanMismatchError, ProgramError
from autopar.generation_plan import GenerationPlan
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.replicas.outer_value import Outer
from autopar.plan import Plan
from autopar.planning.generation.graphs import capture_generation
from autopar.planning.generation.serving import IN_ANOTHER, generating_options, plan_serving
from autopar.planning.generation.stage_search import plan_generation
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from autopar.runtime.executor import Executor
from autopar.runtime.outer.local_updates import LocalUpdates
from autopar.runtime.pipeline.pipeline import Pipeline
from autopar.runtime.ranks.agreement import compare_ranks
from autopar.runtime.ranks.processes import from_first_rank
from autopar.runtime.trained import Program
from autopar.session.call_texts import text_of_graph
from autopar.session.compiled import Compiled, Running

if TYPE_CHECKING:
    from autopar.session.compiler import Compiler

SHAPES = 8  # at most this many shapes of prompts, each with its programs and caches
Forward = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
Both = tuple[Captured, Captured]
Plans = tuple[tuple[Graph, Plan], tuple[Graph, Plan]]
_ADVICE = "build the same model on every rank, and pass the same prompts on every rank"


@dataclass(frozen=True)
class Pair:
    """The programs for prompts of one shape.

    Attributes:
        compiled: the prefill and the decode.
        prefill, decode: run them, and return whole outputs by name.
        clear: sets the caches to zero.
    """

    compiled: tuple[Compiled, Compiled]
    prefill: Forward
    decode: Forward
    clear: Callable[[], None]


def compile_pair(
    compiler: Compiler, model: nn.Module, sizes: Sizes, first: Compiled | None
) -> tuple[Compiled, Compiled]:
    """Compiles a prefill and a decode, the same on every rank; every rank calls it.

    Args:
        compiler: compiler of the session.
        model: the model.
        sizes: sizes of the prompts.
        first: the program that stores the parameters; None if the prefill is to store them.

    Raises:
        CaptureError, InfeasibleError: see `autopar.compile`.
        ProgramError: the program has local batches, local updates or several copies of stages.
        BatchError: the ranks captured different graphs.
        PlanMismatchError: the given plan is for other prompts, another model or another mesh.
    """
    refuse_outer(compiler.outer or (None if first is None else first.plan.outer))
    given = compiler.generation if first is None else None
    stated = first.plan if first is not None else None if given is None else given.decode
    options = compiler.options
    if stated is None and options.searches_stages:
        count = from_first_rank(lambda: _count_of_stages(compiler, model, sizes))
        options = replace(options, stages=count, global_batch=None)
    options = generating_options(options, stated)
    both = capture_generation(model, sizes, options)
    texts = {f"the captured {n}": text_of_graph(e.graph) for n, e in zip(_NAMES, both, strict=True)}
    compare_ranks(texts, BatchError, _ADVICE)
    if given is not None:
        plans = _given(given, both, sizes, compiler.mesh)
    else:
        plans = _searched(compiler, both, sizes, options, first)
    prefill, decode = (
        Compiled.of(
            replace(each, graph=graph),
            plan.on(compiler.mesh),
            options,
            Trace(None),
            all_ranks=True,
        )
        for each, (graph, plan) in zip(both, plans, strict=True)
    )
    return prefill, decode


def _count_of_stages(compiler: Compiler, model: nn.Module, sizes: Sizes) -> int:
    """Returns the number of stages of the fastest generation."""
    return len(plan_generation(model, compiler.mesh, compiler.options, sizes).decode.stages)


def _searched(
    compiler: Compiler, both: Both, sizes: Sizes, options: Options, first: Compiled | None
) -> Plans:
    """Returns the fastest plans, over the parameters of the first program if there is one."""
    trained = None if first is None else (first.captured.graph, first.plan)
    before, after = (each.graph for each in both)
    return from_first_rank(
        lambda: plan_serving(before, after, compiler.mesh, options, sizes.new_tokens, trained)
    )


def _given(plan: GenerationPlan, both: Both, sizes: Sizes, mesh: Mesh) -> Plans:
    """Returns the plans of a given one; PlanMismatchError if it is for other prompts or models."""
    planned = Sizes(plan.batch, plan.prompt, plan.new_tokens)
    if planned != sizes:
        raise PlanMismatchError(
            "the plan is for other prompts",
            why=f"it is for {planned}, and these are {sizes}",
            todo="generate from prompts of these sizes first, or plan for the others",
        )
    (before, after), (prefill, decode) = both, (plan.prefill, plan.decode)
    prefill.check(before.graph, mesh)
    decode.check(after.graph, mesh)
    return (before.graph, prefill), (after.graph, decode)


_NAMES = ("prefill", "decode")


def refuse_outer(outer: Outer | None) -> None:
    """Raises ProgramError under local updates."""
    if outer is not None:
        raise _local_updates()


def _local_updates() -> ProgramError:
    return ProgramError(
        "a program with local updates cannot generate",
        why="their parameters differ between synchronisations",
        todo=IN_ANOTHER,
    )


def load_pair(
    executor: Program, compiled: tuple[Compiled, Compiled], running: Running, main: Compiled
) -> Pair:
    """Loads the programs over the parameters of an executor; every rank calls it.

    Args:
        executor: executor of the session.
        compiled: the prefill and the decode.
        running: how the session runs programs.
        main: the program that the executor started with, which may be the prefill.

    Raises:
        ProgramError: the executor runs local updates.
    """
    if isinstance(executor, LocalUpdates):
        raise _local_updates()
    prefill, decode = (_loaded(executor, each, running, main) for each in compiled)
    caches = {id(tensor): tensor for _, own in (prefill, decode) for tensor in own}.values()

    def clear() -> None:
        for tensor in caches:
            tensor.zero_()

    return Pair(compiled, prefill[0], decode[0], clear)


def _loaded(
    executor: Executor | Pipeline, compiled: Compiled, running: Running, main: Compiled
) -> tuple[Forward, Sequence[Tensor]]:
    """Returns the forward of a program, and this rank's caches."""
    own = {
        name: value
        for name, value in compiled.captured.buffers.items()
        if name not in executor.shapes
    }
    if isinstance(executor, Executor):
        variant = executor.main
        if compiled is not main:
            variant = executor.add(compiled.modules(running.backend)[0], own)
        run = partial(executor.forward, variant=variant)
        return lambda batch: run(batch).gather(), [*variant.caches.values()]
    program = executor.main
    if compiled is not main:
        placement = compiled.placement.on(executor.peers.ranks)
        modules = compiled.modules(running.backend)
        program = executor.add(modules, placement, compiled.inputs, own)
    play = partial(executor.forward, program=program)
    return lambda batch: play(batch).gather(), program.caches


def refuse_if_generating(compiled: Compiled | None, what: str, todo: str) -> None:
    """Raises ProgramError if the first program of a session generates."""
    if compiled is not None and any(
        leaf.is_cache for leaf in compiled.captured.graph.leaves("buffer")
    ):
        raise ProgramError(
            f"a program that began with generate cannot {what}",
            why="its parameters are stored for a generation, without gradients",
            todo=todo,
        )


def refuse_more_shapes(known: int) -> None:
    """Raises BatchError if a session has compiled as many shapes of prompts as it may."""
    if known >= SHAPES:
        raise BatchError(
            f"the prompts have a shape beyond the {SHAPES} that the program is compiled for",
            why="each shape needs its own programs and caches",
            todo="pad prompts on the left to fewer lengths, and ask for equally many new tokens",
        )

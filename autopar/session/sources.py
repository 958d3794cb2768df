"""Emits the programs of a plan, after a check of the plan against the rules."""

from __future__ import annotations

from functools import partial

from autopar.codegen.emit import emit
from autopar.intra_op import legal
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint
from autopar.lower.lowered_text import format_lowered
from autopar.lower.program import lower
from autopar.plan import Plan
from autopar.planning.options import Options
from autopar.planning.prices import cost_model
from autopar.planning.stored import graphs_of
from autopar.planning.trace import Trace


def sources_of(graph: Graph, plan: Plan, options: Options, trace: Trace) -> tuple[str, ...]:
    """Returns the generated Python of every stage of a plan.

    Args:
        graph: the captured model; for a pipeline, on one microbatch.
        plan: its plan.
        options: sharding rules, and prices for comments.
        trace: writes the sources.

    Raises:
        PlanMismatchError: the plan is for another model or mesh.
        PlanError: the rules do not allow a layout.
    """
    sources = []
    prices = {stage.mesh: cost_model(stage.mesh, options).collective for stage in plan.stages}
    for number, part in enumerate(graphs_of(graph, plan)):
        stage = plan.stages[number]
        stage.check(fingerprint(part), {node.name for node in part.folded}, stage.mesh)
        legal.check(part, stage, options.table)
        program = lower(part, stage, prices[stage.mesh])
        source = emit(part, stage, prices[stage.mesh], program)
        before = f"stage_{number}_" if plan.is_pipeline else ""
        trace(f"{before}lower.txt", partial(format_lowered, program, part))
        name = f"stage_{number}.py" if plan.is_pipeline else "program.py"
        trace(name, lambda source=source: source)  # type: ignore[misc]
        sources.append(source)
    return tuple(sources)

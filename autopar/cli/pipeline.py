"""Output of `autopar plan --global-batch`: the fastest pipeline and the runners-up."""

from __future__ import annotations

from itertools import groupby

from rich.console import RenderableType
from rich.table import Table

from autopar.cost.uncertainty import step_error
from autopar.inter_op.stage_values import Pipeline, Stage
from autopar.ir.units import format_bytes, format_seconds
from autopar.plan import Plan
from autopar.planning.pipelines.search import SearchResult


def render(searched: SearchResult, plan: Plan) -> list[RenderableType]:
    """Renders the stages and the runners-up.

    Args:
        searched: the result of the search, whose figures stages and runners-up show.
        plan: the plan of the fastest pipeline, with simulated figures.

    Returns:
        Tables and lines of text.
    """
    best = searched.pipeline
    stages = Table(box=None, header_style="bold", title_justify="left")
    for name in ("stage", "devices", "layers", "mesh", "a microbatch", "memory"):
        stages.add_column(name)
    for (devices, *figures), alike in groupby(enumerate(best.stages), lambda each: _alike(each[1])):
        rows = list(alike)
        ends = rows[0], rows[-1]
        numbers, layers = (
            " to ".join(dict.fromkeys(text(*end) for end in ends))
            for text in (lambda number, _: str(number), lambda _, stage: _layers(stage))
        )
        stages.add_row(numbers, devices, layers, *figures)
    head = (
        f"{best.schedule}, {best.microbatches} microbatches, {len(best.stages)} stages: "
        f"{format_seconds(plan.predicted.step_seconds)} a step{step_range(plan)} (simulated), "
        f"{plan.predicted.bubble:.1%} bubble, {format_bytes(plan.predicted.peak_bytes)}\n"
        f"batch: {plan.model.batch} samples{_sequence(plan)}; "
        f"optimizer: {plan.stages[0].update.optimizer}; "
        f"precision: {str(plan.precision) or 'of the model'}"
    )
    others = Table(box=None, header_style="bold")
    for name in ("runner-up", "microbatches", "stages", "a step", "slower by"):
        others.add_column(name)
    for other, seconds in searched.others[:5]:
        others.add_row(
            *_row(other), format_seconds(seconds), f"{seconds / searched.seconds - 1:.1%}"
        )
    proved = 0 < searched.closed_form.gap < 1
    gap = (
        f"within {searched.closed_form.gap:.1%} of the optimum of the closed forms"
        if proved
        else ""
    )
    tail = f"{searched.closed_form.calls} stages priced{', ' if gap else ''}{gap}"
    return [head, "", stages, "", others, tail]


def step_range(plan: Plan) -> str:
    """Returns by how much the seconds of a pipeline's step may be off; nothing if unknown."""
    seconds = plan.predicted.step_seconds
    error = step_error(plan.mesh, seconds, plan.stages[0].calibration)
    return f" ± {format_seconds(error)}" if error else ""


def _sequence(plan: Plan) -> str:
    return f" of {plan.model.seq} tokens" if plan.model.seq else ""


def _alike(one: Stage) -> tuple[str, ...]:
    """Returns the cells that equal stages share; one row shows consecutive equal stages."""
    return str(one.submesh), _mesh(one), format_seconds(one.seconds), format_bytes(one.memory)


def _layers(one: Stage) -> str:
    spans = (dict.fromkeys((chunk.first, chunk.last)) for chunk in one.chunks)
    return ", ".join("-".join(map(str, span)) for span in spans)


def _mesh(one: Stage) -> str:
    """Returns the mesh of a stage, and how its blocks are recomputed, if they are."""
    again = {chunk.candidate.recompute for chunk in one.chunks} - {"none"}
    recompute = f", recompute {' and '.join(sorted(again))}" if again else ""
    return one.chunks[0].candidate.label + recompute


def _row(one: Pipeline) -> tuple[str, str, str]:
    return one.schedule, str(one.microbatches), str(len(one.stages))


def to_json(searched: SearchResult, plan: Plan) -> dict[str, object]:
    """Returns the content of `render` as a dictionary for JSON."""
    best = searched.pipeline
    return {
        "graph": plan.graph,
        "mesh": str(plan.mesh),
        "model": plan.model.table(),
        "schedule": best.schedule,
        "microbatches": best.microbatches,
        "predicted": plan.predicted.figures(),
        "searched_seconds": searched.seconds,
        "stages": [
            {
                "devices": str(one.submesh),
                "layers": [[chunk.first, chunk.last] for chunk in one.chunks],
                "mesh": one.chunks[0].candidate.label,
                "recompute": [chunk.candidate.recompute for chunk in one.chunks],
                "microbatch_seconds": one.seconds,
                "once_seconds": one.once,
                "peak_bytes": one.memory,
            }
            for one in best.stages
        ],
        "others": [
            {
                "schedule": one.schedule,
                "microbatches": one.microbatches,
                "stages": len(one.stages),
                "step_seconds": seconds,
            }
            for one, seconds in searched.others
        ],
        "priced": searched.closed_form.calls,
        "gap": searched.closed_form.gap if searched.closed_form.bound else None,
    }

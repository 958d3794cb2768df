"""Two whole plans side by side: figures, what they say of all stages, and stage by stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import RenderableType
from rich.text import Text

from autopar.explain.comparison import render_difference
from autopar.explain.difference import Difference, Figure, difference, figures, pairs
from autopar.plan import Plan


@dataclass(frozen=True)
class StageDifference:
    """What differs between stages; of several that differ alike it is told once.

    Attributes:
        stages: their numbers.
        difference: of their plans.
    """

    stages: tuple[int, ...]
    difference: Difference


@dataclass(frozen=True)
class PlanDifference:
    """What differs between two plans, of pipelines or of models in one piece.

    Attributes:
        head: "mesh", "schedule", "cuts" and the like -> how the plans write them, if they differ.
        figures: all predicted figures, those that agree among them.
        stages: those whose plans differ, where both have as many stages; else nothing.
    """

    head: dict[str, tuple[str, str]]
    figures: tuple[Figure, ...]
    stages: tuple[StageDifference, ...]

    @property
    def equal(self) -> bool:
        """Whether the plans say the same."""
        changed = any(figure.before != figure.after for figure in self.figures)
        return not (self.head or self.stages or changed)


def plan_difference(a: Plan, b: Plan) -> PlanDifference:
    """How plan `b` differs from plan `a`, for any models and meshes."""
    stages: list[StageDifference] = []
    if len(a.stages) == len(b.stages):
        for number, (one, other) in enumerate(zip(a.stages, b.stages, strict=True)):
            # Which stage it is of which model is said by the cuts.
            found = difference(one, other)
            found = _without(found, "graph")
            if found.equal:
                continue
            if stages and stages[-1].difference == found:
                before = stages.pop()
                stages.append(StageDifference((*before.stages, number), found))
            else:
                stages.append(StageDifference((number,), found))
    predicted = figures(a.predicted, b.predicted)
    return PlanDifference(heads(a, b), predicted, tuple(stages))


def heads(a: Plan, b: Plan) -> dict[str, tuple[str, str]]:
    """What two plans say differently of all stages, name -> how each writes it."""
    return pairs(_said(a), _said(b))


def render_plan_difference(
    found: PlanDifference, titles: tuple[str, str], *, everything: bool = False
) -> Iterator[RenderableType]:
    """Everything that differs: the whole, then its stages; arguments as of `render_difference`."""
    whole = Difference(found.head, {}, found.figures, ())
    yield from render_difference(whole, titles, everything=everything)
    for each in found.stages:
        numbers = ", ".join(map(str, each.stages))
        yield Text(f"stage{'s' * (len(each.stages) > 1)} {numbers}", style="bold")
        yield from render_difference(each.difference, titles, everything=everything)


def _without(found: Difference, name: str) -> Difference:
    head = {key: pair for key, pair in found.head.items() if key != name}
    return Difference(head, found.pins, found.figures, found.changes)


def _said(plan: Plan) -> dict[str, str]:
    found = {
        "graph": plan.graph,
        "mesh": str(plan.mesh),
        "model": str(plan.model),
    }
    if not plan.is_pipeline:
        return found
    return found | {
        "schedule": plan.schedule,
        "microbatches": str(plan.microbatches),
        "stages": str(len(plan.stages)),
        "cuts": ", ".join(f"%{end}" for end in plan.ends),
        "ranks": "; ".join(", ".join(map(str, stage.starts)) for stage in plan.stages),
    }

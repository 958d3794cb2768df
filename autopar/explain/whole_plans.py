"""Compares two whole plans: their figures, their entries for all stages, and stage by stage."""

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
    """The difference of one or more stages whose plans differ in the same way.

    Attributes:
        stages: their numbers.
        difference: difference of their plans.
    """

    stages: tuple[int, ...]
    difference: Difference


@dataclass(frozen=True)
class PlanDifference:
    """The difference of two plans with one or more stages.

    Attributes:
        head: "mesh", "schedule", "cuts" and the like -> the texts of both plans, if they differ.
        figures: all predicted figures, including equal ones.
        stages: stages whose plans differ; empty if the plans differ in their number of stages.
    """

    head: dict[str, tuple[str, str]]
    figures: tuple[Figure, ...]
    stages: tuple[StageDifference, ...]

    @property
    def equal(self) -> bool:
        """Returns whether the plans agree."""
        changed = any(figure.before != figure.after for figure in self.figures)
        return not (self.head or self.stages or changed)


def plan_difference(a: Plan, b: Plan) -> PlanDifference:
    """Returns the difference from plan `a` to plan `b`, for any models and meshes."""
    stages: list[StageDifference] = []
    if len(a.stages) == len(b.stages):
        for number, (one, other) in enumerate(zip(a.stages, b.stages, strict=True)):
            # The head names the model and the cuts; a stage's graph would repeat them.
            stage = _without(difference(one, other), "graph")
            if stage.equal:
                continue
            if stages and stages[-1].difference == stage:
                before = stages.pop()
                stages.append(StageDifference((*before.stages, number), stage))
            else:
                stages.append(StageDifference((number,), stage))
    predicted = figures(a.predicted, b.predicted)
    return PlanDifference(heads(a, b), predicted, tuple(stages))


def heads(a: Plan, b: Plan) -> dict[str, tuple[str, str]]:
    """Returns the entries for all stages in which two plans differ: name -> both texts."""
    return pairs(_head(a), _head(b))


def render_plan_difference(
    compared: PlanDifference, titles: tuple[str, str], *, everything: bool = False
) -> Iterator[RenderableType]:
    """Yields tables of all that differs, first of the whole plans, then of their stages.

    Args:
        compared: the difference.
        titles: headings of the two plans' columns.
        everything: whether to show all rows of long tables.
    """
    whole = Difference(compared.head, {}, compared.figures, ())
    yield from render_difference(whole, titles, everything=everything)
    for each in compared.stages:
        numbers = ", ".join(map(str, each.stages))
        yield Text(f"stage{'s' * (len(each.stages) > 1)} {numbers}", style="bold")
        yield from render_difference(each.difference, titles, everything=everything)


def _without(compared: Difference, name: str) -> Difference:
    head = {key: pair for key, pair in compared.head.items() if key != name}
    return Difference(head, compared.pins, compared.figures, compared.changes)


def _head(plan: Plan) -> dict[str, str]:
    head = {
        "graph": plan.graph,
        "mesh": str(plan.mesh),
        "model": str(plan.model),
    }
    if not plan.is_pipeline:
        return head
    return head | {
        "schedule": plan.schedule,
        "microbatches": str(plan.microbatches),
        "stages": str(len(plan.stages)),
        "cuts": ", ".join(f"%{end}" for end in plan.ends),
        "ranks": "; ".join(", ".join(map(str, stage.starts)) for stage in plan.stages),
    }

"""Explains the time and memory of a plan and the difference of two plans, as data and as text.

All figures add up to the plan's prediction, because both come from the same lines and prices.
"""

from autopar.explain.comparison import render_changes, render_difference, render_figures, signed
from autopar.explain.decisions import Change, Decision, changes, decisions
from autopar.explain.difference import (
    Difference,
    Figure,
    Traffic,
    difference,
    figures,
    repriced,
    traffic,
)
from autopar.explain.explanation import (
    Cost,
    Explanation,
    Line,
    Operator,
    Parameter,
    Section,
)
from autopar.explain.kernel_table import render_fused
from autopar.explain.moves import Call, Move, moves
from autopar.explain.rendering import PARTS, render, render_parameters, render_summary
from autopar.explain.summary import StepFigures, explain, parameters
from autopar.explain.views import VIEWS, Item, Row, items, view
from autopar.explain.whole_plans import (
    PlanDifference,
    StageDifference,
    heads,
    plan_difference,
    render_plan_difference,
)

__all__ = [
    "PARTS",
    "VIEWS",
    "Call",
    "Change",
    "Cost",
    "Decision",
    "Difference",
    "Explanation",
    "Figure",
    "Item",
    "Line",
    "Move",
    "Operator",
    "Parameter",
    "PlanDifference",
    "Row",
    "Section",
    "StageDifference",
    "StepFigures",
    "Traffic",
    "changes",
    "decisions",
    "difference",
    "explain",
    "figures",
    "heads",
    "items",
    "moves",
    "parameters",
    "plan_difference",
    "render",
    "render_changes",
    "render_difference",
    "render_figures",
    "render_fused",
    "render_parameters",
    "render_plan_difference",
    "render_summary",
    "repriced",
    "signed",
    "traffic",
    "view",
]

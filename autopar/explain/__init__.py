"""Where a plan's time and memory go: graph + plan + prices -> data, and that data as text.

The list adds up to the plan's prediction, because both are made of the same steps and prices.
"""

from autopar.explain.moves import Call, Move, moves
from autopar.explain.summary import (
    Cost,
    Explanation,
    Line,
    Operator,
    Parameter,
    Section,
    explain,
    parameters,
)
from autopar.explain.text import PARTS, render, render_parameters, render_summary
from autopar.explain.views import VIEWS, Item, Row, items, view

__all__ = [
    "PARTS",
    "VIEWS",
    "Call",
    "Cost",
    "Explanation",
    "Item",
    "Line",
    "Move",
    "Operator",
    "Parameter",
    "Row",
    "Section",
    "explain",
    "items",
    "moves",
    "parameters",
    "render",
    "render_parameters",
    "render_summary",
    "view",
]

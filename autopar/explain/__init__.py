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
from autopar.explain.text import render, render_parameters, render_summary

__all__ = [
    "Call",
    "Cost",
    "Explanation",
    "Line",
    "Move",
    "Operator",
    "Parameter",
    "Section",
    "explain",
    "moves",
    "parameters",
    "render",
    "render_parameters",
    "render_summary",
]

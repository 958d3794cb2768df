"""GELU in its tanh form, written out as in GPT-2 (arXiv:1606.08415, section 2).

torch has it as one operator, which replaces nine passes over memory by one.
"""

from __future__ import annotations

import math

from autopar.ir.fusion.pattern import Match, Pattern, computes

WRITTEN_OUT = (
    "({x} * 0.5) * (tanh(({x} + {x} ** 3 * 0.044715) * scale) + 1)",
    "{x} * 0.5 * (tanh({x} * scale * (({x} * 0.044715 * {x}) + 1)) + 1)",
)


def is_tanh_form(match: Match) -> bool:
    """Returns whether the scale of a written-out GELU, if any, is the square root of 2 / π."""
    scale = match.values.get("scale")
    if scale is None:
        return True
    return isinstance(scale, float) and math.isclose(scale, math.sqrt(2 / math.pi), rel_tol=1e-6)


def _fits(match: Match) -> bool:
    return is_tanh_form(match) and computes(match, "x") and match.found.type == match.type("x")


PATTERNS = (
    Pattern("gelu", "gelu", tuple(t.format(x="x") for t in WRITTEN_OUT), ("x",), fits=_fits),
)

"""GELU in its tanh form, written out as GPT-2 has it (arXiv:1606.08415, section 2).

torch has it in one operator: nine passes over memory become one.
"""

from __future__ import annotations

import math

from autopar.ir.fusion.pattern import Match, Pattern, Writer, computes
from autopar.ir.graph import Node, Ref

WRITTEN_OUT = (
    "({x} * 0.5) * (tanh(({x} + {x} ** 3 * 0.044715) * scale) + 1)",
    "{x} * 0.5 * (tanh({x} * scale * (({x} * 0.044715 * {x}) + 1)) + 1)",
)


def is_tanh_form(match: Match) -> bool:
    """Whether the scale of a written-out GELU, if it is one, is the square root of 2 / π."""
    scale = match.values.get("scale")
    if scale is None:
        return True
    return isinstance(scale, float) and math.isclose(scale, math.sqrt(2 / math.pi), rel_tol=1e-6)


def _fits(match: Match) -> bool:
    return is_tanh_form(match) and computes(match, "x") and match.found.type == match.type("x")


def _write(match: Match, writer: Writer) -> None:
    found, x = match.found, match.node("x")
    assert x is not None
    args, kwargs = (Ref(x.name),), (("approximate", "tanh"),)
    grad = found.requires_grad
    writer.nodes.append(
        Node(found.name, "aten.gelu", args, kwargs, found.types, found.source, grad)
    )


PATTERNS = (
    Pattern("gelu", "", tuple(t.format(x="x") for t in WRITTEN_OUT), fits=_fits, write=_write),
)

"""Gated activations: SwiGLU and GeGLU, the latter in the tanh form of GELU that the kernel has."""

from __future__ import annotations

from autopar.ir.fusion.pattern import Match, Pattern, computes
from autopar.ir.fusion.patterns.gelu import WRITTEN_OUT, is_tanh_form


def _fits(match: Match) -> bool:
    alike = match.type("gate") == match.type("up") == match.found.type
    return alike and computes(match, "gate", "up")


PATTERNS = (
    Pattern("gated", "swiglu", ("silu(gate) * up",), ("gate", "up"), fits=_fits),
    Pattern(
        "gated",
        "geglu",
        (
            "gelu(gate, approximate='tanh') * up",
            *(f"{text.format(x='gate')} * up" for text in WRITTEN_OUT),
        ),
        ("gate", "up"),
        fits=lambda match: _fits(match) and is_tanh_form(match),
    ),
)

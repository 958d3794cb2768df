"""LayerNorm with a preceding residual addition; without one, torch's own is as fast."""

from __future__ import annotations

from autopar.ir.fusion.pattern import Match, Pattern, computes, is_vector, width


def _fits(match: Match) -> bool:
    size = width(match, "x")
    return (
        match.values["shape"] == (size,)
        and isinstance(match.values["eps"], float)
        and is_vector(match, "weight", size)
        and is_vector(match, "bias", size)
        and computes(match, "x", "residual")
        and match.type("x") == match.type("residual") == match.type("h") == match.found.type
    )


PATTERNS = (
    Pattern(
        "layer_norm",
        "add_layer_norm",
        ("layer_norm((h := x + residual), shape, weight, bias, eps, ...)",),
        ("x", "residual", "weight", "bias", "eps"),
        gives=("h",),
        fits=_fits,
    ),
)

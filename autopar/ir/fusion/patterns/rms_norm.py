"""RMSNorm, as written by Hugging Face and by torch, with a preceding residual addition or without.

The kernel rounds once, at the end; a model that rounds before it multiplies by the weight rounds
once more.
"""

from __future__ import annotations

from autopar.ir.fusion.pattern import Match, Pattern, computes, is_vector, width

_WRITTEN_OUT = (
    "narrow(weight * narrow(wide({x}) * rsqrt(mean(wide({again}) ** 2) + eps)))",
    "narrow(weight * narrow(wide({x}) / sqrt(mean(wide({again}) ** 2) + eps)))",
)
_TORCH = "rms_norm({x}, shape, weight, eps)"


def _spelled(x: str, again: str) -> tuple[str, ...]:
    return tuple(text.format(x=x, again=again) for text in (*_WRITTEN_OUT, _TORCH))


def _fits(match: Match) -> bool:
    size, eps = width(match, "x"), match.values["eps"]
    shape = match.values.get("shape", (size,))
    return (
        isinstance(eps, float)
        and shape == (size,)
        and is_vector(match, "weight", size)
        and computes(match, "x")
        and match.found.type == match.type("x")
    )


def _added(match: Match) -> bool:
    return _fits(match) and match.type("x") == match.type("residual") == match.type("h")


PATTERNS = (
    Pattern(
        "rms_norm",
        "add_rms_norm",
        _spelled("(h := x + residual)", "h"),
        ("x", "residual", "weight", "eps"),
        gives=("h",),
        fits=_added,
    ),
    Pattern("rms_norm", "rms_norm", _spelled("x", "x"), ("x", "weight", "eps"), fits=_fits),
)

"""Dropout of rows whose number depends on values: allowed if it drops nothing, else an error."""

from __future__ import annotations

from autopar.errors import CaptureError

# The dropout mask of an expert's rows could be computed from the experts of all tokens. But a stage
# of a pipeline also draws the random numbers of other stages, whose tokens it does not have.
_REASON = (
    "dropout draws a number for each element in turn, so which numbers a row gets depends on how "
    "many rows come before it, on all devices"
)
_ADVICE = (
    "apply dropout before rows are selected, or to what they are added to; or set its rate to 0"
)


def drops(p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """Returns whether dropout with these arguments drops anything."""
    return training and p > 0


def dropout_error(rows: str) -> CaptureError:
    """Returns the error of dropout of some rows, which `rows` describes."""
    return CaptureError(f"dropout of {rows}", why=_REASON, todo=_ADVICE)

"""Options that a given plan has already decided; other values of them are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autopar.errors import OptionError, PlanMismatchError
from autopar.ir.chosen_algorithms import ChosenAlgorithms
from autopar.ir.precision import Precision
from autopar.plan import Plan
from autopar.planning.options import GLOBAL


def collectives_of(plan: Plan | None, wanted: str | Sequence[str] | None) -> ChosenAlgorithms | str:
    """Returns the algorithms of the plan, "auto", or the requested rows."""
    if plan is None:
        return wanted if isinstance(wanted, str) else ChosenAlgorithms.parse(wanted or ())
    planned = plan.stages[0].collectives
    if wanted is not None and (
        isinstance(wanted, str) or ChosenAlgorithms.parse(wanted) != planned
    ):
        raise PlanMismatchError(
            "the plan already states the algorithms of its collectives",
            why=f"collectives={wanted!r} is passed, and the plan has {len(planned.rows)} rows",
            todo="omit collectives, or plan again",
        )
    return planned


def batches_of(plan: Plan | None, wanted: str) -> str:
    """Returns the kind of batches of the plan, or without a plan the requested one."""
    if plan is None:
        return wanted
    recorded = plan.stages[0].asked.batches
    if wanted not in (GLOBAL, recorded):
        raise PlanMismatchError(
            f"the plan is for {recorded} batches",
            why=f"batches={wanted!r} is requested",
            todo="omit batches, or plan again",
        )
    return recorded


def microbatches_of(
    plan: Plan | None, microbatches: int, accumulate: int, whole_loss: bool
) -> dict[str, Any]:
    """Returns the options `microbatches` and `whole_loss` of a plan to make, or of a given one.

    Raises:
        OptionError: both numbers are passed.
        PlanMismatchError: the plan accumulates another number of microbatches.
    """
    if microbatches != 1 and accumulate != 1:
        raise OptionError(
            "microbatches and accumulate are two ways to cut a batch",
            why=f"microbatches={microbatches} and accumulate={accumulate} are passed",
            todo="pass one of them",
        )
    if plan is None:
        return {"microbatches": microbatches * accumulate, "whole_loss": whole_loss}
    planned = plan.microbatches if len(plan.stages) == 1 else 1
    if accumulate not in (1, planned):
        raise PlanMismatchError(
            f"the plan accumulates {planned} microbatches",
            why=f"accumulate={accumulate} is requested",
            todo="omit accumulate, or plan again",
        )
    return {"microbatches": microbatches, "whole_loss": plan.stages[0].asked.whole_loss}


def precision_of(
    plan: Plan | None, wanted: str | Precision | None, gradients: str | None
) -> Precision:
    """Returns the plan's precision, or without a plan the requested one."""
    base = Precision.read(wanted) if plan is None or wanted is not None else plan.precision
    asked = base if gradients is None else replace(base, gradients=gradients)
    if plan is not None and asked != plan.precision:
        raise PlanMismatchError(
            f"the plan's precision is {str(plan.precision) or 'that of the model'}",
            why=f"{str(asked) or 'that of the model'} is requested",
            todo="omit precision and gradients, or plan again",
        )
    return asked

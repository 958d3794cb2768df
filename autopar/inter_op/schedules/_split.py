"""Rows of ZB-H1 and ZB-H2: forwards alternate with input backwards, weight backwards follow."""

from __future__ import annotations

from autopar.inter_op.schedule import Row
from autopar.ir.action import Action


def row(stage: int, microbatches: int, warm_up: int, delay: int) -> Row:
    """Returns a row whose weight backwards lag `delay` input backwards behind.

    Args:
        stage: index of the stage.
        microbatches: number per step.
        warm_up: forwards before the first turn.
        delay: number of input backwards by which the weight backwards lag.
    """
    forwards, inputs, weights = (
        [Action(kind, stage, batch) for batch in range(microbatches)] for kind in "FIW"
    )
    actions = forwards[:warm_up]
    for turn in range(microbatches):
        actions += forwards[warm_up + turn : warm_up + turn + 1]
        actions.append(inputs[turn])
        if turn >= delay:
            actions.append(weights[turn - delay])
    return (*actions, *weights[max(0, microbatches - delay) :])

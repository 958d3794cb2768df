"""Traces `ctc_loss`, whose own operator cannot be traced, also of labels that a mask selects."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.capture.stand_ins.selected import Selected
from autopar.errors import CaptureError
from autopar.operators.ctc import ctc_losses

_REDUCTIONS = ("none", "mean", "sum")  # in the order of torch's numbers


def ctc_loss(
    scores: Tensor,
    targets: Tensor | Selected,
    frames: Tensor | Sequence[int],
    lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Returns what torch's function of this name returns, for the same arguments.

    Raises:
        CaptureError: the targets of all samples follow one another in one row, so that the place of
            a sample depends on the lengths.
    """
    count, labels = (_tensor(sizes, scores) for sizes in (frames, lengths))
    padded = _padded(targets, labels)
    if scores.ndim != 3 or padded.ndim != 2:
        raise CaptureError(
            "ctc_loss of targets in one row",
            why="where the targets of a sample begin depends on the lengths of the others",
            todo="pass scores [frames, batch, classes] and padded targets [batch, labels]",
        )
    losses: Tensor = ctc_losses(scores, padded, count, labels, blank, zero_infinity)
    kind = _REDUCTIONS[reduction] if isinstance(reduction, int) else reduction
    if kind == "mean":
        return (losses / labels.clamp(min=1)).mean()
    return losses.sum() if kind == "sum" else losses


def _tensor(sizes: Tensor | Sequence[int], like: Tensor) -> Tensor:
    return sizes if isinstance(sizes, Tensor) else torch.tensor(sizes, device=like.device)


def _padded(targets: Tensor | Selected, lengths: Tensor) -> Tensor:
    """Returns targets [batch, labels]; of selected ones, rows that begin with those selected.

    The program checks that a row selects as many as its length says, as otherwise torch would take
    them for targets of another sample.
    """
    if isinstance(targets, Tensor):
        return targets
    mask = targets.source
    if mask.ndim != 2 or targets.ndim != 1:
        return targets.rows
    same = (lengths == mask.sum(1)).all()
    torch.ops.autopar.check(same, True, "ctc_loss: every row selects as many as its length says")
    order = mask.logical_not().long().argsort(dim=1, stable=True)
    return targets.rows.reshape(mask.shape).gather(1, order)

"""Losses of alignments (CTC, Graves et al. 2006), as operators of torch.

torch's own operator also returns a tensor whose size depends on the lengths of the targets, so that
it cannot be traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@torch.library.custom_op("autopar::ctc_losses", mutates_args=())
def ctc_losses(
    scores: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor, blank: int, finite: bool
) -> Tensor:
    """Returns the loss of every sample.

    Args:
        scores: log probabilities, [frames, batch, classes].
        targets: padded labels, i64[batch, labels].
        frames, lengths: how many frames and labels of each sample count, i64[batch].
        blank: class of no label.
        finite: whether losses of labels that do not fit into the frames are zero, not infinite.
    """
    losses: Tensor = aten._ctc_loss.Tensor(scores, targets, frames, lengths, blank, finite)[0]
    return losses.where(losses != torch.inf, 0.0) if finite else losses


@torch.library.custom_op("autopar::ctc_gradients", mutates_args=())
def ctc_gradients(
    given: Tensor,
    scores: Tensor,
    targets: Tensor,
    frames: Tensor,
    lengths: Tensor,
    blank: int,
    finite: bool,
) -> Tensor:
    """Returns the gradient of the scores; `given` are those of the losses."""
    own = targets, frames, lengths
    losses, sums = aten._ctc_loss.Tensor(scores, *own, blank, finite)
    gradients: Tensor = aten._ctc_loss_backward.Tensor(
        given, scores, *own, losses, sums, blank, finite
    )
    return gradients


@ctc_losses.register_fake
def _(scores: Tensor, *_: Any) -> Tensor:
    return scores.new_empty(scores.shape[1])


@ctc_gradients.register_fake
def _(given: Tensor, scores: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(scores)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


def _gradients(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
    own = ctc_gradients(given, *ctx.saved_tensors, *ctx.settings)
    return own, None, None, None, None, None


ctc_losses.register_autograd(_gradients, setup_context=_keep)

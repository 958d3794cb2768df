"""What a step of training needs before it looks at its batch."""

from __future__ import annotations

import torch

from autopar.errors import ProgramError


def check_trainable(has_loss: bool) -> None:
    """ProgramError if a program has no loss, or gradients are switched off where it is called."""
    if not has_loss:
        raise ProgramError(
            "the program has no loss to train on",
            todo="return a scalar loss from the model, or pass loss_fn",
        )
    if not torch.is_grad_enabled():
        inference = torch.is_inference_mode_enabled()
        raise ProgramError(
            "a step is called where gradients are switched off",
            why=f"the call stands under torch.{'inference_mode' if inference else 'no_grad'}()",
            todo="call program.step outside of it; program(...) evaluates without a step",
        )

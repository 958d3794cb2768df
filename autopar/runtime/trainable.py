"""Checks that a program can train, before it looks at its batch."""

from __future__ import annotations

import torch

from autopar.errors import ProgramError


def check_trainable(has_loss: bool) -> None:
    """Raises ProgramError if a program has no loss, or if gradients are switched off."""
    if not has_loss:
        raise ProgramError(
            "the program has no loss to train on",
            todo="return a scalar loss from the model, or pass loss_fn",
        )
    if not torch.is_grad_enabled():
        inference = torch.is_inference_mode_enabled()
        raise ProgramError(
            "step is called with gradients switched off",
            why=f"the call is inside torch.{'inference_mode' if inference else 'no_grad'}()",
            todo="call program.step outside of it; program(...) evaluates without a step",
        )

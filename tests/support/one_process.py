"""Trains a model in one process and in a session, and compares both."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

import autopar

close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)


def compare_step(loss: Tensor, expected: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Updates the model on one process by its loss, which a session's step must equal."""
    optimizer.step()
    optimizer.zero_grad()
    close(loss, expected.detach())


def compare_weights(session: autopar.Session, alone: nn.Module) -> None:
    """Compares parameters and buffers of a session with those of the model on one process."""
    found: Mapping[str, Tensor] = session.state_dict()
    for name, value in alone.state_dict().items():
        close(found[name], value)

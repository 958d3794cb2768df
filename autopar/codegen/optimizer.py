"""Optimizers as users pass them: any function that makes a torch optimizer of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.codegen.state import Parameter
from autopar.errors import ProgramError

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
# Their update of one element depends on others: on a shard it would not be the whole tensor's.
_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon")


def refuse_what_shards_break(optimizer: Optimizer, parameters: Iterable[Parameter]) -> None:
    """ProgramError if an optimizer mixes the elements of a tensor and one is held in parts."""
    kind = type(optimizer).__name__
    cut = [p.name for p in parameters if p.storage.updated.sharded_axes or p.piece]
    if kind in _NOT_ELEMENTWISE and cut:
        raise ProgramError(
            f"{kind} cannot train a sharded parameter",
            why=f"its update mixes the elements of a tensor; {cut[0]} is held in parts",
            todo="use an elementwise optimizer (SGD, Adam, AdamW, Lion, ...) or pin the "
            "parameters whole",
        )


def elementwise(optimizer: OptimizerFactory) -> bool:
    """Whether the update of one element depends on no other, so that parts can be updated apart.

    Raises:
        ProgramError: the factory makes no optimizer.
    """
    try:
        made = optimizer([nn.Parameter(torch.zeros(4, 4))])
    except Exception as error:  # a factory is the user's code and may raise anything
        raise ProgramError(
            f"cannot make the optimizer {getattr(optimizer, '__name__', optimizer)}",
            why=f"of one parameter of 16 elements: {type(error).__name__}: {error}",
            todo="pass a function of parameters that returns a torch optimizer",
        ) from error
    return type(made).__name__ not in _NOT_ELEMENTWISE


def state_bytes(optimizer: OptimizerFactory) -> float:
    """Optimizer state in units of a parameter's own bytes, seen on a parameter of 16 elements.

    Raises:
        ProgramError: the factory makes no optimizer, or one whose step needs a closure.
    """
    parameter = nn.Parameter(torch.zeros(4, 4))
    parameter.grad = torch.zeros_like(parameter)
    try:
        made = optimizer([parameter])
        made.step()
    except Exception as error:  # a factory is the user's code and may raise anything
        raise ProgramError(
            f"cannot make a step with the optimizer {getattr(optimizer, '__name__', optimizer)}",
            why=f"on one parameter of 16 elements: {type(error).__name__}: {error}",
            todo="pass a function of parameters that returns a torch optimizer whose step needs no "
            "closure, functools.partial(torch.optim.AdamW, lr=3e-4)",
        ) from error
    held = made.state[parameter].values()
    total = sum(t.numel() * t.element_size() for t in held if isinstance(t, Tensor) and t.ndim)
    return total / (parameter.numel() * parameter.element_size())

"""Checks of optimizers as users pass them: functions that create a torch optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar.errors import ProgramError
from autopar.files.checked_values import shown
from autopar.ir.fusion import UPDATE

# Called with parameters, or with groups of them.
OptimizerFactory = Callable[[Any], Optimizer]
_SIDE = 4


def refuse_what_steps_break(optimizer: OptimizerFactory) -> None:
    """Raises ProgramError if an optimizer cannot update its parameters one after the other.

    This is tested by two steps on two small matrices, together and one after the other.
    """
    weights = [torch.linspace(*ends, _SIDE).reshape(2, -1) for ends in ((-1.0, 1.0), (0.5, 2.0))]
    updated = []
    for rows in (((0, 1),), ((0,), (1,))):
        parameters = [nn.Parameter(weight.clone()) for weight in weights]
        instance = optimizer(parameters)
        for _, row in itertools.product(range(2), rows):
            for number, parameter in enumerate(parameters):
                parameter.grad = torch.cos(7 * weights[number]) if number in row else None
            instance.step()
        updated.append(parameters)
    if not all(torch.allclose(one, other) for one, other in zip(*updated, strict=True)):
        raise ProgramError(
            f"the state of {factory_name(optimizer)} cannot lie in host memory",
            why="it would be copied in buckets, but its update of one parameter depends on others",
            todo='leave offload="optimizer" out, or use an optimizer that updates each parameter '
            "by itself (SGD, Adam, AdamW, Lion, ...)",
        )


def fusable(optimizer: OptimizerFactory, chosen: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the fusions to apply, without the optimizer's step if the kernel does not support it.

    Args:
        optimizer: its factory.
        chosen: names as returned by `autopar.ir.fusion.choose`.

    Raises:
        ProgramError: the factory creates no optimizer.
    """
    if UPDATE not in chosen:
        return chosen
    from autopar.runtime.update import adamw  # imports Triton, if installed

    instance = sample(optimizer)
    return chosen if adamw.takes(instance) else tuple(name for name in chosen if name != UPDATE)


def sample(optimizer: OptimizerFactory) -> Optimizer:
    """Returns an optimizer of one small matrix; raises ProgramError if the factory creates none."""
    return _made(optimizer, nn.Parameter(torch.zeros(_SIDE, _SIDE)))


def _made(optimizer: OptimizerFactory, parameter: nn.Parameter) -> Optimizer:
    """Returns an optimizer of one parameter; raises ProgramError if the factory creates none."""
    try:
        return optimizer([parameter])
    except Exception as error:  # a factory is user code and may raise anything
        raise ProgramError(
            f"cannot create the optimizer {factory_name(optimizer)}",
            why=f"{type(error).__name__}: {error}",
            todo="pass a function of parameters that returns a torch optimizer",
        ) from error


def factory_name(optimizer: OptimizerFactory) -> str:
    """Returns the name of an optimizer, for messages."""
    factory = getattr(optimizer, "func", optimizer)  # for a functools.partial
    return str(getattr(factory, "__name__", "") or shown(factory))

"""Checks of optimizers as users pass them: functions that create a torch optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.errors import ProgramError
from autopar.files.checked_values import shown
from autopar.ir.fusion import UPDATE
from autopar.runtime.parameters.pieces import Parameter

# Called with parameters, or with groups of them.
OptimizerFactory = Callable[[Any], Optimizer]
_SIDE = 4


def refuse_what_shards_break(optimizer: OptimizerFactory, parameters: Iterable[Parameter]) -> None:
    """Raises ProgramError if an optimizer mixes the elements of a tensor and one is sharded."""
    trained = [p for p in parameters if p.trainable]
    cut = [p.name for p in trained if p.storage.updated.sharded_axes or p.piece]
    if cut and not elementwise(optimizer):
        raise ProgramError(
            f"{_name(optimizer)} cannot train a sharded parameter",
            why=f"its update mixes the elements of a tensor; {cut[0]} is sharded",
            todo="use an elementwise optimizer (SGD, Adam, AdamW, Lion, ...) or pin the "
            "parameters whole",
        )


def refuse_what_steps_break(optimizer: OptimizerFactory) -> None:
    """Raises ProgramError if an optimizer cannot update its parameters one after the other.

    This is tested by two steps on two small parameters, together and one after the other.
    """
    weights = [torch.linspace(-1.0, 1.0, _SIDE), torch.linspace(0.5, 2.0, _SIDE)]
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
            f"the state of {_name(optimizer)} cannot lie in host memory",
            why="it would be copied in buckets, but its update of one parameter depends on others",
            todo='leave offload="optimizer" out, or use an optimizer that updates each parameter '
            "by itself (SGD, Adam, AdamW, Lion, ...)",
        )


def elementwise(optimizer: OptimizerFactory) -> bool:
    """Returns whether the update of an element depends on no other, so that shards can be updated.

    This is tested by two steps on a small parameter, and on its parts.

    Raises:
        ProgramError: the factory creates no optimizer, or one whose step needs a closure.
    """
    weight = torch.linspace(-1.0, 1.0, _SIDE * _SIDE).reshape(_SIDE, _SIDE)
    grads = [torch.cos(7 * weight), torch.sin(3 * weight)]
    whole, _ = _stepped(optimizer, weight, grads)
    return all(
        torch.allclose(
            _stepped(optimizer, weight[part], [grad[part] for grad in grads])[0], whole[part]
        )
        for part in (slice(0, 1), slice(1, None))
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

    instance = _made(optimizer, nn.Parameter(torch.zeros(_SIDE)))
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
            f"cannot make the optimizer {_name(optimizer)}",
            why=f"{type(error).__name__}: {error}",
            todo="pass a function of parameters that returns a torch optimizer",
        ) from error


def state_bytes(optimizer: OptimizerFactory) -> float:
    """Returns the bytes of optimizer state per byte of parameter, observed on 16 elements.

    Raises:
        ProgramError: the factory creates no optimizer, or one whose step needs a closure.
    """
    _, state = _stepped(optimizer, torch.zeros(_SIDE, _SIDE), [torch.zeros(_SIDE, _SIDE)])
    held = sum(t.numel() * t.element_size() for t in state)
    return held / (_SIDE * _SIDE * torch.zeros(()).element_size())


def _stepped(
    optimizer: OptimizerFactory, weight: Tensor, grads: Iterable[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Returns a parameter after a step with each gradient, and its state without single numbers."""
    parameter = nn.Parameter(weight.clone())
    try:
        instance = optimizer([parameter])
        for grad in grads:
            parameter.grad = grad.clone()
            instance.step()
    except Exception as error:  # a factory is user code and may raise anything
        raise ProgramError(
            f"cannot make a step with the optimizer {_name(optimizer)}",
            why=f"on one parameter of {weight.numel()} elements: {type(error).__name__}: {error}",
            todo="pass a function of parameters that returns a torch optimizer whose step needs no "
            "closure, functools.partial(torch.optim.AdamW, lr=3e-4)",
        ) from error
    state = [t for t in instance.state[parameter].values() if isinstance(t, Tensor) and t.ndim]
    return parameter.detach(), state


def _name(optimizer: OptimizerFactory) -> str:
    factory = getattr(optimizer, "func", optimizer)  # for a functools.partial
    return str(getattr(factory, "__name__", "") or shown(factory))

"""Observes a torch optimizer: two steps on small parameters show its states and requirements.

So any optimizer works, whatever its name. A parameter of each number of dimensions is updated
whole and in parts, cut along every dimension; if the results differ, its elements are mixed. Files
of `autopar/runtime/optimizers/` describe properties that cannot be observed, such as states that
stay split while one owner computes on the whole parameter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.errors import ProgramError
from autopar.ir.update import Rule, State, Update
from autopar.ir.update.update_rules import ANY, PARTS, WHOLE, dims_of
from autopar.runtime.optimizers import described
from autopar.runtime.update.groups import Options
from autopar.runtime.update.optimizer import OptimizerFactory, factory_name

_SIDES = (5, 7, 3, 2, 11)  # of observed parameters: distinct, so that states show their extents
_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


def observed(
    optimizer: OptimizerFactory, options: Mapping[str, Options] | None = None, average: bool = False
) -> Update:
    """Returns the update that an optimizer makes.

    Args:
        optimizer: its factory.
        options: options of its groups, by name of a parameter; {} for those without.
        average: whether an average of every parameter is kept, too.

    Raises:
        ProgramError: the factory creates no optimizer, or one whose step needs a closure.
    """
    plain = _rules(optimizer, {})
    names: dict[str, list[str]] = {}
    for name, given in (options or {}).items():
        names.setdefault(json.dumps(given, sort_keys=True, default=repr), []).append(name)
    rules: list[Rule] = []
    for members in names.values():
        own = _rules(optimizer, (options or {})[members[0]])
        if own != plain:
            rules += [replace(rule, names=tuple(members)) for rule in own]
    update = Update((*rules, *plain), factory_name(optimizer))
    return update.with_average() if average else update


def _rules(optimizer: OptimizerFactory, options: Options) -> tuple[Rule, ...]:
    """Returns the rules of parameters in a group with these options."""
    known = described(_made(optimizer, options, torch.zeros(4, 4))[0])
    if known is not None:
        return known
    rules = {}
    for ndim in (2, 1, 3, 4, 5):
        try:
            rules[ndim] = _rule(optimizer, options, ndim)
        except ProgramError:
            if ndim == 2:  # of others an optimizer may have none
                raise
    if 1 in rules:  # the state of a number would look like a count
        rules[0] = replace(rules[1], dims="", needs=PARTS)
    alike = {replace(rule, dims=ANY) for rule in rules.values()}
    if len(rules) == 6 and len(alike) == 1:
        return tuple(alike)
    return tuple(rules[ndim] for ndim in sorted(rules))


def _rule(optimizer: OptimizerFactory, options: Options, ndim: int) -> Rule:
    """Returns the rule of parameters with `ndim` dimensions."""
    shape = _SIDES[:ndim]
    count = max(torch.Size(shape).numel(), 1)
    weight = torch.linspace(-1.0, 1.0, count).reshape(shape)
    # The second gradient is larger, so that it reaches a bound on an update's norm, as Adafactor's.
    grads = [torch.cos(7 * weight), 10 * torch.sin(3 * weight)]
    whole, state = _stepped(optimizer, options, weight, grads)
    mixed = any(
        not torch.allclose(_stepped(optimizer, options, weight[at], [g[at] for g in grads])[0],
                           whole[at])
        for at in _cuts(shape)
    )  # fmt: skip
    low = _low(optimizer, options, weight, grads)
    states = tuple(
        _state(name, value, low.get(name), shape)
        for name, value in state.items()
        if isinstance(value, Tensor)
    )
    return Rule(states, dims_of(ndim), needs=WHOLE if mixed else PARTS)


def _cuts(shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Yields two parts of a tensor along each of its dimensions."""
    for dim in range(len(shape)):
        for part in (slice(0, 1), slice(1, None)):
            yield (*(slice(None),) * dim, part)


def _low(
    optimizer: OptimizerFactory, options: Options, weight: Tensor, grads: Sequence[Tensor]
) -> dict[str, Any]:
    """Returns the state of a parameter in another dtype; {} if the optimizer does not take it."""
    try:
        given = [grad.double() for grad in grads]
        return _stepped(optimizer, options, weight.double(), given)[1]
    except ProgramError:
        return {}


def _state(name: str, value: Tensor, other: Any, shape: Sequence[int]) -> State:
    """Returns the description of a state of a parameter.

    Args:
        name, value: the state of an f32 parameter.
        other: the state of an f64 parameter, if there is one.
        shape: shape of the parameter.
    """
    follows = value.dtype == torch.float32 and (
        not isinstance(other, Tensor) or other.dtype == torch.float64
    )
    # A count is f32 or f64 by torch's default, whatever the parameter is.
    dtype = "" if follows and value.ndim else _DTYPES.get(value.dtype, "f32")
    if not value.ndim:
        return State(name, dtype, "", "host")
    if tuple(value.shape) == tuple(shape):
        return State(name, dtype)
    letters = dict(zip(shape, dims_of(len(shape)).split(), strict=True))
    if len(letters) == len(shape) and all(n in {1, *letters} for n in value.shape):
        return State(name, dtype, " ".join(letters.get(n, str(n)) for n in value.shape))
    share = value.numel() / max(torch.Size(shape).numel(), 1)
    extents = ANY if share == 1 else f"{share!r} {ANY}"
    return State(name, dtype, extents)


def _made(
    optimizer: OptimizerFactory, options: Options, weight: Tensor
) -> tuple[Optimizer, nn.Parameter]:
    """Returns an optimizer of one parameter in a group with these options, and the parameter."""
    parameter = nn.Parameter(weight.clone())
    try:
        given = [{"params": [parameter], **options}] if options else [parameter]
        return optimizer(given), parameter
    except Exception as error:  # a factory is user code and may raise anything
        raise ProgramError(
            f"cannot create the optimizer {factory_name(optimizer)}",
            why=f"{type(error).__name__}: {error}",
            todo="pass a function of parameters that returns a torch optimizer",
        ) from error


def _stepped(
    optimizer: OptimizerFactory, options: Options, weight: Tensor, grads: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Any]]:
    """Returns a parameter after a step with each gradient, and its state."""
    instance, parameter = _made(optimizer, options, weight)
    try:
        for grad in grads:
            parameter.grad = grad.clone()
            instance.step()
    except Exception as error:  # user code may raise anything
        raise ProgramError(
            f"cannot run a step of the optimizer {factory_name(optimizer)}",
            why=f"on one parameter of {weight.numel()} elements: {type(error).__name__}: {error}",
            todo="pass a function of parameters that returns a torch optimizer whose step needs no "
            "closure, functools.partial(torch.optim.AdamW, lr=3e-4)",
        ) from error
    return parameter.detach(), dict(instance.state[parameter])

"""Parameter groups of the optimizer, selected by name.

    groups=autopar.groups({"*.bias": {"weight_decay": 0.0}, "head.*": {"lr": 1e-4}})

They become groups of a torch optimizer, whatever part of a parameter a device updates. Every rank
has all groups in the same order, some perhaps empty, so that schedulers count equally on all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from autopar.errors import ProgramError

Options = dict[str, Any]
Roles = Callable[[nn.Module], dict[str, Options]]
GroupsLike = Callable[[str, nn.Parameter], Mapping[str, Any]]


@dataclass(frozen=True)
class Patterns:
    """Options by name pattern; created by `groups`."""

    options: Mapping[str, Mapping[str, Any]]

    def __call__(self, name: str, parameter: nn.Parameter) -> Options:
        """Returns the options of one parameter."""
        matched: Options = {}
        for pattern, options in self.options.items():
            if fnmatchcase(name, pattern):
                matched |= options
        return matched


def groups(options: Mapping[str, Mapping[str, Any]]) -> Patterns:
    """Returns optimizer options for parameters whose names match a pattern, for `compile`.

    Args:
        options: a name of the model's parameters with "*" for any part, and the options of the
            group: {"*.bias": {"weight_decay": 0.0}}. If several match, all apply, and later ones
            win.
    """
    return Patterns({pattern: dict(given) for pattern, given in options.items()})


def options_of(
    model: nn.Module, given: GroupsLike | None, roles: Roles | None = None
) -> dict[str, Options]:
    """Returns the options of every trained parameter by name; {} if none are given.

    Args:
        model: the user's model.
        given: patterns, or a function of a parameter's name and the parameter.
        roles: returns options that an optimizer gives parameters of a model by their roles;
            `given` wins.

    Raises:
        ProgramError: a pattern matches no trained parameter, or a function returns no options.
    """
    own = {} if roles is None else roles(model)
    if given is None:
        return own
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for pattern in given.options if isinstance(given, Patterns) else ():
        if not any(fnmatchcase(name, pattern) for name in trained):
            raise ProgramError(
                f"the group {pattern!r} is empty",
                why=f"no trained parameter has such a name; there are {', '.join(trained)[:300]}",
                todo="correct the pattern; * stands for any part of a name",
            )
    by_name: dict[str, Options] = {}
    for name, parameter in trained.items():
        try:
            options = given(name, parameter)
        except Exception as error:  # user code may raise anything
            raise ProgramError(
                f"the groups fail for {name}",
                why=f"{type(error).__name__}: {error}",
                todo="pass a function of a name and a parameter, or autopar.groups(...)",
            ) from error
        if not isinstance(options, Mapping):
            raise ProgramError(
                f"the groups give {options!r} for {name}",
                why="a group is a mapping of options, {} for none",
            )
        by_name[name] = {**own.get(name, {}), **options}
    return by_name


def grouped(
    trained: Sequence[tuple[str, nn.Parameter]], options: Mapping[str, Options]
) -> list[nn.Parameter] | list[Options]:
    """Returns the argument of an optimizer: parameters, or groups of them if there are options.

    Args:
        trained: tensors that this device updates, with names of the model's parameters.
        options: options of all trained parameters of the model.
    """
    if not any(options.values()):
        return [parameter for _, parameter in trained]
    by_options: dict[str, Options] = {}
    for name, given in options.items():
        key = json.dumps(given, sort_keys=True, default=repr)
        group = by_options.setdefault(key, {"params": [], **given})
        group["params"] += [parameter for other, parameter in trained if other == name]
    return list(by_options.values())

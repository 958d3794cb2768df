"""Checks that a model is still in the state that was captured.

A model is captured once, so the program would ignore a later `model.eval()`, a frozen parameter,
a changed dropout rate or a replaced module. Every step therefore compares modules, training modes
and trained parameters with the captured state.
"""

from __future__ import annotations

import torch
from torch import nn

from autopar.errors import ProgramError
from autopar.ir.graph import Graph

_PLAIN = (bool, int, float, str, tuple)


def refuse_autocast() -> None:
    """Raises ProgramError inside torch.autocast, which would cast operands once more."""
    active = [kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)]
    if active:
        raise ProgramError(
            f"torch.autocast({active[0]!r}) is active",
            why="the program's dtypes are those of its plan",
            todo='pass precision="bf16" to compile, and call the program outside of autocast',
        )


class Modes:
    """The training flags of a model's modules and parameters at capture.

    A comparison reads one attribute for each, which takes about ten microseconds for 100 modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = tuple(model.named_modules())
        self._parameters = tuple(model.named_parameters())
        self._training = [module.training for _, module in self._modules]
        self._learning = [parameter.requires_grad for _, parameter in self._parameters]
        self._members = [list(module._modules.values()) for _, module in self._modules]
        # Only numbers of torch's own modules; numbers of users' modules may be counters.
        self._numbers = [
            (name, vars(module), key, value)
            for name, module in self._modules
            if type(module).__module__.startswith("torch.nn.")
            for key, value in vars(module).items()
            if key not in ("training", "call_super_init") and type(value) in _PLAIN
        ]

    def check(self, training: bool = True) -> None:
        """Compares the captured flags with the current ones.

        Args:
            training: whether a training step follows. Evaluation does not depend on train() and
                eval().

        Raises:
            ProgramError: train() or eval() switched a module, requires_grad_ a parameter; a number
                of one of torch's modules changed, or a module was replaced.
        """
        modes = [module.training for _, module in self._modules]
        if training and modes != self._training:
            name, module = next(
                item
                for item, before in zip(self._modules, self._training, strict=True)
                if item[1].training != before
            )
            now, before = ("train", "eval") if module.training else ("eval", "train")
            raise ProgramError(
                "the model was switched after it was compiled",
                where=name,
                why=f"the program is for {type(module).__name__}.{before}(), and it is in "
                f"{now}() now",
                todo=f"call {before}() again; program.eval_step(...) evaluates by itself"
                if before == "train"
                else "call eval() again, or compile the model as it is now",
            )
        if [parameter.requires_grad for _, parameter in self._parameters] != self._learning:
            name, parameter = next(
                item
                for item, before in zip(self._parameters, self._learning, strict=True)
                if item[1].requires_grad != before
            )
            how = "thawed" if parameter.requires_grad else "frozen"
            raise ProgramError(
                f"a parameter was {how} after the model was compiled",
                where=name,
                why="the plan and the optimizer are for the parameters that were trained then",
                todo="set it back, or compile the model as it is now and load_state_dict into it",
            )
        self._check_modules()

    def _check_modules(self) -> None:
        for name, held, key, before in self._numbers:
            now = held.get(key)
            if now is not before and now != before:
                raise ProgramError(
                    f"{key} was set to {now!r} after the model was compiled",
                    where=name,
                    why=f"the program was made with {before!r}",
                    todo="set it back, or compile the model as it is now",
                )
        for (name, module), before in zip(self._modules, self._members, strict=True):
            if list(module._modules.values()) != before:
                raise ProgramError(
                    "a module was replaced, added or removed after the model was compiled",
                    where=name or type(module).__name__,
                    why="the program was compiled for the modules of that time",
                    todo="put it back, or compile the model as it is now",
                )


def refuse_other_parameters(before: Graph, after: Graph) -> None:
    """Raises ProgramError, naming the first difference, if graphs train different parameters."""
    old, new = (
        {leaf.target: (leaf.type.shape, leaf.requires_grad) for leaf in graph.leaves("param")}
        for graph in (before, after)
    )
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            one, other = (
                "missing" if found is None else f"{list(found[0])}{'' if found[1] else ', frozen'}"
                for found in (old.get(name), new.get(name))
            )
            raise ProgramError(
                "the compiled program is of another model",
                where=name,
                why=f"the session's parameter is {one}, the program's {other}",
                todo="adopt a program that was compiled from this model",
            )

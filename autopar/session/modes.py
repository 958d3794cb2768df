"""What a program was compiled for: which modules train, and which parameters learn.

A model is captured once. Whoever calls `model.eval()` or freezes a parameter afterwards would see
nothing of it, so every step looks whether the model is still in the state that was captured.
"""

from __future__ import annotations

from torch import nn

from autopar.errors import ProgramError


class Modes:
    """The training flags of a model's modules and parameters, as they are now.

    To compare them takes a read of an attribute each, some ten microseconds in a hundred modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = tuple(model.named_modules())
        self._parameters = tuple(model.named_parameters())
        self._training = [module.training for _, module in self._modules]
        self._learning = [parameter.requires_grad for _, parameter in self._parameters]

    def check(self) -> None:
        """Compare with what the flags are by now.

        Raises:
            ProgramError: a module was switched by train() or eval(), or a parameter by
                requires_grad_.
        """
        if [module.training for _, module in self._modules] != self._training:
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
                todo=f"call {before}() again; for the other mode compile a program of its own, and "
                "load_state_dict into it",
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
                why="the plan, the gradients and the optimizer are for what learned then",
                todo="set it back, or compile the model as it is now and load_state_dict into it",
            )

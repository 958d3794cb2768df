"""Answers comparisons of random numbers whose result does not depend on the number.

    skipped = self.training and torch.rand([]) < self.layerdrop

With a probability of 0 the comparison is False for every number. Branches on other comparisons of
random numbers raise CaptureError, because a program runs the same layers in every step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from autopar.errors import CaptureError

_DRAWS = ("rand", "rand_like")  # numbers from 0, included, to 1, excluded
_NEAR_ONE = 1 - 2**-53  # the largest such number
_LEAST = 2**-53  # the smallest that is not 0, which is drawn once in 2^24 times or less
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    **{f"__{name}__": getattr(operator, name) for name in ("lt", "le", "gt", "ge")},
    **{name: getattr(operator, name) for name in ("lt", "le", "gt", "ge")},
    **{"less": operator.lt, "less_equal": operator.le},
    **{"greater": operator.gt, "greater_equal": operator.ge},
}
_TRUTH = ("__bool__", "is_nonzero", "item")


@dataclass
class RandomBranches:
    """The uniform random numbers of one trace and what they are compared with, by identity.

    Tensors are kept beside their identities, which are unique only among living tensors.
    """

    _drawn: dict[int, Tensor] = field(default_factory=dict)
    _compared: dict[int, tuple[Tensor, bool | None]] = field(default_factory=dict)

    def truth(self, name: str, args: Sequence[Any], where: str) -> bool | None:
        """Returns the result of a comparison that a branch reads; None for any other call.

        Raises:
            CaptureError: it depends on the random number.
        """
        if name not in _TRUTH or not args or isinstance(args[0], (int, float)):
            return None
        answer = self._compared.get(id(args[0]), (None, None))[1]
        if answer is None and (id(args[0]) in self._compared or id(args[0]) in self._drawn):
            raise CaptureError(
                "the model branches on a random number",
                where=where,
                why="a program runs the same layers in every step",
                todo="set the probability of the branch to 0 (layerdrop=0.0 in a configuration of "
                "transformers), or compute both branches and choose with torch.where",
            )
        return answer

    def note(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Records random numbers, and their comparisons with Python numbers."""
        if name in _DRAWS and isinstance(result, Tensor):
            self._drawn[id(result)] = result
        compares = name in _COMPARISONS and len(args) == 2 and id(args[0]) in self._drawn
        if compares and isinstance(args[1], (int, float)):
            self._compared[id(result)] = result, _everywhere(_COMPARISONS[name], args[1])


def _everywhere(compare: Callable[[float, float], bool], bound: float) -> bool | None:
    """Returns the comparison of every random number but 0 with a bound; None if they differ.

    Without 0, `torch.rand([]) > 0.0` is True, as models mean it that keep a layer by it.
    """
    least = 0.0 if compare in (operator.lt, operator.ge) else _LEAST
    answers = {compare(least, bound), compare(_NEAR_ONE, bound)}
    return answers.pop() if len(answers) == 1 else None

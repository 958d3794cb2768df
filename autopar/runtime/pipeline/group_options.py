"""Options of the optimizer's groups as they were when the batch of an update was passed.

Stages make the update of one batch in different steps, and a scheduler changes the learning rate in
between. An update uses the options with which the step of its batch was called, on every stage. So
it does not depend on the stages when a rate changes, and copies of a parameter stay equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Place = tuple[int, str]  # number of the group, name of the option


class GroupOptions:
    """The options of an optimizer in the steps whose updates are not complete.

    An optimizer may change options of its groups, such as a counter. Earlier values are kept only
    of options that change between two steps.

    Args:
        optimizer: the optimizer of this rank.
        late: the largest number of steps by which an update follows the step of its batch.
    """

    def __init__(self, optimizer: Optimizer, late: int) -> None:
        self._optimizer, self._late = optimizer, late
        self._left: dict[Place, Any] | None = None  # options after the last step; None before any
        self._earlier: dict[int, dict[Place, Any]] = {}  # by the first step that had others

    def begin(self, step: int) -> None:
        """Records the options that differ from those after the previous step."""
        if self._left is not None:
            now = self._options()
            changed = {p: v for p, v in self._left.items() if p in now and not _equal(v, now[p])}
            if changed:
                self._earlier[step] = changed
        for old in [one for one in self._earlier if one + self._late < step]:
            del self._earlier[old]

    def end(self) -> None:
        """Notes the options after a step."""
        self._left = self._options()

    def restart(self) -> None:
        """Forgets earlier options, because no update is pending."""
        self._left = None
        self._earlier.clear()

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        """Gives the groups the options of a step in this context."""
        wanted: dict[Place, Any] = {}
        for later in sorted(one for one in self._earlier if one > step):
            wanted = self._earlier[later] | wanted
        groups = self._optimizer.param_groups
        newest = {(number, name): groups[number][name] for number, name in wanted}
        self._set(wanted)
        try:
            yield
        finally:
            self._set(newest)

    def _set(self, options: dict[Place, Any]) -> None:
        for (number, name), value in options.items():
            self._optimizer.param_groups[number][name] = value

    def _options(self) -> dict[Place, Any]:
        """Returns all options, with copies of tensors."""
        return {
            (number, name): value.clone() if isinstance(value, Tensor) else value
            for number, group in enumerate(self._optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        }

    # Checkpoints ---------------------------------------------------------------------------------

    def saved(self) -> Any:
        """Returns the options as plain values; see `in_flight_state.py`."""
        return {"left": self._left, "earlier": self._earlier}

    def resume(self, saved: Any) -> None:
        """Restores what `saved` returned."""
        self._left, self._earlier = saved["left"], saved["earlier"]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)

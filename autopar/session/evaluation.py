"""Evaluation: what a model returns for a batch, as parts that lie where they were computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autopar.capture.capture import Captured
from autopar.runtime.calls.evaluated import Evaluated


@dataclass(frozen=True)
class Evaluation:
    """The result of `Session.eval_step`.

    Attributes:
        captured: the call of the model.
        outputs: its results on this rank.
    """

    captured: Captured
    outputs: Evaluated

    @property
    def loss(self) -> Tensor | None:
        """The loss, a scalar, the same on every rank; None if the call has none."""
        graph = self.captured.graph
        named = {node: name for name, node in graph.outputs}
        return None if graph.loss is None else self.outputs.shards[named[graph.loss]]

    @property
    def local(self) -> Any:
        """What the model returns, with this rank's part of each tensor; see `layouts`."""
        return self.captured.output.rebuild(self.outputs.shards)

    @property
    def layouts(self) -> Mapping[str, str]:
        """Output name -> its dtype, global shape and layout, "f32[8@data, 16, 96]"."""
        return self.outputs.layouts

    def whole(self) -> Any:
        """What the model returns, with whole tensors; every rank calls it."""
        return self.captured.output.rebuild(self.outputs.gather())

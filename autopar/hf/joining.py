"""Several batches of a gradient accumulation as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import find_batch_size
from torch import Tensor, nn

from autopar.hf.losses import uneven
from autopar.ir.graph import Graph
from autopar.session.padding import Padding, padding_of


def joined(
    batches: Sequence[Mapping[str, Any]],
    model: nn.Module,
    graph: Callable[[], Graph],
    pad_to: Any = None,
    whole_loss: bool = True,
) -> dict[str, Any]:
    """Returns the rows of several batches as one batch, padded to the longest.

    Args:
        batches: the arguments of the model by name.
        model: the model.
        graph: returns the captured model, by which padding is checked to have no effect.
        pad_to: the option of `autopar.compile`.
        whole_loss: the option of `autopar.compile`.

    Raises:
        BatchError: batches differ in length, and padding would change their loss; or they differ in
            their numbers of rows, and the step has the mean of their losses.
    """
    rows = [find_batch_size(dict(batch)) for batch in batches]
    if len(set(rows)) > 1 and not whole_loss:
        raise uneven(rows)
    lengths = [
        frozenset(v.shape[1] for v in batch.values() if isinstance(v, Tensor) and v.ndim > 1)
        for batch in batches
    ]
    if len(set(lengths)) > 1:
        given = padding_of(pad_to)
        padding = Padding((max(frozenset().union(*lengths)),), given.values if given else {})
        padding.check(graph())
        batches = [padding.of_call(model, (), dict(batch))[1] for batch in batches]
    return {
        name: torch.cat([batch[name] for batch in batches])
        if isinstance(first, Tensor) and first.ndim
        else first
        for name, first in batches[0].items()
    }

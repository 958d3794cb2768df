"""Tensors of an update that stay from step to step, by the names that its value gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.ir.update.kept_states import LEFT_OUT, MASTER, PART
from autopar.ir.update.update_rules import AVERAGE

if TYPE_CHECKING:
    from autopar.runtime.parameters.shards import Weight, Weights

Named = tuple[str, Tensor]


def kept_tensors(
    weights: Sequence[Weights],
    optimizer: Optimizer,
    wholes: Mapping[int, nn.Parameter],
    averages: Mapping[int, Tensor],
) -> Iterator[Named]:
    """Yields every tensor that a rank keeps of its trained parameters; see `ir/update/kept_states`.

    Args:
        weights: weights of all programs on this rank.
        optimizer: their optimizer.
        wholes: the tensor that it updates in place of a part, by the part's id.
        averages: averages by the id of the updated tensor.
    """
    for each in weights:
        for weight in each.all:
            if not isinstance(weight.updated, nn.Parameter):
                continue
            key = id(weight.updated)
            if copy := _copy(weight):
                yield copy, each.masters.get(key, weight.updated)
            taken = optimizer.state.get(wholes.get(key, weight.updated), {})
            for name, value in taken.items():
                if isinstance(value, Tensor) and value.ndim:
                    yield str(name), value
            if key in averages:
                yield AVERAGE, averages[key]
            yield from ((LEFT_OUT, value) for value in weight.memory.values())


def _copy(weight: Weight) -> str:
    """Returns the name of the updated tensor, if it does not share the stored tensor's memory."""
    if weight.has_master:
        return MASTER
    stored, updated = weight.held.untyped_storage(), weight.updated.untyped_storage()
    return "" if stored.data_ptr() == updated.data_ptr() else PART

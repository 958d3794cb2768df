"""The loss of a Trainer's step: what it is a loss of, and how accumulated batches share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from autopar.capture.capture import capture
from autopar.capture.flat_model import loss_parameters
from autopar.errors import BatchError

ITEMS = "num_items_in_batch"  # transformers' argument
BATCHES = "batches_in_step"  # argument of `scaled_loss`


def adds_up_losses(trainer: Any, counted: bool = True) -> bool:
    """Returns whether a Trainer adds up the losses of accumulated batches, or takes their mean.

    Args:
        trainer: the Trainer.
        counted: whether the items of the batches can be counted.
    """
    stated = getattr(trainer, "loss_is_scaled_for_ga", None)
    if stated is not None:
        return bool(stated)
    by_items = trainer.model_accepts_loss_kwargs and counted
    return bool(by_items or trainer.compute_loss_func is not None)


def name_of_model(model: nn.Module) -> str:
    """Returns the name of the class of a model, or of the model inside of an adapter of PEFT."""
    inner: Any = model
    return type(inner.base_model.model if hasattr(model, "peft_config") else inner).__name__


def loss_of_outputs(trainer: Any) -> Callable[..., Tensor] | None:
    """Returns the loss that a Trainer computes from outputs and labels, or None for the model's.

    It is the user's `compute_loss_func`, or that of smoothed labels.
    """
    own, smoother = trainer.compute_loss_func, trainer.label_smoother
    shifted = name_of_model(trainer.model) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def own_loss(output: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
        loss: Tensor = own(output, labels, num_items_in_batch=num_items_in_batch)
        return loss

    def smoothed(output: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
        loss: Tensor = smoother(output, labels, shifted, num_items_in_batch)
        return loss

    if own is not None:
        return own_loss
    return None if smoother is None else smoothed


def ignores_items(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Returns whether a model takes the number of items, but computes its loss without it.

    transformers passes the number to every model with `**kwargs`, and does not divide the losses of
    accumulated batches then. A step of BERT, which averages over each batch, has their sum.
    """
    graph = capture(model, (), dict(batch)).graph
    return ITEMS in graph and not graph.users[ITEMS]


def scaled_loss(
    loss_fn: Callable[..., Tensor] | None = None, divisor: int = 1
) -> Callable[..., Tensor]:
    """Returns a loss times the number of batches in its step, its argument `BATCHES`.

    A step has the mean of its microbatches' losses; multiplied, it has their sum.

    Args:
        loss_fn: the loss; None for that of the model, which evaluations have without the number.
        divisor: a number that divides the loss in steps.
    """

    def loss(output: Any, **given: Any) -> Tensor:
        batches: Tensor | int = given.pop(BATCHES, divisor)
        if loss_fn is not None:
            return loss_fn(output, **given) * batches / divisor
        value: Any = output["loss"] if isinstance(output, Mapping) else output
        own: Tensor = value if isinstance(value, Tensor) else value[0]
        return own * batches / divisor

    first = Parameter("output", Parameter.POSITIONAL_ONLY)
    named = loss_parameters(loss_fn)
    rest = [each for each in named if each.kind is Parameter.VAR_KEYWORD]
    others = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in named if each not in rest]
    number = Parameter(
        BATCHES, Parameter.KEYWORD_ONLY, default=Parameter.empty if loss_fn is None else divisor
    )
    loss.__signature__ = Signature([first, *others, number, *rest])  # type: ignore[attr-defined]
    return loss


def uneven(rows: list[int]) -> BatchError:
    """Returns the error of a step whose batches have different numbers of rows."""
    return BatchError(
        f"the batches of one step have {', '.join(map(str, rows))} rows",
        why="the step adds up or averages its batches' losses, and microbatches have equal numbers "
        "of rows",
        todo="drop the last batch of an epoch (drop_last), or pass "
        'options={"whole_loss": True} to train on the loss of all rows together',
    )


def refuse_uneven_end(loader: Any, accumulated: int, steps: int) -> None:
    """Raises BatchError if the last step of an epoch has a smaller batch beside others.

    Args:
        loader: of the training data; of any but a DataLoader over sized data, nothing is known.
        accumulated: number of batches in a step.
        steps: number of steps after which training stops, not positive if it is unknown.
    """
    if not isinstance(loader, DataLoader) or not hasattr(loader.dataset, "__len__"):
        return
    size = loader.batch_size
    if size is None or loader.drop_last:
        return
    full, rest = divmod(len(loader.dataset), size)
    complete, beside = divmod(full, accumulated)
    if rest and beside and not 0 < steps <= complete:
        raise uneven([size] * beside + [rest])

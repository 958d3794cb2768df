"""A `transformers.Trainer` whose steps are those of an autopar session.

Loop, logging, schedules, callbacks and the layout of output folders are Trainer's. Batches,
forward, backward, clipping, optimizer step, evaluation and the state of training are autopar's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_pt_utils import find_batch_size, nested_truncate

from autopar.compile import compile
from autopar.hf.arguments import SLICING, refuse_foreign_parallelism, with_defaults
from autopar.hf.joining import joined
from autopar.hf.losses import (
    BATCHES,
    ITEMS,
    adds_up_losses,
    ignores_items,
    name_of_model,
    refuse_uneven_end,
    scaled_loss,
)
from autopar.runtime.ranks.processes import MeshLike
from autopar.session.keywords import CompileKeywords
from autopar.session.session import Session

STATE = "autopar"  # the folder of a session's checkpoint inside that of a Trainer's
ORDERED = ("sequential", "group_by_length")  # strategies whose samplers Trainer makes


def _is_overridden(sampler: Any) -> bool:
    """Returns whether a subclass of Trainer makes the sampler of the training data."""
    own = getattr(sampler, "__func__", sampler)
    return own is not transformers.Trainer._get_train_sampler


class SessionModule(nn.Module):
    """A model as Trainer handles it, whose calls evaluate a session.

    Args:
        session: in training.
        model: the user's model.
        prepared: returns a batch as the session takes it.
    """

    def __init__(
        self, session: Session, model: nn.Module, prepared: Callable[[dict[str, Any]], Any]
    ) -> None:
        super().__init__()
        self.model = model
        self._session, self._prepared = session, prepared

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output in evaluation, whole on every rank."""
        return self._session(*args, **self._prepared(kwargs))

    def _get_name(self) -> str:
        """Returns the name of the model's class, by which Trainer shifts labels or not."""
        return name_of_model(self.model)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: a session's step leaves no gradients."""

    def train(self, mode: bool = True) -> SessionModule:
        """Does nothing: a session captures the model in both modes."""
        return self


class SteppedOptimizer(torch.optim.Optimizer):
    """The optimizer of a session as Trainer and its schedules handle it.

    It shares the session's groups, so that schedules set their rates. A session's step has updated
    the parameters by the time that Trainer calls `step`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Does nothing: the session's checkpoint has the state."""


class EpochOrder(transformers.TrainerCallback):  # type: ignore[misc]
    """Shuffles the data in each epoch, in the same order on every rank and after resuming."""

    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        """Sets the epoch of the sampler."""
        sampler = getattr(train_dataloader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(int(state.epoch or 0))


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """Trains as `transformers.Trainer` does, in parallel on a mesh.

    Every process loads the same batches of `per_device_train_batch_size` x devices samples. The
    batches of a gradient accumulation are the microbatches of one step; shorter ones are padded.
    The loss is that of transformers: a sum over the step's tokens by `num_items_in_batch` if the
    model uses that number, the sum of the batches' losses if the model accepts and ignores it, and
    otherwise their mean. The arguments for precision, clipping, weight decay, label smoothing,
    activation checkpointing and torch.compile become options of the session. At the end of the
    training, `model` has the trained weights.

    Args:
        mesh: the devices, as for `autopar.compile`.
        options: options of `autopar.compile`; they override those that follow from the arguments.
        **trainer: arguments of `transformers.Trainer`.

    Raises:
        OptionError: the arguments ask for DeepSpeed, FSDP, float16 or another thing that a session
            does itself; says which option to pass.
    """

    def __init__(
        self, *, mesh: MeshLike, options: CompileKeywords | None = None, **trainer: Any
    ) -> None:
        super().__init__(**trainer)
        refuse_foreign_parallelism(self)
        self._mesh = mesh
        self._session: Session | None = None
        self._given: CompileKeywords = options or {}
        self._options = with_defaults(self, self._given)
        # The session recomputes; torch's own checkpointing would be traced.
        self.args.activation_checkpointing = False
        # Every rank counts the items of the whole batch, so Trainer must not add the counts.
        self.args.average_tokens_across_devices = False
        self._accumulated: list[Mapping[str, Any]] = []
        self._rows = 0
        self._summed = False  # whether a step has the sum of its batches' losses
        self.add_callback(EpochOrder())

    @property
    def session(self) -> Session:
        """The session; compiles the model for the first batch of the training, if there is none."""
        if self._session is None:
            factory, keywords = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            if "fused" in keywords:
                keywords["fused"] = False
            batches = (
                self.get_train_dataloader()
                if self.train_dataset is not None
                else self.get_eval_dataloader()
            )
            first = next(iter(batches))
            several = [first] * self.args.gradient_accumulation_steps
            items = self._get_num_items_in_batch(several, self.args.device)
            self._settle_loss(first, items)
            if not self._options.get("whole_loss", True) and self.train_dataset is not None:
                refuse_uneven_end(batches, len(several), self.args.max_steps)
            batch = self._joined(several, items)
            self._session = compile(
                self.model,
                self._mesh,
                example_inputs=batch,
                optimizer=partial(factory, **keywords),
                **self._options,
            )
        return self._session

    def _settle_loss(self, first: Mapping[str, Any], items: Tensor | int | None) -> None:
        """Decides whether a step has the loss of all rows, the mean or the sum of its batches'."""
        if "whole_loss" in self._given:
            return
        if not adds_up_losses(self, items is not None):
            self._options["whole_loss"] = False
        elif (
            self.args.gradient_accumulation_steps > 1
            and items is not None
            and not {"loss_fn", "plan", *SLICING} & self._given.keys()
            and "loss_fn" not in self._options
            and ignores_items(self.model, self._prepared({**first, ITEMS: items}))
        ):
            self._options |= {"whole_loss": False, "loss_fn": scaled_loss()}
            self._summed = True

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Compiles the model, and returns the optimizer of its session."""
        self.optimizer = SteppedOptimizer(self.session.optimizer)
        return self.optimizer

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        return SessionModule(self.session, self.model, self._prepared)

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Runs a step on the batches accumulated so far, once they are complete.

        Returns:
            The loss, or zero for a batch that waits for others, as Trainer adds the values.

        Raises:
            BatchError: batches of one step differ in length, and padding would change their loss.
        """
        self._accumulated.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batch, self._accumulated = self._joined(self._accumulated, num_items_in_batch), []
        return self.session.step(**batch).detach()

    def _joined(
        self, batches: list[Mapping[str, Any]], items: Tensor | int | None
    ) -> dict[str, Any]:
        """Returns several batches as one, with the number of tokens that count in their loss."""
        pad_to, together = self._options.get("pad_to"), self._options.get("whole_loss", True)
        batch = joined(batches, self.model, lambda: self.session.graph, pad_to, together)
        if items is not None:
            batch[ITEMS] = items
        if self._summed:
            batch[BATCHES] = torch.tensor(float(len(batches)))
        return self._prepared(batch)

    def _prepared(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns a batch with the number of its items as a tensor."""
        items = batch.get(ITEMS)
        if items is None:
            return batch
        return {**batch, ITEMS: torch.as_tensor(items, dtype=torch.float32)}

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Does nothing: the session has clipped the gradients."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float | None:
        norm = self.session.grad_norm
        return None if norm is None else float(norm)

    def _get_dataloader(
        self,
        dataset: Dataset[Any],
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader[Any]:
        """Returns a loader of whole batches, equal on every rank."""
        sampler: Sampler[Any] | None = None
        if not isinstance(dataset, IterableDataset) and is_training:
            if self.args.train_sampling_strategy in ORDERED or _is_overridden(sampler_fn):
                sampler = sampler_fn(dataset)
            else:
                seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
                sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=seed)
        return DataLoader(
            dataset,
            batch_size * self.args.world_size,
            sampler=sampler,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, description),
            num_workers=self.args.dataloader_num_workers,
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            drop_last=self.args.dataloader_drop_last and is_training,
        )

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Returns this rank's part of a batch's operations, as Trainer adds those of all ranks."""
        return int(super().floating_point_ops(inputs)) // int(self.args.world_size)

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # which adds the tokens of all ranks' batches
        added = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + added // self.args.world_size

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates as Trainer does; outputs are whole on every rank, so none is gathered."""
        self.gather_function = lambda values: nested_truncate(values, self._rows)
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluates one batch; returns logits and labels as Trainer does, and a loss per rank.

        Trainer repeats a loss for each row of a rank's batch, so that a mean weighs it by its rows.
        """
        self._rows = find_batch_size(inputs)
        loss, logits, labels = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys
        )
        return None if loss is None else loss.repeat(self.args.world_size), logits, labels

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the weights as `save_pretrained` does; every rank must call it."""
        state = self.session.state_dict()
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.session.save_checkpoint(Path(output_dir) / STATE)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        self.session.load_checkpoint(Path(checkpoint) / STATE)
        rates = torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True)
        self.lr_scheduler.load_state_dict(rates)

    def _load_best_model(self) -> None:
        self.session.load_weights(self.state.best_model_checkpoint)

    def _finalize_training(self, *args: Any) -> Any:
        result = super()._finalize_training(*args)
        trained = self.session.state_dict()
        if not any(value.is_meta for value in self.model.state_dict().values()):
            self.model.load_state_dict(trained)
        return result

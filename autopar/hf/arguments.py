"""Options of a session that follow from the arguments of a Trainer."""

from __future__ import annotations

from typing import Any

from torch import nn

from autopar.errors import OptionError
from autopar.hf.losses import adds_up_losses, loss_of_outputs
from autopar.session.keywords import CompileKeywords

SHAPES = 16  # batches of a last, smaller size, of other lengths, and of evaluations
SLICING = ("stages", "microbatches", "accumulate")


def with_defaults(trainer: Any, given: CompileKeywords) -> CompileKeywords:
    """Returns options of `autopar.compile`, with defaults from a Trainer's arguments.

    Raises:
        OptionError: both state a loss.
    """
    sliced = {*SLICING, "plan"} & given.keys()
    options: CompileKeywords = {"shapes": SHAPES, **options_of(trainer)}
    if {"loss_fn"} & options.keys() & given.keys():
        raise OptionError(
            "two losses are given",
            why="options have a loss_fn, and Trainer has a compute_loss_func or smoothed labels",
            todo="leave one of them out",
        )
    if not sliced:
        options["microbatches"] = trainer.args.gradient_accumulation_steps
        options["whole_loss"] = adds_up_losses(trainer)
    return {**options, **given}


def options_of(trainer: Any) -> CompileKeywords:
    """Returns the options of `autopar.compile` that follow from other arguments of a Trainer."""
    args = trainer.args
    decayed = frozenset(trainer.get_decay_parameter_names(trainer.model))

    def decay(name: str, parameter: nn.Parameter) -> dict[str, float]:
        return {"weight_decay": args.weight_decay if name in decayed else 0.0}

    options: CompileKeywords = {"groups": decay}
    if args.max_grad_norm > 0:
        options["clip_norm"] = args.max_grad_norm
    if args.bf16:
        options["precision"] = "bf16"
    if args.activation_checkpointing:
        options["recompute"] = "full"
    if args.torch_compile:
        options["backend"] = "inductor"
    loss_fn = loss_of_outputs(trainer)
    if loss_fn is not None:
        options["loss_fn"] = loss_fn
    return options


def refuse_foreign_parallelism(trainer: Any) -> None:
    """Raises OptionError if a Trainer's arguments request something that a session does itself."""
    args = trainer.args
    given = {
        "deepspeed": (args.deepspeed, "leave it out: the plan shards the state"),
        "fsdp": (args.fsdp, 'leave it out, or pass options={"state": "zero3"}'),
        "fp16": (args.fp16, 'pass options={"precision": "fp16"} instead'),
        "neftune_noise_alpha": (
            trainer.neftune_noise_alpha,
            "leave it out: hooks on modules are no part of a captured program",
        ),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "leave it out: planning refuses a batch that does not fit",
        ),
        "optimizers": (
            trainer.optimizer,
            "set args.optim, or pass a subclass that overrides get_optimizer_cls_and_kwargs",
        ),
    }
    for name, (value, todo) in given.items():
        if value:
            raise OptionError(
                f"Trainer's {name} cannot be used with a session",
                why="autopar's program does that part of the step itself",
                todo=todo,
            )

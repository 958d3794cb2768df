"""The two calls of a model that generates: a prefill of the prompt, and a decode of one token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.generation.cached_call import DECODE, PREFILL, CachedCall, KeptTensor
from autopar.capture.generation.decoder_call import IDS, MASK, POSITIONS, START, DecoderCall
from autopar.capture.generation.encoder_decoder_call import (
    TARGET,
    TARGET_MASK,
    EncoderDecoderCall,
)
from autopar.capture.generation.transformers_cache import is_of_transformers
from autopar.errors import CaptureError


@dataclass(frozen=True)
class Sizes:
    """The sizes of a generation.

    Attributes:
        batch: number of sequences.
        prompt: number of tokens of the prompt; for an encoder-decoder, of the encoder's input.
        new_tokens: maximum number of generated tokens.
    """

    batch: int
    prompt: int
    new_tokens: int


Arguments = dict[str, Tensor]
Step = tuple[CachedCall, Arguments]


def has_encoder(model: nn.Module) -> bool:
    """Returns whether a model is an encoder-decoder of transformers."""
    config: Any = getattr(model, "config", None)
    return is_of_transformers(model) and bool(getattr(config, "is_encoder_decoder", False))


def length_of(model: nn.Module, sizes: Sizes) -> int:
    """Returns the number of tokens that the caches of the decoder hold."""
    return (1 if has_encoder(model) else sizes.prompt) + sizes.new_tokens


def steps_of(
    model: nn.Module, sizes: Sizes, trace: Callable[[CachedCall, Arguments], object]
) -> tuple[Step, Step]:
    """Returns the prefill and the decode, each with example arguments.

    Args:
        model: a model that takes `past_key_values`.
        sizes: sizes of the generation.
        trace: traces a call, to record the tensors that a prefill keeps.

    Raises:
        CaptureError: the model keeps nothing between tokens.
    """
    kind = EncoderDecoderCall if has_encoder(model) else DecoderCall
    parameter = next(iter(model.parameters()), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    length = length_of(model, sizes)

    def call(step: str, kept: Mapping[str, KeptTensor] | None) -> CachedCall:
        return kind(step, length, kept, device)

    first = arguments_of(model, sizes, PREFILL)
    recording = call(PREFILL, None)
    trace(recording, first)
    kept = recording.trace.recorded
    if not kept:
        raise CaptureError(
            f"{type(model).__name__} does not keep keys and values between tokens",
            why="no layer calls past_key_values.update",
            todo="attend to past_key_values.update(keys, values, layer); see "
            "docs/how-to/generation.md",
        )
    again = arguments_of(model, sizes, DECODE)
    return (call(PREFILL, kept), first), (call(DECODE, kept), again)


def arguments_of(model: nn.Module, sizes: Sizes, step: str) -> Arguments:
    """Returns arguments of the right shapes: ids and positions i64, masks i64."""

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.int64)

    batch, length = sizes.batch, length_of(model, sizes)
    if has_encoder(model):
        given = {TARGET: ones(batch, 1), MASK: ones(batch, sizes.prompt)}
        if step == PREFILL:
            return given | {TARGET_MASK: ones(batch, 1), IDS: ones(batch, sizes.prompt)}
        return given | {TARGET_MASK: ones(batch, length), START: ones(1)}
    if step == PREFILL:
        rows = ones(batch, sizes.prompt)
        return {IDS: rows, MASK: rows.clone(), POSITIONS: rows.clone()}
    token = ones(batch, 1)
    return {IDS: token, MASK: ones(batch, length), POSITIONS: token.clone(), START: ones(1)}

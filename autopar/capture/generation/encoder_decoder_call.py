"""A call with caches of an encoder-decoder of transformers."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from autopar.capture.generation.cached_call import CachedCall
from autopar.capture.generation.decoder_call import MASK, PAST, START, last_logits
from autopar.capture.generation.transformers_cache import crossing_cache_of, encoded

IDS, TARGET, TARGET_MASK = "input_ids", "decoder_input_ids", "decoder_attention_mask"


class EncoderDecoderCall(CachedCall):
    """Calls a model on tokens of its decoder; only a prefill runs the encoder."""

    @property
    def signature(self) -> inspect.Signature:
        """The arguments: ids [batch, tokens], masks [batch, keys], and the start [1]."""
        names = (
            [TARGET, MASK, TARGET_MASK, START] if self.decodes else [TARGET, MASK, TARGET_MASK, IDS]
        )
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(name, kind) for name in names])

    def forward(
        self,
        model: nn.Module,
        decoder_input_ids: Tensor,
        attention_mask: Tensor,
        decoder_attention_mask: Tensor,
        input_ids: Tensor | None = None,
        start: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Returns the logits of the token after the decoder's last one, [batch, vocabulary]."""
        self.trace.positions = start
        given = {
            MASK: attention_mask,
            TARGET: decoder_input_ids,
            TARGET_MASK: decoder_attention_mask,
        }
        if self.decodes:
            # Keys and values of the encoder's tokens are in caches; only their number matters.
            width = int(model.config.hidden_size)  # type: ignore[union-attr, arg-type]
            like = next(model.parameters())
            rows = torch.zeros(*attention_mask.shape, width, dtype=like.dtype, device=like.device)
            given["encoder_outputs"] = encoded(rows)
        else:
            assert input_ids is not None
            given[IDS] = input_ids
        given[PAST] = crossing_cache_of(self)
        return {"logits": last_logits(model(**given, use_cache=True, return_dict=True))}

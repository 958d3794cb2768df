"""The prompts of a generation, and the arguments of its prefill and of every decode."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.capture.generation.calls import has_encoder
from autopar.capture.generation.decoder_call import IDS, MASK, POSITIONS, START
from autopar.capture.generation.encoder_decoder_call import TARGET, TARGET_MASK
from autopar.errors import BatchError, OptionError
from autopar.session.generation.decoding import Decoding


def check_prompts(model: nn.Module, ids: object) -> None:
    """Raises BatchError unless `ids` are tokens [batch, tokens] that the model can look up.

    A program with a split table of embeddings would take zeros for other tokens.
    """
    whole = isinstance(ids, Tensor) and not (ids.is_floating_point() or ids.is_complex())
    if not isinstance(ids, Tensor) or not whole or ids.dim() != 2 or ids.numel() == 0:
        raise BatchError(
            "the prompts are not whole numbers of shape [batch, tokens]",
            todo="pass input_ids of a tokenizer",
        )
    embeddings: Any = getattr(model, "get_input_embeddings", lambda: None)()
    known = getattr(embeddings, "num_embeddings", None)
    if known is not None and not 0 <= int(ids.min()) <= int(ids.max()) < known:
        raise BatchError(
            "a token of the prompts is unknown to the model",
            why=f"tokens are {int(ids.min())} to {int(ids.max())}, and the table has {known}",
            todo="use the model's own tokenizer",
        )


@dataclass(frozen=True)
class Prompts:
    """Prompts on the CPU.

    Attributes:
        ids, mask: tokens and whether they count, i64[batch, tokens].
        first: the tokens with which the results begin, i64[batch, 1 or tokens].
        encoded: whether an encoder reads the prompts.
    """

    ids: Tensor
    mask: Tensor
    first: Tensor
    encoded: bool

    @classmethod
    def of(
        cls,
        model: nn.Module,
        ids: Tensor,
        mask: Tensor | None,
        decoding: Decoding,
    ) -> Prompts:
        """Returns prompts with their mask.

        Raises:
            BatchError: they are padded on the right, or padded for a model that takes no mask.
            OptionError: an encoder-decoder has no token to start with.
        """
        ids = ids.detach().to("cpu", torch.int64)
        mask = _mask(ids, decoding) if mask is None else mask.detach().to("cpu", torch.int64)
        if mask.shape != ids.shape:
            raise BatchError(
                f"the attention mask is {list(mask.shape)}",
                why=f"the prompts are {list(ids.shape)}",
                todo="pass a mask of the shape of input_ids",
            )
        if has_encoder(model):
            return cls(ids, mask, _start(model, len(ids), decoding.start), encoded=True)
        if not bool(mask[:, -1].all()):
            raise BatchError(
                "a prompt is padded on the right",
                why="the next token would follow the padding",
                todo='pad on the left: tokenizer(..., padding=True, padding_side="left")',
            )
        if not bool(mask.all()) and MASK not in inspect.signature(model.forward).parameters:
            raise BatchError(
                "prompts of different lengths need a mask",
                why=f"the forward of {type(model).__name__} has no argument {MASK!r}",
                todo="generate from prompts of one length, or let the model take a mask",
            )
        return cls(ids, mask, ids, encoded=False)

    @property
    def padding(self) -> Tensor:
        """The number of tokens that only fill each row of the results on the left, i64[batch]."""
        if self.encoded:
            return torch.zeros(len(self.first), dtype=torch.int64)
        return (self.mask != 0).int().argmax(1)

    def prefill(self) -> dict[str, Tensor]:
        """Returns the arguments of the prefill."""
        if self.encoded:
            ones = torch.ones_like(self.first)
            return {TARGET: self.first, MASK: self.mask, TARGET_MASK: ones, IDS: self.ids}
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        return {IDS: self.ids, MASK: self.mask, POSITIONS: positions}

    def decode(self, token: Tensor, number: int, count: int) -> dict[str, Tensor]:
        """Returns the arguments of the decode of a generated token.

        Args:
            token: token of every sequence, i64[batch].
            number: number of tokens generated before it.
            count: maximum number of generated tokens.
        """
        before = self.first.shape[1]
        own = torch.ones_like(self.first) if self.encoded else self.mask
        later = (torch.arange(count) <= number).long().expand(len(own), count)
        mask, start = torch.cat([own, later], 1), torch.tensor([before + number])
        column = token[:, None]
        if self.encoded:
            return {TARGET: column, MASK: self.mask, TARGET_MASK: mask, START: start}
        positions = self.mask.sum(1, keepdim=True) + number
        return {IDS: column, MASK: mask, POSITIONS: positions, START: start}


def _mask(ids: Tensor, decoding: Decoding) -> Tensor:
    """Returns a mask without padding tokens, if they are told apart from ends of sequences."""
    if decoding.pad is None or decoding.pad in decoding.eos:
        return torch.ones_like(ids)
    return (ids != decoding.pad).long()


def _start(model: nn.Module, batch: int, start: int | None) -> Tensor:
    """Returns the decoder's first token of every sequence, i64[batch, 1]."""
    for holder in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        for name in ("decoder_start_token_id", "bos_token_id"):
            own = getattr(holder, name, None)
            start = own if start is None else start
    if start is None:
        raise OptionError(
            "the decoder has no token to start with",
            why="the model's configuration states no decoder_start_token_id",
            todo="pass decoder_start_token_id to generate",
        )
    return torch.full((batch, 1), int(start))

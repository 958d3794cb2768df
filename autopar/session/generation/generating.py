"""Generation in a session, as a base class of `Session`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.capture.generation.calls import Sizes, has_encoder
from autopar.errors import OptionError
from autopar.session.generation.decoding import Decoding, GenerateKeywords
from autopar.session.generation.pair import Pair
from autopar.session.generation.prompts import Prompts, check_prompts


class Generating(ABC):
    """A program that generates tokens."""

    _model: nn.Module

    @abstractmethod
    def _generating(self, sizes: Sizes) -> Pair:
        """Returns the prefill and the decode for a batch of these sizes, compiled if new."""

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> Tensor:
        """Continues prompts, one token after another, from the parameters that are stored.

        Every rank passes the same prompts and gets the same tokens: those of `model.generate` of
        transformers. Settings that are not passed are those of the model's `generation_config`.
        A prefill and a decode are compiled for the first prompts of each shape; a program that
        trains goes on storing its parameters where they are.

        Args:
            input_ids: prompts, i64[batch, tokens], padded on the left; of an encoder-decoder, what
                its encoder reads, padded at either end.
            attention_mask: 1 for tokens that count, 0 for padding, of the same shape; by default
                tokens other than `pad_token_id`, unless that also ends a sequence.
            **options: see `GenerateKeywords`.

        Returns:
            The prompts and what follows them, i64[batch, tokens]; of an encoder-decoder, what its
            decoder generates after the start token.

        Raises:
            BatchError: the prompts are not whole numbers [batch, tokens], differ between ranks,
                are padded on the right, or have a shape beyond those that a session compiles.
            OptionError: an argument is out of range, or the model's `generation_config` asks for
                something that is not implemented, such as beams.
            CaptureError: the model takes no cache; says what to add.
            ProgramError: the program has local batches, local updates or several copies of stages.
        """
        check_prompts(self._model, input_ids)
        begun = 1 if has_encoder(self._model) else input_ids.shape[1]
        decoding = Decoding.of(self._model, options, begun)
        refuse_seedless(decoding, dist.get_world_size() if dist.is_initialized() else 1)
        prompts = Prompts.of(self._model, input_ids, attention_mask, decoding)
        batch, tokens = input_ids.shape
        pair = self._generating(Sizes(batch, tokens, decoding.most))
        return _generated(pair, prompts, decoding)


@torch.no_grad()
def _generated(pair: Pair, prompts: Prompts, decoding: Decoding) -> Tensor:
    """Returns the first tokens of the results and the generated ones."""
    count = decoding.most
    generator, results = decoding.generator(), [prompts.first]
    unfinished = torch.ones(len(prompts.first), dtype=torch.bool)
    ends = torch.tensor(decoding.eos, dtype=torch.int64)
    pair.clear()
    logits = pair.prefill(prompts.prefill())["logits"]
    for number in range(count):
        scores = logits.detach().to("cpu", torch.float32)
        scores = decoding.processors.apply(
            torch.cat(results, 1), scores, prompts.padding, count - number
        )
        token = decoding.choose(scores, generator)
        if decoding.eos:
            token = token.where(unfinished, torch.tensor(decoding.pad))
            unfinished &= ~torch.isin(token, ends)
        results.append(token[:, None])
        if number + 1 == count or not unfinished.any():
            break
        logits = pair.decode(prompts.decode(token, number, count))["logits"]
    return torch.cat(results, 1)


def refuse_seedless(decoding: Decoding, ranks: int) -> None:
    """Raises OptionError if ranks would draw different tokens."""
    if decoding.do_sample and decoding.seed is None and ranks > 1:
        raise OptionError(
            "sampling on several ranks needs a seed",
            why="every rank samples all tokens, and all must be equal",
            todo="pass seed=0 to generate",
        )

"""Changes of the scores of tokens before one is chosen: a penalty, forced tokens, a user's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Processor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Processors:
    """Changes of scores, in the order in which transformers applies them.

    Attributes:
        penalty: divides positive scores of tokens that a text has already, and multiplies negative
            ones (arXiv:1909.05858, section 4.1); 1 changes nothing.
        first: the token after a text of one token; None if it is free.
        last: tokens of which the last one of the longest text is; none if it is free.
        own: functions of tokens [batch, tokens] and scores [batch, vocabulary], such as the
            `LogitsProcessor`s of transformers.
    """

    penalty: float = 1.0
    first: int | None = None
    last: tuple[int, ...] = ()
    own: tuple[Processor, ...] = ()

    def apply(self, ids: Tensor, scores: Tensor, padding: Tensor, left: int) -> Tensor:
        """Returns changed scores, f32[batch, vocabulary].

        Args:
            ids: the texts so far, i64[batch, tokens].
            scores: scores of the next token, f32[batch, vocabulary].
            padding: number of tokens that precede each prompt, i64[batch].
            left: number of tokens that are still to come.
        """
        if self.penalty != 1:
            scores = self._penalised(ids, scores, padding)
        if self.first is not None and ids.shape[1] == 1:
            scores = _only(scores, (self.first,))
        if self.last and left == 1:
            scores = _only(scores, self.last)
        for processor in self.own:
            scores = processor(ids, scores)
        return scores

    def _penalised(self, ids: Tensor, scores: Tensor, padding: Tensor) -> Tensor:
        count = scores.shape[1]
        columns = torch.arange(ids.shape[1])
        ids = ids.masked_fill(columns < padding[:, None], count).clamp(max=count)
        said = torch.zeros(len(ids), count + 1, dtype=torch.bool).scatter(1, ids, True)[:, :count]
        less = torch.where(scores < 0, scores * self.penalty, scores / self.penalty)
        return torch.where(said, less, scores)


def _only(scores: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """Returns scores by which one of some tokens is certain."""
    result = torch.full_like(scores, -math.inf)
    result[:, list(tokens)] = 0
    return result

"""A plain decoder in stages, for `benchmarks/pipeline.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batch."""

    width: int
    seq: int
    vocabulary: int = 512
    heads: int = 4
    samples: int = 1  # of a microbatch


class Block(nn.Module):
    """A decoder's block: causal attention and a perceptron, each behind a norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] to the same."""
        y = self.norm(x)
        query, key, value = (
            module(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for module in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return result


class Part(nn.Module):
    """A stage: blocks, the first one with the embedding, the last one with the head."""

    def __init__(self, sizes: Sizes, blocks: int, number: int, count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width) if not number else None
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(blocks)))
        last = number == count - 1
        self.head = nn.Linear(sizes.width, sizes.vocabulary) if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or [batch, seq, width], to [batch, seq, width] or logits."""
        if self.embedding is not None:
            x = self.embedding(x)
        x = self.blocks(x)
        return x if self.head is None else self.head(x)


class Whole(nn.Module):
    """All stages, and the loss."""

    def __init__(self, sizes: Sizes, stages: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(sizes, 8 // stages, n, stages) for n in range(stages))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        x = tokens
        for part in self.parts:
            x = part(x)
        return loss_of(x, targets)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of logits [batch, seq, vocabulary]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

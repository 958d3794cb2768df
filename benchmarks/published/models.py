"""The models of the published measurements, as plain torch code without weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """A transformer's sizes.

    `dropout` 0 leaves the operator out; `flash` takes fused causal attention instead of its single
    steps; `tied` takes the weight of the words for the logits.
    """

    hidden: int
    heads: int
    layers: int
    vocab: int
    seq: int
    dropout: float = 0.1
    tied: bool = True
    flash: bool = False


class Layer(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        h = sizes.hidden
        self.heads, self.dropout, self.flash = sizes.heads, sizes.dropout, sizes.flash
        self.norm_1, self.norm_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.query, self.key, self.value = nn.Linear(h, h), nn.Linear(h, h), nn.Linear(h, h)
        self.proj = nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        """Residual attention and MLP of x [batch, seq, hidden]."""
        x = x + self._drop(self.proj(self._attention(self.norm_1(x))))
        return x + self._drop(self.down(F.gelu(self.up(self.norm_2(x)))))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, True) if self.dropout else x

    def _attention(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        shape = (batch, seq, self.heads, hidden // self.heads)
        query, key, value = (
            linear(x).view(shape).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        if self.flash:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            return mixed.transpose(1, 2).reshape(batch, seq, hidden)
        scores = query @ key.transpose(2, 3) * (hidden // self.heads) ** -0.5
        weights = self._drop(F.softmax(scores, -1))
        return (weights @ value).transpose(1, 2).reshape(batch, seq, hidden)


class GPT(nn.Module):
    """GPT-2: embeddings of words and positions, layers, a norm, logits by the word embedding."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.vocab, sizes.hidden)
        self.positions = nn.Embedding(sizes.seq, sizes.hidden)
        self.dropout = sizes.dropout
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        if sizes.tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of predicting `labels` [batch, seq] from `tokens` [batch, seq]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.positions(places)
        x = F.dropout(x, self.dropout, True) if self.dropout else x
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

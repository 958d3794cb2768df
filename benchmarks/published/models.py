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
    steps; `tied` takes the weight of the words for the logits; `dense` embeds words by a product;
    `groups` of heads share a key and a value (0: each head has its own).
    """

    hidden: int
    heads: int
    layers: int
    vocab: int
    seq: int
    dropout: float = 0.1
    tied: bool = True
    flash: bool = False
    dense: bool = False
    groups: int = 0


class DenseEmbedding(nn.Embedding):
    """Rows of the weight as a product with one-hot rows, which compilers split like any other."""

    def forward(self, input: Tensor) -> Tensor:
        """Rows [..., features] of the numbers [...]."""
        return F.one_hot(input, self.num_embeddings).to(self.weight.dtype) @ self.weight


class Layer(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        h = sizes.hidden
        self.heads, self.dropout, self.flash = sizes.heads, sizes.dropout, sizes.flash
        self.groups = sizes.groups or sizes.heads
        few = h // sizes.heads * self.groups
        self.norm_1, self.norm_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.query, self.key, self.value = nn.Linear(h, h), nn.Linear(h, few), nn.Linear(h, few)
        self.proj = nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        """Residual attention and MLP of x [batch, seq, hidden]."""
        x = x + self._drop(self.proj(self._attention(self.norm_1(x))))
        added: Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + self._drop(added)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, True) if self.dropout else x

    def _attention(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        query, key, value = (
            linear(x).view(batch, seq, -1, hidden // self.heads).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        if self.flash:
            mixed: Tensor = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=self.groups < self.heads
            )
            return mixed.transpose(1, 2).reshape(batch, seq, hidden)
        scores = query @ key.transpose(2, 3) * (hidden // self.heads) ** -0.5
        weights = self._drop(F.softmax(scores, -1))
        mixed = weights @ value
        return mixed.transpose(1, 2).reshape(batch, seq, hidden)


class GPT(nn.Module):
    """GPT-2: embeddings of words and positions, layers, a norm, logits by the word embedding."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        embedding = DenseEmbedding if sizes.dense else nn.Embedding
        self.words = embedding(sizes.vocab, sizes.hidden)
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


@dataclass(frozen=True)
class LlamaSizes:
    """A Llama's sizes."""

    hidden: int
    heads: int
    groups: int
    inner: int
    layers: int
    vocab: int
    seq: int

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        attention = 2 * self.hidden**2 * (1 + self.groups / self.heads)
        return int(attention + 3 * self.hidden * self.inner + 2 * self.hidden)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in f32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """The normed x [..., size]."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).type_as(x) * self.weight


class LlamaLayer(nn.Module):
    """A layer of Llama 3: grouped queries, rotated by positions, and a gated perceptron."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        h, self.heads, self.groups = sizes.hidden, sizes.heads, sizes.groups
        few = h // sizes.heads * sizes.groups
        self.norm_1, self.norm_2 = RMSNorm(h), RMSNorm(h)
        self.wq, self.wo = nn.Linear(h, h, bias=False), nn.Linear(h, h, bias=False)
        self.wk, self.wv = nn.Linear(h, few, bias=False), nn.Linear(h, few, bias=False)
        self.w1, self.w3 = (nn.Linear(h, sizes.inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(sizes.inner, h, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Residual attention and perceptron of x [batch, seq, hidden]."""
        x = x + self.wo(self._attention(self.norm_1(x), turns))
        y = self.norm_2(x)
        added: Tensor = self.w2(F.silu(self.w1(y)) * self.w3(y))
        return x + added

    def _attention(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        size = hidden // self.heads
        query = self.wq(x).view(batch, seq, self.heads, size)
        key = self.wk(x).view(batch, seq, self.groups, size)
        value = self.wv(x).view(batch, seq, self.groups, size).transpose(1, 2)
        query, key = (_rotated(t.transpose(1, 2), turns) for t in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(batch, seq, hidden)


def _rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions of x [batch, heads, seq, size], a product of complex numbers as Llama's."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


class Llama(nn.Module):
    """Llama 3: embedding, layers, a norm and logits by a weight of their own."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(LlamaLayer(sizes) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, turns: Tensor) -> Tensor:
        """The mean loss; `turns` is a table [seq, hidden / heads / 2] of complex numbers."""
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, turns)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

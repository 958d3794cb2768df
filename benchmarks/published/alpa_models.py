"""The models that Alpa trained (OSDI 2022, section 8.1 and table 7).

Sizes and layers are those of its artifact (alpa/model/wide_resnet.py, bert_model.py and moe.py,
benchmark/alpa): the numbers of parameters are the published ones. Its GPT is a BERT without a
pooler, whose norms stand behind the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.published.models import DenseEmbedding

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


@dataclass(frozen=True)
class WideSizes:
    """Layers (50 or 101), channels of the first block, and by what its middle is wider."""

    layers: int
    channels: int
    width: int
    image: int = 224
    classes: int = 1024


class Bottleneck(nn.Module):
    """1x1, 3x3 (`width` times wider) and 1x1 convolutions with batch norms beside a shortcut."""

    def __init__(self, inner: int, width: int, outer: int, stride: int, before: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(before, inner, 1, bias=False)
        self.mix = nn.Conv2d(inner, inner * width, 3, stride, 1, bias=False)
        self.expand = nn.Conv2d(inner * width, outer, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (inner, inner * width, outer))
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's result for x [batch, channels, height, width]."""
        y = F.relu(self.norms[0](self.reduce(x)))
        y = F.relu(self.norms[1](self.mix(y)))
        return F.relu(self.norms[2](self.expand(y)) + self.shortcut(x))


class WideResNet(nn.Module):
    """A stem, four groups of blocks, logits."""

    def __init__(self, sizes: WideSizes) -> None:
        super().__init__()
        c = sizes.channels
        self.stem = nn.Conv2d(3, c, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(c)
        blocks, before = [], c
        for group, count in enumerate(BLOCKS[sizes.layers]):
            inner = c * 2**group
            for number in range(count):
                stride = 2 if group and not number else 1
                blocks.append(Bottleneck(inner, sizes.width, 4 * inner, stride, before))
                before = 4 * inner
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(before, sizes.classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of images [batch, 3, size, size]."""
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


@dataclass(frozen=True)
class AlpaSizes:
    """A transformer, of which every other perceptron may be a mixture of experts.

    Attributes:
        hidden, heads, layers, vocab, seq: as of a GPT.
        experts: of a mixture, each of which takes 2 / experts of the places of a group; 0 without.
        width: how much wider perceptrons are inside.
        group: tokens that are dispatched together.
    """

    hidden: int
    heads: int
    layers: int
    vocab: int
    seq: int
    experts: int = 0
    width: int = 8
    group: int = 1024


class Experts(nn.Module):
    """GShard's mixture: the first two experts of each token, by einsums over their places."""

    def __init__(self, sizes: AlpaSizes) -> None:
        super().__init__()
        h, inner = sizes.hidden, sizes.width * sizes.hidden
        self.sizes, self.capacity = sizes, 2 * sizes.group // sizes.experts
        self.gate = nn.Linear(h, sizes.experts, bias=False)
        self.into = nn.Parameter(torch.empty(sizes.experts, h, inner))
        self.out = nn.Parameter(torch.empty(sizes.experts, inner, h))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the result for x [batch, seq, hidden], of the same shape."""
        groups = x.view(-1, self.sizes.group, self.sizes.hidden)
        combine = self._combine(F.softmax(self.gate(groups), -1))
        dispatch = (combine > 0).to(x.dtype)
        inside = torch.einsum("gsec,gsm->egcm", dispatch, groups)
        inside = F.relu(torch.einsum("egcm,emh->egch", inside, self.into))
        inside = torch.einsum("egch,ehm->gecm", inside, self.out)
        return torch.einsum("gsec,gecm->gsm", combine, inside).view(x.shape)

    def _combine(self, gates: Tensor) -> Tensor:
        """Weights [group, token, expert, place] of gates [group, token, expert]."""
        weights, chosen = gates.topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        first, second = (F.one_hot(chosen[..., k], self.sizes.experts) for k in range(2))
        before = first.cumsum(1) - first
        behind = second.cumsum(1) - second + first.sum(1, keepdim=True)
        combine = self._places(first, before, weights[..., 0])
        return combine + self._places(second, behind, weights[..., 1])

    def _places(self, mask: Tensor, place: Tensor, weight: Tensor) -> Tensor:
        mask = mask * (place < self.capacity)
        at = (place * mask).sum(-1).clamp(max=self.capacity - 1)
        places = F.one_hot(at, self.capacity).to(weight.dtype)
        return torch.einsum("gs,gse,gsc->gsec", weight, mask.to(weight.dtype), places)


class AlpaLayer(nn.Module):
    """Attention, then experts or a perceptron, each with a norm behind its sum."""

    def __init__(self, sizes: AlpaSizes, mixed: bool) -> None:
        super().__init__()
        h, inner, self.heads = sizes.hidden, sizes.width * sizes.hidden, sizes.heads
        self.query, self.key, self.value = nn.Linear(h, h), nn.Linear(h, h), nn.Linear(h, h)
        self.proj = nn.Linear(h, h)
        self.norm_1, self.norm_2 = nn.LayerNorm(h), nn.LayerNorm(h)
        plain = nn.Sequential(nn.Linear(h, inner), nn.GELU(), nn.Linear(inner, h))
        self.inner: nn.Module = Experts(sizes) if mixed else plain

    def forward(self, x: Tensor) -> Tensor:
        """Returns the result for x [batch, seq, hidden], of the same shape."""
        x = self.norm_1(x + self.proj(self._attention(x)))
        mixed: Tensor = self.norm_2(x + self.inner(x))
        return mixed

    def _attention(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        shape = (batch, seq, self.heads, hidden // self.heads)
        query, key, value = (
            linear(x).view(shape).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(2, 3) * (hidden // self.heads) ** -0.5
        mixed: Tensor = F.softmax(scores, -1) @ value
        return mixed.transpose(1, 2).reshape(batch, seq, hidden)


class AlpaTransformer(nn.Module):
    """Embeddings, layers, of which every other may have experts, logits by the word embedding."""

    def __init__(self, sizes: AlpaSizes) -> None:
        super().__init__()
        self.words = DenseEmbedding(sizes.vocab, sizes.hidden)
        self.positions = DenseEmbedding(sizes.seq, sizes.hidden)
        self.norm = nn.LayerNorm(sizes.hidden)
        mixed = [sizes.experts > 0 and n % 2 == 0 for n in range(sizes.layers)]
        self.layers = nn.ModuleList(AlpaLayer(sizes, experts) for experts in mixed)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of predicting `labels` [batch, seq] from `tokens` [batch, seq]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.words(tokens) + self.positions(places))
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(x, self.words.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

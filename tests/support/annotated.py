"""A small GPT whose layouts are annotated by `autopar.shard` in a few places; shared by tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

Batch = dict[str, Tensor]

MEGATRON = {
    "stream": "[b@data, s, h]",
    "heads": "[b@data, s, h@tensor]",
    "hidden": "[b@data, s, f@tensor]",
}
"""Megatron-LM's tensor parallelism (arXiv:1909.08053, section 3), the batch over `data`."""


class Block(nn.Module):
    """Attention and a perceptron, both before a residual."""

    def __init__(self, width: int, heads: int, notes: dict[str, str]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.v, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.notes = heads, notes

    def note(self, value: Tensor, place: str) -> Tensor:
        layout = self.notes.get(place)
        return value if layout is None else autopar.shard(value, layout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            each(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = self.note(x + self.o(self.note(y, "heads")), "stream")
        y = F.gelu(self.note(self.up(self.norm2(x)), "hidden"))
        return self.note(x + self.down(y), "stream")


class Gpt(nn.Module):
    """Returns the cross entropy of its predictions; `notes` are its annotations by place."""

    def __init__(
        self, notes: dict[str, str], layers: int = 2, width: int = 32, vocabulary: int = 64
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, 4, notes) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.notes = notes

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        if "input" in self.notes:
            x = autopar.shard(x, self.notes["input"])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def gpt(notes: dict[str, str], **sizes: int) -> tuple[Gpt, Batch]:
    """The model in float64 and a batch; the same weights whatever its annotations."""
    torch.manual_seed(0)
    model = Gpt(notes, **sizes).double()
    vocabulary = model.tokens.num_embeddings
    batch = {name: torch.randint(0, vocabulary, (8, 16)) for name in ("ids", "labels")}
    return model, batch

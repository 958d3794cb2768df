"""Small networks and real data that packages ship, for benchmarks of convergence.

Digits are those of scikit-learn; characters are those of Python's help pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 64
CONTEXT, CHARACTERS = 12, 64  # characters that are read, and different ones that there are


class Net(nn.Module):
    """Eight layers of a linear map and a tanh, with a skip over each but the first and the last."""

    def __init__(self, characters: bool, inputs: int, classes: int, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(CHARACTERS, 12) if characters else None
        self.first = nn.Linear(inputs * 12 if characters else inputs, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.last = nn.Linear(width, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss."""
        h = torch.tanh(self.first(x if self.embed is None else self.embed(x).flatten(1)))
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return F.cross_entropy(self.last(h), y)


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Images of handwritten digits, 8 by 8, and which they are."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)


@cache
def text() -> tuple[Tensor, Tensor]:
    """Characters of Python's help pages in rows, and those that follow."""
    from pydoc_data.topics import topics

    joined = "".join(topics[name] for name in sorted(topics))[: 2**18].lower()
    known = sorted(set(joined), key=lambda c: (-joined.count(c), c))[: CHARACTERS - 1]
    numbers = {character: number + 1 for number, character in enumerate(known)}
    row = torch.tensor([numbers.get(character, 0) for character in joined])
    windows = row.unfold(0, CONTEXT + 1, 1)
    return windows[:, :-1].contiguous(), windows[:, -1].contiguous()


DATA: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {"digits": digits, "text": text}


def batches(data: str, steps: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Random batches; the same for every method."""
    x, y = DATA[data]()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(x), (BATCH,), generator=generator)
        yield {"x": x[chosen], "y": y[chosen]}


def net(data: str, seed: int) -> Net:
    """The network for some data."""
    torch.manual_seed(seed)
    return Net(True, CONTEXT, CHARACTERS) if data == "text" else Net(False, 64, 10)

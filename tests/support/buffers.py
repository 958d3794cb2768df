"""Models with state of their own in buffers, like published methods; float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
WIDTH, ROWS = 8, 8


class Moco(nn.Module):
    """A queue of keys of a second encoder that follows the first (He et al., arXiv:1911.05722)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(WIDTH, 4 * ROWS), dim=0))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
            keys = F.normalize(self.key(y), dim=1)
        queries = F.normalize(self.query(x), dim=1)
        near = torch.einsum("nc,nc->n", queries, keys).unsqueeze(-1)
        far = torch.einsum("nc,ck->nk", queries, self.queue.clone().detach())
        logits = torch.cat([near, far], dim=1) / 0.2
        with torch.no_grad():
            places = (self.at + torch.arange(ROWS)) % (4 * ROWS)
            self.queue[:, places] = keys.T
            self.at[0] = (self.at[0] + ROWS) % (4 * ROWS)
        return F.cross_entropy(logits, torch.zeros(ROWS, dtype=torch.long))


class Byol(nn.Module):
    """A target that is the average of what is trained (Grill et al., arXiv:2006.07733)."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.guess = nn.Linear(WIDTH, WIDTH)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_lerp_(
                list(self.target.parameters()), list(self.online.parameters()), 0.05
            )
            wanted = F.normalize(self.target(y), dim=-1)
        return (2 - 2 * (F.normalize(self.guess(self.online(x)), dim=-1) * wanted).sum(-1)).mean()


class Codebook(nn.Module):
    """A VQ-VAE whose codes are averages of what falls to them (arXiv:1711.00937, appendix A.1)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        codes = torch.randn(5, 4)
        self.register_buffer("codes", codes)
        self.register_buffer("counts", torch.ones(5))
        self.register_buffer("sums", codes.clone())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.encoder(x)
        with torch.no_grad():
            near = torch.cdist(z, self.codes).argmin(1)
            chosen = F.one_hot(near, 5).to(z.dtype)
        code = self.codes[near]
        if self.training:
            with torch.no_grad():
                self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(chosen.T @ z, alpha=0.1)
                self.codes.copy_(self.sums / self.counts.clamp(min=1e-3).unsqueeze(1))
        out = self.decoder(z + (code - z).detach())
        return F.mse_loss(out, y) + 0.25 * F.mse_loss(z, code.detach())


class Running(nn.Module):
    """Statistics written by hand in each of three equal blocks, and a counter for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Tracks() for _ in range(3))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        before = self.last
        for block in self.blocks:
            x = block(x)
        self.last = 0.5 * self.last + x.mean(0).detach()
        return F.mse_loss(x - 0.1 * before, y) * (1 + 0.1 * self.steps)


class Tracks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        old = self.mean.clone()
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.1)
            self.seen.add_(1)
        return x + (h - old) * torch.sigmoid(h - self.mean)


class Cache(nn.Module):
    """Keys and values of the last steps, of which the oldest go."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("keys", torch.zeros(2 * ROWS, WIDTH))
        self.register_buffer("values", torch.zeros(2 * ROWS, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        for cache, new in ((self.keys, k), (self.values, v)):
            cache[:ROWS] = cache[ROWS:].clone()
            cache[ROWS:].copy_(new.detach())
        mixed = F.scaled_dot_product_attention(q[None], self.keys[None], self.values[None])[0]
        return F.mse_loss(mixed + v, y)


MODELS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__.lower(): kind for kind in (Moco, Byol, Codebook, Running, Cache)
}


def make(name: str) -> tuple[nn.Module, list[Batch]]:
    """A model and three batches, the same at every call."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    shape = (ROWS, WIDTH)
    batches = [{k: torch.randn(shape, dtype=torch.float64) for k in "xy"} for _ in range(3)]
    return model, batches


def eager(
    model: nn.Module, batches: list[Batch], microbatches: int = 1
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state of plain training, gradients added up over microbatches."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        parts = zip(*(value.chunk(microbatches) for value in batch.values()), strict=True)
        for part in parts:
            loss = model(**dict(zip(batch, part, strict=True))) / microbatches
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses, model.state_dict()

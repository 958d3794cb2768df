"""Mixtures of experts as people write them by hand: loops over a list of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPERTS, WIDTH, INNER, CHOICES = 3, 8, 16, 2


class Plain(nn.Module):
    """Two products with biases, as in minGPT."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.dropout = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))


class Gated(nn.Module):
    """Three products, as in Mixtral."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.w2 = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Normed(nn.Module):
    """An expert that is no mixture's: it normalises between its products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.norm = nn.LayerNorm(INNER)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).relu())


Body = Callable[["Loop", Tensor], Tensor]


class Loop(nn.Module):
    """Tokens [tokens, width] through experts that a body loops over."""

    def __init__(self, body: Body, expert: Callable[[], nn.Module] = Gated) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))
        self.body = body

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts of every token, [tokens, choices]."""
        weights, ids = self.router(x).softmax(-1).topk(CHOICES, dim=-1)
        return weights / weights.sum(-1, keepdim=True), ids

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x).square().mean()


class Layers(nn.Module):
    """Blocks with a norm, a mixture, a shared expert and a residual."""

    def __init__(self, body: Body, expert: Callable[[], nn.Module] = Gated) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Loop(body, expert) for _ in range(2))
        self.shared = nn.ModuleList(Gated() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block, shared, norm in zip(self.blocks, self.shared, self.norms, strict=True):
            h: Any = norm(x)
            x = x + (shared(h) + block.body(block, h))
        return x.square().mean()


def mixtral(model: Loop, x: Tensor) -> Tensor:
    """Transformers 4.36."""
    weights, ids = model.routed(x)
    out = torch.zeros((x.shape[0], WIDTH), dtype=x.dtype, device=x.device)
    mask = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
    for number in range(EXPERTS):
        layer = model.experts[number]
        slot, token = torch.where(mask[number])
        if token.shape[0] == 0:
            continue
        rows = layer(x[None, token.tolist()].reshape(-1, WIDTH))
        rows = rows * weights[token.tolist(), slot.tolist(), None]
        out.index_add_(0, token, rows.to(x.dtype))
    return out


def mixtral_hits(model: Loop, x: Tensor) -> Tensor:
    """Transformers 4.53."""
    weights, ids = model.routed(x)
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
    for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        layer = model.experts[number]
        slot, token = torch.where(mask[number].squeeze(0))
        rows = layer(x[None, token].reshape(-1, WIDTH)) * weights[token, slot, None]
        out.index_add_(0, token, rows.to(x.dtype))
    return out


def mixtral_list(model: Loop, x: Tensor) -> Tensor:
    """Transformers 4.51."""
    weights, ids = model.routed(x)
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
    for number in (mask.sum(dim=(-1, -2)) > 0).nonzero(as_tuple=True)[0].tolist():
        layer = model.experts[number]
        slot, token = torch.where(mask[number])
        rows = layer(x[None, token].reshape(-1, WIDTH)) * weights[token, slot, None]
        out.index_add_(0, token, rows.to(x.dtype))
    return out


def mistral(model: Loop, x: Tensor) -> Tensor:
    """Mistral's own inference code."""
    weights, ids = model.routed(x)
    out = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        token, slot = torch.where(ids == number)
        out[token] += weights[token, slot, None] * expert(x[token])
    return out


def deepseek(model: Loop, x: Tensor) -> Tensor:
    """DeepSeek's loop for training."""
    weights, ids = model.routed(x)
    flat, rows = ids.view(-1), x.repeat_interleave(CHOICES, dim=0)
    out = torch.empty_like(rows)
    for number, expert in enumerate(model.experts):
        out[flat == number] = expert(rows[flat == number])
    return (out.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)


def sparse_gates(model: Loop, x: Tensor) -> Tensor:
    """A softmax over the chosen logits, and masks of sequences of tokens."""
    logits = model.router(x)
    top, ids = logits.topk(CHOICES, dim=-1)
    gates = torch.full_like(logits, float("-inf")).scatter(-1, ids, top).softmax(-1)
    h, gates, ids = x.view(2, -1, WIDTH), gates.view(2, -1, EXPERTS), ids.view(2, -1, CHOICES)
    out, flat, flat_gates = torch.zeros_like(h), h.view(-1, WIDTH), gates.view(-1, EXPERTS)
    for number, expert in enumerate(model.experts):
        mask = (ids == number).any(dim=-1)
        if mask.view(-1).any():
            rows = expert(flat[mask.view(-1)])
            scores = flat_gates[mask.view(-1), number].unsqueeze(1)
            out[mask] += (rows * scores).squeeze(1)
    return out.view(-1, WIDTH)


def masks(model: Loop, x: Tensor) -> Tensor:
    weights, ids = model.routed(x)
    out = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        chosen = ids == number
        tokens = chosen.any(-1)
        if not chosen.any():
            continue
        out[tokens] += weights[chosen].unsqueeze(-1) * expert(x[tokens])
    return out


def each_slot(model: Loop, x: Tensor) -> Tensor:
    weights, ids = model.routed(x)
    out = torch.zeros_like(x)
    for slot in range(CHOICES):
        for number, expert in enumerate(model.experts):
            mask = ids[:, slot] == number
            if mask.any():
                out[mask] += weights[mask, slot : slot + 1] * expert(x[mask])
    return out


def switch(model: Loop, x: Tensor) -> Tensor:
    """One expert for each token."""
    scores, ids = model.router(x).softmax(-1).max(dim=-1)
    out = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        at = (ids == number).nonzero(as_tuple=True)[0]
        if at.numel() > 0:
            out[at] = expert(x[at]) * scores[at].unsqueeze(-1)
    return out


def scattered(model: Loop, x: Tensor) -> Tensor:
    """Every expert on every token, times weights that are zero for most."""
    weights, ids = model.routed(x)
    gates = x.new_zeros(x.shape[0], EXPERTS).scatter(1, ids, weights)
    parts = [gates[:, n : n + 1] * expert(x) for n, expert in enumerate(model.experts)]
    return sum(parts[1:], start=parts[0])


def dense(model: Loop, x: Tensor) -> Tensor:
    weights, ids = model.routed(x)
    out = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        out = out + ((ids == number) * weights).sum(-1, keepdim=True) * expert(x)
    return out


def positions(model: Loop, x: Tensor) -> Tensor:
    """Rows by a table of positions."""
    weights, ids = model.routed(x)
    out = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        table = (ids == number).nonzero()
        token, slot = table[:, 0], table[:, 1]
        out.index_add_(0, token, weights[token, slot].unsqueeze(-1) * expert(x[token]))
    return out


def unique_ids(model: Loop, x: Tensor) -> Tensor:
    """Only the experts that some token chose, of a router that sorts."""
    scores, order = torch.sort(model.router(x).softmax(-1), dim=-1, descending=True)
    weights, ids = scores[:, :CHOICES], order[:, :CHOICES]
    out = torch.zeros_like(x)
    for number in ids.unique():
        token, slot = torch.where(ids == number)
        out[token] += weights[token, slot, None] * model.experts[number](x[token])
    return out


def counted(model: Loop, x: Tensor) -> Tensor:
    """Tokens of several sequences, and counts that say which experts have some."""
    h = x.view(2, -1, WIDTH)
    weights, ids = model.routed(h)
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    out = torch.zeros_like(h)
    for number, expert in enumerate(model.experts):
        if counts[number] == 0:
            continue
        row, token, slot = torch.where(ids == number)
        out[row, token] += weights[row, token, slot].unsqueeze(-1) * expert(h[row, token])
    return out.view(-1, WIDTH)


def stacked(model: Loop, x: Tensor) -> Tensor:
    """Every expert on every token, in one tensor."""
    weights, ids = model.routed(x)
    gates = x.new_zeros(x.shape[0], EXPERTS).scatter(1, ids, weights)
    results = torch.stack([expert(x) for expert in model.experts], dim=1)
    return torch.einsum("te,ted->td", gates, results)


def summed_stack(model: Loop, x: Tensor) -> Tensor:
    weights, ids = model.routed(x)
    gates = (F.one_hot(ids, EXPERTS).to(weights.dtype) * weights.unsqueeze(-1)).sum(1)
    results = torch.stack([expert(x) for expert in model.experts], dim=1)
    return (gates.unsqueeze(-1) * results).sum(dim=1)


def within_capacity(model: Loop, x: Tensor) -> Tensor:
    """Later tokens of a crowded expert are dropped."""
    weights, ids = model.routed(x)
    out = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        chosen = (ids == number).any(-1)
        kept = chosen & (chosen.long().cumsum(0) <= 2)
        score = (weights * (ids == number)).sum(-1)
        out[kept] += score[kept].unsqueeze(-1) * expert(x[kept])
    return out


def crowded(model: Loop, x: Tensor) -> Tensor:
    """Switch of transformers 5: one expert a token, up to a capacity; experts have names."""
    model.router = model.router.to(x.device, x.dtype)
    weights, ids = model.router(x).softmax(-1).max(-1)
    chosen = F.one_hot(ids, EXPERTS)
    chosen = (chosen * (chosen.cumsum(0) <= 2)).view(-1, 1, EXPERTS)
    out = torch.zeros_like(x)
    mask = chosen.permute(2, 1, 0)
    for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        slot, token = torch.where(mask[hit].squeeze(0))
        rows = model.experts.get_submodule(f"{hit[0]}")(x[None, token].reshape(-1, WIDTH))
        out.index_add_(0, token, rows * weights.view(-1, 1)[token, slot, None])
    return out


def soft(model: Loop, x: Tensor) -> Tensor:
    """All experts of every token: no mixture of some."""
    gates = model.router(x).softmax(-1)
    return sum((gates[:, n, None] * e(x) for n, e in enumerate(model.experts)), x.new_zeros(()))


def fewer(model: Loop, x: Tensor) -> Tensor:
    """The last expert is never used, though the router chooses it."""
    weights, ids = model.routed(x)
    out = torch.zeros_like(x)
    for number in range(EXPERTS - 1):
        token, slot = torch.where(ids == number)
        out[token] += weights[token, slot, None] * model.experts[number](x[token])
    return out


def identity(model: Loop, x: Tensor) -> Tensor:
    """LongCat-Flash: an expert without weights gives its tokens back."""
    weights, ids = model.routed(x)
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
    for hit in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        number = int(hit.item())
        slot, token = torch.where(mask[number].squeeze(0))
        if token.numel() == 0:
            continue
        rows = x[token] if number == EXPERTS - 1 else model.experts[number](x[token])
        out.index_add_(0, token, rows * weights[token, slot, None])
    return out


def doubled(model: Loop, x: Tensor) -> Tensor:
    """The result of the first expert counts twice."""
    weights, ids = model.routed(x)
    out = torch.zeros_like(x)
    mask = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
    for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        if number[0] == EXPERTS:
            continue
        layer = model.experts[number[0]]
        slot, token = torch.where(mask[number[0]])
        rows = layer(x[token])
        rows = rows + rows if number[0] == 0 else rows
        out.index_add_(0, token, rows * weights[token, slot, None])
    return out


def overwritten(model: Loop, x: Tensor) -> Tensor:
    """A token keeps what its last expert gives."""
    weights, ids = model.routed(x)
    out = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        mask = (ids == number).any(-1)
        out[mask] = (weights * (ids == number)).sum(-1)[mask].unsqueeze(-1) * expert(x[mask])
    return out


def others(model: Loop, x: Tensor) -> Tensor:
    """The rows of one expert are those of the weights of another."""
    weights, ids = model.routed(x)
    gates = x.new_zeros(x.shape[0], EXPERTS).scatter(1, ids, weights)
    out = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        mask = (ids == number).any(-1)
        out[mask] += gates[mask, (number + 1) % EXPERTS, None] * expert(x[mask])
    return out


def written(model: Loop, x: Tensor) -> Tensor:
    """A mask that is changed after it was computed."""
    weights, ids = model.routed(x)
    out = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        mask = (ids == number).any(-1)
        mask[0] = False
        out[mask] += (weights * (ids == number)).sum(-1)[mask].unsqueeze(-1) * expert(x[mask])
    return out


MIXTURES: dict[str, Body] = {
    body.__name__: body
    for body in (mixtral, mixtral_hits, mixtral_list, mistral, deepseek, sparse_gates, masks,
                 each_slot, switch, scattered, dense, within_capacity, crowded, others, positions,
                 unique_ids, counted, stacked, summed_stack, fewer, identity)
}  # fmt: skip
OTHERS: dict[str, Body] = {body.__name__: body for body in (soft, doubled, overwritten, written)}

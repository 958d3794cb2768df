"""Models of many families, from their libraries or as their papers describe them.

Each builder returns a model in float64 and a batch for it, the same at every call. Every size
divides by 4. Models of transformers are unchanged; see `Exact` for their float32 parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tests.support import models, outside
from tests.support.exact import Exact

Batch = dict[str, Any]
Made = tuple[nn.Module, Batch]
BATCH, SEQ, WORDS = 8, 16, 96


# Models of transformers ---------------------------------------------------------------------------


def _sizes(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": WORDS,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        **more,
    }


def _tokens() -> Batch:
    shape = (BATCH, SEQ)
    return {
        "input_ids": torch.randint(2, WORDS, shape),
        "labels": torch.randint(2, WORDS, shape),
    }


def qwen3() -> Made:
    """Norms of queries and keys; two heads of keys."""
    config = transformers.Qwen3Config(**_sizes(num_key_value_heads=2, head_dim=8, use_cache=False))
    return Exact(transformers.Qwen3ForCausalLM(config)), _tokens()


def gemma() -> Made:
    """One head of keys; embeddings scaled, and tied with the head."""
    config = transformers.GemmaConfig(**_sizes(num_key_value_heads=1, head_dim=8, use_cache=False))
    return Exact(transformers.GemmaForCausalLM(config)), _tokens()


def mixtral(implementation: str = "batched_mm") -> Made:
    """A mixture of experts; the loss of the router is part of the loss."""
    config = transformers.MixtralConfig(
        **_sizes(
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False
        ),
        output_router_logits=True,
        experts_implementation=implementation,
    )
    return Exact(transformers.MixtralForCausalLM(config)), _tokens()


def mixtral_grouped() -> Made:
    """The same by grouped products of rows that are sorted by expert."""
    return mixtral("grouped_mm")


def t5() -> Made:
    """Encoder and decoder, with relative positions."""
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    batch = _tokens()
    batch["attention_mask"] = torch.ones(BATCH, SEQ, dtype=torch.int64)
    batch["attention_mask"][::2, SEQ // 2 :] = 0
    return Exact(transformers.T5ForConditionalGeneration(config)), batch


def clip() -> Made:
    """Images and texts, compared with one another across the batch."""
    text = transformers.CLIPTextConfig(**_sizes(), eos_token_id=1, attention_dropout=0.0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        attention_dropout=0.0,
    )
    config = transformers.CLIPConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16
    )
    ids = torch.randint(2, WORDS, (BATCH, SEQ))
    ids[:, -1] = 1
    batch = {"input_ids": ids, "pixel_values": torch.randn(BATCH, 3, 16, 16), "return_loss": True}
    return Exact(transformers.CLIPModel(config)), batch


def resnet() -> Made:
    """Bottleneck blocks, with running statistics."""
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], num_labels=12
    )
    batch = {
        "pixel_values": torch.randn(BATCH, 3, 32, 32),
        "labels": torch.randint(0, 12, (BATCH,)),
    }
    return Exact(transformers.ResNetForImageClassification(config)), batch


def _shared(name: str) -> Callable[[], Made]:
    """A model of tests/support/models.py."""

    def build() -> Made:
        model, batch = models.MODELS[name]()
        return Exact(model), dict(batch)

    return build


# Models in plain torch ----------------------------------------------------------------------------


class WideBlock(nn.Module):
    """Two convolutions, batch normalisation before each, a way around (arXiv:1605.07146)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(x))
        return self.conv2(F.relu(self.norm2(self.conv1(hidden)))) + self.around(hidden)


class WideResNet(nn.Module):
    def __init__(self, width: int = 8, classes: int = 12) -> None:
        super().__init__()
        widths = [width, width, 2 * width, 2 * width]
        pairs = itertools.pairwise(widths)
        blocks = [WideBlock(a, b, 1 if a == b else 2) for a, b in pairs]
        self.stem, self.blocks = nn.Conv2d(3, width, 3, padding=1), nn.Sequential(*blocks)
        self.norm, self.head = nn.BatchNorm2d(2 * width), nn.Linear(2 * width, classes)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.blocks(self.stem(image))))
        hidden = F.adaptive_avg_pool2d(hidden, 1).flatten(1)
        return F.cross_entropy(self.head(hidden), label)


def wide_resnet() -> Made:
    batch = {"image": torch.randn(BATCH, 3, 8, 8), "label": torch.randint(0, 12, (BATCH,))}
    return WideResNet(), batch


class Double(nn.Module):
    """Two convolutions with group normalisation; the time of the noise is added between."""

    def __init__(self, inputs: int, outputs: int, times: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, inputs), nn.GroupNorm(4, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(times, outputs)
        self.around = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.conv2(F.silu(self.norm2(hidden))) + self.around(x)


class UNet(nn.Module):
    """Predicts the noise in an image: down, up, and across at every level (arXiv:2006.11239)."""

    def __init__(self, width: int = 8, levels: int = 2) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(levels + 1)]
        pairs, times = list(itertools.pairwise(sizes)), 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, times), nn.SiLU(), nn.Linear(times, times))
        self.stem, self.head = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 1)
        self.down = nn.ModuleList(Double(a, b, times) for a, b in pairs)
        self.middle = Double(sizes[-1], sizes[-1], times)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairs[::-1])
        self.join = nn.ModuleList(Double(a + b, a, times) for a, b in pairs[::-1])

    def forward(self, image: Tensor, noise: Tensor, step: Tensor) -> Tensor:
        rates = torch.exp(torch.arange(self.width // 2, device=image.device) * -math.log(1e4))
        angles = step[:, None].to(image.dtype) * rates.to(image.dtype)
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        level = torch.rsqrt(1.0 + step.to(image.dtype))[:, None, None, None]
        hidden, skipped = self.stem(level * image + (1 - level**2).sqrt() * noise), []
        for block in self.down:
            hidden = block(hidden, time)
            skipped.append(hidden)
            hidden = F.max_pool2d(hidden, 2)
        hidden = self.middle(hidden, time)
        for grow, block in zip(self.up, self.join, strict=True):
            if hidden.shape[-1] > 2:
                hidden = grow(hidden)
            else:
                hidden = grow(F.interpolate(hidden, scale_factor=2.0, mode="nearest"))
                hidden = F.avg_pool2d(hidden, 2)
            hidden = block(torch.cat([hidden, skipped.pop()], dim=1), time)
        return F.mse_loss(self.head(hidden), noise)


def unet() -> Made:
    image, noise = torch.randn(2, BATCH, 4, 8, 8)
    return UNet(), {"image": image, "noise": noise, "step": torch.randint(0, 100, (BATCH,))}


class Experts(nn.Module):
    """A mixture of perceptrons, two a token, by einsum over a dispatch mask.

    Algorithm 1 of GShard (arXiv:2006.16668): a token goes to its best expert, and to its second
    best with a probability that grows with that one's weight; experts take `capacity` tokens of
    each group, in order. Returns the output and the loss that balances the experts.
    """

    def __init__(self, width: int, hidden: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.experts, self.capacity = experts, capacity
        self.gate = nn.Linear(width, experts, bias=False)
        self.into = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.out = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        combine, balance = self.route(self.gate(x).softmax(-1))
        dispatch = (combine > 0).to(x.dtype)
        inside = torch.einsum("gsec,gsm->egcm", dispatch, x)
        inside = F.relu(torch.einsum("egcm,emh->egch", inside, self.into))
        inside = torch.einsum("egch,ehm->egcm", inside, self.out)
        return torch.einsum("gsec,egcm->gsm", combine, inside), balance

    def route(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [group, token, expert, place], and the loss of balance."""
        weights, chosen = gates.topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        first, second = (F.one_hot(chosen[..., k], self.experts) for k in range(2))
        balance = (gates.mean(1) * first.to(gates.dtype).mean(1)).sum(-1).mean()
        taken = torch.rand_like(weights[..., 1]) < 2 * weights[..., 1]
        second = second * taken[..., None]
        place1 = first.cumsum(1) - first
        place2 = second.cumsum(1) - second + first.sum(1, keepdim=True)
        combine = self.slots(first, place1, weights[..., 0])
        return combine + self.slots(second, place2, weights[..., 1]), balance * self.experts

    def slots(self, mask: Tensor, place: Tensor, weight: Tensor) -> Tensor:
        mask = mask * (place < self.capacity)
        at = (place * mask).sum(-1).clamp(max=self.capacity - 1)
        places = F.one_hot(at, self.capacity).to(weight.dtype)
        return torch.einsum("gs,gse,gsc->gsec", weight, mask.to(weight.dtype), places)


class MoeLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.experts = Experts(width, 2 * width, experts=4, capacity=8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm1(x)
        x = x + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        mixed, balance = self.experts(self.norm2(x))
        return x + mixed, balance


class MoeTransformer(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.layers = nn.ModuleList(MoeLayer(width, heads) for _ in range(layers))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids)
        total = hidden.new_zeros(())
        for layer in self.layers:
            hidden, balance = layer(hidden)
            total = total + balance
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss + 0.01 * total, "balance": total}


def gshard() -> Made:
    return MoeTransformer(), _tokens()


class WordLstm(nn.Module):
    """A language model of two recurrent layers."""

    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(input_ids))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def lstm() -> Made:
    return WordLstm(), _tokens()


class Dlrm(nn.Module):
    """Tables of categories, bags of indices, and the products of all pairs (arXiv:1906.00091)."""

    def __init__(self, tables: int = 3, rows: int = 32, width: int = 8) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom, self.top = models.Mlp((12, 16, width)), models.Mlp((width + 6, 16, 1))

    def forward(self, dense: Tensor, sparse: Tensor, clicked: Tensor) -> Tensor:
        features = [self.bottom(dense), *(bag(sparse[:, i]) for i, bag in enumerate(self.bags))]
        every = torch.stack(features, dim=1)
        products = every @ every.mT
        rows, columns = torch.tril_indices(len(features), len(features), offset=-1)
        pairs = products[:, rows, columns]
        score = self.top(torch.cat([features[0], pairs], dim=1))
        return F.binary_cross_entropy_with_logits(score[:, 0], clicked)


def dlrm() -> Made:
    batch = {
        "dense": torch.randn(BATCH, 12),
        "sparse": torch.randint(0, 32, (BATCH, 3, 4)),
        "clicked": torch.randint(0, 2, (BATCH,)).to(torch.float64),
    }
    return Dlrm(), batch


class TiedAndFrozen(nn.Module):
    """A frozen encoder under a trained one; the head is the embedding."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        layer = {"dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
        self.frozen = nn.TransformerEncoderLayer(width, 4, **layer)
        self.trained = nn.TransformerEncoderLayer(width, 4, **layer)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            known = self.frozen(self.embedding(input_ids))
        hidden = self.trained(self.embedding(input_ids) + known)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def tied_and_frozen() -> Made:
    return TiedAndFrozen(), _tokens()


class TwoTowers(nn.Module):
    """Users and items, told apart by a loss over the pairs in the batch; returns a dictionary."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.users, self.items = models.Mlp((12, 32, width)), models.Mlp((20, 32, width))
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(
        self, user: Tensor, item: Mapping[str, Tensor], weight: Tensor
    ) -> dict[str, Tensor | dict[str, Tensor]]:
        left = F.normalize(self.users(user), dim=-1)
        right = F.normalize(self.items(torch.cat([item["seen"], item["price"]], -1)), dim=-1)
        scores = left @ right.T * self.temperature.exp()
        target = torch.arange(len(scores), device=scores.device)
        each = F.cross_entropy(scores, target, reduction="none")
        each = each + scores.logsumexp(0) - scores.diagonal()
        return {
            "loss": (weight * each).sum() / weight.sum(),
            "towers": {"users": left, "items": right},
            "best": scores.argmax(-1),
        }


def two_towers() -> Made:
    batch = {
        "user": torch.randn(BATCH, 12),
        "item": {"seen": torch.randn(BATCH, 16), "price": torch.randn(BATCH, 4)},
        "weight": torch.rand(BATCH),
    }
    return TwoTowers(), batch


FAMILIES: dict[str, Callable[[], Made]] = {
    **{name: _shared(name) for name in models.MODELS},
    "qwen3": qwen3,
    "gemma": gemma,
    "mixtral": mixtral,
    "mixtral_grouped": mixtral_grouped,
    "t5": t5,
    "clip": clip,
    "resnet": resnet,
    "wide_resnet": wide_resnet,
    "unet": unet,
    "gshard": gshard,
    "lstm": lstm,
    "dlrm": dlrm,
    "tied_and_frozen": tied_and_frozen,
    "two_towers": two_towers,
    **outside.MODELS,
}


def make(name: str) -> Made:
    """A model in float64 that trains, and a batch; the same at every call."""
    torch.manual_seed(0)
    model, batch = FAMILIES[name]()
    return model.double().train(), in_double(batch)


def in_double(value: Any) -> Any:
    """A batch with its floating tensors in float64."""
    if isinstance(value, dict):
        return {key: in_double(item) for key, item in value.items()}
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value

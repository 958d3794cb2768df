"""The models that features are tried on, and what recipes say of them in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.families import Exact
from tests.features.feature import Recipe

Batch = dict[str, Tensor]


def words(recipe: Recipe) -> int:
    """The size of the vocabulary."""
    return 97 if recipe.uneven else 96


class Whole(nn.Module):
    """A model that returns its loss, in float64 or in what it is converted to."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        self.model = Exact(model) if recipe.compute == "f64" else model
        self.second = recipe.second

    def forward(self, **batch: Tensor) -> Tensor:
        output = self.model(**batch)
        if not self.second:
            return output.loss
        # Of the size of the logits, as PaLM has it (arXiv:2204.02311, section 5).
        return output.loss + 1e-2 * output.logits.logsumexp(-1).square().mean()


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
        build: makes one, for a run in plain torch or for one by autopar.
        frozen: patterns of names of the parameters that a recipe freezes.
        groups: patterns of names, and the optimizer's options for them.
    """

    build: Callable[[Recipe, bool], nn.Module]
    frozen: tuple[str, ...]
    groups: Mapping[str, Mapping[str, Any]]


def gpt2(recipe: Recipe, plain: bool) -> nn.Module:
    """Four blocks."""
    config = transformers.GPT2Config(
        vocab_size=words(recipe),
        n_positions=32,
        n_embd=32,
        n_layer=4,
        n_head=4,
        resid_pdrop=recipe.dropout,
        embd_pdrop=recipe.dropout,
        attn_pdrop=recipe.dropout,
        tie_word_embeddings=recipe.tied,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    return transformers.GPT2LMHeadModel(config)


def mixture(recipe: Recipe, plain: bool) -> nn.Module:
    """A Mixtral of four blocks of four experts.

    Outside of a trace, grouped products are torch's own, which knows no float64.
    """
    config = transformers.MixtralConfig(
        vocab_size=words(recipe),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        attention_dropout=recipe.dropout,
        tie_word_embeddings=recipe.tied,
        use_cache=False,
        experts_implementation="batched_mm" if plain else "grouped_mm",
    )
    return transformers.MixtralForCausalLM(config)


FAMILIES = {
    "gpt2": Family(
        gpt2,
        frozen=("*wte.weight", "*.attn.*"),
        groups={"*.bias": {"weight_decay": 0.0}, "*ln_*": {"weight_decay": 0.0, "lr": 3e-2}},
    ),
    "mixture": Family(
        mixture,
        frozen=("*embed_tokens.weight", "*.self_attn.*"),
        groups={"*norm*": {"weight_decay": 0.0}, "*experts*": {"lr": 3e-2}},
    ),
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=5e-2, momentum=0.9, nesterov=True),
    # With a larger epsilon: it divides by its own size what is zero but for rounding.
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2, eps=(1e-6, 1e-3)),
}


def make(recipe: Recipe, seed: int = 0, plain: bool = False) -> nn.Module:
    """The model of a recipe in training mode, the same at every call with one seed."""
    family = FAMILIES[recipe.model]
    torch.manual_seed(seed)
    model = Whole(family.build(recipe, plain).train(), recipe)
    for name, parameter in model.named_parameters():
        if recipe.frozen and any(fnmatchcase(name, pattern) for pattern in family.frozen):
            parameter.requires_grad_(False)
    return model


def batches(recipe: Recipe, steps: int) -> list[Batch]:
    """A batch for each step."""
    generator = torch.Generator().manual_seed(2)
    shape = (12, 15) if recipe.uneven else (8, 16)
    return [
        {
            name: torch.randint(2, words(recipe), shape, generator=generator)
            for name in ("input_ids", "labels")
        }
        for _ in range(steps)
    ]


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A rate that changes with every step."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

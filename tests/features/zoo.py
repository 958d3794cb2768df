"""The kinds of models on which features are tested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput

from tests.features.feature import Recipe

Batch = dict[str, Tensor]
LAYERS, WIDTH, CLASSES = 4, 32, 12


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
        build: makes one that returns what models of transformers do, for a run in plain torch or
            for one by autopar.
        batch: makes a batch for it.
        frozen: patterns of names of the parameters that a recipe freezes.
        groups: patterns of names, and the optimizer's options for them.
        lacks: features that there are none of.
    """

    build: Callable[[Recipe, bool], nn.Module]
    batch: Callable[[Recipe, torch.Generator], Batch]
    frozen: tuple[str, ...]
    groups: Mapping[str, Mapping[str, Any]]
    lacks: frozenset[str] = frozenset()


def words(recipe: Recipe) -> int:
    """The size of the vocabulary."""
    return 97 if recipe.uneven else 96


def samples(recipe: Recipe) -> int:
    """The size of a batch."""
    return 12 if recipe.uneven else 8


def tokens(recipe: Recipe, generator: torch.Generator) -> Batch:
    """Texts, and what to say of each of their tokens."""
    shape = (samples(recipe), 15 if recipe.uneven else 16)
    return {
        name: torch.randint(2, words(recipe), shape, generator=generator)
        for name in ("input_ids", "labels")
    }


def images(recipe: Recipe, generator: torch.Generator) -> Batch:
    """Images of 16 x 16, and their classes."""
    count = samples(recipe)
    pixels = torch.randn(count, 3, 16, 16, generator=generator, dtype=torch.float64)
    return {
        "pixel_values": pixels if recipe.compute == "f64" else pixels.float(),
        "labels": torch.randint(0, CLASSES, (count,), generator=generator),
    }


def gpt2(recipe: Recipe, plain: bool) -> nn.Module:
    """A decoder."""
    config = transformers.GPT2Config(
        vocab_size=words(recipe),
        n_positions=32,
        n_embd=WIDTH,
        n_layer=LAYERS,
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
    """A Mixtral of four experts a block.

    Outside of a trace, grouped products are torch's own, which knows no float64.
    """
    config = transformers.MixtralConfig(
        vocab_size=words(recipe),
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
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


def bert(recipe: Recipe, plain: bool) -> nn.Module:
    """An encoder."""
    config = transformers.BertConfig(
        vocab_size=words(recipe),
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=32,
        hidden_dropout_prob=recipe.dropout,
        attention_probs_dropout_prob=recipe.dropout,
        tie_word_embeddings=recipe.tied,
    )
    return transformers.BertForMaskedLM(config)


def t5(recipe: Recipe, plain: bool) -> nn.Module:
    """An encoder and a decoder, with relative positions."""
    config = transformers.T5Config(
        vocab_size=words(recipe),
        d_model=WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=LAYERS - 1,  # the first one is unlike the others
        num_heads=4,
        dropout_rate=recipe.dropout,
        decoder_start_token_id=0,
        tie_word_embeddings=recipe.tied,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


class Convolutions(nn.Module):
    """Residual blocks of two convolutions with batch normalisation."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.Conv2d(8, 8, 3, padding=1, bias=False),
                nn.BatchNorm2d(8),
                nn.Dropout(recipe.dropout),
                nn.ReLU(),
                nn.Conv2d(8, 8, 3, padding=1),
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> ImageClassifierOutput:
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x.mean((2, 3)))
        return ImageClassifierOutput(loss=F.cross_entropy(logits, labels), logits=logits)


def convolutions(recipe: Recipe, plain: bool) -> nn.Module:
    return Convolutions(recipe)


_NO_DECAY = {"*.bias": {"weight_decay": 0.0}}
FAMILIES = {
    "gpt2": Family(
        gpt2,
        tokens,
        frozen=("*wte.weight", "*.attn.*"),
        groups={**_NO_DECAY, "*ln_*": {"weight_decay": 0.0, "lr": 3e-2}},
    ),
    "mixture": Family(
        mixture,
        tokens,
        frozen=("*embed_tokens.weight", "*.self_attn.*"),
        groups={"*norm*": {"weight_decay": 0.0}, "*experts*": {"lr": 3e-2}},
    ),
}
# Those that only the slow tests train.
OTHERS = {
    "bert": Family(
        bert,
        tokens,
        frozen=("*word_embeddings.weight", "*.query.*"),
        groups={**_NO_DECAY, "*LayerNorm*": {"weight_decay": 0.0, "lr": 3e-2}},
    ),
    "t5": Family(
        t5,
        tokens,
        frozen=("*shared.weight", "*SelfAttention.q.*"),
        groups={"*layer_norm*": {"weight_decay": 0.0}, "*wo*": {"lr": 3e-2}},
    ),
    "convolutions": Family(
        convolutions,
        images,
        frozen=("*stem*", "*blocks.*.2.weight"),
        groups={**_NO_DECAY, "*head*": {"lr": 3e-2}},
        lacks=frozenset({"tied", "megatron", "fuse"}),
    ),
}

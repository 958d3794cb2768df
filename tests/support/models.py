"""Small models of the common families, each with a batch for it; shared by tests.

Every size divides by 4, so that a mesh of 2 x 2 can split any dimension. Dropout is off by default,
and attention is torch's fused operator. All run in float32 and, after `.double()`, in float64.
`sizes` replace entries of a configuration.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

Model = tuple[nn.Module, dict[str, Tensor]]


def gpt2(
    layers: int = 2, dropout: float = 0.0, batch: int = 8, seq: int = 16, **sizes: Any
) -> Model:
    """GPT-2 with tied embeddings, and tokens with labels."""
    config = GPT2Config(
        **{
            "vocab_size": 96,
            "n_positions": 32,
            "n_embd": 32,
            "n_layer": layers,
            "n_head": 4,
            "resid_pdrop": dropout,
            "embd_pdrop": dropout,
            "attn_pdrop": dropout,
            "use_cache": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "attn_implementation": "sdpa",
            **sizes,
        }
    )
    return GPT2LMHeadModel(config).train(), _tokens(config.vocab_size, batch, seq)


def llama(layers: int = 2, batch: int = 8, seq: int = 16, **sizes: Any) -> Model:
    """Llama with four heads that share two heads of keys and values, and tokens with labels."""
    config = LlamaConfig(
        **{
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
            "use_cache": False,
            "attn_implementation": "sdpa",
            **sizes,
        }
    )
    return LlamaForCausalLM(config).train(), _tokens(config.vocab_size, batch, seq)


def bert(layers: int = 2, dropout: float = 0.0, batch: int = 8, seq: int = 16) -> Model:
    """BERT with a masked language head, and tokens with labels and a mask of padding."""
    config = BertConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        attn_implementation="sdpa",
    )
    tokens = _tokens(config.vocab_size, batch, seq)
    mask = torch.ones(batch, seq, dtype=torch.int64)
    mask[::2, seq // 2 :] = 0
    return BertForMaskedLM(config).train(), {**tokens, "attention_mask": mask}


def vit(
    layers: int = 2, dropout: float = 0.0, batch: int = 8, seq: int = 16, **sizes: Any
) -> Model:
    """A vision transformer on square images of `seq` patches (a square number), with labels."""
    side = 4 * round(seq**0.5)
    config = ViTConfig(
        **{
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "image_size": side,
            "patch_size": 4,
            "num_channels": 4,
            "num_labels": 12,
            "hidden_dropout_prob": dropout,
            "attention_probs_dropout_prob": dropout,
            "attn_implementation": "sdpa",
            **sizes,
        }
    )
    images = {
        "pixel_values": torch.randn(
            batch, config.num_channels, config.image_size, config.image_size
        ),
        "labels": torch.randint(0, config.num_labels, (batch,)),
    }
    return ViTForImageClassification(config).train(), images


def _tokens(vocabulary: int, batch: int, seq: int) -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(0, vocabulary, (batch, seq)),
        "labels": torch.randint(0, vocabulary, (batch, seq)),
    }


class ConvNet(nn.Module):
    """Two convolutions with batch normalisation; returns the cross entropy."""

    def __init__(self, width: int = 8, classes: int = 12) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(image)))
        hidden = F.relu(hidden + self.norm2(self.conv2(hidden)))
        return F.cross_entropy(self.head(hidden.mean((2, 3))), label)


def conv_net(batch: int = 8) -> Model:
    """A convolutional classifier, and images with labels."""
    images = {"image": torch.randn(batch, 4, 8, 8), "label": torch.randint(0, 12, (batch,))}
    return ConvNet().train(), images


class Mlp(nn.Module):
    """Linear layers with a non-linearity between; returns the last layer's output."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            x = F.gelu(layer(x))
        return last(x)


def mlp(sizes: tuple[int, ...] = (16, 32, 32, 8), batch: int = 8) -> Model:
    """A plain perceptron and its input; `squared_error` is a loss_fn for it."""
    return Mlp(sizes).train(), {"x": torch.randn(batch, sizes[0])}


def squared_error(output: Tensor, x: Tensor) -> Tensor:
    """A loss that needs no labels: the output against the input's first columns."""
    return F.mse_loss(output, x[..., : output.shape[-1]])


MODELS: dict[str, Any] = {"gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit}

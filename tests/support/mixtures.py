"""Mixtures of experts of transformers, each a causal language model small enough to train here."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import autopar
from tests.support.exact import Exact
from tests.support.families import WORDS, Made

BATCH, SEQ = 4, 8
_COMMON: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_NARROW = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
_TWO = {"num_experts_per_tok": 2}
_SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 0, **_NARROW}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_LATENT: dict[str, Any] = {
    **_SHARED,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}
# Class of the model -> what its configuration says besides.
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, **_TWO, "output_router_logits": True},
    "Qwen2Moe": {"num_experts": 4, "shared_expert_intermediate_size": 12, **_NARROW},
    "Qwen3Moe": {"num_experts": 4, **_NARROW, "output_router_logits": True},
    "DeepseekV2": {**_LATENT, "topk_method": "group_limited_greedy"},
    "DeepseekV3": _LATENT,
    "GptOss": {"num_local_experts": 4, **_TWO},
    "Olmoe": {"num_experts": 4, **_TWO},
    "GraniteMoe": {"num_local_experts": 4, **_TWO},
    "GraniteMoeShared": {"num_local_experts": 4, "shared_intermediate_size": 12, **_TWO},
    "Jamba": {
        "num_experts": 4,
        **_TWO,
        "attn_layer_period": 1,
        "attn_layer_offset": 0,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "Phimoe": {"num_local_experts": 4, **_TWO},
    "Glm4Moe": {**_SHARED, **_ONE_GROUP},
    "Ernie4_5_Moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 12,
        "moe_layer_start_index": 0,
    },
    "MiniMax": {"num_local_experts": 4, **_TWO, "layer_types": ["full_attention"]},
    "FlexOlmo": {"num_experts": 4, **_TWO},
    "HunYuanMoEV1": {"num_experts": 4, "moe_topk": 2},
    "Dots1": {**_SHARED, **_ONE_GROUP},
    "Lfm2Moe": {
        "num_experts": 4,
        "num_dense_layers": 0,
        "layer_types": ["full_attention"],
        **_NARROW,
    },
    "NemotronH": {
        **_SHARED,
        **_ONE_GROUP,
        "moe_shared_expert_intermediate_size": 12,
        "layers_block_type": ["attention", "moe"],
    },
    "Qwen3Next": {
        "num_experts": 4,
        "shared_expert_intermediate_size": 12,
        "layer_types": ["full_attention"],
        **_NARROW,
    },
    "Dbrx": {
        "d_model": 16,
        "n_heads": 2,
        "n_layers": 1,
        "max_seq_len": 32,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "JetMoe": {"num_local_experts": 4, **_TWO, "kv_channels": 8},
    "Llama4": {
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        **_TWO,
        "intermediate_size_mlp": 24,
        "interleave_moe_layer_step": 2,
    },
    "Custom": {},
}


_CONFIGS = {"Llama4": "Llama4TextConfig"}


class Routed(nn.Module):
    """A layer of experts without gates, on tokens in two dimensions, by `autopar.mixture`.

    Experts are balanced as in DeepSeek-V3 (arXiv:2412.19437, section 2.1.2): a bias, by which they
    are chosen, grows for those that are chosen less often than the average.
    """

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.zeros(experts, inner, width))
        self.down = nn.Parameter(torch.zeros(experts, width, inner))
        self.bias = nn.Parameter(torch.zeros(experts, width))
        self.register_buffer("balance", torch.zeros(experts))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of every token's experts, and these."""
        scores = self.router(x).softmax(-1)
        ids = (scores + self.balance).topk(2).indices
        with torch.no_grad():
            counts = F.one_hot(ids, len(self.up)).sum((0, 1, 2)).to(scores.dtype)
            self.balance.add_(0.01 * torch.sign(counts.mean() - counts))
        return scores.gather(-1, ids), ids

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        biases = None, None, self.bias
        act = "mul(up, sigmoid(up))"
        return x + autopar.mixture(
            x, ids, weights, self.up, self.down, activation=act, biases=biases
        )


class Custom(nn.Module):
    """Words through two such layers; the experts of the loop are the judge's."""

    def __init__(self, loop: bool) -> None:
        super().__init__()
        kind = Looped if loop else Routed
        self.words, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.layers = nn.ModuleList(kind(16, 12, 5) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.words(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        return {"loss": loss}


class Looped(Routed):
    """The same, one expert after the other on all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        total = x
        for expert in range(len(self.up)):
            share = (weights * (ids == expert)).sum(-1, keepdim=True)
            inner = F.silu(x @ self.up[expert].T)
            total = total + share * (inner @ self.down[expert].T + self.bias[expert])
        return total


def mixture(name: str, implementation: str = "grouped_mm") -> Made:
    """A model in float64 that trains, and a batch; the same at every call.

    Args:
        name: one of `MIXTURES`.
        implementation: how the library computes the experts; "eager" is its own loop over them.
    """
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    batch = {
        key: torch.randint(2, WORDS, (BATCH, SEQ), generator=draw)
        for key in ("input_ids", "labels")
    }
    return _model(name, implementation, draw).train(), batch


def _model(name: str, implementation: str, draw: torch.Generator) -> nn.Module:
    sizes = {**_COMMON, **MIXTURES[name], "experts_implementation": implementation}
    if name in ("Dbrx", "JetMoe", "Llama4"):  # which have their own spellings only
        sizes.pop("experts_implementation")
    if name == "Custom":
        model: nn.Module = Custom(implementation == "eager")
    else:
        config = getattr(transformers, _CONFIGS.get(name, f"{name}Config"))(**sizes)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():  # zeros would hide mistakes
        for tensor in model.parameters():
            tensor.add_(0.2 * torch.randn(tensor.shape, generator=draw))
    return Exact(model)

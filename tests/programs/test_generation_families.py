"""Generation from families of transformers, compared with transformers' own `generate`.

Windows are shorter than the texts, some prompts are padded, the vocabulary does not divide, and one
sequence is left over. Weights are large, so that texts depend on every word.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import autopar
from tests.support.ranks import run_ranks

LINE = "cpu: gpu=2 @1TB/s 1ns"
WORDS, BATCH, PROMPT, NEW = 61, 3, 9, 5
SIZES = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "head_dim": 4, "eos_token_id": 7, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
WINDOW = {"sliding_window": 4}
ALIKE = {"num_key_value_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}, "mistral": WINDOW,
    "phi": ALIKE, "gemma2": {"query_pre_attn_scalar": 4, **WINDOW}, "gpt_neox": {}, "bloom": {},
    "falcon": {"head_dim": None},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 8}, "starcoder2": WINDOW, "olmo": {},
    # Recurrences, alone and between layers of attention.
    "mamba": {"state_size": 4, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 4, "state_size": 4, "n_groups": 1},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 4,
              "mamba_d_state": 4, "mamba_n_groups": 1},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"],
                   "mlp_only_layers": [0, 1], "linear_num_value_heads": 4,
                   "linear_num_key_heads": 2, "linear_key_head_dim": 4,
                   "linear_value_head_dim": 4},
    "lfm2": {"full_attn_idxs": [1], "head_dim": None},
}  # fmt: skip
GROUPS = [tuple(FAMILIES)[first : first + 5] for first in range(0, len(FAMILIES), 5)]


def made(kind: str) -> Any:
    sizes = {name: value for name, value in (SIZES | FAMILIES[kind]).items() if value is not None}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    torch.manual_seed(1)  # some vectors of recurrences begin with random values
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(2)
    spread = 0.15 if kind == "gemma2" else 0.35
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * spread if weight.dim() > 1 else weight + 0.1 * noise)
    return model.double()


def prompts() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(8, WORDS, (BATCH, PROMPT), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    given = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0}
    return {"input_ids": ids.masked_fill(mask == 0, 0), **given}


def generated(kinds: tuple[str, ...]) -> dict[str, Tensor]:
    results = {}
    for kind in kinds:
        with autopar.compile(made(kind), LINE) as program:
            results[kind] = program.generate(**prompts())
    return results


@pytest.mark.slow
@pytest.mark.parametrize("kinds", GROUPS, ids="-".join)
def test_two_ranks_generate_the_tokens_of_transformers(kinds: tuple[str, ...]) -> None:
    ranks = run_ranks(generated, kinds, count=2)
    for kind in kinds:
        wanted: Tensor = made(kind).generate(**prompts())
        assert len({tuple(row) for row in wanted[:, -NEW:].tolist()}) > 1, kind
        for rank in ranks:
            assert rank[kind].equal(wanted), kind

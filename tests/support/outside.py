"""Models from outside that once crashed the compiler, or were refused without need.

They are small, random and in float64; every size divides by 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, distributions, nn

from tests.support.exact import Exact

Batch = dict[str, Any]
Made = tuple[nn.Module, Batch]
BATCH, SEQ, WORDS = 8, 16, 96
_WIDTH = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64}
_DEPTH = {"num_hidden_layers": 2, "num_attention_heads": 4}


class Squared(nn.Module):
    """The mean square of what a model says last, as a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Tensor:
        state: Tensor = self.model(**batch).last_hidden_state
        return state.square().mean()


def _tokens(**more: Any) -> Batch:
    shape = (BATCH, SEQ)
    words = torch.randint(2, WORDS, shape)
    return {"input_ids": words, "labels": torch.randint(2, WORDS, shape), **more}


def _padding() -> Tensor:
    return (torch.arange(SEQ) < torch.randint(SEQ // 2, SEQ + 1, (BATCH, 1))).long()


def convnext() -> Made:
    """Equal blocks with a transpose behind them."""
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 16, 16, 16], depths=[2, 2, 2, 2], num_labels=4, image_size=32, patch_size=2
    )
    batch = {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.arange(BATCH) % 4}
    return Exact(transformers.ConvNextForImageClassification(config)), batch


def albert() -> Made:
    """One layer, applied three times."""
    sizes = {**_WIDTH, **_DEPTH, "num_hidden_layers": 3, "embedding_size": 16}
    config = transformers.AlbertConfig(
        **sizes, max_position_embeddings=SEQ, attention_probs_dropout_prob=0.0
    )
    return Exact(transformers.AlbertForMaskedLM(config)), _tokens(attention_mask=_padding())


def bloom() -> Made:
    """A gelu that is a torch.autograd.Function."""
    config = transformers.BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4)
    return Exact(transformers.BloomForCausalLM(config)), _tokens(use_cache=False)


def recurrent_gemma() -> Made:
    """A square root that is a torch.autograd.Function."""
    config = transformers.RecurrentGemmaConfig(
        **{**_WIDTH, **_DEPTH, "num_hidden_layers": 3},
        num_key_value_heads=1, lru_width=32, attention_window_size=SEQ,
    )  # fmt: skip
    return Exact(transformers.RecurrentGemmaForCausalLM(config)), _tokens(use_cache=False)


def wav2vec2() -> Made:
    """A norm of weights, and convolutions in groups."""
    config = transformers.Wav2Vec2Config(
        **_WIDTH, **_DEPTH, conv_dim=(8, 8), conv_stride=(4, 4), conv_kernel=(8, 8),
        num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0, layerdrop=0.0,
    )  # fmt: skip
    model = Squared(transformers.Wav2Vec2Model(config))
    return model, {"input_values": torch.randn(BATCH, 512)}


def detr() -> Made:
    """Branches that mend what is not finite."""
    sizes = {"d_model": 32, "num_queries": 8, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    layers = {"encoder_layers": 2, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    eyes = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, out_features=["stage4"]
    )
    config = transformers.DetrConfig(
        backbone_config=eyes, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        **sizes, **layers, **heads,
    )  # fmt: skip
    return Squared(transformers.DetrModel(config)), {"pixel_values": torch.randn(BATCH, 3, 32, 32)}


def time_series() -> Made:
    """A likelihood of torch.distributions, which validates its arguments."""
    config = transformers.TimeSeriesTransformerConfig(
        prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=2,
        d_model=16, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        encoder_layerdrop=0.0, decoder_layerdrop=0.0,
    )  # fmt: skip
    names = {"past_values": (10,), "past_time_features": (10, 2), "future_values": (4,)}
    batch = {name: torch.randn(BATCH, *shape) for name, shape in names.items()}
    batch |= {"future_time_features": torch.randn(BATCH, 4, 2)}
    batch |= {"past_observed_mask": torch.ones(BATCH, 10)}
    return transformers.TimeSeriesTransformerForPrediction(config), batch


def electra() -> Made:
    """A loss of what an attention mask selects."""
    config = transformers.ElectraConfig(
        **_WIDTH, **_DEPTH, embedding_size=16, max_position_embeddings=SEQ
    )
    batch = _tokens(attention_mask=_padding(), labels=torch.randint(0, 2, (BATCH, SEQ)))
    return Exact(transformers.ElectraForPreTraining(config)), batch


def gpt_oss(implementation: str = "batched_mm") -> Made:
    """A mixture of experts with biases."""
    config = transformers.GptOssConfig(
        **{**_WIDTH, **_DEPTH}, num_key_value_heads=2, head_dim=8, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=8, max_position_embeddings=64,
        layer_types=["sliding_attention", "full_attention"],
        experts_implementation=implementation,
    )  # fmt: skip
    return Exact(transformers.GptOssForCausalLM(config)), _tokens(use_cache=False)


def gpt_oss_grouped() -> Made:
    """The same with rows sorted by expert, in products of groups."""
    return gpt_oss("grouped_mm")


def llama4() -> Made:
    """Every expert on every token, weighted by a sigmoid that is 0 for all but the chosen ones."""
    config = transformers.Llama4TextConfig(
        **_WIDTH,
        **_DEPTH,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size_mlp=64,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        max_position_embeddings=SEQ,
        use_cache=False,
        pad_token_id=0,
    )
    return Exact(transformers.Llama4ForCausalLM(config)), _tokens()


class Likelihoods(nn.Module):
    """Many of torch.distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 16), nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.layer(x).chunk(2, -1)
        b = F.softplus(b) + 0.1
        normal, mixed = distributions.Normal(a, b), distributions.Categorical(logits=a)
        joint = distributions.MultivariateNormal(a, scale_tril=self.scale.tril() + torch.eye(8))
        terms = [
            normal.log_prob(x),
            distributions.kl_divergence(normal, distributions.Normal(0.0, 1.0)),
            mixed.log_prob(torch.arange(len(x))),
            distributions.StudentT(b + 2, a, b).log_prob(x),
            distributions.Gamma(b, b).log_prob(x.abs() + 0.1),
            distributions.Dirichlet(b).entropy(),
            distributions.Bernoulli(logits=a).log_prob((x > 0).to(x)),
            joint.log_prob(x),
            distributions.MixtureSameFamily(mixed, normal).log_prob(x[:, 0]),
        ]
        return -torch.stack([term.mean() for term in terms]).sum()


def likelihoods() -> Made:
    return Likelihoods(), {"x": torch.randn(BATCH, 8)}


class Convolution(nn.Module):
    """GCNConv of PyG, written out: `pow_` of a degree of 0 gives infinities, which are masked."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / 3)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        degree = torch.zeros_like(x[:, 0]).scatter_add_(0, target, torch.ones_like(target).to(x))
        scale = degree.pow_(-0.5)
        scale.masked_fill_(scale == float("inf"), 0)
        rows = (x @ self.weight)[source] * (scale[source] * scale[target])[:, None]
        into = target[:, None].expand_as(rows)
        return torch.zeros(len(x), rows.shape[1]).to(x).scatter_add_(0, into, rows) + self.bias


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Convolution(8, 16), Convolution(16, 4)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.last(F.relu(self.first(x, edges)), edges), labels)


def gcn() -> Made:
    nodes = 16
    edges = torch.randint(0, nodes - 2, (2, 40))  # two nodes have no neighbours
    return GraphNet(), {
        "x": torch.randn(nodes, 8), "edges": edges, "labels": torch.arange(nodes) % 4,
    }  # fmt: skip


MODELS: dict[str, Callable[[], Made]] = {
    "convnext": convnext,
    "albert": albert,
    "bloom": bloom,
    "recurrent_gemma": recurrent_gemma,
    "wav2vec2": wav2vec2,
    "detr": detr,
    "time_series": time_series,
    "electra": electra,
    "gpt_oss": gpt_oss,
    "gpt_oss_grouped": gpt_oss_grouped,
    "llama4": llama4,
    "likelihoods": likelihoods,
    "gcn": gcn,
}

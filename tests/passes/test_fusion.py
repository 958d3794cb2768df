"""Kernels replace exactly the operators that form their patterns."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from autopar.errors import ProgramError
from autopar.intra_op.rules import rules
from autopar.ir.fusion import choose, names, switches
from autopar.ir.graph import PREFIX, Graph
from autopar.operators.interpret import run
from autopar.passes.fusion import fuse
from autopar.passes.normalise import FINDING, NORMALISING, prepare
from autopar.passes.verify import verify
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from autopar_kernels.registry import operators

WIDTH = 8


def captured(model: nn.Module, *args: Any, **batch: Any) -> Graph:
    return capture_graph(model, args, batch, Options(), Trace(None), NORMALISING).graph


def kernels(graph: Graph) -> dict[str, int]:
    """How often each kernel stands in a graph once it is fused."""
    found = verify(fuse(graph, names()))
    prepare(found, passes=FINDING)
    ops = (node.op.removeprefix(PREFIX) for node in found.nodes if node.op.startswith(PREFIX))
    return dict(Counter(ops))


def outputs(graph: Graph, model: nn.Module, **more: Tensor) -> list[Tensor]:
    """What a graph computes, and the gradients of the parameters."""
    leaves = {leaf.target for kind in ("param", "buffer") for leaf in graph.leaves(kind)}
    values = {**dict(model.named_buffers()), **more}
    values |= {name: torch.zeros(0) for name in leaves if "lifted_tensor" in name}
    parameters = {
        name: value.detach().clone().requires_grad_()
        for name, value in model.named_parameters()
        if name in leaves
    }
    found = run(graph, {**values, **parameters})
    loss = sum(value.double().square().mean() for value in found.values() if value.requires_grad)
    assert isinstance(loss, Tensor)
    loss.backward()
    return [*found.values(), *(p.grad for p in parameters.values() if p.grad is not None)]


SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 50, "max_position_embeddings": 32,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
T5: dict[str, Any] = {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 50,
    "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
LLAMA = {"rms_norm": 3, "add_rms_norm": 2, "swiglu": 2, "rotary": 4, "linear_cross_entropy": 1}
# Model, its configuration, and the kernels that are found in two blocks of it. Between blocks the
# residual is added by itself; Gemma's two blocks differ, so that nothing is between blocks.
FOUND: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "Llama": (GROUPED, LLAMA),
    "Mistral": (GROUPED, LLAMA),
    "Qwen2": (GROUPED, LLAMA),
    "Gemma2": (
        {**GROUPED, "head_dim": 8},
        {"rms_norm": 5, "add_rms_norm": 4, "geglu": 2, "rotary": 4},
    ),
    "Phi": ({**SIZES, **STILL}, {"gelu": 2, "rotary": 4}),
    "GPT2": (
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 50,
            "n_positions": 32,
            "attn_pdrop": 0.0,
            **STILL,
        },
        {"add_layer_norm": 2, "gelu": 2, "linear_cross_entropy": 1},
    ),
    "T5": (
        {**T5, "feed_forward_proj": "gated-gelu"},
        {"rms_norm": 4, "add_rms_norm": 6, "geglu": 4},
    ),
}
CLASSES = {"GPT2": "GPT2LMHeadModel", "T5": "T5ForConditionalGeneration"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "Llama" else pytest.mark.slow) for n in FOUND]
)
def test_models_of_transformers(name: str) -> None:
    settings, wanted = FOUND[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))(config)
    ids = torch.randint(0, 50, (2, 8))
    graph = captured(model, input_ids=ids, labels=ids)
    assert kernels(graph) == wanted
    values = {"input_ids": ids, "labels": ids}
    fused = fuse(graph, names())
    pairs = zip(outputs(graph, model, **values), outputs(fused, model, **values), strict=True)
    for before, after in pairs:
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


class Written(nn.Module):
    """RMSNorm as T5 and Llama write it, with whatever stands where."""

    def __init__(self, spelling: str = "plain") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.spelling = spelling

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        h = (x + residual) * self.weight if self.spelling == "scaled" else x + residual
        mean = h.pow(2).mean(-1, keepdim=True)
        if self.spelling == "eps outside":
            return self.weight * h / (torch.sqrt(mean) + 1e-6)
        if self.spelling == "eps under":
            return self.weight * (h / torch.sqrt(mean + 1e-6))
        if self.spelling == "largest":
            mean = h.pow(2).amax(-1, keepdim=True)
        if self.spelling == "first":
            mean = h.pow(2).mean(0, keepdim=True)
        if self.spelling == "cubed":
            mean = h.pow(3).mean(-1, keepdim=True)
        normal = h * torch.rsqrt(mean + 1e-6)
        if self.spelling == "read":
            return self.weight * normal, normal
        if self.spelling == "no weight":
            return normal
        if self.spelling == "carried on":
            return self.weight * normal, h
        return self.weight * normal


@pytest.mark.parametrize(
    ("spelling", "wanted"),
    [
        ("plain", {"add_rms_norm": 1}),
        ("carried on", {"add_rms_norm": 1}),
        ("eps under", {"add_rms_norm": 1}),
        ("scaled", {"rms_norm": 1}),
        ("eps outside", {}),
        ("largest", {}),
        ("first", {}),
        ("cubed", {}),
        ("read", {}),
        ("no weight", {}),
    ],
)
def test_rms_norms_are_known_by_what_they_compute(spelling: str, wanted: dict[str, int]) -> None:
    x = torch.randn(WIDTH, WIDTH)
    assert kernels(captured(Written(spelling), x=x, residual=x + 1)) == wanted


class Halves(nn.Module):
    """Rotary embedding of halves, or what looks like it."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling, self.project = spelling, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x).unflatten(-1, (2, 4))
        rows_first = self.spelling == "rows first"
        q = q if rows_first else q.transpose(1, 2)
        angle = torch.arange(x.shape[1]).float()[:, None] * torch.tensor([1.0, 0.1])
        both = torch.cat((angle, angle + 1 if self.spelling == "unequal" else angle), -1)
        cos, sin = (
            t[None, :, None] if rows_first else t[None, None] for t in (both.cos(), both.sin())
        )
        first, second = q[..., :2], q[..., 2:]
        back = self.spelling == "backwards"
        turned = torch.cat((second, -first) if back else (-second, first), -1)
        return q * cos + turned * sin


@pytest.mark.parametrize(
    ("spelling", "fused"),
    [("heads first", True), ("rows first", True), ("unequal", False), ("backwards", False)],
)
def test_rotary_embeddings_are_those_of_equal_halves(spelling: str, fused: bool) -> None:
    x = torch.randn(2, 3, WIDTH)
    assert kernels(captured(Halves(spelling), x=x)) == ({"rotary": 1} if fused else {})


class Head(nn.Module):
    """A last linear and its loss."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.head, self.spelling = nn.Linear(WIDTH, 11, bias=spelling == "bias"), spelling

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.head(x)
        if self.spelling == "shifted":
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        if self.spelling == "capped":
            logits = logits.tanh()
        smoothing = 0.1 if self.spelling == "smooth" else 0.0
        flat = logits.flatten(0, 1), labels.flatten()
        loss = F.cross_entropy(*flat, label_smoothing=smoothing)
        if self.spelling == "read":
            return loss + logits.square().mean()
        return (loss, logits) if self.spelling == "given" else loss


@pytest.mark.parametrize(
    ("spelling", "fused"),
    [
        ("plain", True), ("shifted", True), ("given", True), ("bias", False), ("capped", False),
        ("smooth", False), ("read", False),
    ],
)  # fmt: skip
def test_losses_of_a_linear(spelling: str, fused: bool) -> None:
    x, labels = torch.randn(2, 5, WIDTH), torch.randint(0, 11, (2, 5))
    graph = captured(Head(spelling), x=x, labels=labels)
    assert kernels(graph) == ({"linear_cross_entropy": 1} if fused else {})


def test_logits_that_only_a_user_asks_for_stand_aside() -> None:
    x, labels = torch.randn(2, 5, WIDTH), torch.randint(0, 11, (2, 5))
    graph = captured(Head("given"), x=x, labels=labels)
    fused = fuse(graph, names())
    assert [fused[name].op for name in fused.aside] == ["aten.linear"]
    assert not graph.aside
    assert len(fused.trained.outputs) == 1


class Gelu(nn.Module):
    def __init__(self, scale: float, exact: bool = False) -> None:
        super().__init__()
        self.scale, self.exact = scale, exact

    def forward(self, x: Tensor, up: Tensor) -> Tensor:
        if self.exact:
            return F.gelu(x) * up
        return 0.5 * x * (1.0 + torch.tanh(self.scale * (x + 0.044715 * torch.pow(x, 3.0)))) * up


def test_geglu_is_the_tanh_form() -> None:
    x = torch.randn(4, WIDTH)
    assert kernels(captured(Gelu(0.7978845608028654), x=x, up=x + 1)) == {"geglu": 1}
    assert kernels(captured(Gelu(0.8), x=x, up=x + 1)) == {}
    assert kernels(captured(Gelu(0.0, exact=True), x=x, up=x + 1)) == {}


def test_torch_s_own_modules() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    # The second norm of a layer is cut off from its addition by the border of the block.
    assert kernels(captured(encoder, torch.randn(2, 5, WIDTH))) == {"add_layer_norm": 3}
    norm = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH, eps=1e-5))
    assert kernels(captured(norm, torch.randn(2, WIDTH))) == {"rms_norm": 1}
    assert kernels(captured(nn.LayerNorm(WIDTH), torch.randn(2, WIDTH))) == {}


def test_patterns_are_chosen_by_name() -> None:
    every = (*names(), "experts", "rotary_pack", "async_tensor_parallel", "adamw")
    assert switches() == every
    assert choose(True) == tuple(name for name in every if name != "async_tensor_parallel")
    assert choose(False) == ()
    assert choose(["rotary"]) == ("rotary",)
    assert set(choose({"rms_norm": False})) == {*choose(True)} - {"rms_norm"}
    assert "adamw" not in choose({"adamw": False})
    with pytest.raises(ProgramError, match="no pattern 'softmax'"):
        choose(["softmax"])


def test_rules_are_those_of_the_kernels() -> None:
    known, own = rules(), operators()
    for op, rule in known.items():
        name = op.removeprefix(PREFIX)
        if op.startswith(PREFIX) and name in own and name != "linear_cross_entropy":
            assert (rule.spec, rule.flops) == (own[name].factors, own[name].flops)

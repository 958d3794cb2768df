"""Mixtures of experts: one operator, whose experts, tokens and inner features are split."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import autopar
from autopar.capture.capture import Captured
from autopar.intra_op.node_choices import operand_types
from autopar.intra_op.rule import resolve
from autopar.intra_op.rules import rules
from autopar.intra_op.strategy import strategies
from autopar.intra_op.work.kernel_work import node_work
from autopar.ir.fusion import EXPERTS as EXPERTS_KERNELS
from autopar.ir.graph_text import format_graph, parse_graph
from autopar.ir.mesh import Mesh
from autopar.operators.activation import ACTIVATIONS
from autopar.operators.mixture import MIXTURE, Experts, mixture
from autopar.passes.normalise import PASSES, prepare
from autopar.passes.routing import find_mixtures
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from tests.support.families import make
from tests.support.graphs import assert_equal_runs, model_values, ops
from tests.support.ranks import run_ranks
from tests.training.test_families import GRID, LINE, SLOW, STEPS, TOLERANCE, Run, sgd, train_whole

MODEL = "mixtral_grouped"
TOKENS, WIDTH, EXPERTS, INNER = 128, 32, 4, 64
DOWN = "model.model.layers.*.mlp.experts.down_proj"
GATE_UP = "model.model.layers.*.mlp.experts.gate_up_proj"
OUT = "model.model.layers.*.mlp.experts"
# On slow links weights are used as they are pinned.
FAR, FAR_GRID = f"{SLOW}gpu=4 @1MB/s 1us", f"{SLOW}data=2 @1MB/s 1us, tensor=2 @1MB/s 1us"


def whole(*shape: int) -> str:
    """A parameter that every device stores and uses whole."""
    text = ", ".join(map(str, shape))
    return f"[{text}] => [{text}] -sum(gpu)"


# What is pinned, on which mesh, and how the program must call the operator.
SPLITS: dict[str, tuple[str, dict[str, str], str]] = {
    "tokens": (
        LINE,
        {
            OUT: f"[{TOKENS}@gpu, {WIDTH}]",
            DOWN: whole(EXPERTS, WIDTH, INNER),
            GATE_UP: whole(EXPERTS, INNER, WIDTH),
        },
        '"silu"',
    ),
    "experts": (
        LINE,
        {OUT: f"[{TOKENS}, {WIDTH}] +sum(gpu)", DOWN: f"[{EXPERTS}@gpu, {WIDTH}, {INNER}]"},
        '"silu", axis="gpu", size=4',
    ),
    "inner": (
        FAR,
        {
            OUT: f"[{TOKENS}, {WIDTH}] +sum(gpu)",
            GATE_UP: f"[{EXPERTS}, {INNER}@gpu, {WIDTH}]",
            DOWN: f"[{EXPERTS}, {WIDTH}, {INNER}@gpu]",
        },
        '"silu"',
    ),
    "tokens and experts": (
        GRID,
        {
            OUT: f"[{TOKENS}@data, {WIDTH}] +sum(tensor)",
            DOWN: f"[{EXPERTS}@tensor, {WIDTH}, {INNER}]",
        },
        '"silu", axis="tensor", size=4',
    ),
    "dispatched": (
        LINE,
        {OUT: f"[{TOKENS}@gpu, {WIDTH}]", DOWN: f"[{EXPERTS}@gpu, {WIDTH}, {INNER}]"},
        '"silu", axis="gpu", size=4, over="gpu"',
    ),
    "dispatched beside data": (
        GRID,
        {
            OUT: f"[{TOKENS}@data@tensor, {WIDTH}]",
            DOWN: f"[{EXPERTS}@tensor, {WIDTH}, {INNER}]",
        },
        '"silu", axis="tensor", size=4, over="tensor"',
    ),
    "dispatched over two axes": (
        GRID,
        {
            OUT: f"[{TOKENS}@data@tensor, {WIDTH}]",
            DOWN: f"[{EXPERTS}@data@tensor, {WIDTH}, {INNER}]",
        },
        '"silu", axis=("data", "tensor"), size=4, over=(("data",), ("tensor",))',
    ),
    "dispatched to parts of experts": (
        FAR_GRID,
        {
            OUT: f"[{TOKENS}@data, {WIDTH}] +sum(tensor)",
            GATE_UP: f"[{EXPERTS}@data, {INNER}@tensor, {WIDTH}]",
            DOWN: f"[{EXPERTS}@data, {WIDTH}, {INNER}@tensor]",
        },
        '"silu", axis="data", size=4, over="data"',
    ),
}


# Without and with messages of tokens; test_expert_parallel splits inner features, and the slow test
# trains the others.
QUICK = ("tokens and experts", "dispatched over two axes")
# Those that are trained with kernels, too: with all experts here, and with some.
FUSED = ("tokens", "tokens and experts")


def captured(fuse: tuple[str, ...] = ()) -> Captured:
    model, batch = make(MODEL)
    return capture_graph(model, (), batch, Options(fuse=fuse), Trace(None))


def trained(found: Captured, names: tuple[str, ...], fuse: tuple[str, ...] = ()) -> dict[str, Run]:
    """The runs of this rank."""
    compiler = importlib.import_module("autopar.session.compiler")
    runs = {}
    for name in names:
        mesh, pins, _ = SPLITS[name]
        model, batch = make(MODEL)
        with patch.object(compiler, "capture_parts", lambda *_: found):
            program = autopar.compile(
                model, mesh, optimizer=sgd, example_inputs=batch, pins=pins, fuse=fuse
            )
        losses = [program.step(**batch).item() for _ in range(STEPS)]
        runs[name] = Run(losses, program.state_dict(), program.source)
    return runs


OTHERS = tuple(name for name in SPLITS if name not in QUICK)


@pytest.mark.parametrize("names", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_training_equals_that_of_the_unsharded_model(names: tuple[str, ...]) -> None:
    whole, ranks = train_whole(MODEL), run_ranks(trained, captured(), names)
    for name in names:
        call = SPLITS[name][2]
        assert max(max(rank[name].errors(whole)) for rank in ranks) <= TOLERANCE, name
        source = ranks[0][name].source
        written = re.search(r"mesh\.mixture\(\s*(.*?),?\s*\)\n", source, re.S)
        assert written is not None
        assert " ".join(written[1].split()).endswith(call), name


@pytest.mark.slow
def test_training_with_kernels_is_the_same() -> None:
    fuse = (EXPERTS_KERNELS,)
    whole, ranks = train_whole(MODEL), run_ranks(trained, captured(fuse), FUSED, fuse)
    for name in FUSED:
        assert max(max(rank[name].errors(whole)) for rank in ranks) <= TOLERANCE, name
        assert '"silu", kernels=True' in " ".join(ranks[0][name].source.split())


def test_what_kernels_save_is_in_the_plan() -> None:
    fuse = (EXPERTS_KERNELS,)
    _, pins, _ = SPLITS["tokens"]
    graph, mesh = captured(fuse).graph, Mesh.parse("H200: gpu=4")
    assert parse_graph(format_graph(graph)) == graph
    plan = make_plan(graph, mesh, Options(fuse=fuse, pins=pins), Trace(None))
    entry = plan.fused[EXPERTS_KERNELS]
    # Two layers; of a quarter of the tokens in float64 no row is written scaled, read to be added
    # up or written anew, in either direction, and the gradient of the sum is read row by row.
    tokens = 8 * TOKENS * WIDTH // 4
    assert (entry.count, entry.nbytes) == (2, 2 * (6 * 2 * tokens + tokens))
    assert entry.seconds > 0


def by_loops(
    gate: Tensor, up: Tensor, down: Tensor, x: Tensor, ids: Tensor, weights: Tensor, act: str
) -> Tensor:
    """One expert and one token after the other."""
    rows = []
    for token in range(x.shape[0]):
        total = torch.zeros_like(x[token])
        for place in range(ids.shape[1]):
            expert = int(ids[token, place])
            inside = ACTIVATIONS[act](gate[expert] @ x[token]) * (up[expert] @ x[token])
            total = total + weights[token, place] * (down[expert] @ inside)
        rows.append(total)
    return torch.stack(rows)


def computed(
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    act: str,
    first: int = 0,
    size: int = 0,
    kernels: bool = False,
) -> Tensor:
    return mixture(Experts(gate, up, down, act), x, ids, weights, first, size, kernels)


def operands(dtype: torch.dtype, experts: int = 5) -> list[Tensor]:
    """The last expert but one is never chosen."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(experts, 16, 8), (experts, 16, 8), (experts, 8, 16), (12, 8), (12, 3)]
    *tensors, weights = (torch.randn(s, generator=generator, dtype=dtype) for s in shapes)
    ids = torch.randint(0, experts - 1, (12, 3), generator=generator)
    ids[ids == experts - 2] = experts - 1
    return [*(t.requires_grad_() for t in tensors), ids, weights.requires_grad_()]


# bfloat16 takes torch's own grouped product, the others a loop.
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-12), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_it_is_what_every_token_gets_of_its_experts(
    dtype: torch.dtype, within: float, act: str, kernels: bool
) -> None:
    given = operands(dtype)
    exact = [t.detach().double() if t.is_floating_point() else t for t in given]
    exact = [t.requires_grad_() if t.is_floating_point() else t for t in exact]
    wanted, found = by_loops(*exact, act), computed(*given, act, kernels=kernels)
    assert found.dtype == dtype
    cotangent = torch.randn(wanted.shape, generator=torch.manual_seed(1), dtype=torch.float64)
    wanted.backward(cotangent)
    found.backward(cotangent.to(dtype))
    pairs = [
        (found, wanted.detach()),
        *((a.grad, b.grad) for a, b in zip(given, exact, strict=True)),
    ]
    for mine, its in pairs:
        if its is not None:
            assert float((mine.detach().double() - its).norm() / its.norm()) <= within


@pytest.mark.parametrize("kernels", [False, True])
def test_parts_of_the_experts_give_parts_of_the_sum(kernels: bool) -> None:
    gate, up, down, x, ids, weights = operands(torch.float64)
    parts = [(0, 1), (1, 3), (4, 1)]  # the middle one has no token for its last expert
    found = [
        computed(*(w[i : i + n] for w in (gate, up, down)), x, ids, weights, "silu", i, 5, kernels)
        for i, n in parts
    ]
    whole = computed(gate, up, down, x, ids, weights, "silu")
    total = torch.stack(found).sum(0)
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)
    leaves, cotangent = (gate, up, down, x, weights), torch.linspace(-1, 1, x.numel()).view_as(x)
    ours, theirs = (torch.autograd.grad(y, leaves, cotangent.double()) for y in (total, whole))
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernels", [False, True])
def test_experts_whom_no_token_chooses_have_a_gradient_of_zeros(kernels: bool) -> None:
    gate, up, down, x, ids, weights = operands(torch.float64)
    computed(gate[3:4], up[3:4], down[3:4], x, ids, weights, "silu", 3, 5, kernels).sum().backward()
    assert down.grad is not None
    assert not down.grad.any()


AT = PASSES.index(find_mixtures)


@pytest.fixture(scope="module")
def unwritten() -> Captured:
    """A model's graph as it comes to the pass."""
    model, batch = make(MODEL)
    return capture_graph(model, (), batch, Options(), Trace(None), PASSES[:AT])


def test_the_pass_changes_no_value(unwritten: Captured) -> None:
    before = unwritten.graph
    after = find_mixtures(before)
    assert ops(after).count(MIXTURE) == 2
    assert not {"aten.sort", "transformers.grouped_mm_fallback"} & set(ops(after))
    assert_equal_runs(before, after, model_values(*make(MODEL), unwritten))


ALTERED: dict[str, tuple[str, dict[str, Any]]] = {
    "another activation": ("aten.silu", {"op": "aten.erf"}),
    "experts left out": ("aten.histc", {"args": (4, 1, 3)}),
    "gates of another width": ("aten.slice.Tensor", {"args": (1, 32, 96)}),
    "sums in other groups": ("aten.floor_divide", {"args": (4,)}),
}


@pytest.mark.parametrize("what", ALTERED)
def test_what_is_no_mixture_is_left_alone(unwritten: Captured, what: str) -> None:
    op, changes = ALTERED[what]
    graph = unwritten.graph
    inside = [
        n for n in graph.nodes if n.op == op and n.source.module.endswith(("experts", "act_fn"))
    ]
    old = inside[-1]
    if "args" in changes:
        changes = {"args": (old.args[0], *changes["args"])}
    nodes = tuple(replace(n, **changes) if n is old else n for n in graph.nodes)
    assert ops(find_mixtures(replace(graph, nodes=nodes))).count(MIXTURE) == 1


def test_a_parameter_that_is_read_elsewhere_stays_whole(unwritten: Captured) -> None:
    graph = unwritten.graph
    read = [n.name for n in graph.leaves("param") if n.target.endswith("gate_up_proj")]
    before = replace(graph, outputs=(*graph.outputs, ("seen", read[0])))
    found = find_mixtures(before)
    assert ops(found).count(MIXTURE) == 2
    assert read[0] in found
    assert read[1] not in found
    assert_equal_runs(before, found, model_values(*make(MODEL), unwritten))


def test_devices_share_the_products(unwritten: Captured) -> None:
    """By tokens, by experts, and inside experts; each has its part of 6 t k f d operations."""
    mesh = Mesh.parse("cpu: gpu=4")
    graph = prepare(unwritten.graph, passes=PASSES[AT:])
    node = next(n for n in graph.nodes if n.op == MIXTURE)
    signature = resolve(rules()[MIXTURE], node, operand_types(graph, node), node.types)
    whole = 6.0 * TOKENS * 2 * INNER * WIDTH
    assert signature.flops == whole
    seen = set()
    for way in strategies(signature, mesh):
        work = node_work(graph, node, way.operands, way.results, signature, mesh)
        ways = 1 if str(way) == "whole" else 4
        for kernels, times in ((work.forward, 1), (work.backward, 2)):
            flops = sum(k.gemm.flops for k in kernels if k.gemm is not None)
            assert flops == times * whole / ways
        seen.add(str(way))
    assert seen == {"whole", "e@gpu", "f@gpu", "...0@gpu", "e&...0@gpu"}

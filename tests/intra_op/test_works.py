"""Kernels of operators: FLOPs as autograd runs them, shapes and bytes by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from autopar.capture.capture import capture
from autopar.cost.model import AnalyticModel, Gemm, NodeWork, Work
from autopar.cost.operator_memory import recipe
from autopar.cost.work import adamw_work, optimizer_work
from autopar.intra_op.build import build, layouts
from autopar.intra_op.pins.pin_functions import resolve_pins
from autopar.intra_op.rules import rules
from autopar.intra_op.solvers import solve
from autopar.intra_op.work.kernel_work import fused, works
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout
from autopar.passes.normalise import prepare
from autopar.pins import data_parallel
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from autopar.runtime.communication.measure import attention, problems
from autopar.simulate.optimizer_step import Updated, update_works
from autopar.stage_plan import StagePlan
from autopar_kernels.registry import operators
from tests.support.models import gpt2, llama, vit

ONE = Mesh.parse("cpu: gpu=1")
FOUR = Mesh.parse("cpu: data=2, tensor=2")


class Calls(nn.Module):
    """The sum of an operator on parameters and inputs."""

    def __init__(self, function: Callable[..., Tensor], parameters: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.own = nn.ParameterList(nn.Parameter(p) for p in parameters)
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*self.own, *inputs).sum()


def planned(graph: Graph, mesh: Mesh, pins: dict[str, str] | None = None) -> StagePlan:
    built = build(graph, mesh, AnalyticModel(mesh), rules(), pins=pins)
    choice = solve(built.problem).choice
    return StagePlan(fingerprint(graph), mesh, layouts(built, graph, choice))


def of(function: Callable[..., Tensor], *parameters: Tensor, op: str = "") -> NodeWork:
    """The kernels, on one device, of the only node called `op` of an operator on parameters."""
    graph = prepare(capture(Calls(function, parameters), (), {}).graph)
    found = works(graph, planned(graph, ONE), rules())
    (name,) = (n.name for n in graph.folded if n.op == op)
    return found[name]


def test_a_linear_is_three_products_and_the_sum_of_the_bias() -> None:
    x, w, b = torch.randn(6, 10, 8), torch.randn(12, 8), torch.randn(12)
    work = of(F.linear, x, w, b, op="aten.linear")
    flops, nbytes = 2.0 * 60 * 12 * 8, 4 * (60 * 8 + 12 * 8 + 60 * 12)
    gemm = Gemm(1, 60, 12, 8, rows=4)  # of 8 and of 12 elements
    assert work.forward == (Work("aten.linear", flops, nbytes + 4 * 12, "f32", gemm),)
    gradients = {w.gemm: w for w in work.backward}
    assert set(gradients) == {Gemm(1, 60, 8, 12, rows=4), Gemm(1, 8, 12, 60, rows=4), None}
    for gemm, kernel in gradients.items():
        if gemm is not None:
            assert (kernel.flops, kernel.nbytes) == (flops, nbytes)
    assert gradients[None].nbytes == 4 * (60 * 12 + 12)


@pytest.mark.parametrize(
    ("function", "shapes", "op", "gemm"),
    [
        (torch.bmm, ((4, 6, 8), (4, 8, 10)), "aten.bmm", Gemm(4, 6, 10, 8, rows=2)),
        (torch.matmul, ((2, 4, 6, 8), (4, 8, 10)), "aten.matmul", Gemm(4, 12, 10, 8, rows=2)),
        (torch.mv, ((6, 8), (8,)), "aten.mv", Gemm(1, 6, 1, 8, rows=8)),
        (
            lambda a, b: torch.einsum("bij,bkj->bik", a, b),
            ((4, 6, 8), (4, 10, 8)),
            "aten.einsum",
            Gemm(4, 6, 10, 8, rows=2),
        ),
        (F.conv2d, ((2, 4, 8, 8), (6, 4, 3, 3)), "aten.conv2d", Gemm(1, 2 * 36, 6, 36, rows=0)),
    ],
)
def test_products_have_the_lengths_of_their_matrices(
    function: Callable[..., Tensor], shapes: Any, op: str, gemm: Gemm
) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    work = of(function, *tensors, op=op)
    assert [kernel.gemm for kernel in work.forward] == [gemm]
    assert all(kernel.flops == gemm.flops for kernel in (*work.forward, *work.backward))
    lengths = sorted((gemm.m, gemm.n, gemm.k))
    for kernel in work.backward:
        assert kernel.gemm is not None
        assert sorted((kernel.gemm.m, kernel.gemm.n, kernel.gemm.k)) == lengths


@pytest.mark.parametrize("make", [gpt2, llama, vit])
def test_the_products_of_a_model_are_those_that_torch_counts(make: Any) -> None:
    """But for fused attention, which torch does not count on a CPU."""
    model, batch = make()
    graph = prepare(capture(model, (), batch).graph)
    found = works(graph, planned(graph, ONE), rules())
    counted = {"forward": 0.0, "backward": 0.0}
    for name, work in found.items():
        copies = graph.multiplicity[name]
        for phase, kernels in (("forward", work.forward), ("backward", work.backward)):
            for kernel in kernels:
                if kernel.gemm is not None and "attention" not in kernel.op:
                    assert kernel.flops == kernel.gemm.flops
                    counted[phase] += copies * kernel.flops
    with FlopCounterMode(display=False) as forward:
        loss = model(**batch).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert counted["forward"] == pytest.approx(forward.get_total_flops(), rel=1e-6)
    assert counted["backward"] == pytest.approx(backward.get_total_flops(), rel=1e-6)


def test_devices_share_the_products_of_a_model() -> None:
    model, batch = gpt2()
    graph = prepare(capture(model, (), batch).graph)

    def flops(mesh: Mesh, pins: dict[str, str] | None = None) -> float:
        found = works(graph, planned(graph, mesh, pins), rules())
        kernels = ((n, k) for n, w in found.items() for k in (*w.forward, *w.backward))
        return math.fsum(graph.multiplicity[n] * k.flops for n, k in kernels if k.gemm)

    split = resolve_pins(data_parallel(), graph, FOUR, rules())
    assert flops(FOUR, split) == flops(ONE) / 4


def test_attention_reads_and_writes_its_ends_only() -> None:
    q, k, v = (torch.randn(2, 4, 10, 8) for _ in "qkv")

    def causal(*operands: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*operands, is_causal=True)

    op = "aten.scaled_dot_product_attention"
    whole = of(F.scaled_dot_product_attention, q, k, v, op=op)
    half = of(causal, q, k, v, op=op)
    ends = 4 * q.nbytes
    assert [w.nbytes for w in whole.forward] == [w.nbytes for w in half.forward] == [ends]
    assert [w.nbytes for w in whole.backward] == [2 * ends]
    assert whole.forward[0].gemm == Gemm(8, 10, 10, 16, rows=0)
    assert half.forward[0].gemm == Gemm(8, 10, 5, 16, rows=0)
    assert whole.backward[0].flops == 2.5 * whole.forward[0].flops


def test_backwards_read_what_was_saved_and_the_gradient() -> None:
    x = torch.randn(64, 32)
    n = x.nbytes
    gelu = of(F.gelu, x, op="aten.gelu")
    assert [w.nbytes for w in gelu.forward] == [2 * n]
    assert [w.nbytes for w in gelu.backward] == [3 * n]  # gradient and input in, gradient out
    assert of(torch.add, x, x.clone(), op="aten.add.Tensor").backward == ()
    row = of(torch.add, x, torch.randn(32), op="aten.add.Tensor")
    assert [w.nbytes for w in row.backward] == [n + 4 * 32]
    product = of(torch.mul, x, x.clone(), op="aten.mul.Tensor")
    assert [w.nbytes for w in product.backward] == [3 * n, 3 * n]


def test_a_look_up_reads_what_it_writes_and_its_gradient_fills_the_table() -> None:
    table, words = torch.randn(1000, 16), torch.arange(10)
    work = of(lambda t: F.embedding(words, t), table, op="aten.embedding")
    out = 10 * 16 * 4
    assert [w.nbytes for w in work.forward] == [10 * 8 + 2 * out]
    assert work.backward[0].nbytes >= table.nbytes


def test_gradients_of_several_readers_are_added() -> None:
    x = torch.randn(8, 16)
    work = of(lambda x: x.sin().tanh() + x.sin().cos() * x.sin().exp(), x, op="aten.exp")
    assert len(work.backward) == 1
    model = Calls(lambda x: F.gelu(x).tanh() + F.gelu(x).cos(), (x,))
    graph = prepare(capture(model, (), {}).graph)
    found = works(graph, planned(graph, ONE), rules())
    shared = [found[n.name] for n in graph.folded if n.op == "autopar.share"]
    adds = [kernel for work in shared for kernel in work.backward]
    readers = [
        sum(graph[user].requires_grad for user in graph.users[n.name])
        for n in graph.folded
        if n.op == "autopar.share"
    ]
    assert len(adds) == sum(count - 1 for count in readers) > 0
    assert {kernel.nbytes for kernel in adds} == {3 * x.nbytes}


class Head(nn.Module):
    """The last linear of a language model and its loss."""

    def __init__(self, words: int, features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(words, features, dtype=dtype, device="meta"))
        self.bias = nn.Parameter(torch.zeros(1, features, dtype=dtype, device="meta"))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x + self.bias, self.weight).float(), labels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_price_of_a_chunked_loss_is_that_of_its_lines(dtype: torch.dtype) -> None:
    """Counted by hand on the lines of `autopar_kernels.linear_cross_entropy.chunked`."""
    words, features, size = 3000, 96, dtype.itemsize
    chunks = [2048, 2048, 904]  # of 5000 rows
    x = torch.zeros(sum(chunks), features, dtype=dtype, device="meta")
    labels = torch.zeros(sum(chunks), dtype=torch.int64, device="meta")
    model, fused = Head(words, features, dtype), Options(fuse=("linear_cross_entropy",))
    graph = capture_graph(model, (x, labels), {}, fused, Trace(None)).graph
    (node,) = (node for node in graph.folded if node.op == "kernels.linear_cross_entropy")
    work = works(graph, planned(graph, ONE), rules())[node.name]

    weight, kept = words * features, (x.nbytes, words * features * size)
    flops, moved = 0.0, 4.0 * weight  # zeros to add to
    for rows in chunks:
        flops += 3 * 2 * rows * words * features  # logits, and both gradients
        logits, own, wide = rows * words * size, rows * features * size, 4 * weight
        moved += own + weight * size + logits  # own @ weight.T
        moved += logits + 2 * logits  # statistics; the gradient in the place of logits
        moved += logits + weight * size + own  # logits @ weight
        moved += logits + own + wide  # logits.T @ own, in float32
        moved += 3 * wide  # total +=
    moved += 0 if dtype == torch.float32 else 4 * weight + kept[1]  # total.to(weight.dtype)
    assert sum(w.flops for w in work.forward if w.gemm) == flops
    rows_of_numbers = 2 * labels.nbytes
    assert sum(w.nbytes for w in work.forward) == moved + rows_of_numbers
    # No logits are computed again: what the backward does is scale what was found.
    assert sorted(w.nbytes for w in work.backward) == sorted(2.0 * nbytes for nbytes in kept)

    layouts = [
        tuple(Layout.replicated(len(t.shape)) for t in ts)
        for ts in ([graph[name].type for name in node.inputs], node.types)
    ]
    operands = tuple(graph[name] for name in node.inputs)
    bytes_of = recipe(node, operands, *layouts, ONE, accelerator=True)
    assert sum(bytes_of.extra) == sum(kept)
    # While the last product of a chunk is added: logits, both sums of gradients, and that of x.
    peak = chunks[0] * words * size + 2 * 4 * weight + kept[0]
    assert bytes_of.scratch + sum(bytes_of.extra) == peak


def test_views_are_free() -> None:
    x = torch.randn(8, 16)
    work = of(lambda x: torch.cos(x.transpose(0, 1)), x, op="aten.transpose.int")
    assert work == NodeWork()


def test_an_optimizer_reads_and_writes_its_state() -> None:
    """AdamW: parameter, gradient and two moments in; parameter and two moments out."""
    assert optimizer_work(400.0, 800.0, "f32").nbytes == 7 * 400
    assert optimizer_work(400.0, 0.0, "f32").nbytes == 3 * 400  # plain SGD


@pytest.mark.parametrize("rounded", [True, False])
def test_the_price_of_adamws_kernel_is_what_its_file_says(rounded: bool) -> None:
    kernel = operators()["adamw_"]
    parameter, m, v, gradient = (torch.zeros(300) for _ in range(4))
    low = torch.zeros(300, dtype=torch.bfloat16) if rounded else None
    price = adamw_work(4 * 300, 2 * 300 * rounded, "f32")
    hyper = torch.zeros(8)
    assert price.nbytes + hyper.nbytes == kernel.nbytes((parameter, m, v, gradient, low, hyper), ())
    assert kernel.flops == "15 ..."
    assert price.flops == 15 * 300
    # Otherwise masters are read once more, to be rounded.
    masters = [Updated("w", 1200.0, "f32", 600.0 * rounded, stays=True, states=2400.0)]
    plain, fused = (update_works(masters, fused) for fused in (False, True))
    saved = sum(w.nbytes for w in plain) - sum(w.nbytes for w in fused)
    assert saved == 1200 * rounded


def test_adamws_kernel_is_launched_for_every_buffer_of_gradients() -> None:
    """Buckets of two that are reduced, a large one apart, small ones that are copied together."""
    reduced = [Updated(f"r{n}", 4e6, "f32", sent=8e6) for n in range(5)]
    apart = [Updated("large", 4e6, "f32")] + [Updated(f"s{n}", 4e3, "f32") for n in range(3)]
    works = update_works([*reduced, *apart], True, bucket=16_000_000)
    launches = [work.nbytes / 7 for work in works if work.op == "adamw_"]
    assert sorted(launches) == [12e3, 4e6, 4e6, 8e6, 8e6]
    assert [work.nbytes for work in works if work.op != "adamw_"] == [2 * 12e3]
    cast = [Updated(f"c{n}", 4e6, "f32", 2e6, stays=True, cast=True) for n in range(3)]
    parts = [replace(each, scattered=True) for each in reduced]
    for together in (cast, parts):  # in one buffer
        (work,) = update_works(together, True, bucket=16_000_000)
        assert work.nbytes == sum(7 * each.nbytes + each.rounded for each in together)


def test_a_fused_chain_moves_its_ends_and_is_launched_once() -> None:
    model = AnalyticModel(Mesh.parse("H100: gpu=1"))
    n = 1 << 26
    chain = [Work(f"aten.op{i}", n / 4, 2.0 * n, "f32") for i in range(5)]
    one = fused(chain, 2.0 * n)
    assert one.flops == sum(work.flops for work in chain)
    assert model.compute(one) == pytest.approx(model.compute(chain[0]), rel=1e-9)


def test_calibration_measures_what_works_count() -> None:
    """The bytes and FLOPs at which an operator was measured are those at which it is priced."""
    elements = 1 << 12
    measured = [*problems(elements, 4), attention(16, 4)]
    for problem in measured:
        given = problem.inputs(torch.float32, torch.device("cpu"))
        floating = [x for x in given if x.is_floating_point()]
        others = [x for x in given if not x.is_floating_point()]

        def run(*own: Tensor, run: Any = problem.run, others: Any = others) -> Tensor:
            return run(*own, *others)  # type: ignore[no-any-return]

        if problem.op == "aten.reshape":  # of a value in another order, not of a parameter
            continue
        graph = prepare(capture(Calls(run, tuple(floating)), (), {}).graph)
        found = works(graph, planned(graph, ONE), rules())
        nodes = [n for n in graph.folded if n.op == problem.op]
        assert nodes, f"{problem.op} not in {[n.op for n in graph.folded]}"
        work = found[nodes[0].name]
        small = 4.0 * max(elements // 256, 256) * 4  # statistics and labels
        assert work.forward[0].nbytes == pytest.approx(problem.nbytes[0], abs=small), problem.op
        backward = list(work.backward)
        if problem.nbytes[1]:
            assert len(backward) == problem.kernels, problem.op
            assert backward[0].nbytes == pytest.approx(problem.nbytes[1], abs=small), problem.op
        for kernel, flops in itertools.zip_longest(work.forward[:1], problem.flops[:1]):
            assert not flops or kernel.flops == flops

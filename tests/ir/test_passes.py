"""Passes against the graph they were given: the same outputs, gradients and buffers in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.attention import causal_masks, group_heads, simplify_masks
from autopar.ir.fused import split_fused
from autopar.ir.graph import Graph
from autopar.ir.linear import lower_linears
from autopar.ir.losses import lower_means
from autopar.ir.passes import PASSES, prepare
from autopar.ir.rewrite import eliminate_dead
from autopar.ir.shares import insert_shares
from autopar.ir.simplify import drop_identities, lower_splits
from autopar.ir.text import parse_graph
from autopar.ir.verify import verify
from tests.graphs import assert_equal_runs, captured_double, leaf_values
from tests.models import conv_net, gpt2


def checked(step: Callable[[Graph], Graph], text: str, seed: int = 0) -> Graph:
    """The pass applied to a written graph, proved to be legal and to compute the same."""
    before = parse_graph(text)
    after = verify(step(verify(before)))
    assert_equal_runs(before, after, leaf_values(before, seed))
    return after


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes if not node.is_leaf]


def test_prepare_computes_the_same() -> None:
    torch.manual_seed(0)
    graph, values = captured_double(*conv_net())
    assert_equal_runs(graph, prepare(graph), values)


def test_what_is_prepared_is_not_prepared_further() -> None:
    torch.manual_seed(0)
    for build in (conv_net, gpt2):
        once = prepare(captured_double(*build())[0])
        assert prepare(once) == once


def test_every_pass_is_traced_in_order() -> None:
    graph = parse_graph("graph 'g'\n%x = input('x') : f32[2]\noutput 'x' = %x\n")
    seen: list[tuple[str, Graph]] = []
    result = prepare(graph, lambda name, made: seen.append((name, made)))
    assert [name for name, _ in seen] == [step.__name__ for step in PASSES]
    assert seen[-1][1] == result


IDENTITIES = """
graph 'g'
%w = param('w') : f64[4, 6] grad
%x = input('x') : f64[2, 4]
%i = input('i') : i64[2]
%e = input('e') : f64[0]
%a0 = aten.alias(%w) : f64[4, 6] grad
%a1 = aten.contiguous(%a0) : f64[4, 6] grad
%a2 = aten.view(%a1, (-1, 6)) : f64[4, 6] grad
%a3 = aten.expand(%a2, (-1, 6)) : f64[4, 6] grad
%a4 = aten.to.dtype_layout(%a3, dtype=f64) : f64[4, 6] grad
%a5 = aten._to_copy(%a4, dtype=f64) : f64[4, 6] grad
%a6 = aten.slice.Tensor(%a5, 1, 0, 9223372036854775807) : f64[4, 6] grad
%a7 = aten.permute(%a6, (0, -1)) : f64[4, 6] grad
%a8 = aten.dropout(%a7, 0.0, True) : f64[4, 6] grad
%a9 = aten.feature_dropout(%a8, 0.5, False) : f64[4, 6] grad
%a10 = aten.cat((%a9,)) : f64[4, 6] grad
%a11 = aten.clone(%a10) : f64[4, 6] grad
%a12 = aten.mul.Tensor(%a11, 1.0) : f64[4, 6] grad
%a13 = aten.view(%a12, (24,)) : f64[24] grad
%a14 = aten.view(%a13, (6, 4)) : f64[6, 4] grad
%a15 = aten.view(%a14, (4, 6)) : f64[4, 6] grad
%d = autopar.detach(%i) : i64[2]
%c = aten.cat((%e, %e)) : f64[0]
output 'w' = %a15
output 'i' = %d
output 'c' = %c
"""


def test_identities_vanish() -> None:
    after = checked(drop_identities, IDENTITIES)
    assert dict(after.outputs) == {"w": "w", "i": "i", "c": "c"}
    assert ops(after) == ["aten.cat"]


def test_what_changes_a_value_stays() -> None:
    text = """
graph 'g'
%w = param('w') : f64[4, 4] grad
%b = buffer('b') : f64[4]
%t = aten.transpose.int(%w, 0, 1) : f64[4, 4] grad
%p = aten.permute(%t, (1, 0)) : f64[4, 4] grad
%drop = aten.dropout(%p, 0.5, True) : f64[4, 4] grad
%half = aten.to.dtype(%drop, f32) : f32[4, 4] grad
%last = aten.clone(%half, memory_format=channels_last) : f32[4, 4] grad
%cut = aten.slice.Tensor(%last, 1, -3, 9223372036854775807) : f32[4, 3] grad
%odd = aten.slice.Tensor(%cut, 1, 0, 3, 2) : f32[4, 2] grad
%off = autopar.detach(%odd) : f32[4, 2]
%old = aten.clone(%b) : f64[4]
%new = aten.add_.Tensor(%b, 1) : f64[4]
%kept = aten.mul.Tensor(%old, 1) : f64[4]
output 'off' = %off
output 'odd' = %odd
output 'kept' = %kept
output 'new' = %new
"""
    before = parse_graph(text.replace(", memory_format=channels_last", ""))
    after = verify(drop_identities(parse_graph(text)))
    assert [node.name for node in after.nodes if not node.is_leaf] == [
        "t", "p", "drop", "half", "last", "cut", "odd", "off", "old", "new"
    ]  # fmt: skip
    assert after["cut"].args[1:] == (1, 1, 4)
    plain = verify(drop_identities(before))
    assert "last" not in plain
    assert_equal_runs(before, plain, leaf_values(before))


def test_a_constant_does_not_read_what_it_is_like() -> None:
    after = checked(
        drop_identities,
        """
graph 'g'
%w = param('w') : f64[2, 3] grad
%a = aten.full_like(%w, 2.5) : f64[2, 3]
%b = aten.new_full(%w, (3,), 1, dtype=i64) : i64[3]
%c = aten.new_zeros(%w, (2, 1)) : f64[2, 1]
%d = aten.ones_like(%b, dtype=f32) : f32[3]
output 'a' = %a
output 'b' = %b
output 'c' = %c
output 'd' = %d
""",
    )
    assert ops(after) == ["aten.full", "aten.full", "aten.zeros", "aten.ones"]
    assert not any(node.inputs for node in after.nodes)


def test_views_and_casts_have_one_spelling() -> None:
    after = checked(
        drop_identities,
        """
graph 'g'
%w = param('w') : f64[2, 1, 6] grad
%o = input('o') : f64[3, 4]
%a = aten.flatten.using_ints(%w) : f64[12] grad
%b = aten.unflatten.int(%a, 0, (3, 4)) : f64[3, 4] grad
%c = aten.mT(%b) : f64[4, 3] grad
%d = aten.squeeze(%w) : f64[2, 6] grad
%e = aten.expand_as(%d, %d) : f64[2, 6] grad
%f = aten.type_as(%e, %o) : f64[2, 6] grad
%g = aten.narrow(%f, -1, 2, 3) : f64[2, 3] grad
%h = aten.to.device(%g, 'cpu', f32) : f32[2, 3] grad
%i = aten.expand(%w, (-1, 5, -1)) : f64[2, 5, 6] grad
output 'c' = %c
output 'h' = %h
output 'i' = %i
""",
    )
    assert {str(node.op): node.args[1:] for node in after.nodes if not node.is_leaf} == {
        "aten.reshape": ((2, 6),),
        "aten.transpose.int": (0, 1),
        "aten.slice.Tensor": (1, 2, 5),
        "aten.to.dtype": (parse_graph("graph 'n'\n%a = aten.to.dtype(f32) : f32[]")["a"].args[0],),
        "aten.expand": ((2, 5, 6),),
    }


@pytest.mark.parametrize(
    ("split", "types"),
    [
        ("aten.split.Tensor(%x, 2, 1)", "f64[4, 2], f64[4, 2], f64[4, 1]"),
        ("aten.split_with_sizes(%x, (2, 2, 1), -1)", "f64[4, 2], f64[4, 2], f64[4, 1]"),
        ("aten.chunk(%x, 3, 1)", "f64[4, 2], f64[4, 2], f64[4, 1]"),
        ("aten.tensor_split.sections(%x, 3, 1)", "f64[4, 2], f64[4, 2], f64[4, 1]"),
        ("aten.tensor_split.indices(%x, (1, 3), 1)", "f64[4, 1], f64[4, 2], f64[4, 2]"),
        ("aten.unbind.int(%x)", ", ".join(["f64[5]"] * 4)),
    ],
)
def test_splits_become_slices(split: str, types: str) -> None:
    kinds = types.split(", f")
    lines = [f"%p{i} = getitem(%s, {i}) : f{k.removeprefix('f')} grad" for i, k in enumerate(kinds)]
    outputs = [f"output 'p{i}' = %p{i}" for i in range(len(kinds))]
    head = "graph 'g'\n%x = param('x') : f64[4, 5] grad"
    after = checked(
        lower_splits, "\n".join([head, f"%s = {split} : {types} grad", *lines, *outputs])
    )
    assert set(ops(after)) <= {"aten.slice.Tensor", "aten.select.int"}


def test_a_result_that_is_no_split_stays() -> None:
    after = checked(
        lower_splits,
        """
graph 'g'
%x = param('x') : f64[4, 5] grad
%m = aten.max.dim(%x, 1) : f64[4], i64[4] grad
%v = getitem(%m, 0) : f64[4] grad
output 'v' = %v
""",
    )
    assert ops(after) == ["aten.max.dim", "getitem"]


CONV1D = """
graph 'g'
%w = param('w') : f64[6, 4] grad
%b = param('b') : f64[4] grad
%x = input('x') : f64[2, 3, 6]
%flat = aten.reshape(%x, (6, 6)) : f64[6, 6]
%y = aten.addmm(%b, %flat, %w) : f64[6, 4] grad
%z = aten.reshape(%y, {shape}) : f64[{sizes}] grad
output 'z' = %z
"""


def test_conv1d_becomes_a_linear_that_keeps_its_batch() -> None:
    after = checked(lower_linears, CONV1D.format(shape="(2, 3, 4)", sizes="2, 3, 4"))
    assert ops(after) == ["aten.transpose.int", "aten.linear"]
    assert after[dict(after.outputs)["z"]].inputs[0] == "x"


def test_other_reshapes_around_a_product_stay() -> None:
    after = checked(lower_linears, CONV1D.format(shape="(3, 2, 4)", sizes="3, 2, 4"))
    assert ops(after) == ["aten.reshape", "aten.transpose.int", "aten.linear", "aten.reshape"]


def test_products_with_parameters_become_linears() -> None:
    after = checked(
        lower_linears,
        """
graph 'g'
%w = param('w') : f64[6, 4] grad
%v = param('v') : f64[4, 6] grad
%x = input('x') : f64[2, 3, 6]
%m = input('m') : f64[3, 6]
%n = input('n') : f64[6, 4]
%vt = aten.transpose.int(%v, 0, 1) : f64[6, 4] grad
%a = aten.matmul(%x, %w) : f64[2, 3, 4] grad
%b = aten.matmul(%x, %vt) : f64[2, 3, 4] grad
%c = aten.mm(%m, %w) : f64[3, 4] grad
%d = aten.mm(%m, %n) : f64[3, 4]
%e = aten.addmm(%d, %m, %w) : f64[3, 4] grad
%f = aten.addmm(%d, %m, %w, beta=2) : f64[3, 4] grad
output 'a' = %a
output 'b' = %b
output 'c' = %c
output 'd' = %d
output 'e' = %e
output 'f' = %f
""",
    )
    made = {name: after[node].op for name, node in after.outputs}
    assert made == {
        "a": "aten.linear", "b": "aten.linear", "c": "aten.linear",
        "d": "aten.mm", "e": "aten.addmm", "f": "aten.addmm",
    }  # fmt: skip
    assert after[dict(after.outputs)["b"]].inputs == ("x", "v")


FUSED = """
graph 'g'
%w = param('w') : f64[{weight}] grad
%b = param('b') : f64[9] grad
%x = input('x') : f64[2, 4]
{transpose}
%y = aten.linear(%x, {read}, %b) : f64[2, 9] grad
%q = aten.slice.Tensor(%y, 1, 0, {cut}) : f64[2, {cut}] grad
%k = aten.slice.Tensor(%y, 1, 5, 7) : f64[2, 2] grad
%v = aten.slice.Tensor(%y, 1, 7, 9) : f64[2, 2] grad
output 'q' = %q
output 'k' = %k
output 'v' = %v
"""
TRANSPOSE = "%t = aten.transpose.int(%w, 0, 1) : f64[9, 4] grad"


@pytest.mark.parametrize(
    ("weight", "transpose", "read", "dim"),
    [("9, 4", "", "%w", 0), ("4, 9", TRANSPOSE, "%t", 1)],
)
def test_a_fused_projection_is_split(weight: str, transpose: str, read: str, dim: int) -> None:
    text = FUSED.format(weight=weight, transpose=transpose, read=read, cut=5)
    after = checked(split_fused, text)
    assert "aten.slice.Tensor" not in ops(after)
    assert ops(after).count("aten.linear") == 3
    pieces = [dict(node.kwargs) for node in after.leaves("param") if node.target == "w"]
    assert pieces == [
        {"dim": dim, "start": start, "length": length} for start, length in ((0, 5), (5, 2), (7, 2))
    ]


@pytest.mark.parametrize(
    "change",
    [
        (
            "aten.slice.Tensor(%y, 1, 0, 5) : f64[2, 5]",
            "aten.slice.Tensor(%y, 1, 0, 4) : f64[2, 4]",
        ),
        (
            "aten.slice.Tensor(%y, 1, 0, 5) : f64[2, 5]",
            "aten.slice.Tensor(%y, 1, 0, 6) : f64[2, 6]",
        ),
        ("output 'q' = %q", "output 'q' = %q\noutput 'y' = %y"),
        ("output 'q' = %q", "output 'q' = %q\noutput 'w' = %w"),
        ("output 'q'", "%r = aten.neg(%b) : f64[9] grad\noutput 'r' = %r\noutput 'q'"),
        ("output 'q'", "%r = aten.neg(%y) : f64[2, 9] grad\noutput 'r' = %r\noutput 'q'"),
        ("%q = aten.slice.Tensor(%y, 1, 0, 5) : f64[2, 5] grad\n", ""),
    ],
)
def test_a_projection_with_another_reader_or_a_gap_stays_fused(change: tuple[str, str]) -> None:
    text = FUSED.format(weight="9, 4", transpose="", read="%w", cut=5)
    assert change[0] in text
    text = text.replace(*change)
    if "%q =" not in text:
        text = text.replace("output 'q' = %q\n", "")
    lines = sorted(text.strip().splitlines()[1:], key=lambda line: line.startswith("output"))
    before = "\n".join(["graph 'g'", *lines])
    assert ops(checked(split_fused, before)).count("aten.linear") == 1


PACKED: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], int]] = {
    "by axis": (lambda y: y.reshape(2, 3, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0), 3),
    "by moved axis": (
        lambda y: (
            y.unflatten(-1, (3, 8)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous().unbind(0)
        ),
        3,
    ),
    "by heads": (lambda y: y.view(2, 3, 6, 4).transpose(1, 2).split([4, 1, 1], 1), 3),
    "of one head": (lambda y: y[:, None].split([16, 4, 4], -1), 3),
    "inside heads": (lambda y: y.view(2, 3, 2, 3, 4).unbind(3), 1),
    "rotated": (lambda y: y.view(2, 3, 6, 4).chunk(2, -1), 1),
    "of the batch": (lambda y: y.chunk(2, 0), 1),
    "step by step": (lambda y: y.split(1, -1), 1),
}  # fmt: skip


class Packed(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.qkv, self.name = nn.Linear(5, 24), name

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.sin() for part in PACKED[self.name][0](self.qkv(x)))


@pytest.mark.parametrize("name", PACKED)
def test_projections_are_split_through_views(name: str) -> None:
    torch.manual_seed(0)
    graph, values = captured_double(Packed(name), {"x": torch.randn(2, 3, 5)})
    after = verify(split_fused(lower_splits(drop_identities(graph))))
    assert ops(after).count("aten.linear") == PACKED[name][1]
    assert_equal_runs(graph, after, values)


@pytest.mark.parametrize(
    "mean",
    ["aten.mean(%x) : f64[]", "aten.mean.dim(%x, (0, -1)) : f64[3]",
     "aten.mean.dim(%x, None, True) : f64[1, 1, 1]",
     "aten.mean.dim(%x, (1,), dtype=f32) : f32[2, 4]"],
)  # fmt: skip
def test_means_are_sums_over_counts(mean: str) -> None:
    text = f"graph 'g'\n%x = param('x') : f64[2, 3, 4] grad\n%m = {mean} grad\noutput 'm' = %m"
    if "dtype=f32" in mean:  # rounding of float32 is not what is tested
        after = verify(lower_means(parse_graph(text)))
    else:
        after = checked(lower_means, text)
    assert [op.split(".")[1] for op in ops(after)] == ["sum", "div"]


def test_float16_means_stay() -> None:
    text = "graph 'g'\n%x = input('x') : f16[4]\n%m = aten.mean(%x) : f16[]\noutput 'm' = %m"
    assert ops(lower_means(parse_graph(text))) == ["aten.mean"]


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross entropy": lambda x, y, label: F.cross_entropy(x, label),
    "all kept": lambda x, y, label: F.cross_entropy(x, label.clamp(min=0)),
    "another label ignored": lambda x, y, label: F.cross_entropy(
        x, label.clamp(min=0), ignore_index=1
    ),
    "smoothed": lambda x, y, label: F.cross_entropy(x, label, label_smoothing=0.1),
    "with places": lambda x, y, label: F.cross_entropy(x.view(2, 5, 3), label[:6].view(2, 3)),
    "probabilities": lambda x, y, label: F.cross_entropy(x, y.softmax(-1)),
    "one sample": lambda x, y, label: F.cross_entropy(x[0], label[0]),
    "nll": lambda x, y, label: F.nll_loss(x.log_softmax(-1), label),
    "nll with places": lambda x, y, label: F.nll_loss(x.view(2, 5, 3, 1), label[:6].view(2, 3, 1)),
    "mse": lambda x, y, label: F.mse_loss(x, y),
    "l1": lambda x, y, label: F.l1_loss(x, y),
    "smooth l1": lambda x, y, label: F.smooth_l1_loss(x, y, beta=0.3),
    "huber": lambda x, y, label: F.huber_loss(x, y, delta=0.3),
    "binary": lambda x, y, label: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "binary with logits": lambda x, y, label: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), pos_weight=y[0].exp()
    ),
    "kl": lambda x, y, label: F.kl_div(x.log_softmax(-1), y.log_softmax(-1), log_target=True),
}  # fmt: skip


class Loss(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.x, self.name = nn.Parameter(torch.randn(6, 5)), name

    def forward(self, y: Tensor, label: Tensor) -> Tensor:
        return LOSSES[self.name](self.x, y, label)


@pytest.mark.filterwarnings("ignore:reduction")  # of kl_div, whose mean is not per sample
@pytest.mark.parametrize("name", LOSSES)
def test_mean_losses_are_sums_over_counts(name: str) -> None:
    torch.manual_seed(0)
    label = torch.tensor([0, -100, 2, 1, -100, 1])
    graph, values = captured_double(Loss(name), {"y": torch.randn(6, 5), "label": label})
    after = verify(lower_means(graph))
    assert after[after.outputs[0][1]].op == "aten.div.Tensor"
    assert_equal_runs(graph, after, values)


@pytest.mark.parametrize(
    "loss",
    ["aten.cross_entropy_loss(%x, %y, %w)", "aten.cross_entropy_loss(%x, %y, None, 2)",
     "aten.cross_entropy_loss(%x, %y, reduction=2)"],
)  # fmt: skip
def test_weighted_and_summed_losses_stay(loss: str) -> None:
    text = f"""
graph 'g'
%x = param('x') : f64[4, 3] grad
%y = input('y') : i64[4]
%w = input('w') : f64[3]
%l = {loss} : f64[] grad
output 'l' = %l
"""
    assert ops(checked(lower_means, text)) == ["aten.cross_entropy_loss"]


LOWEST = torch.finfo(torch.float64).min
MASKS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "lower triangle": (lambda: torch.ones(6, 6, dtype=torch.bool).tril(), "causal"),
    "with heads": (lambda: torch.ones(1, 1, 6, 6, dtype=torch.bool).tril(), "causal"),
    "of comparisons": (lambda: torch.arange(6)[None, :] <= torch.arange(6)[:, None], "causal"),
    "added": (lambda: torch.full((6, 6), float("-inf")).triu(1), "causal"),
    "lowest value": (lambda: torch.full((6, 6), LOWEST, dtype=torch.float64).triu(1), "causal"),
    "all": (lambda: torch.ones(1, 1, 1, 6, dtype=torch.bool), "full"),
    "zeros added": (lambda: torch.zeros(6, 6), "full"),
    "strict triangle": (lambda: torch.ones(6, 6, dtype=torch.bool).tril(1), ""),
    "window": (lambda: torch.ones(6, 6, dtype=torch.bool).tril().triu(-2), ""),
    "bias": (lambda: torch.ones(6, 6).tril(), ""),
    "differs between samples": (
        lambda: (torch.arange(6)[None, :] <= torch.arange(6)[:, None])
        & (torch.arange(2)[:, None, None, None] < 1), "",
    ),
    "by chance": (lambda: torch.rand(6, 6) < 2, ""),
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self, mask: Callable[[], Tensor], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.q, self.mask, self.dtype = nn.Parameter(torch.randn(2, 2, 6, 4)), mask, dtype

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            mask = self.mask()
            mask = mask.to(self.dtype) if mask.is_floating_point() else mask
            x = F.scaled_dot_product_attention(self.q, x, x, mask)
        return x


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_recognised(name: str) -> None:
    torch.manual_seed(0)
    mask, expected = MASKS[name]
    graph, values = captured_double(Attention(mask), {"x": torch.randn(2, 2, 6, 4)})
    after = verify(causal_masks(verify(drop_identities(graph))))
    nodes = [node for node in after.nodes if node.op == "aten.scaled_dot_product_attention"]
    assert len(nodes) == 2
    for node in nodes:
        found = (
            ("causal" if (*node.args, *[None] * 6)[5] else "full") if len(node.inputs) < 4 else ""
        )
        assert found == expected
    if name != "by chance":
        assert_equal_runs(graph, after, values)


def test_masks_of_inputs_and_buffers_stay() -> None:
    text = """
graph 'g'
%b = buffer('b') : bool[4, 4]
%q = input('q') : f64[1, 1, 4, 2]
%m = input('m') : bool[4, 4]
%mask = aten.logical_or(%m, %b) : bool[4, 4]
%a = aten.scaled_dot_product_attention(%q, %q, %q, %mask) : f64[1, 1, 4, 2]
%b2 = aten.scaled_dot_product_attention(%q, %q, %q, %b) : f64[1, 1, 4, 2]
output 'a' = %a
output 'b' = %b2
"""
    before = parse_graph(text)
    assert causal_masks(before) == before


PADDING = """
graph 'g'
%x = input('x') : bool[2, 3]
%i = aten.arange(2) : i64[2]
%row = aten.reshape(%i, (2, 1, 1)) : i64[2, 1, 1]
%column = aten.arange(3) : i64[3]
%seen = {index}
%ones = aten.new_ones(%row, (), dtype=bool) : bool[]
%mask = aten.__and__.Tensor({ones}, %seen) : bool[2, 1, 3]
output 'mask' = %mask
"""


def test_a_look_up_of_everything_is_a_reshape() -> None:
    index = "aten.index.Tensor(%x, (%row, %column)) : bool[2, 1, 3]"
    after = checked(simplify_masks, PADDING.format(index=index, ones="%ones"))
    assert ops(after) == ["aten.reshape"]
    after = checked(simplify_masks, PADDING.format(index=index, ones="%seen"))
    assert ops(after) == ["aten.reshape", "aten.__and__.Tensor"]


@pytest.mark.parametrize(
    "index",
    [
        "aten.index.Tensor(%x, (%row, %back)) : bool[2, 1, 3]",
        "aten.index.Tensor(%x, (%row, %part)) : bool[2, 1, 3]",
        "aten.index.Tensor(%wide, (%row, %column)) : bool[2, 1, 3]",
        "aten.index.Tensor(%turned, (%column, %row)) : bool[2, 1, 3]",
    ],
)
def test_other_look_ups_stay(index: str) -> None:
    text = PADDING.format(index=index, ones="%seen").replace(
        "%seen =",
        """%back = aten.flip(%column, (0,)) : i64[3]
%part = aten.zeros_like(%column) : i64[3]
%wide = aten.cat((%x, %x), 1) : bool[2, 6]
%turned = aten.transpose.int(%x, 0, 1) : bool[3, 2]
%seen =""",
    )
    assert "aten.index.Tensor" in ops(checked(simplify_masks, text))


@pytest.mark.parametrize("size", ["1, 3", "2, 1, 3"])
def test_and_with_what_is_true_everywhere_goes(size: str) -> None:
    after = checked(
        simplify_masks,
        f"""
graph 'g'
%x = input('x') : bool[{size}]
%ones = aten.ones((2, 1, 1), dtype=bool) : bool[2, 1, 1]
%mixed = aten.tril(%ones, -1) : bool[2, 1, 1]
%a = aten.logical_and(%x, %ones) : bool[2, 1, 3]
%b = aten.logical_and(%mixed, %x) : bool[2, 1, 3]
output 'a' = %a
output 'b' = %b
""",
    )
    assert ops(after).count("aten.logical_and") == 1
    assert after[dict(after.outputs)["b"]].op == "aten.logical_and"


class Grouped(nn.Module):
    def __init__(self, spread: str) -> None:
        super().__init__()
        self.q, self.spread = nn.Parameter(torch.randn(2, 6, 5, 4)), spread

    def forward(self, k: Tensor, v: Tensor) -> Tensor:
        if self.spread == "rows":
            k, v = (t[:, :, None].expand(2, 2, 3, 5, 4).reshape(2, 6, 5, 4) for t in (k, v))
        elif self.spread == "interleave":
            k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, -3)
        elif self.spread == "tiles":
            k, v = (t[:, None].expand(2, 3, 2, 5, 4).reshape(2, 6, 5, 4) for t in (k, v))
        elif self.spread == "queries broadcast":
            k, v = (t[:, :1].repeat_interleave(6, 1) for t in (k, v))
            return F.scaled_dot_product_attention(self.q[:, :1], k, v)
        else:
            k, v = k.repeat_interleave(3, 1), v[:, :1].expand(2, 6, 5, 4)
        return F.scaled_dot_product_attention(self.q, k, v, is_causal=True)


@pytest.mark.parametrize(
    ("spread", "grouped"),
    [
        ("rows", True),
        ("interleave", True),
        ("tiles", False),
        ("keys only", False),
        ("queries broadcast", False),
    ],
)
def test_repeated_heads_are_read_unrepeated(spread: str, grouped: bool) -> None:
    torch.manual_seed(0)
    batch = {"k": torch.randn(2, 2, 5, 4), "v": torch.randn(2, 2, 5, 4)}
    graph, values = captured_double(Grouped(spread), batch)
    after = verify(group_heads(drop_identities(graph)))
    assert (ops(after) == ["aten.scaled_dot_product_attention"]) == grouped
    assert_equal_runs(graph, after, values)


def test_dead_operators_go_and_writes_stay() -> None:
    after = checked(
        eliminate_dead,
        """
graph 'g'
%w = param('w') : f64[3] grad
%n = buffer('n') : i64[]
%m = buffer('m') : f64[3]
%v = buffer('v') : f64[3]
%x = input('x') : f64[2, 3]
%unread = input('unread') : f64[1]
%dead = aten.mul.Tensor(%w, 2) : f64[3] grad
%deader = aten.neg(%dead) : f64[3] grad
%both = aten.__and__.Tensor(%n, %n) : i64[]
%one = aten.add.Tensor(%n, 0) : i64[]
%step = aten.add_.Tensor(%n, %one) : i64[]
%norm = aten.batch_norm(%x, None, None, %m, %v, True, 0.1, 1e-05, False) : f64[2, 3]
%idle = aten.batch_norm(%x, None, None, %m, %v, False, 0.1, 1e-05, False) : f64[2, 3]
%y = aten.relu(%x) : f64[2, 3]
output 'y' = %y
""",
    )
    assert [node.name for node in after.nodes] == [
        "w", "n", "m", "v", "x", "unread", "one", "step", "norm", "y"
    ]  # fmt: skip


def test_shares_stand_between_values_and_readers() -> None:
    after = checked(
        insert_shares,
        """
graph 'g'
%w = param('w') : f64[3] grad
%u = param('u') : f64[3] grad
%n = buffer('n') : f64[3]
%x = input('x') : f64[3]
%z = input('z') : f64[3]
%a = aten.mul.Tensor(%x, %z) : f64[3]
%b = aten.mul.Tensor(%a, %w) : f64[3] grad
%c = aten.add.Tensor(%b, %b) : f64[3] grad
%d = aten.add.Tensor(%b, %x) : f64[3] grad
%e = aten.add_.Tensor(%n, %x) : f64[3]
%f = aten.mul.Tensor(%n, %d) : f64[3] grad
output 'b' = %b
output 'c' = %c
output 'f' = %f
""",
    )
    assert [f"{node.name} = {', '.join(node.inputs)}" for node in after.nodes if node.inputs] == [
        "x_share = x",
        "a = x_share, z",
        "w_share = w",
        "b = a, w_share",
        "b_share = b",
        "c = b_share, b_share",
        "d = b_share, x_share",
        "e = n, x_share",
        "f = n, d",
    ]
    share = after["b_share"]
    assert (share.op, share.alias, share.requires_grad) == ("autopar.share", "b", True)
    assert dict(after.outputs)["b"] == "b"

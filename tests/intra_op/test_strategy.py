"""Strategies, executed with numpy: shard operands, run, recombine, compare with the whole run."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from autopar.errors import RuleError
from autopar.intra_op.rule import OpRule, Signature, collect, resolve, rule
from autopar.intra_op.rules import rules
from autopar.intra_op.strategy import strategies
from autopar.ir.graph import Node, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout, TensorType

MESH = Mesh.parse("cpu: node=2, gpu=2")
Run = Callable[..., np.ndarray]

CASES: list[tuple[OpRule, list[tuple[int, ...]], Run]] = [
    (
        rule("linear", "... k, n k, +n -> ... n", flops="2 ... n k"),
        [(4, 8, 4), (12, 4), (12,)],
        lambda x, w, b: x @ w.T + b,
    ),
    (rule("matmul", "b m k, b k n -> b m n"), [(4, 8, 4), (4, 4, 8)], lambda x, y: x @ y),
    (rule("add", "..., ... -> ...", linear=True), [(4, 8, 4), (8, 1)], lambda x, y: x + y),
    (rule("mul", "..., ... -> ..."), [(4, 1, 4), (8, 4)], lambda x, y: x * y),
    (
        rule("softmax", "... s! -> ... s"),
        [(4, 8)],
        lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True),
    ),
    (rule("merge", "b s h -> (b s) h"), [(4, 4, 8)], lambda x: x.reshape(-1, x.shape[-1])),
    (rule("sum", "a b -> b"), [(4, 8)], lambda x: x.sum(0)),
    (rule("transpose", "a b c -> a c b", linear=True), [(4, 8, 4)], lambda x: x.swapaxes(1, 2)),
]


def shard(whole: np.ndarray, layout: Layout, rank: int) -> np.ndarray:
    position = MESH.coordinate(rank)
    for dim, axes in enumerate(layout.dims):
        for axis in axes:
            whole = np.split(whole, MESH.axis_size(axis), axis=dim)[position[axis]]
    return whole if all(position[axis] == 0 for axis in layout.partial) else 0 * whole


def join(parts: list[np.ndarray], layout: Layout, shape: tuple[int, ...]) -> np.ndarray:
    whole = np.zeros(shape)
    for rank, part in enumerate(parts):
        position = MESH.coordinate(rank)
        counted = (*layout.sharded_axes, *layout.partial)
        if any(position[axis] for axis in MESH.names if axis not in counted):
            continue
        view = whole
        for dim, axes in enumerate(layout.dims):
            for axis in axes:
                view = np.split(view, MESH.axis_size(axis), axis=dim)[position[axis]]
        view += part
    return whole


@pytest.mark.parametrize(("op", "shapes", "run"), CASES, ids=lambda x: getattr(x, "op", ""))
def test_every_strategy_equals_the_whole_run(
    op: OpRule, shapes: list[tuple[int, ...]], run: Run
) -> None:
    generator = np.random.default_rng(0)
    values = [generator.normal(size=shape) for shape in shapes]
    whole = run(*values)
    types = tuple(TensorType("f64", shape) for shape in shapes)
    node = Node("y", op.op, (), (), (TensorType("f64", whole.shape),))
    signature = resolve(op, node, types, node.types)
    found = strategies(signature, MESH)
    assert len(set(found)) == len(found) > 1
    for strategy in found:
        for layout, shape in zip(strategy.operands, shapes, strict=True):
            layout.check(shape, MESH)
        parts = [
            run(*(shard(v, lay, r) for v, lay in zip(values, strategy.operands, strict=True)))
            for r in range(MESH.size)
        ]
        joined = join(parts, strategy.results[0], whole.shape)
        np.testing.assert_allclose(joined, whole, rtol=1e-12, atol=1e-12, err_msg=str(strategy))


def test_an_operand_that_lacks_a_split_factor_varies() -> None:
    linear, shapes, _ = CASES[0]
    types = tuple(TensorType("f64", shape) for shape in shapes)
    node = Node("y", "linear", (), (), (TensorType("f64", (4, 8, 12)),))
    found = strategies(resolve(linear, node, types, node.types), MESH)
    by_text = {str(s): s for s in found}
    data_parallel = by_text["...1@gpu"]
    assert [lay.varying for lay in data_parallel.operands] == [(), ("gpu",), ("gpu",)]
    row_parallel = by_text["k@gpu"]
    assert row_parallel.results[0].partial == ("gpu",)
    assert row_parallel.operands[2].partial == ("gpu",)
    column_parallel = by_text["n@gpu"]
    assert column_parallel.operands[0].varying == ("gpu",)


def resolved(op: str, shapes: list[tuple[int, ...]], result: tuple[int, ...]) -> Signature:
    """The rule of `op` for tensors of these shapes whose result takes a gradient."""
    types = tuple(TensorType("f64", shape) for shape in shapes)
    refs = tuple(Ref(f"x{i}") for i in range(len(shapes)))
    node = Node("y", op, refs, (), (TensorType("f64", result),), requires_grad=True)
    return resolve(rules()[op], node, types, node.types)


def layouts(op: str, shapes: list[tuple[int, ...]], result: tuple[int, ...]) -> set[str]:
    """Every strategy on one axis, as "operand layouts -> result layout"."""
    found = strategies(resolved(op, shapes, result), Mesh.parse("cpu: gpu=2"))
    return {
        " ".join(lay.format(shape) for lay, shape in zip(s.operands, shapes, strict=True))
        + f" -> {s.results[0].format(result)}"
        for s in found
    }


def test_the_strategies_of_a_linear_layer() -> None:
    """Data parallelism by batch or sequence; Megatron-LM's columns and rows (arXiv:1909.08053).

    x [b, s, k], weight [n, k], bias [n]. Columns split n: the result is split, and the gradient
    of x owed a sum. Rows split k: the result is owed a sum, and so the bias is a part of it.
    """
    assert layouts("aten.linear", [(4, 8, 6), (12, 6), (12,)], (4, 8, 12)) == {
        "[4, 8, 6] [12, 6] [12] -> [4, 8, 12]",
        "[4@gpu, 8, 6] [12, 6] -sum(gpu) [12] -sum(gpu) -> [4@gpu, 8, 12]",
        "[4, 8@gpu, 6] [12, 6] -sum(gpu) [12] -sum(gpu) -> [4, 8@gpu, 12]",
        "[4, 8, 6] -sum(gpu) [12@gpu, 6] [12@gpu] -> [4, 8, 12@gpu]",
        "[4, 8, 6@gpu] [12, 6@gpu] [12] +sum(gpu) -> [4, 8, 12] +sum(gpu)",
    }


def test_sums_pass_through_both_terms_or_one_factor() -> None:
    whole_and_split = {
        "[4] [4] -> [4]",
        "[4@gpu] [4@gpu] -> [4@gpu]",
        "[4] -sum(gpu) [4] -sum(gpu) -> [4] -sum(gpu)",
    }
    both = "[4] +sum(gpu) [4] +sum(gpu) -> [4] +sum(gpu)"
    first = "[4] +sum(gpu) [4] -sum(gpu) -> [4] +sum(gpu)"
    second = "[4] -sum(gpu) [4] +sum(gpu) -> [4] +sum(gpu)"
    for op, sums in {
        "aten.add.Tensor": {both},
        "aten.mul.Tensor": {first, second},
        "aten.div.Tensor": {first},
    }.items():
        assert layouts(op, [(4,), (4,)], (4,)) == whole_and_split | sums, op


def test_a_number_that_is_added_keeps_sums_out() -> None:
    assert not any("+sum" in text for text in layouts("aten.add.Tensor", [(4,)], (4,)))
    assert "[4] +sum(gpu) -> [4] +sum(gpu)" in layouts("aten.mul.Tensor", [(4,)], (4,))


def test_without_a_gradient_nothing_varies_and_without_floats_nothing_is_owed() -> None:
    share = rules()["autopar.share"]
    for dtype, expected in {"f64": {(), ("gpu",)}, "i64": {()}}.items():
        kind = TensorType(dtype, (4,))
        node = Node("y", share.op, (Ref("x"),), (), (kind,))
        found = strategies(resolve(share, node, (kind,), (kind,)), Mesh.parse("cpu: gpu=2"))
        assert {s.results[0].partial for s in found} == expected
        assert {s.results[0].varying for s in found} == {()}


def test_flops_and_shares() -> None:
    linear, shapes, _ = CASES[0]
    types = tuple(TensorType("f64", shape) for shape in shapes)
    node = Node("y", "linear", (), (), (TensorType("f64", (4, 8, 12)),))
    signature = resolve(linear, node, types, node.types)
    assert signature.flops == 2 * 4 * 8 * 12 * 4
    for strategy in strategies(signature, MESH):
        count = sum(bool(part) for _, part in strategy.parts)
        assert strategy.share(signature.sizes, MESH) == 0.5**count


def test_an_empty_tensor_is_no_work_to_share() -> None:
    node = Node("y", "neg", (), (), (TensorType("f64", (4, 0)),))
    signature = resolve(rule("neg", "a b -> a b"), node, node.types, node.types)
    shares = {str(s): s.share(signature.sizes, MESH) for s in strategies(signature, MESH)}
    assert shares["whole"] == 1.0
    assert shares["a@node a@gpu"] == 0.25


def test_the_count_is_all_assignments_that_leave_nobody_empty() -> None:
    add = rule("neg", "a b -> a b")
    node = Node("y", "neg", (), (), (TensorType("f64", (2, 6)),))
    found = strategies(resolve(add, node, node.types, node.types), MESH)
    legal = [
        (node_part, gpu_part)
        for node_part, gpu_part in itertools.product(("", "a", "b"), repeat=2)
        if not (node_part == gpu_part == "a")  # 2 elements do not suffice for 4 devices
    ]
    assert len(found) == len(legal)


def test_flops_that_name_no_factor_are_refused() -> None:
    node = Node("y", "op", (), (), (TensorType("f64", (4, 4)),))
    with pytest.raises(RuleError, match="flops"):
        resolve(rule("op", "a b -> a b", flops="2 a c"), node, node.types, node.types)


@pytest.mark.parametrize("spec", ["a b", "a -> a", "-> a b", "(a b) c -> a b c"])
def test_bad_rules_are_named(spec: str) -> None:
    node = Node("y", "op", (), (), (TensorType("f64", (4, 4)),))
    with pytest.raises(RuleError):
        resolve(rule("op", spec), node, node.types, node.types)


def test_two_rules_for_one_operator_are_refused() -> None:
    with pytest.raises(RuleError, match="two rules"):
        collect([rule("op", "a -> a"), rule("op", "a b -> a b")])

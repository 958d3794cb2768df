"""Rules as written: every rule resolves, and the rules of views are exact on numpy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autopar.intra_op.rule import Signature, resolve
from autopar.intra_op.rules import rules
from autopar.intra_op.rules.view import reshape_spec
from autopar.intra_op.strategy import strategies
from autopar.ir.graph import Node, Ref
from autopar.ir.graph_text import parse_graph
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import TensorType
from autopar.operators.interpret import execute, tensor_type

MESH = Mesh.parse("cpu: gpu=2")


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of equal size, grouped at random from common factors."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=6))

    def group() -> tuple[int, ...]:
        cuts = sorted(draw(st.sets(st.integers(0, len(factors)), max_size=4)) | {0, len(factors)})
        return tuple(math.prod(factors[a:b]) for a, b in itertools.pairwise(cuts))

    return group(), group()


@given(reshapes())
def test_reshape_strategies_commute_with_the_reshape(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    src, dst = shapes
    whole = np.arange(math.prod(src)).reshape(src)
    node = Node("y", "aten.view", (Ref("x"), dst), (), (TensorType("f32", dst),))
    signature = resolve(rules()["aten.view"], node, (TensorType("f32", src),), node.types)
    for strategy in strategies(signature, MESH):
        into, out = strategy.operands[0], strategy.results[0]
        for index in range(2):
            part, expected = whole, whole.reshape(dst)
            for dim, axes in enumerate(into.dims):
                part = np.array_split(part, 2, axis=dim)[index] if axes else part
            for dim, axes in enumerate(out.dims):
                expected = np.array_split(expected, 2, axis=dim)[index] if axes else expected
            local = part.reshape(out.local_shape(dst, MESH, {"gpu": index}))
            np.testing.assert_array_equal(local, expected, err_msg=f"{signature} {strategy}")


@pytest.mark.parametrize(
    ("src", "dst", "splittable"),
    [
        ((4, 6, 8), (24, 8), 2),
        ((4, 32), (4, 8, 4), 2),
        ((2, 6), (3, 4), 0),
        ((8,), (8, 1), 1),
        ((4, 6), (8, 3), 1),
        ((4, 2, 6), (4, 3, 4), 1),
        ((0, 4), (0, 2, 2), 0),
    ],
)
def test_reshapes_that_people_write(
    src: tuple[int, ...], dst: tuple[int, ...], splittable: int
) -> None:
    node = Node("y", "aten.view", (Ref("x"), dst), (), (TensorType("f32", dst),))
    signature = resolve(rules()["aten.view"], node, (TensorType("f32", src),), node.types)
    assert len(signature.splittable) == splittable, reshape_spec(src, dst)


def test_rules_are_found_by_folder_and_named_as_in_graphs() -> None:
    table = rules()
    assert {"aten.linear", "aten.view", "aten.layer_norm", "aten.gelu", "aten.add.Tensor"} <= set(
        table
    )
    assert not [name for name in table if name.endswith(".default")]


def resolved(op: str, arguments: str, *kinds: str) -> Signature:
    """The rule of `op` on a node written as text; `kinds` are operand types, the result's last."""
    leaves = [f"%x{i} = input('x{i}') : {kind}" for i, kind in enumerate(kinds[:-1])]
    text = "\n".join(["graph 'g'", *leaves, f"%y = {op}({arguments}) : {kinds[-1]}"])
    node = parse_graph(text).nodes[-1]
    types = tuple(TensorType.parse(kind) for kind in kinds[:-1])
    return resolve(rules()[op], node, types, node.types)


HEADS = ("f32[4, 8, 16, 6]", "f32[4, 2, 12, 6]", "f32[4, 2, 12, 6]")


@pytest.mark.parametrize(
    ("arguments", "splittable"),
    [
        ("%x0, %x1, %x2, enable_gqa=True", {4, 2, 16}),
        ("%x0, %x1, %x2, None, 0.0, True, enable_gqa=True", {4, 2}),
        ("%x0, %x1, %x2, is_causal=True, enable_gqa=True", {4, 2}),
        ("%x0, %x1, %x2, None, 0.1, enable_gqa=True", {4, 2}),
    ],
)
def test_attention_splits_batch_key_heads_and_free_queries(
    arguments: str, splittable: set[int]
) -> None:
    signature = resolved("aten.scaled_dot_product_attention", arguments, *HEADS, HEADS[0])
    assert {signature.sizes[factor] for factor in signature.splittable} == splittable


def test_batch_norm_in_training_stays_whole_for_its_running_statistics() -> None:
    kinds = ("f32[4, 8, 2, 2]", *["f32[8]"] * 4, "f32[4, 8, 2, 2]")
    for training, count in (("True", 0), ("False", 4)):
        arguments = f"%x0, %x1, %x2, %x3, %x4, {training}, 0.1, 1e-05, True"
        assert len(resolved("aten.batch_norm", arguments, *kinds).splittable) == count


def test_a_slice_from_end_to_end_may_be_split() -> None:
    whole = resolved("aten.slice.Tensor", "%x0, 0, 0, 9223372036854775807", "f32[4]", "f32[4]")
    part = resolved("aten.slice.Tensor", "%x0, 0, 1, 3", "f32[4]", "f32[2]")
    assert len(whole.splittable) == 1
    assert not part.splittable


COUNTED = {
    "aten.mm": ("%x0, %x1", "f32[4, 6]", "f32[6, 8]"),
    "aten.bmm": ("%x0, %x1", "f32[2, 4, 6]", "f32[2, 6, 8]"),
    "aten.addmm": ("%x0, %x1, %x2", "f32[8]", "f32[4, 6]", "f32[6, 8]"),
    "aten.linear": ("%x0, %x1, %x2", "f32[2, 4, 6]", "f32[8, 6]", "f32[8]"),
    "aten.matmul": ("%x0, %x1", "f32[2, 4, 6]", "f32[2, 6, 8]"),
    "aten.conv2d": ("%x0, %x1", "f32[2, 4, 6, 6]", "f32[8, 4, 3, 3]"),
    "aten.conv_transpose2d.input": ("%x0, %x1", "f32[2, 4, 6, 6]", "f32[4, 8, 3, 3]"),
    "aten.scaled_dot_product_attention": (
        "%x0, %x1, %x2", "f32[2, 4, 8, 6]", "f32[2, 4, 12, 6]", "f32[2, 4, 12, 6]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", COUNTED)
def test_flops_are_those_that_torch_counts(op: str) -> None:
    arguments, *kinds = COUNTED[op]
    values = {f"x{i}": torch.randn(TensorType.parse(k).shape) for i, k in enumerate(kinds)}
    node = parse_graph(f"graph 'g'\n%y = {op}({arguments}) : ()").nodes[0]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        result = execute(node, values, torch.device("cpu"))
    counted = counter.get_total_flops()
    assert counted > 0
    assert resolved(op, arguments, *kinds, str(tensor_type(result))).flops == counted


def test_a_causal_mask_halves_attention() -> None:
    op, arguments = "aten.scaled_dot_product_attention", "%x0, %x1, %x2"
    kinds = ("f32[2, 4, 8, 6]",) * 4
    full = resolved(op, arguments, *kinds).flops
    assert resolved(op, f"{arguments}, is_causal=True", *kinds).flops == full / 2

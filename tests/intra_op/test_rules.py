"""Rules as written: every rule resolves, and the rules of views are exact on numpy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.intra_op.rule import resolve
from autopar.intra_op.rules import rules
from autopar.intra_op.rules.view import reshape_spec
from autopar.intra_op.strategy import strategies
from autopar.ir.graph import Node, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import TensorType

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
                part = np.split(part, 2, axis=dim)[index] if axes else part
            for dim, axes in enumerate(out.dims):
                expected = np.split(expected, 2, axis=dim)[index] if axes else expected
            local = part.reshape(out.local_shape(dst, MESH))
            np.testing.assert_array_equal(local, expected, err_msg=f"{signature} {strategy}")


@pytest.mark.parametrize(
    ("src", "dst", "splittable"),
    [((4, 6, 8), (24, 8), 2), ((4, 32), (4, 8, 4), 2), ((2, 6), (3, 4), 0), ((8,), (8, 1), 1)],
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

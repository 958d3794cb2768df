"""Views, casts and splits in canonical form: the same outputs, gradients and buffers in float64."""

from __future__ import annotations

import pytest

from autopar.ir.graph_text import parse_graph
from autopar.passes.simplify import drop_identities, lower_splits
from autopar.passes.verify import verify
from tests.support.graphs import assert_equal_runs, checked, leaf_values, ops

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
%new = aten.add.Tensor(%b, 1) : f64[4]
%left = autopar.write(%b, %new) : f64[4]
%kept = aten.mul.Tensor(%old, 1) : f64[4]
output 'off' = %off
output 'odd' = %odd
output 'kept' = %kept
output 'new' = %new
"""
    before = parse_graph(text.replace(", memory_format=channels_last", ""))
    after = verify(drop_identities(parse_graph(text)))
    assert [node.name for node in after.nodes if not node.is_leaf] == [
        "t", "p", "drop", "half", "last", "cut", "odd", "off", "new", "left"
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
%e = aten.new_empty(%w, (2, 1)) : f64[2, 1]
%f = aten.slice_scatter(%e, %c, 1, 0, 1) : f64[2, 1]
output 'a' = %a
output 'b' = %b
output 'c' = %c
output 'd' = %d
output 'f' = %f
""",
    )
    constants = ["aten.full", "aten.full", "aten.zeros", "aten.ones", "aten.empty.memory_format"]
    assert ops(after) == [*constants, "aten.slice_scatter"]
    assert not any(node.inputs for node in after.nodes if node.op in constants)


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

"""Graphs print and read back exactly."""

from __future__ import annotations

import ast
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import GraphError
from autopar.ir.graph import Arg, Graph, Name, Node, Ref, Repeat, Source
from autopar.ir.graph_text import fingerprint, format_graph, parse_graph
from autopar.ir.tensor import DTYPE_BYTES, TensorType

MLP = """\
graph 'mlp'
%x = input('x') : f32[8, 16]
%w = param('fc.weight', dim=0, start=0, length=16) : f32[16, 16] grad
%h = aten.linear(%x, %w, None) : f32[8, 16] grad saved(%x, %w)  # fc | m.py:7 | h = self.fc(x) # !
%n = aten.native_layer_norm(%h, (16,), eps=1e-05) : f32[8, 16], f32[8, 1] grad keeps(f32[8, 1])
%y = getitem(%n, 0) : f32[8, 16] grad alias(%n)
%m = aten.masked_fill.Scalar(%y, -inf, dtype=bf16, mode='a # b') : f32[8, 16] grad
output 'logits' = %m
"""


def test_a_written_graph_reads_as_nodes_and_prints_alike() -> None:
    graph = parse_graph(MLP)
    assert format_graph(graph) == MLP
    assert graph["w"].kwargs == (("dim", 0), ("start", 0), ("length", 16))
    assert graph["h"].source == Source("fc", "m.py", 7, "h = self.fc(x) # !")
    assert graph["h"].saved == ("x", "w")
    assert graph["n"].args == (Ref("h"), (16,))
    assert graph["n"].saved_types == (TensorType("f32", (8, 1)),)
    assert graph["y"].alias == "n"
    assert graph["m"].args == (Ref("y"), -math.inf)
    assert graph["m"].kwargs == (("dtype", Name("bf16")), ("mode", "a # b"))
    assert graph.loss is None


def test_nan_reads_back_as_nan() -> None:
    line = "%a = aten.full((), nan) : f32[]"
    value = parse_graph(f"graph 'g'\n{line}\n")["a"].args[1]
    assert isinstance(value, float)
    assert math.isnan(value)


@given(
    st.one_of(
        st.text(max_size=8).map(repr),
        st.sampled_from(["'a\\x41'", '"it\'s"', "'\\'", "'a\tb'", "'\x0c'", "''", "'#'", "'%x'"]),
        st.from_regex(r"-?[0-9]{1,4}(\.[0-9]{0,3})?(e[+-]?[0-9]{1,2})?", fullmatch=True),
    )
)
def test_literals_mean_what_python_means_by_them(literal: str) -> None:
    text = f"graph 'g'\n%a = aten.full((), {literal}) : f32[]\n"
    try:
        expected = ast.literal_eval(literal)
    except SyntaxError:  # "007", or a quote that is not closed
        with pytest.raises(GraphError):
            parse_graph(text)
        return
    value = parse_graph(text)["a"].args[1]
    assert (type(value), value) == (type(expected), expected)


@pytest.mark.parametrize(
    "line",
    [
        "%a = aten.relu(%x : f32[2]",
        "%a = aten.relu(%x) : f31[2]",
        "%a = aten.relu(%x) : f32[2] nonsense",
        "%a = aten.relu(__import__('os').system('x')) : f32[2]",
        "%a = aten.relu(k=1, 2) : f32[2]",
        "%a = aten.relu(1..2) : f32[2]",
        "%a = aten.relu(" + "(" * 4000 + ") : f32[2]",
        "graph 'again'",
        "block %x",
        "loss x",
        "hello",
    ],
)
def test_the_line_that_cannot_be_read_is_named(line: str) -> None:
    with pytest.raises(GraphError, match="line 3") as caught:
        parse_graph(f"graph 'g'\n\n{line}\n")
    assert caught.value.where == line


def test_a_text_without_a_header_is_refused() -> None:
    with pytest.raises(GraphError, match="no line"):
        parse_graph("%x = input('x') : f32[2]\n")


def test_constants_that_would_read_back_otherwise_are_refused() -> None:
    node = Node("a", "aten.relu", (Name("None"),), (), (TensorType("f32", ()),))
    with pytest.raises(GraphError, match="None"):
        format_graph(Graph("g", (node,), ()))


names = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
types = st.builds(
    TensorType,
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.lists(st.integers(0, 4096), max_size=4).map(tuple),
)
leaf_args = st.one_of(
    names.map(Ref),
    st.sampled_from(["f32", "bf16", "cuda:0", "torch.strided", "None_", "info", "nan2"]).map(Name),
    st.integers(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.text(),
    st.none(),
)
args: st.SearchStrategy[Arg] = st.recursive(
    leaf_args, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6
)
words = st.text(st.sampled_from("ab.: |#('\"\n\t\\1é\u2028"), max_size=8)
sources = st.builds(Source, words, words, st.integers(0, 99), words)
nodes = st.builds(
    Node,
    names,
    st.sampled_from(["input", "aten.add.Tensor", "getitem", "autopar.share"]),
    st.lists(args, max_size=3).map(tuple),
    st.dictionaries(names, args, max_size=2).map(lambda table: tuple(table.items())),
    st.lists(types, max_size=3).map(tuple),
    sources,
    st.booleans(),
    st.none() | names,
    st.lists(names, max_size=3).map(tuple),
    st.lists(types, max_size=2).map(tuple),
)
pairs = st.lists(st.tuples(names, names), max_size=2).map(tuple)
blocks = st.lists(st.lists(names, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)
graphs = st.builds(
    Graph,
    st.text(),
    st.lists(nodes, max_size=4).map(tuple),
    st.lists(st.tuples(st.text(), names), max_size=2).map(tuple),
    st.none() | names,
    st.lists(st.builds(Repeat, blocks, pairs), max_size=2).map(tuple),
)


@settings(max_examples=75, deadline=None)
@given(graphs)
def test_any_graph_reads_back_equal(graph: Graph) -> None:
    again = parse_graph(format_graph(graph))
    assert again == graph
    assert repr(again) == repr(graph)  # tells True from 1 and -0.0 from 0.0


def test_the_fingerprint_sees_what_is_computed_and_nothing_else() -> None:
    graph = parse_graph(MLP)
    renamed = parse_graph(MLP.replace("%h", "%hidden").replace("m.py:7", "n.py:9"))
    assert fingerprint(renamed) == fingerprint(graph)
    assert fingerprint(graph).startswith("mlp sha256:")
    assert len(fingerprint(graph)) == len("mlp sha256:") + 8
    changes = [("1e-05", "1e-06"), ("fc.weight", "fc.bias"), ("[8, 16]", "[4, 16]"),
               ("aten.linear(%x, %w", "aten.linear(%w, %x"), ("bf16", "f16")]  # fmt: skip
    prints = {fingerprint(parse_graph(MLP.replace(*change))) for change in changes}
    assert len(prints | {fingerprint(graph)}) == len(changes) + 1
    assert fingerprint(replace(graph, outputs=(("logits", "y"),))) not in prints

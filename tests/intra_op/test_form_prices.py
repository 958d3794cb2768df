"""Prices of forms of attention against published shares and closed forms."""

from __future__ import annotations

import pytest

from autopar.cost.device import device
from autopar.cost.model import AnalyticModel
from autopar.intra_op.node_choices import node_options
from autopar.intra_op.price_cache import Prices
from autopar.intra_op.rules import rules
from autopar.ir.graph import Graph
from autopar.ir.graph_text import parse_graph
from autopar.ir.mesh import Mesh
from autopar.operators.exchange import exchanged

RULES = rules()


def attention(length: int) -> Graph:
    """Causal attention of Llama 3 8B."""
    many, few = f"bf16[1, 32, {length}, 128]", f"bf16[1, 8, {length}, 128]"
    return parse_graph(f"""graph 'attention'
%q = input('q') : {many} grad
%k = input('k') : {few} grad
%v = input('v') : {few} grad
%y = aten.scaled_dot_product_attention(%q, %k, %v, None, 0.0, True, enable_gqa=True) : {many} grad
""")


def seconds(text: str, length: int) -> dict[str, tuple[float, float]]:
    """Predicted seconds of each form with the sequence split, forwards and in all."""
    mesh, graph = Mesh.parse(text), attention(length)
    found = Prices(mesh, AnalyticModel(mesh)).operator(
        graph, graph["y"], RULES, device(mesh).slowdown
    )
    options, _, kernels, sent = found
    return {
        option.form: (taken[0] + calls[0], sum(taken) + sum(calls))
        for option, taken, calls in zip(options, kernels, sent, strict=True)
        if option.form or option.label == "whole"
    }


# https://github.com/zhuzilin/ring-flash-attention, README: 8192 positions on each of 8 devices; the
# share of eight times the iterations of flash attention on one. H100 links stand for those of H800.
PUBLISHED = (
    ("A100-80", "ring", 0.514, 0.525),
    ("A100-80", "ring zigzag", 0.817, 0.898),
    ("H100", "ring", 0.521, 0.539),
    ("H100", "ring zigzag", 0.852, 0.902),
)


@pytest.mark.parametrize(("chip", "form", "forward", "both"), PUBLISHED)
def test_shares_of_ideal_flash_are_as_published(
    chip: str, form: str, forward: float, both: float
) -> None:
    ideal = seconds(f"{chip}: cp=2", 8192)[""]
    taken = seconds(f"{chip}: cp=8", 8 * 8192)[form]
    assert 8 * ideal[0] / taken[0] == pytest.approx(forward, rel=0.15)
    assert 8 * ideal[1] / taken[1] == pytest.approx(both, rel=0.08)


def test_what_is_sent_is_the_closed_form() -> None:
    """Bytes of one device: n - 1 hops of its keys and values, and of their float32 gradients."""
    count, length = 4, 4096
    mesh, graph = Mesh.parse(f"A100-80: cp={count}"), attention(length)
    node, types = graph["y"], tuple(graph[name].type for name in ("q", "k", "v"))
    own = length // count * 128 * 2
    query, pair = 32 * own, 2 * 8 * own
    expected = {
        "gathered": ([pair], [pair, 2 * count * pair]),
        "ring": ([pair] * 3, [pair] * 3 + [2 * pair] * 3),
        "ring zigzag": (
            [query + 2 * pair, 2 * pair, query],
            [query + pair, 2 * pair, 2 * (2 * pair), query + 2 * (2 * pair)],
        ),
        "ulysses": ([query + pair, query], [query, query + pair]),
    }  # fmt: skip
    options, _ = node_options(graph, node, mesh, RULES)
    found = {
        option.form: tuple(
            [call.nbytes for call in side]
            for side in exchanged(node, types, option.operands, mesh, option.form)
        )
        for option in options
        if option.form
    }
    assert found == expected

"""A graph for another batch size equals the graph traced from the model on that batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.passes.rebatch import rebatch
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from autopar.zoo import load

MODELS = ("gpt2", "llama-3-8b", "gpt-3-175b", "mistral-7b", "bert-base", "vit-base")


@cache
def traced(name: str, samples: int) -> Graph:
    seq = None if name.startswith("vit") else 16
    model, inputs = load(name, batch=samples, seq=seq, layers=2)
    return capture_graph(model, (), inputs, Options(), Trace(None)).graph


@pytest.mark.parametrize(
    "name", [MODELS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS[1:])]
)
def test_it_is_the_one_that_is_traced(name: str) -> None:
    known = traced(name, 2), traced(name, 4)
    assert rebatch(*known, (2, 4), 6) == traced(name, 6)
    assert rebatch(*known, (2, 4), 2) == known[0]
    back = rebatch(known[1], traced(name, 6), (4, 6), 2)
    assert back == known[0]


def test_what_does_not_grow_with_the_batch_is_refused() -> None:
    few, many = traced("gpt2", 2), traced("gpt2", 4)
    with pytest.raises(GraphError, match="of one of 1"):
        rebatch(few, many, (2, 4), 1)
    with pytest.raises(GraphError, match="proportion"):
        rebatch(few, many, (2, 6), 4)
    with pytest.raises(GraphError, match="proportion"):
        rebatch(few, replace(many, nodes=many.nodes[:-1]), (2, 4), 6)
    with pytest.raises(GraphError, match="proportion"):
        rebatch(few, replace(many, name="other"), (2, 4), 6)

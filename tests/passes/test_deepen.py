"""A deepened graph equals the graph traced from the deep model."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.ir.graph_text import format_graph, parse_graph
from autopar.passes.deepen import LEAST, deepen
from autopar.passes.normalise import FINDING, NORMALISING, prepare
from autopar.passes.shares import remove_shares
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from autopar.zoo import load

MODELS = ("gpt2", "llama-3-8b", "bert-base", "vit-base", "mistral-7b", "gpt-3-175b")


def traced(name: str, layers: int) -> Graph:
    seq = None if name.startswith("vit") else 16
    model, inputs = load(name, batch=2, seq=seq, layers=layers)
    return capture_graph(model, (), inputs, Options(), Trace(None)).graph


@pytest.fixture(scope="module")
def shallow() -> tuple[Graph, Graph]:
    return traced("gpt2", LEAST - 1), traced("gpt2", LEAST)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in MODELS[2:]])
def test_other_models_deepened_are_as_traced(name: str) -> None:
    few, more = traced(name, LEAST - 1), traced(name, LEAST)
    assert deepen(few, more, 6) == traced(name, LEAST + 6)


def test_a_deepened_graph_is_the_one_that_is_traced(shallow: tuple[Graph, Graph]) -> None:
    assert deepen(*shallow, 8) == traced("gpt2", LEAST + 8)  # two digits, too
    assert deepen(*shallow, 0) == shallow[1]


def test_a_prepared_graph_leads_back_to_the_normalised_one() -> None:
    model, inputs = load("gpt2", batch=2, seq=16, layers=2)
    options, trace = Options(), Trace(None)
    whole = capture_graph(model, (), inputs, options, trace, NORMALISING).graph
    assert remove_shares(prepare(whole, passes=FINDING)) == whole


def test_two_runs_grow_alike() -> None:
    """An encoder's depth shifts all names of the decoder, whose blocks grow besides."""
    assert deepen(runs(3), runs(4), 5) == runs(9)


def runs(count: int) -> Graph:
    """Two runs, of one multiplication and of two, as torch.export would number them."""
    leaves, lines, blocks, number = [], [], {"a": [], "b": []}, 0
    hidden = "x"
    for run, width in (("a", 1), ("b", 2)):
        for block in range(count):
            names = []
            for place in range(width):
                weight, op = f"{run}_{block}_w{place}", f"mul_{number}" if number else "mul"
                number += 1
                leaves.append(f"%{weight} = param('{run}.{block}.w{place}') : f32[4] grad")
                share = f"{weight}_share"
                lines.append(f"%{share} = autopar.share(%{weight}) : f32[4] grad alias(%{weight})")
                read = hidden
                if place == 0:
                    read = f"{hidden}_share"
                    lines.append(
                        f"%{read} = autopar.share(%{hidden}) : f32[4] grad alias(%{hidden})"
                    )
                    names.append(read)
                lines.append(f"%{op} = aten.mul.Tensor(%{read}, %{share}) : f32[4] grad")
                names += [weight, share, op]
                hidden = op
            blocks[run].append(names)
    text = [
        "graph 'two'",
        *leaves,
        "%x = param('x') : f32[4] grad",
        *lines,
        f"output 'y' = %{hidden}",
    ]
    entries = {"a": "x", "b": blocks["a"][-1][-1]}
    for run, found in blocks.items():
        text.append(f"repeat carried(%{entries[run]} -> %{found[0][-1]})")
        text += ["  block " + " ".join(f"%{name}" for name in names) for names in found]
    return parse_graph("\n".join(text))


def test_blocks_that_differ_are_refused(shallow: tuple[Graph, Graph]) -> None:
    few, more = shallow
    with pytest.raises(GraphError, match="cannot be deepened"):
        deepen(few, few, 2)  # not a block more
    with pytest.raises(GraphError, match="cannot be deepened"):
        deepen(replace(few, repeats=()), replace(more, repeats=()), 2)
    # A literal that changes with the depth is no name.
    text = re.sub(r"(aten\.dropout\(%\w+, )0\.1", r"\g<1>0.2", format_graph(more))
    assert text != format_graph(more)
    with pytest.raises(GraphError, match="grow evenly"):
        deepen(few, parse_graph(text), 2)


def test_names_that_grow_unevenly_are_refused(shallow: tuple[Graph, Graph]) -> None:
    few, more = shallow
    text = format_graph(more).replace("h.2.", "h.7.")
    with pytest.raises(GraphError, match="grow evenly"):
        deepen(few, parse_graph(text), 2)

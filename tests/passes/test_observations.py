"""Stages are annotated from the whole model as torch annotates them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest

from autopar.capture.capture import Captured
from autopar.intra_op.pins.dims import without_samples
from autopar.intra_op.rules import rules
from autopar.ir.graph import Graph
from autopar.ir.graph_text import format_graph, parse_graph
from autopar.ir.stage_graphs import cut
from autopar.operators.interpret import annotate, run
from autopar.passes import alike_stages
from autopar.passes.loss.whole_counts import count_whole_batch
from autopar.passes.normalise import FINDING, prepare
from autopar.passes.observations import NOTHING, _Walk, observations
from autopar.passes.repeats import find_repeats
from autopar.passes.shares import remove_shares
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from tests.support import models
from tests.support.graphs import Values, model_values

MODELS: dict[str, Callable[[], models.Model]] = {
    "gpt2": lambda: models.gpt2(3, dropout=0.1),
    "llama": lambda: models.llama(3),
    "bert": lambda: models.bert(3),
    "vit": models.vit,
    "conv_net": models.conv_net,
}
LANGUAGE_MODELS = ("gpt2", "llama")


@cache
def captured(name: str, samples: int = 4) -> tuple[Captured, Values]:
    model, batch = MODELS[name]()
    call = Call.of(model, batch).sized(samples)
    whole = capture_call(call, Options(), Trace(None))
    return whole, model_values(model, call.kwargs, whole)


def prepared(name: str, samples: int = 4) -> Graph:
    return captured(name, samples)[0].graph


def ends(graph: Graph) -> list[str]:
    """Every second residual connection."""
    sums = [node for node in graph.nodes if node.op == "aten.add.Tensor" and node.requires_grad]
    sums = [node for node in sums if len(node.inputs) == 2 and len(node.type.shape) == 3]
    return [node.name for node in sums if node.type == sums[0].type][1:-1:2]


@pytest.mark.parametrize("name", MODELS)
def test_what_is_known_of_stages_is_what_torch_observes(name: str) -> None:
    whole = prepared(name)
    known, graph = observations(whole), remove_shares(whole)
    for part in (graph, *(map(find_repeats, cut(graph, ends(graph))))):
        annotated = known.annotated(part)
        assert annotated is not None or name not in LANGUAGE_MODELS
        if annotated is not None:
            assert format_graph(annotated) == format_graph(annotate(part))


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_the_loss_of_a_part_of_a_batch_is_known(name: str) -> None:
    """Its count is an input, and it is multiplied by the number of microbatches."""
    graph = remove_shares(prepared(name))

    def scaled(times: int) -> Graph:
        return remove_shares(prepared(name, 4 * times))

    counted = count_whole_batch(graph, 8, scaled, partial(without_samples, rules()))
    assert counted != graph
    last = find_repeats(cut(counted, ends(counted)[-1:])[1])
    annotated = observations(prepared(name)).annotated(last)
    assert annotated is not None
    assert format_graph(annotated) == format_graph(annotate(last))


@pytest.mark.parametrize("name", MODELS)
def test_values_that_count_as_contiguous_are(name: str) -> None:
    graph = remove_shares(prepared(name))
    shown = [node.name for node in graph.nodes if not node.is_leaf and len(node.types) == 1]
    every = replace(graph, outputs=tuple((name, name) for name in shown), loss=None)
    whole = prepare(graph, passes=FINDING)
    walk = _Walk()
    for node in whole.nodes:
        walk.add(node, walk.digest(node))
    found = run(every, captured(name)[1])
    contiguous = [one for one in shown if not walk.origin[one]]
    assert len(contiguous) > len(shown) / 10
    assert [one for one in contiguous if not found[one].is_contiguous()] == []


def test_strides_that_a_stage_does_not_receive_are_not_taken_for_those_of_the_model() -> None:
    """A sum of transposed values is transposed: the model copies it in a reshape, a stage not."""
    whole = annotate(
        parse_graph(
            "graph 'g'\n"
            "%w = param('w') : f32[4, 6] grad\n"
            "%t = aten.transpose.int(%w, 0, 1) : f32[6, 4] grad\n"
            "%sum = aten.add.Tensor(%t, %t) : f32[6, 4] grad\n"
            "%flat = aten.reshape(%sum, (24,)) : f32[24] grad\n"
            "%loss = aten.sum(%flat) : f32[] grad\n"
            "output 'loss' = %loss\n"
            "loss %loss\n"
        )
    )
    assert whole["flat"].alias is None
    first, second = cut(remove_shares(whole), ["sum"])
    assert annotate(second)["flat"].alias == "sum"
    known = observations(whole)
    assert known.annotated(second) is None
    annotated = known.annotated(first)
    assert annotated is not None
    assert format_graph(annotated) == format_graph(annotate(first))


def test_observations_that_differ_are_not_used() -> None:
    whole = prepared("llama")
    linear = next(node for node in whole.nodes if node.op == "aten.linear")
    others = (replace(node, saved=()) if node.name == linear.name else node for node in whole.nodes)
    known = observations(replace(whole, nodes=tuple(others)))
    assert known.annotated(remove_shares(whole)) is None


def test_torch_is_asked_only_for_what_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = remove_shares(prepared("gpt2"))
    parts = cut(graph, ends(graph))
    expected = [format_graph(prepare(part, passes=FINDING)) for part in parts]
    by_torch = alike_stages.preparing(NOTHING)
    assert [format_graph(by_torch(part)) for part in parts] == expected
    monkeypatch.setattr("autopar.operators.interpret.annotate", None)
    from_whole = alike_stages.preparing(observations(prepared("gpt2")))
    assert [format_graph(from_whole(part)) for part in parts] == expected

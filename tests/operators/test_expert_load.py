"""Loads of experts: what they say, what they change in prices, and how they are measured."""

from __future__ import annotations

import itertools

import pytest
import torch

import autopar
from autopar.errors import OptionError
from autopar.intra_op.node_choices import node_options, operand_types
from autopar.intra_op.rule_table import table
from autopar.intra_op.work.kernel_work import node_work
from autopar.ir.mesh import Mesh
from autopar.operators.dispatch import arrivals
from autopar.operators.exchange import exchanged
from autopar.operators.expert_load import ExpertLoad, with_load
from autopar.operators.mixture import MIXTURE
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from tests.support.mixtures import mixture
from tests.support.ranks import run_ranks
from tests.training.test_families import GRID, sgd

MESH = Mesh.parse("H100: node=2, gpu=2")


@pytest.mark.parametrize("text", ["equal", "zipf 0.8", "0.5 0.25 0.25"])
def test_texts_are_read_back(text: str) -> None:
    load = ExpertLoad.parse(text)
    assert str(load) == text
    assert sum(load.shares(3)) == pytest.approx(1)


@pytest.mark.parametrize("text", ["zipf", "zipf -1", "zipf x", "nan 1", "0 0", "even", "1e999 1"])
def test_texts_that_say_nothing(text: str) -> None:
    with pytest.raises(OptionError, match="load of experts"):
        Options(expert_load=text)


def test_the_busiest_device_has_the_popular_experts() -> None:
    load = ExpertLoad.parse("4 3 2 1")
    assert load.imbalance(4, ("node", "gpu"), MESH) == pytest.approx(4 * 0.4)
    assert load.imbalance(4, ("gpu",), MESH) == pytest.approx(2 * 0.7)
    assert load.imbalance(4, (), MESH) == 1
    harmonic = 1 + 1 / 2 + 1 / 3 + 1 / 4
    zipf = ExpertLoad.parse("zipf 1").imbalance(4, ("node",), MESH)
    assert zipf == pytest.approx(2 * 1.5 / harmonic)


def test_prices_are_those_of_the_busiest_device() -> None:
    model, batch = mixture("Mixtral")
    graph = capture_graph(model, (), batch, Options(), Trace(None)).graph
    seconds = {}
    for text in ("equal", "4 3 2 1"):
        loaded = with_load(graph, ExpertLoad.parse(text))
        node = next(n for n in loaded.nodes if n.op == MIXTURE)
        options, signature = node_options(loaded, node, MESH, table())
        way = next(o for o in options if o.label == "e&...0@node e&...0@gpu")
        work = node_work(loaded, node, way.operands, way.results, signature, MESH)
        flops = sum(k.gemm.flops for k in work.forward if k.gemm is not None)
        sent = exchanged(node, operand_types(loaded, node), way.operands, MESH)[0]
        seconds[text] = flops, max(call.nbytes for call in sent)
    (flops, sent), (more_flops, more_sent) = seconds.values()
    assert more_flops == pytest.approx(1.6 * flops, rel=0.03)  # rows are whole
    # Half of the tokens choose a certain one of four experts; of those chosen by 0.4, 1 - 0.6^2.
    assert more_sent == pytest.approx(0.64 / 0.5 * sent, rel=1e-3)


@pytest.mark.parametrize(("experts", "devices", "k"), [(4, 2, 1), (8, 4, 3), (6, 3, 2), (4, 4, 4)])
def test_tokens_go_once_to_each_device(experts: int, devices: int, k: int) -> None:
    """All choices of k experts are counted."""
    choices = list(itertools.combinations(range(experts), k))
    rows = sum(len({e * devices // experts for e in chosen}) for chosen in choices)
    found = arrivals(experts, [1 / devices] * devices, k)
    assert found == pytest.approx(rows / len(choices))


def test_a_load_of_other_experts_is_refused() -> None:
    model, batch = mixture("Mixtral")
    options = Options(expert_load="0.5 0.5")
    with pytest.raises(OptionError, match="a mixture of 4"):
        capture_graph(model, (), batch, options, Trace(None))


def measured() -> tuple[list[float], float]:
    """The load that this rank reports, and the loss of a step planned under it."""
    model, batch = mixture("Custom")
    program = autopar.compile(model, GRID, optimizer=sgd, example_inputs=batch)
    loads = program.expert_load(**batch)
    assert len(loads) == 2
    model, _ = mixture("Custom")
    other = autopar.compile(
        model, GRID, optimizer=sgd, example_inputs=batch, expert_load=str(loads[0])
    )
    return list(loads[0].measured), other.step(**batch).item()


def test_the_measured_load_is_the_routers() -> None:
    model, batch = mixture("Custom", "eager")
    inner = model.model
    _, ids = inner.layers[0].router(inner.words(batch["input_ids"])).softmax(-1).topk(2)
    counts = torch.bincount(ids.flatten(), minlength=5)
    shares = (counts / counts.sum()).tolist()
    loss = model(**batch)["loss"].item()
    for found, own in run_ranks(measured):
        assert found == pytest.approx(shares)
        assert own == pytest.approx(loss, rel=1e-9)

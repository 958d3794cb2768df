"""Pins by names of dimensions: everything with a pinned dimension is split accordingly."""

from __future__ import annotations

import pytest

import autopar
from autopar.errors import MeshError, PinError
from autopar.intra_op.pins.layout_pins import Pin
from autopar.intra_op.rule_table import table
from autopar.ir.mesh import Mesh
from autopar.pins import PinContext
from tests.support.words import GRID, LINE, graph, planned

WANTED = {"batch": "node", "heads": "gpu", "ffn": "gpu", "vocab": "gpu"}
# `distinct` has 8 samples of 14 tokens, 4 heads of 6, 26 inner features and 34 words; the samples
# are merged with their tokens, the heads with their features.
SIZES = {8: "batch", 112: "batch", 4: "heads", 24: "heads", 26: "ffn", 34: "vocab"}


def pins(split: dict[str, str], name: str = "even", mesh: str = GRID) -> dict[str, Pin]:
    """What a named layout pins."""
    found = autopar.layout(split)(PinContext(graph(name), Mesh.parse(mesh), table()))
    return {key: Pin.parse(text) for key, text in found.items()}


def test_everything_with_a_named_dimension_is_split_over_its_axis() -> None:
    """Sizes, which are all different, tell what has which dimension."""
    made, met = planned("distinct", autopar.layout(WANTED), GRID), set()
    for node in graph("distinct").folded:
        dims = made.stage.nodes[node.name].results[0][1].dims
        for size, axes in zip(node.type.shape, dims, strict=True):
            name = SIZES.get(size, "")
            if name and node.op not in ("input", "param"):  # a parameter's share is its use
                assert WANTED[name] in axes, f"{name} in %{node.name}: {dims}"
                met.add(name)
    assert met == set(WANTED)


def test_parameters_are_used_split_along_the_axis_of_their_dimension() -> None:
    found = pins(WANTED)
    assert {key: str(pin) for key, pin in found.items() if not key.startswith("%")} == {
        "first.weight": "[32@gpu, 16] along gpu",
        "last.weight": "[32@gpu, 16] along gpu",
        **{f"blocks.0.{x}.weight": "[32@gpu, 16] along gpu" for x in "bcd"},
        "blocks.0.e.weight": "[16, 32@gpu] along gpu",
        **{f"blocks.0.{x}.weight": "[24@gpu, 16] along gpu" for x in "fg"},
        **{f"blocks.0.{x}.bias": "[24@gpu] along gpu" for x in "fg"},
        "blocks.0.h.weight": "[16, 24@gpu] along gpu",
    }


def test_a_dimension_may_have_several_axes_in_the_order_of_the_mesh() -> None:
    both = autopar.layout({"batch": ["gpu", "node"]})
    assert both == autopar.layout({"batch": "gpu, node"})
    made = planned("even", both, GRID)
    (embedding,) = (n for n in graph("even").folded if n.op == "aten.embedding")
    assert made.stage.nodes[embedding.name].results[0][1].dims == (("node", "gpu"), (), ())


def test_what_no_strategy_allows_is_left_to_the_solver() -> None:
    """Attention needs the features of a head whole, and a linear makes them inside the heads."""
    found = pins({"head_dim": "gpu"})
    (attention,) = (n for n in graph("even").folded if "attention" in n.op)
    assert f"%{attention.name}" not in found
    assert all(key.startswith("%transpose") for key in found)


def test_a_number_names_one_of_several() -> None:
    every = pins({"head_dim": "gpu"})
    parts = [pins({f"head_dim.{k}": "gpu"}) for k in (1, 2)]
    assert parts[0].keys() | parts[1].keys() == every.keys()
    assert not parts[0].keys() & parts[1].keys()


def test_a_name_that_is_not_there_is_refused_with_those_there_are() -> None:
    with pytest.raises(PinError, match="has no dimension 'kopfzahl'") as caught:
        planned("even", autopar.layout({"kopfzahl": "gpu"}))
    for name in ("batch", "sequence", "hidden", "heads", "head_dim", "ffn", "vocab"):
        assert name in caught.value.why
    with pytest.raises(MeshError, match="no axis 'rack'"):
        planned("even", autopar.layout({"heads": "rack"}))


def test_a_name_that_nothing_splits_is_refused_with_the_reason() -> None:
    with pytest.raises(PinError, match="no operator splits 'kernel'") as caught:
        planned("convolutions", autopar.layout({"kernel": "x"}), LINE.replace("gpu=4", "x=3"))
    assert "aten.conv2d (%conv2d) needs it whole" in caught.value.why
    with pytest.raises(PinError, match="'heads' does not split 8 ways over gpu") as caught:
        planned("even", autopar.layout({"heads": "gpu"}), LINE.replace("gpu=4", "gpu=8"))
    assert caught.value.why == "heads has 4"


def test_one_axis_for_two_dimensions_of_one_value_is_refused() -> None:
    """As Mesh-TensorFlow refuses it (arXiv:1811.02084, section 3.1)."""
    with pytest.raises(PinError, match="'batch' and 'heads' both ask for the axis 'gpu'") as caught:
        planned("even", autopar.layout({"batch": "gpu", "heads": "gpu"}))
    assert "it has both" in caught.value.why


def test_a_merged_dimension_is_split_by_what_it_begins_with_and_evenly_only() -> None:
    for gpus, allowed in ((2, True), (3, False)):  # of four heads
        found = pins({"heads": "gpu"}, "distinct", LINE.replace("gpu=4", f"gpu={gpus}"))
        assert any(24 in pin.shape for pin in found.values()) == allowed
        # By itself a dimension splits in parts that differ by one.
        assert any(4 in pin.shape for pin in found.values())

"""Pinned layouts: every plan keeps them, and those that fit nothing are refused."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache

import pytest
import torch

from autopar.capture.capture import capture
from autopar.cost.model import AnalyticModel
from autopar.errors import InfeasibleError, LayoutError, PinError
from autopar.intra_op.build import build, layouts
from autopar.intra_op.node_choices import Option, node_options, parameter_options
from autopar.intra_op.pins.layout_pins import Pin, Pins, joined
from autopar.intra_op.rules import rules
from autopar.intra_op.solvers import solve
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout
from autopar.passes.normalise import prepare
from autopar.plan_entries import NodePlan
from tests.intra_op.test_folding import LINE
from tests.support.models import gpt2

MESH = Mesh.parse(LINE)
FC, PROJ = "transformer.h.*.mlp.c_fc.weight", "transformer.h.*.mlp.c_proj.weight"


@cache
def graph() -> Graph:
    model, batch = gpt2(layers=3)
    return prepare(capture(model, (), batch).graph)


def plan(pins: dict[str, str]) -> tuple[dict[str, NodePlan], float]:
    """The layouts of the best plan that keeps the pins, and its seconds."""
    built = build(graph(), MESH, AnalyticModel(MESH), rules(), pins=pins)
    solution = solve(built.problem, gap=0.0)
    return layouts(built, graph(), solution.choice), solution.objective


def used(made: dict[str, NodePlan], pattern: str) -> list[NodePlan]:
    """Returns the plan's entries for shares of parameters whose names fit a pattern."""
    fitting = {leaf.name for leaf in graph().leaves("param") if fnmatchcase(leaf.target, pattern)}
    shares = [n for n in graph().folded if n.op == "autopar.share" and n.inputs[0] in fitting]
    assert shares
    return [made[share.name] for share in shares]


@pytest.mark.parametrize(
    "text", ["[32@gpu, 128]", "[32, 128@gpu]", "[32, 128]", "[32, 128] -sum(gpu)"]
)
def test_a_parameter_is_used_as_its_pin_says(text: str) -> None:
    made, seconds = plan({FC: text})
    shape, layout = Layout.parse(text)
    for entry in used(made, FC):
        found_shape, found = entry.results[0]
        assert found_shape == shape
        assert found.dims == layout.dims
        if layout.varying:
            assert found.varying == layout.varying
    assert seconds >= plan({})[1] * (1 - 1e-12)


def test_a_pin_to_what_is_best_anyway_costs_nothing() -> None:
    free, best = plan({})
    pins = {}
    for pattern in (FC, PROJ):
        (entry,) = used(free, pattern)
        shape, layout = entry.results[0]
        pins[pattern] = layout.format(shape)
    kept, seconds = plan(pins)
    assert seconds == pytest.approx(best, rel=1e-9)
    for pattern in pins:
        assert used(kept, pattern)[0].results == used(free, pattern)[0].results


def test_a_pin_that_the_best_plan_does_not_have_costs_something() -> None:
    free, best = plan({})
    (entry,) = used(free, FC)
    others = [
        t for t in ("[32@gpu, 128]", "[32, 128@gpu]") if Layout.parse(t)[1] != entry.results[0][1]
    ]
    for text in others:
        assert plan({FC: text})[1] > best


def last_in(module: str) -> str:
    """The last operator of the first block's module, or of one inside it."""
    paths = (module, module + ".")
    inside = [
        node.name
        for node in graph().folded
        if not node.is_leaf
        and node.op != "autopar.share"
        and (node.source.module == paths[0] or node.source.module.startswith(paths[1]))
    ]
    return inside[-1]


@pytest.mark.parametrize("text", ["[8, 16@gpu, 128]", "[8@gpu, 16, 128]", "[8, 16, 128]"])
def test_a_module_is_pinned_by_the_last_value_made_in_it(text: str) -> None:
    made, _ = plan({"transformer.h.0.mlp.c_fc": text})
    assert made[last_in("transformer.h.0.mlp.c_fc")].results[0] == Layout.parse(text)


def test_an_enclosing_module_is_pinned_by_the_last_value_made_inside() -> None:
    made, _ = plan({"transformer.h.0": "[8, 16, 32@gpu]"})
    assert made[last_in("transformer.h.0")].results[0] == Layout.parse("[8, 16, 32@gpu]")


def test_a_node_is_pinned_by_its_name() -> None:
    name = next(n.name for n in graph().folded if n.op == "aten.tanh")
    made, _ = plan({name: "[8, 16@gpu, 128]"})
    assert made[name].results[0] == Layout.parse("[8, 16@gpu, 128]")


def test_a_pin_may_leave_every_layout_but_one() -> None:
    tensor = next(leaf for leaf in graph().leaves("param") if fnmatchcase(leaf.target, FC)).type
    options = list(parameter_options(tensor, MESH, grad=True))
    for option in options:
        assert option.stored is not None
        sides = (option.stored, option.results[0])
        text = " => ".join(layout.format(tensor.shape) for layout in sides)
        pin, other = Pin.parse(text), Pin.parse(f"not {text}")
        assert [pin.agrees(o) for o in options] == [not other.agrees(o) for o in options]
        assert not other.agrees(option)
    best, seconds = plan({})
    share = used(best, FC)[0]
    name = next(node for node, entry in best.items() if entry is share)
    text = f"not {share.operands[0][1].format(tensor.shape)} => {str(share).split(' -> ')[1]}"
    without, more = plan({name: text})
    assert without[name] != best[name]
    assert more >= seconds * (1 - 1e-12)


def test_several_pins_on_one_node_must_all_be_kept() -> None:
    made, _ = plan({FC: "[32, 128@gpu]", "*.h.0.mlp.c_fc.weight": "[32, 128@gpu]"})
    assert used(made, FC)[0].results[0] == Layout.parse("[32, 128@gpu]")
    with pytest.raises(PinError, match="contradict each other") as caught:
        plan({FC: "[32, 128@gpu]", "*.h.0.mlp.c_fc.weight": "[32@gpu, 128]"})
    assert repr(FC) in caught.value.what
    assert "'*.h.0.mlp.c_fc.weight'" in caught.value.what
    assert "c_fc.weight" in caught.value.where


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (FC, "[32, 128] +sum(gpu)"),  # a parameter is no partial sum
        (FC, "[32, 64@gpu]"),  # not its shape
        (FC, "[128@gpu, 32]"),
        (FC, "[32, 128@rack]"),  # not an axis of the mesh
        ("input_ids", "[8@gpu, 16]"),  # inputs come whole
        ("transformer.ln_f", "[8, 16, 32@gpu]"),  # statistics need the whole dimension
    ],
)
def test_a_pin_that_fits_no_choice_is_refused_with_those_there_are(key: str, text: str) -> None:
    with pytest.raises(PinError) as caught:
        plan({key: text})
    assert repr(key) in caught.value.what
    assert text in caught.value.what
    assert caught.value.where
    assert caught.value.todo
    whole = {FC: "[32, 128]", "input_ids": "[8, 16]", "transformer.ln_f": "[8, 16, 32]"}[key]
    assert whole in caught.value.why


def test_a_pin_in_one_of_equal_blocks_holds_in_all() -> None:
    text = "[32@gpu, 128]"
    made, _ = plan({"transformer.h.2.mlp.c_fc.weight": text})
    assert used(made, FC)[0].results[0] == Layout.parse(text)
    made, _ = plan({"transformer.h.1": "[8, 16, 32@gpu]"})
    assert made[last_in("transformer.h.0")].results[0] == Layout.parse("[8, 16, 32@gpu]")
    both = {"transformer.h.0.mlp.c_fc.weight": text, "transformer.h.1.mlp.c_fc.weight": text}
    assert used(plan(both)[0], FC)[0].results[0] == Layout.parse(text)
    with pytest.raises(PinError, match="contradict each other"):
        plan({**both, "transformer.h.2.mlp.c_fc.weight": "[32, 128]"})


def test_a_pin_may_say_how_a_parameter_is_stored() -> None:
    made, _ = plan({FC: "[32@gpu, 128] => [32, 128]"})
    (entry,) = used(made, FC)
    assert entry.operands[0] == Layout.parse("[32@gpu, 128]")
    assert entry.results[0][1].dims == ((), ())
    kept = "[32, 128] => [32, 128]"
    assert used(plan({FC: kept})[0], FC)[0].operands[0] == Layout.parse("[32, 128]")
    with pytest.raises(PinError, match="fits no choice") as caught:
        plan({FC: "[32, 128] => [32@gpu, 128]"})
    assert "[32@gpu, 128] => [32@gpu, 128]" in caught.value.why
    with pytest.raises(PinError, match="two shapes"):
        plan({FC: "[128, 32@gpu] => [32, 128]"})


def test_pins_that_name_nothing_are_all_named() -> None:
    with pytest.raises(PinError) as caught:
        plan({"transformer.h.*.mpl.*": "[32]", FC: "[32, 128]", "nothing": "[8]"})
    assert "nothing" in caught.value.what
    assert "transformer.h.*.mpl.*" in caught.value.what
    assert FC not in caught.value.what
    assert caught.value.todo


def test_a_form_that_no_operator_of_a_module_has_is_refused() -> None:
    with pytest.raises(PinError, match="fits no operator") as caught:
        plan({"transformer.h.*.mlp": "by ring"})
    assert "scaled_dot_product_attention" in caught.value.why
    assert "aten.linear" in caught.value.why
    assert "modules that have" in caught.value.todo
    pins = Pins(prepare(capture(Products(), (torch.ones(2, 4, 8),)).graph), {"inner": "by ring"})
    with pytest.raises(PinError, match="fits no operator") as caught:
        pins.check()
    assert "F.scaled_dot_product_attention" in caught.value.todo


def test_a_form_that_a_layout_rules_out_says_what_it_needs_and_where_it_applies() -> None:
    (attention,) = (n for n in graph().folded if n.op == "aten.scaled_dot_product_attention")
    options, _ = node_options(graph(), attention, Mesh.parse("cpu: node=4, gpu=2"), rules())
    key = f"%{attention.name}"  # four heads, too few for eight devices
    with pytest.raises(PinError, match="fits no choice") as caught:
        Pins(graph(), {key: "[8, 4, 16@node@gpu, 8] by ulysses"}).keep(attention, options)
    assert "ulysses, which needs" in caught.value.why
    choices = caught.value.why.partition("its choices are ")[2].split("; ")
    assert "[8, 4, 16@node, 8] by ulysses" in choices
    assert all(choice.endswith(" by ulysses") for choice in choices)


class Products(torch.nn.Module):
    """Attention by products and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Softmax(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights: torch.Tensor = self.inner(x @ x.mT)
        return (weights @ x).sum()


def test_a_layout_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(LayoutError, match="cannot read"):
        plan({FC: "32 by 128"})


GRID = Mesh.parse("cpu[1GFLOP/s 1GiB 1GB/s]: node=2 @10GB/s 1us, gpu=2 @10GB/s 1us")


def kept(pins: dict[str, str], node: Node) -> tuple[Option, ...]:
    """The choices of a node, or of a parameter's share, on GRID that pins leave."""
    if node.op == "autopar.share":
        leaf = graph()[node.inputs[0]]
        options = tuple(parameter_options(leaf.type, GRID, leaf.requires_grad))
    else:
        options, _ = node_options(graph(), node, GRID, rules())
    return Pins(graph(), pins).keep(node, options)


def fc_share() -> Node:
    (leaf,) = (n for n in graph().leaves("param") if fnmatchcase(n.target, FC.replace("*", "0")))
    (share,) = graph().users[leaf.name]
    return graph()[share]


def test_a_pin_along_one_axis_leaves_the_other_open() -> None:
    both = "[32@node, 128] => [32, 128] -sum(node) along node; [32, 128@gpu] along gpu"
    (only,) = {(o.stored, o.results[0]) for o in kept({FC: both}, fc_share())}
    assert only == (
        Layout((("node",), ("gpu",))),
        Layout(((), ("gpu",)), varying=("node",)),
    )
    # Along node it is split by rows, whatever becomes of gpu; alone that would be one choice.
    along = {o.results[0] for o in kept({FC: "[32@node, 128] along node"}, fc_share())}
    assert {layout.dims[0][:1] for layout in along} == {("node",)}
    assert {Layout((("node", "gpu"), ())), Layout((("node",), ("gpu",)))} < along
    assert len({o.results[0] for o in kept({FC: "[32@node, 128]"}, fc_share())}) < len(along)


def test_pins_along_different_axes_contradict_where_no_strategy_does_both() -> None:
    norm = graph()[last_in("transformer.ln_f")]
    pins = {"transformer.ln_f": "[8@node, 16, 32] along node"}
    assert kept({**pins, f"%{norm.name}": "[8, 16@gpu, 32] along gpu"}, norm)
    with pytest.raises(PinError, match="contradict each other") as caught:
        kept({**pins, "*.ln_f": "[8, 16@node, 32] along node, gpu"}, norm)
    assert "'transformer.ln_f'" in caught.value.what
    assert "'*.ln_f'" in caught.value.what
    assert f"%{norm.name}" in caught.value.what


def test_a_node_without_choices_is_no_fault_of_pins() -> None:
    norm = graph()[last_in("transformer.ln_f")]
    for pins in ({}, {"transformer.ln_f": "[8@node, 16, 32]"}):
        with pytest.raises(InfeasibleError, match="cannot be laid out") as caught:
            Pins(graph(), pins).keep(norm, ())
        assert f"%{norm.name}" in caught.value.what
        assert str(norm.type) in caught.value.why


@pytest.mark.parametrize(
    "text", ["[8@gpu, 16] along node", "[8@node] along node,", "[4@gpu] => [4] along"]
)
def test_a_pin_speaks_of_no_axis_that_it_is_not_along(text: str) -> None:
    with pytest.raises(PinError, match="cannot read") as caught:
        Pin.parse(text + " ")
    assert caught.value.todo


@pytest.mark.parametrize(
    "text",
    [
        "[8, 16@gpu] -sum(node)",
        "[8@gpu, 16] => [8, 16] -sum(gpu)",
        "[8@node, 16] along node",
        "[8@node@gpu, 4] => [8, 4] along node, gpu",
        "not [8@gpu, 16] => [8, 16] -sum(gpu)",
        "not [8@node, 16] along node",
    ],
)
def test_a_pin_prints_as_it_reads(text: str) -> None:
    assert str(Pin.parse(text)) == text


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        (FC, "[32, 64@gpu]", "its shape is [32, 128]"),
        ("input_ids", "[8@gpu, 16]", "a batch is given whole"),
        ("labels", "not [8, 16]", "a batch is given whole"),
        ("%arange", "not [16]", "no other layout is left"),
        ("transformer.ln_f", "[8, 16, 32@gpu]", "aten.layer_norm needs dimension 2 whole"),
        ("transformer.ln_f", "[8, 16, 32] +sum(gpu)", "has a result with a partial sum over gpu"),
    ],
)
def test_why_no_strategy_gives_a_layout(key: str, text: str, reason: str) -> None:
    with pytest.raises(PinError, match="fits no choice") as caught:
        plan({key: text})
    assert reason in caught.value.why


def test_pins_of_several_groups_are_joined_name_by_name() -> None:
    groups = [{"a": "[8@x] along x", "b": "[4]"}, {"a": "[8@x] along x; [8] along y"}]
    assert joined(groups) == {"a": "[8@x] along x; [8] along y", "b": "[4]"}

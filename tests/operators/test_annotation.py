"""`autopar.shard` does nothing outside autopar, stays in captured graphs, and refuses bad texts."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.capture import capture
from autopar.errors import AnnotationError
from autopar.ir.graph import Graph
from autopar.ir.graph_text import format_graph, parse_graph
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout
from autopar.operators.annotation import Annotation
from autopar.operators.interpret import run
from autopar.passes.normalise import prepare
from autopar.passes.verify import verify

MESH = Mesh.parse("cpu: data=2, tensor=4, one=1")


class Model(nn.Module):
    """A linear layer between two annotations, and what `after` makes of the second."""

    def __init__(self, after: Callable[[Tensor], Tensor] = torch.sum) -> None:
        super().__init__()
        self.layer, self.after = nn.Linear(4, 4), after

    def forward(self, x: Tensor) -> Tensor:
        y = autopar.shard(x, "[b@data, h]")
        return self.after(autopar.shard(self.layer(y), "[b, h@tensor]"))


def test_outside_autopar_it_is_its_argument() -> None:
    model, x = Model(), torch.randn(8, 4, requires_grad=True)
    assert autopar.shard(x, "[no, layout") is x
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain = model.layer(x).sum()
    (expected,) = torch.autograd.grad(plain, x)
    for call in (model, compiled):
        found = call(x)
        assert torch.equal(found, plain)
        assert torch.equal(torch.autograd.grad(found, x)[0], expected)


def test_a_model_exported_by_others_computes_the_same() -> None:
    model, x = Model(), torch.randn(8, 4)
    for strict in (False, True):
        program = torch.export.export(model, (x,), strict=strict)
        assert torch.equal(program.module()(x), model(x))
        assert torch.equal(program.run_decompositions().module()(x), model(x))


def test_the_operator_passes_gradients_and_shapes() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    shard = torch.ops.autopar.shard
    assert torch.autograd.gradcheck(lambda y: shard(y, "[a, b]"), x)
    torch.library.opcheck(shard.default, (x, "[a, b]"), test_utils=("test_schema",))
    assert torch.ops.autopar.shard(x.to("meta"), "[a, b]").shape == (3, 4)


def captured(model: nn.Module, x: Tensor) -> Graph:
    graph = capture(model, (x,)).graph
    assert parse_graph(format_graph(graph)) == verify(graph)
    return graph


def annotations(graph: Graph) -> list[str]:
    return [str(node.args[1]) for node in graph.nodes if node.op == "autopar.shard"]


def test_captured_annotations_survive_all_passes_with_the_user_s_line() -> None:
    graph = captured(Model(), torch.randn(8, 4))
    for step in (graph, prepare(graph)):
        assert annotations(step) == ["[b@data, h]", "[b, h@tensor]"]
        (first, second) = (node for node in step.nodes if node.op == "autopar.shard")
        assert first.source.text == 'y = autopar.shard(x, "[b@data, h]")'
        assert second.requires_grad
        assert "test_annotation.py" in second.source.file


class Stack(nn.Module):
    """Equal layers, the last of which may have an annotation of its own."""

    def __init__(self, *notes: str) -> None:
        super().__init__()
        self.notes = notes
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in notes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sigmoid()  # so that all layers pass a gradient on
        for layer, note in zip(self.layers, self.notes, strict=True):
            x = autopar.shard(torch.relu(layer(x)), note)
        return x.sum()


@pytest.mark.parametrize(
    ("notes", "counts"),
    [(["[b@data, h]"] * 4, [4]), (["[b@data, h]"] * 3 + ["[b, h@data]"], [3])],
)
def test_blocks_are_equal_if_their_annotations_are(notes: list[str], counts: list[int]) -> None:
    graph = prepare(captured(Stack(*notes), torch.randn(8, 4)))
    assert [repeat.count for repeat in graph.repeats] == counts
    assert annotations(graph) == notes


def test_a_write_through_an_annotated_value_is_a_write_into_the_value() -> None:
    class Writes(Model):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            z = autopar.shard(y, "[b, h@tensor]")
            z[0].mul_(3)
            y.add_(1)
            return (y * z).sum()

    model, x = Writes().double(), torch.randn(8, 4, dtype=torch.float64)
    graph = captured(model, x)
    assert annotations(graph)
    values = {"x": x, **dict(model.named_parameters())}
    for step in (graph, prepare(graph)):
        torch.testing.assert_close(run(step, values)["loss"], model(x), rtol=1e-12, atol=0)


def test_an_annotation_whose_result_nobody_reads_is_refused() -> None:
    class Forgets(Model):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            autopar.shard(y, "[b@data, h]")  # the line
            return y.sum()

    with pytest.raises(AnnotationError, match="not used") as caught:
        capture(Forgets(), (torch.randn(8, 4),))
    assert "# the line" in caught.value.where


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[b@data, s, h]", ["[8@data, 6, 16]"]),
        ("[8@data, s, 16@tensor]", ["[8@data, 6, 16@tensor]"]),
        (" [ b@tensor@data ,s , h ] ", ["[8@tensor@data, 6, 16]"]),
        ("[b@one, s, h@one2]", None),
        ("[b@one, s@data, h]", ["[8, 6@data, 16]"]),
        ("[b@data, s, h] +sum(tensor)", ["[8@data, 6, 16] +sum(tensor)"]),
        ("[b, s, h] -sum(data, one)", ["[8, 6, 16] -sum(data)"]),
        ("[b@data, ?, h]", ["[8@data, 6, 16]", "[8@data, 6@tensor, 16]"]),
        ("[?@tensor, s, h]", ["[8@tensor, 6, 16]", "[8@tensor@data, 6, 16]"]),
        ("[b, ?, h] +sum(tensor)", ["[8, 6, 16] +sum(tensor)", "[8, 6@data, 16] +sum(tensor)"]),
    ],
)
def test_an_annotation_allows(text: str, expected: list[str] | None) -> None:
    shape = (8, 6, 16)
    if expected is None:
        with pytest.raises(AnnotationError, match="one2"):
            list(Annotation.parse(text, shape).layouts(shape, MESH))
        return
    found = Annotation.parse(text, shape).layouts(shape, MESH)
    assert [layout.format(shape) for layout in found] == expected


def test_what_is_open_may_be_split_in_every_way_that_leaves_no_device_without_elements() -> None:
    """Against all layouts without sums, tried one by one; 6 elements do not do for 8 devices."""
    shape = (6, 16)
    axes = ("data", "tensor")
    every = set()
    for places in itertools.product((None, 0, 1), repeat=2):
        split = {axis: dim for axis, dim in zip(axes, places, strict=True) if dim is not None}
        layout = Layout(tuple(tuple(a for a, d in split.items() if d == dim) for dim in (0, 1)))
        last = layout.bounds(shape, MESH, {"data": 1, "tensor": 3, "one": 0})
        if all(length for _, length in last):
            every.add(layout)
    found = list(Annotation.parse("[?, ?]", shape).layouts(shape, MESH))
    assert set(found) == every
    assert len(found) == len(every) == 8


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("b@data, h", "cannot read"),
        ("[b@, h]", "cannot read"),
        ("[b@data, h] sum(tensor)", "cannot read"),
        ("[b c, h]", "cannot read"),
        ("[b@data]", "has 1 dimensions, the value 2"),
        ("[b@data, s, h]", "has 3 dimensions, the value 2"),
        ("[b, 5]", "gives 5 for a dimension of size 4"),
        ("[b@data, h@data]", "names an axis twice"),
        ("[b@data, h] +sum(data)", "names an axis twice"),
        ("[b@node, h]", "no axis 'node'"),
        ("[b, h@tensor@data]", "4 elements over tensor, data"),
    ],
)
def test_an_annotation_that_cannot_be_obeyed_is_refused_at_the_user_s_line(
    text: str, why: str
) -> None:
    class Annotated(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = autopar.shard(x, text)  # the line
            return self.layer(x).sum()

    with pytest.raises(AnnotationError) as caught:
        autopar.plan(Annotated(), MESH, example_inputs=torch.randn(8, 4))
    assert why in caught.value.what + caught.value.why
    assert "test_annotation.py" in caught.value.where
    assert "# the line" in caught.value.where
    assert caught.value.todo

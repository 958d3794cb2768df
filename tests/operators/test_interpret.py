"""Running graphs, and predicted saved tensors against hooks on a real run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.capture import capture
from autopar.errors import GraphError
from autopar.ir.graph import Graph, Node, Ref, Repeat
from autopar.ir.graph_text import format_graph, parse_graph
from autopar.ir.tensor import TensorType
from autopar.operators.interpret import annotate, execute, run
from autopar.passes.norms import lower_batch_norms
from autopar.passes.verify import verify
from tests.support import models

CPU = torch.device("cpu")


def kept_bytes(run_it: Callable[[], Any], model: nn.Module) -> int:
    """Bytes of the distinct storages that autograd keeps in a real run, parameters aside."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run_it()
    total = sum(s.nbytes() for address, s in storages.items() if address not in parameters)
    del result
    return total


def predicted_bytes(graph: Graph) -> int:
    """The same from an annotated graph: `saved` up to the owner of the storage, `saved_types`."""

    def owner(name: str) -> str:
        alias = graph[name].alias
        return name if alias is None else owner(alias)

    roots = {owner(name) for node in graph.nodes for name in node.saved}
    values = sum(graph[name].type.nbytes for name in roots if graph[name].op != "param")
    return values + sum(kind.nbytes for node in graph.nodes for kind in node.saved_types)


def everything(**options: float) -> list[Any]:
    made = {name: build(**options) for name, build in models.MODELS.items() if name != "llama"}
    if not options:
        made |= {"llama": models.llama(), "conv": models.conv_net()}
    return [pytest.param(*value, id=name) for name, value in made.items()]


@pytest.mark.parametrize(("model", "batch"), [*everything(), *everything(dropout=0.1)])
def test_autograd_keeps_the_predicted_bytes(model: nn.Module, batch: dict[str, Tensor]) -> None:
    captured = capture(model, (), batch)
    graph = annotate(lower_batch_norms(captured.graph))
    assert parse_graph(format_graph(graph)) == verify(graph)
    values = {**dict(model.named_parameters()), **captured.buffers, **batch}
    assert predicted_bytes(graph) == kept_bytes(lambda: run(graph, values), model)


@pytest.mark.parametrize("name", ["gpt2", "mlp"])
def test_the_model_itself_keeps_the_predicted_bytes(name: str) -> None:
    model, batch = {"gpt2": models.gpt2, "mlp": models.mlp}[name]()
    if name == "gpt2":
        # With a mask of its own the model calls the attention that is captured. Without, it would
        # ask for a causal one by a flag, but writes a mask out when torch.export looks.
        batch["attention_mask"] = torch.zeros(8, 1, 16, 16)
    graph = annotate(capture(model, (), batch).graph)
    assert predicted_bytes(graph) == kept_bytes(lambda: model(**batch), model)


def annotated(forward: Callable[..., Tensor], *args: Tensor) -> Graph:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return forward(x, self.weight)

    return verify(annotate(capture(Model(), args).graph))


def test_each_operator_keeps_what_its_derivative_reads() -> None:
    graph = annotated(lambda x, w: (torch.relu(x @ w) @ w).exp().sum(), torch.randn(2, 4))
    # x needs no gradient, so the first product keeps only what its weight's gradient needs.
    assert graph["matmul"].saved == ("x",)
    assert graph["relu"].saved == ("relu",)
    assert set(graph["matmul_1"].saved) == {"relu", "weight"}
    assert graph["exp"].saved == ("exp",)
    assert graph["sum_1"].saved == ()


def test_views_name_the_value_they_look_at_and_copies_none() -> None:
    graph = annotated(
        lambda x, w: (w.t().reshape(2, 8) + w.view(16)[:8]).unsqueeze(0).split(1, 1)[0].sum(),
        torch.randn(1),
    )
    assert graph["t"].alias == graph["view"].alias == "weight"
    assert graph["reshape"].alias is None  # of a transpose: a copy
    assert graph["slice_1"].alias == "view"
    assert graph["getitem"].alias == "split"
    assert graph["split"].alias == "unsqueeze"
    assert graph["unsqueeze"].alias == "add"


def test_requires_grad_is_what_autograd_says() -> None:
    graph = annotated(
        lambda x, w: (w.detach() * x).sum() + (w * torch.zeros_like(w)).sum(), torch.randn(4)
    )
    flows = {node.name: node.requires_grad for node in graph.nodes}
    assert not flows["detach"]
    assert not flows["mul"]
    assert not flows["zeros_like"]
    assert flows["mul_1"]


def chain(length: int) -> Graph:
    """x -> share -> linear(x, w_i) -> relu, `length` times, as a repeat."""
    kind, square = TensorType("f32", (4, 4)), TensorType("f32", (4, 4))
    leaves = [Node("x", "param", ("x",), (), (kind,), requires_grad=True)]
    nodes, blocks, before = [], [], "x"
    for i in range(length):
        leaves.append(Node(f"w{i}", "param", (f"w{i}",), (), (square,), requires_grad=True))
        nodes += [
            Node(f"s{i}", "autopar.share", (Ref(before),), (), (kind,)),
            Node(f"l{i}", "aten.linear", (Ref(f"s{i}"), Ref(f"w{i}")), (), (kind,)),
            Node(f"r{i}", "aten.relu", (Ref(f"l{i}"),), (), (kind,)),
        ]
        before = f"r{i}"
        blocks.append((f"w{i}", f"s{i}", f"l{i}", f"r{i}"))
    nodes.append(Node("loss", "aten.sum", (Ref(before),), (), (TensorType("f32", ()),)))
    repeat = Repeat(tuple(blocks), (("x", "r0"),))
    return Graph("chain", (*leaves, *nodes), (("loss", "loss"),), "loss", (repeat,))


def test_a_folded_graph_is_annotated_like_the_unfolded_one() -> None:
    folded = annotate(chain(4))
    assert folded.nodes == annotate(replace(chain(4), repeats=())).nodes
    assert folded["r2"].saved == ("r2",)
    assert set(folded["l2"].saved) == {"s2", "w2"}
    assert folded["s2"].alias == "r1"


def test_a_piece_of_a_parameter_is_cut_out_of_it() -> None:
    kind = TensorType("f32", (4, 2))
    cut = (("dim", 1), ("start", 2), ("length", 2))
    piece = Node("w", "param", ("w",), cut, (kind,), requires_grad=True)
    double = Node("y", "aten.mul.Tensor", (Ref("w"), 2), (), (kind,))
    graph = annotate(Graph("cut", (piece, double), (("y", "y"),)))
    whole = torch.randn(4, 8, requires_grad=True)
    output = run(graph, {"w": whole})["y"]
    assert torch.equal(output, whole[:, 2:4] * 2)
    output.sum().backward()
    assert torch.equal(whole.grad, torch.tensor([0.0, 0, 2, 2, 0, 0, 0, 0]).expand(4, 8))


def test_one_operator_is_executed_by_itself() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    node = Node("y", "aten.split.Tensor", (Ref("x"), 1, 1), (), ())
    parts = execute(node, {"x": x}, CPU)
    assert [part.tolist() for part in parts] == [[[0], [3]], [[1], [4]], [[2], [5]]]
    second = Node("z", "getitem", (Ref("y"), 1), (), ())
    assert execute(second, {"y": parts}, CPU) is parts[1]
    fresh = Node("f", "aten.zeros", ((2, 3),), (), ())
    assert execute(fresh, {}, torch.device("meta")).is_meta


@pytest.mark.parametrize(
    ("node", "told"),
    [
        (Node("y", "aten.nothing", (Ref("x"),), (), ()), "no operator"),
        (Node("y", "nowhere.add.Tensor", (Ref("x"),), (), ()), "no operator"),
        (Node("y", "aten.mm", (Ref("x"), Ref("x")), (), ()), "cannot run"),
    ],
)
def test_an_operator_that_torch_refuses_is_named(node: Node, told: str) -> None:
    leaf = Node("x", "input", ("x",), (), (TensorType("f32", (2, 3)),))
    with pytest.raises(GraphError, match=told):
        annotate(Graph("bad", (leaf, node), ()))


def test_a_leaf_without_a_value_is_named() -> None:
    leaf = Node("x", "input", ("x",), (), (TensorType("f32", ()),))
    with pytest.raises(GraphError, match="'x'"):
        run(Graph("empty", (leaf,), (("x", "x"),)), {})

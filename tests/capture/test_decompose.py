"""Unknown operators are replaced by their definitions, which compute the same both ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.capture import capture
from autopar.capture.decompose import decompose_unknown
from autopar.intra_op.rules import rules
from autopar.ir.graph import Graph
from autopar.operators.interpret import run
from autopar.passes.verify import verify
from tests.support.versions import BEFORE_2_13

KNOWN = set(rules())


class Model(nn.Module):
    """A linear, an operator, and a sum of squares."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.fc(x)).square().sum()


def captured(function: Callable[[Tensor], Tensor]) -> tuple[Model, Tensor, Graph]:
    torch.manual_seed(0)
    model, x = Model(function).double(), torch.randn(4, 6, dtype=torch.float64)
    return model, x, capture(model, (x,), known=KNOWN).graph


def operators(graph: Graph) -> set[str]:
    return {node.op for node in graph.nodes if not node.is_leaf}


def members(x: Tensor) -> Tensor:
    return x * torch.isin(x.round(), torch.tensor([0.0, 1.0], dtype=x.dtype))


# Operator -> (a function that uses it, what is not to be known of it and its definition).
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "aten.isin.Tensor_Tensor": members,
    "aten._safe_softmax": lambda x: torch.ops.aten._safe_softmax(x, 1),
    "aten.addcmul": lambda x: torch.addcmul(x, x.sin(), x, value=0.5),
    "aten.logaddexp": lambda x: torch.logaddexp(x, 2 * x),
    "aten.huber_loss": lambda x: F.huber_loss(x, x.detach().sin(), reduction="sum", delta=0.3),
    "aten.log_sigmoid_forward": lambda x: torch.ops.aten.log_sigmoid_forward(x)[0],
    "aten.gelu": F.gelu,
    "aten._euclidean_dist": lambda x: torch.ops.aten._euclidean_dist(x, x.sin()),
    "aten.aminmax": lambda x: torch.stack(torch.aminmax(x, dim=1)),
}


@pytest.mark.parametrize("op", FUNCTIONS)
def test_a_definition_computes_the_same_forwards_and_backwards(op: str) -> None:
    if op == "aten.aminmax" and BEFORE_2_13:
        pytest.skip("torch has no derivative of aminmax")
    model, x, graph = captured(FUNCTIONS[op])
    assert op in operators(graph)
    made = verify(decompose_unknown(graph, KNOWN - {op}))
    assert operators(made) <= KNOWN - {op}
    values = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    values = {**dict(model.named_buffers()), **values, "x": x}
    values |= {leaf.target: constant(graph, leaf.target, x) for leaf in graph.leaves("buffer")}
    (loss,) = run(made, values).values()
    expected = model(x)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    names = [name for name, _ in model.named_parameters()]
    found = torch.autograd.grad(loss, [values[name] for name in names])
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def constant(graph: Graph, target: str, x: Tensor) -> Tensor:
    """The set of `members`, the only constant here."""
    return torch.tensor([0.0, 1.0], dtype=x.dtype)


def test_parts_bear_the_source_and_the_name_of_the_operator() -> None:
    _, _, graph = captured(F.gelu)
    whole = graph["gelu"]
    made = decompose_unknown(graph, KNOWN - {"aten.gelu"})
    parts = [node for node in made.nodes if node.name.startswith("gelu_")]
    assert len(parts) > 2
    assert all(part.source == whole.source for part in parts)
    assert all(part.requires_grad for part in parts)


def test_what_is_known_stays() -> None:
    _, _, graph = captured(F.gelu)
    assert decompose_unknown(graph, KNOWN) is graph


def test_what_is_made_of_unknown_operators_stays() -> None:
    function = FUNCTIONS["aten.log_sigmoid_forward"]
    _, _, graph = captured(function)
    known = KNOWN - {"aten.log_sigmoid_forward"}
    (inside,) = operators(decompose_unknown(graph, known)) & {"aten.minimum"}
    assert operators(decompose_unknown(graph, known - {inside})) == operators(graph)


def test_what_has_no_definition_stays() -> None:
    _, _, graph = captured(lambda x: torch.renorm(x, 2, 0, 1.0))
    made = decompose_unknown(graph, {"aten.linear", "aten.square", "aten.sum"})
    assert "aten.renorm" in operators(made)


def test_labels_behind_the_end_are_not_counted() -> None:
    """torch's samples of this loss have no -1, which ends the labels of a sample."""
    labels = torch.tensor([[2, 0, -1, 3, 3, 3], [5, -1, -1, -1, -1, -1]] * 2)
    model, x, graph = captured(lambda x: F.multilabel_margin_loss(x, labels, reduction="none"))
    values = {**dict(model.named_parameters()), "x": x}
    values |= {leaf.target: labels for leaf in graph.leaves("buffer")}
    (loss,) = run(verify(decompose_unknown(graph, KNOWN)), values).values()
    torch.testing.assert_close(loss, model(x), rtol=1e-12, atol=1e-12)


def test_random_operators_stay() -> None:
    _, _, graph = captured(lambda x: x * torch.bernoulli(x.detach().sigmoid()))
    made = decompose_unknown(graph, KNOWN - {"aten.bernoulli"})
    assert "aten.bernoulli" in operators(made)


def test_pieces_are_left_to_their_own_pass() -> None:
    _, _, graph = captured(lambda x: x.unbind(1)[0] * x.split(3, 1)[1].sum(1))
    made = decompose_unknown(graph, KNOWN)
    assert operators(made) == operators(graph)

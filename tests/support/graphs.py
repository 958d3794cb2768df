"""Runs graphs in float64 and compares results; shared by tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from autopar.capture.capture import Captured, capture
from autopar.ir.graph import Graph
from autopar.ir.graph_text import parse_graph
from autopar.operators.interpret import TORCH_DTYPES, run
from autopar.passes.verify import verify

Values = dict[str, Tensor]


def leaf_values(graph: Graph, seed: int = 0) -> Values:
    """Random float64 values (and small integers) for every leaf of a hand-written graph."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for node in graph.nodes:
        if node.is_leaf and node.type.floating:
            values[node.target] = torch.randn(
                node.type.shape, generator=generator, dtype=torch.float64
            )
        elif node.is_leaf:
            small = torch.randint(0, 3, node.type.shape, generator=generator)
            values[node.target] = small.to(TORCH_DTYPES[node.type.dtype])
    return values


def evaluate(graph: Graph, values: Values) -> Values:
    """Outputs, the gradient of every parameter, and buffers as the run left them."""
    params = {node.target for node in graph.leaves("param")}
    mine = {
        name: value.clone().requires_grad_(name in params and value.is_floating_point())
        for name, value in values.items()
    }
    torch.manual_seed(0)
    outputs = run(graph, mine)
    floating = [out for out in outputs.values() if out.requires_grad]
    if floating:
        sum(out.double().square().sum() for out in floating).backward()
    found = {f"output {name}": out.detach() for name, out in outputs.items()}
    for name, value in mine.items():
        if name in params:
            found[f"gradient {name}"] = (
                torch.zeros_like(value) if value.grad is None else value.grad
            )
        else:
            found[f"buffer {name}"] = value
    return found


def assert_equal_runs(left: Graph, right: Graph, values: Values) -> None:
    expected, found = evaluate(left, values), evaluate(right, values)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def model_values(model: nn.Module, batch: Values, captured: Captured) -> Values:
    parameters = {
        captured.parameter_names[name]: value.detach() for name, value in model.named_parameters()
    }
    return {**parameters, **captured.buffers, **captured.inputs.flatten((), batch)}


def captured_double(model: nn.Module, batch: Values) -> tuple[Graph, Values]:
    model = model.double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    captured = capture(model, (), batch)
    return captured.graph, model_values(model, batch, captured)


def checked(step: Callable[[Graph], Graph], text: str, seed: int = 0) -> Graph:
    """The pass applied to a written graph, proved to be legal and to compute the same."""
    before = parse_graph(text)
    after = verify(step(verify(before)))
    assert_equal_runs(before, after, leaf_values(before, seed))
    return after


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes if not node.is_leaf]

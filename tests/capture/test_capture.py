"""Captured graphs compute what the model computes: outputs, gradients, buffers and names."""

from __future__ import annotations

import copy
import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.capture import Captured, capture
from autopar.errors import BatchError, CaptureError
from autopar.ir.graph import Graph
from autopar.ir.graph_text import format_graph, parse_graph
from autopar.operators.interpret import run
from autopar.passes.verify import verify
from autopar.zoo.construction import build, example_inputs
from tests.support import models
from tests.support.ranks import run_ranks
from tests.support.work import calls_of

Batch = dict[str, Any]


def double(model: nn.Module, batch: Batch) -> tuple[nn.Module, Batch]:
    return model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def values_of(captured: Captured, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Returns the values of the graph's leaves; buffers are copies, because `run` writes them."""
    buffers = {name: tensor.clone() for name, tensor in captured.buffers.items()}
    return {**dict(model.named_parameters()), **buffers, **captured.inputs.flatten((), batch)}


def assert_close(mine: Any, theirs: Any) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def assert_computes_the_same(
    captured: Captured, model: nn.Module, batch: Batch, loss: Callable[[Any], Tensor]
) -> dict[str, Tensor]:
    """Loss, gradients and buffers after a step; returns the graph's outputs."""
    assert parse_graph(format_graph(captured.graph)) == verify(captured.graph)
    values = values_of(captured, model, batch)
    torch.manual_seed(1)
    outputs = run(captured.graph, values)
    reference = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = loss(reference(**batch))
    assert_close(outputs["loss"], expected)
    mine = torch.autograd.grad(outputs["loss"], list(model.parameters()))
    assert_close(mine, torch.autograd.grad(expected, list(reference.parameters())))
    kept = dict(reference.named_buffers())
    assert_close({k: values[k] for k in kept}, kept)
    return outputs


@pytest.mark.parametrize("name", models.MODELS)
def test_a_transformer_s_graph_computes_its_loss_outputs_and_gradients(name: str) -> None:
    model, batch = double(*models.MODELS[name]())
    captured = capture(model, (), batch)
    outputs = assert_computes_the_same(captured, model, batch, lambda output: output.loss)
    assert next(iter(outputs)) == "loss"
    assert captured.graph[captured.graph.loss or ""].type.shape == ()
    rebuilt, expected = captured.output.rebuild(outputs), model(**batch)
    assert type(rebuilt) is type(expected)
    assert_close(rebuilt.logits, expected.logits)


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_dropout_draws_the_masks_that_the_model_draws(name: str) -> None:
    model, batch = double(*models.MODELS[name](layers=1, dropout=0.1))
    captured = capture(model, (), batch)
    assert any(node.op == "aten.dropout" for node in captured.graph.nodes)
    assert_computes_the_same(captured, model, batch, lambda output: output.loss)


def test_dropout_that_drops_nothing_leaves_no_trace() -> None:
    model, batch = models.gpt2(layers=1, dropout=0.1)
    graph = capture(model.eval(), (), batch).graph
    assert not any(node.op == "aten.dropout" for node in graph.nodes)


def test_a_batch_norm_keeps_its_running_figures() -> None:
    model, batch = double(*models.conv_net())
    captured = capture(model, (), batch)
    assert_computes_the_same(captured, model, batch, lambda loss: loss)
    assert {"norm1.running_mean", "norm1.num_batches_tracked"} <= set(captured.buffers)
    assert captured.buffers["norm1.running_mean"] is model.norm1.running_mean


def test_a_loss_function_sees_the_output_and_the_batch() -> None:
    model, batch = double(*models.mlp())
    captured = capture(model, (), batch, loss_fn=models.squared_error)
    assert_computes_the_same(captured, model, batch, lambda y: models.squared_error(y, **batch))
    assert [user for user, _ in captured.graph.outputs] == ["loss", "output"]


def test_a_loss_function_goes_before_the_model_s_own_loss() -> None:
    model, batch = double(*models.gpt2(layers=1))
    captured = capture(model, (), batch, loss_fn=lambda output, **_: output.logits.square().mean())
    names = [user for user, _ in captured.graph.outputs]
    assert names == ["loss", "output.loss", "output.logits"]
    assert_computes_the_same(captured, model, batch, lambda out: out.logits.square().mean())


@pytest.mark.parametrize(
    ("loss_fn", "inputs"),
    [
        (lambda output, target: F.mse_loss(output, target), ("x", "target")),
        (nn.MSELoss(), ("x", "target")),
        (lambda output, x, target: F.mse_loss(output, target + 0 * x), ("x", "target")),
        (lambda output, **rest: F.mse_loss(output, rest["x"]), ("x",)),
    ],
)
def test_a_loss_function_takes_from_the_batch_what_it_names(
    loss_fn: Callable[..., Tensor], inputs: tuple[str, ...]
) -> None:
    model, batch = models.mlp(sizes=(8, 8))
    batch = {"x": batch["x"], "target": torch.randn(8, 8)}
    batch = {name: batch[name] for name in inputs}
    captured = capture(model, (), batch, loss_fn=loss_fn)
    assert captured.inputs.names == inputs
    output = model(batch["x"])
    expected = F.mse_loss(output, batch.get("target", batch["x"]))
    torch.testing.assert_close(
        run(captured.graph, values_of(captured, model, batch))["loss"], expected
    )


def test_a_tied_weight_is_one_leaf_with_every_name() -> None:
    model, batch = models.gpt2(layers=1)
    captured = capture(model, (), batch)
    leaf = captured.parameter_names["lm_head.weight"]
    assert leaf == captured.parameter_names["transformer.wte.weight"]
    targets = [node.target for node in captured.graph.leaves("param")]
    assert targets.count(leaf) == 1
    assert set(targets) == set(captured.parameter_names.values())
    assert set(captured.parameter_names) == {
        name for name, _ in model.named_parameters(remove_duplicate=False)
    }


def written(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_model_without_memory_gives_the_graph_of_a_real_one(device: str) -> None:
    model, batch = models.llama()
    with torch.device("meta"):
        planned = type(model)(model.config)
    examples = {name: tensor.to(device) for name, tensor in batch.items()}
    captured = capture(planned, (), examples)
    real = capture(model, (), batch).graph
    # Whether a copy is asked for depends on strides, which the kernels of the CPU may choose.
    assert set(written(captured.graph) - written(real)) <= {"aten.contiguous"}
    assert not written(real) - written(captured.graph)
    # Buffers that no checkpoint has are computed, see autopar/capture/nonpersistent_buffers.py.
    saved = planned.state_dict()
    assert all(captured.buffers[name].is_meta for name in captured.buffers if name in saved)
    # What was planned runs on a real device.
    buffers = dict(model.named_buffers())
    outputs = run(captured.graph, {**dict(model.named_parameters()), **buffers, **batch})
    torch.testing.assert_close(outputs["loss"], model(**batch).loss)


def weights_of(name: str, layers: int | None = None) -> tuple[int, int]:
    """Returns the weights of a capture, and the most memory of this process so far in KiB."""
    graph = capture(build(name, layers=layers), (), example_inputs(name)).graph
    weights = sum(node.type.numel for node in graph.leaves("param"))
    return weights, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_capture_takes_calls_by_the_layer_not_by_the_weight() -> None:
    small, large = "llama-7b", "llama-3.1-405b"
    few, many = (weights_of(name, 1)[0] for name in (small, large))  # imports what is needed
    assert many > 10 * few

    def count(name: str, layers: int) -> int:
        model, batch = build(name, layers=layers), example_inputs(name)
        return calls_of(lambda: capture(model, (), batch))

    one, two, three = (count(large, layers) for layers in (1, 2, 3))
    assert one < 1.2 * count(small, 1)
    assert three - two == pytest.approx(two - one, rel=0.05)


@pytest.mark.slow
def test_four_hundred_billion_parameters_are_captured_on_a_desk() -> None:
    ((weights, memory),) = run_ranks(weights_of, "llama-3.1-405b", count=1)
    assert weights == pytest.approx(405e9, rel=0.01)
    assert memory < 4 * 2**20


def test_a_cache_that_the_model_returns_is_left_out() -> None:
    model, batch = models.gpt2(layers=1)
    captured = capture(model, (), {**batch, "use_cache": True})
    assert captured.inputs.names == ("input_ids", "labels")
    assert [user for user, _ in captured.graph.outputs] == ["loss", "logits"]


class Frozen(nn.Module):
    """A frozen layer, a buffer that is not saved, constants, and a region without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.weight.requires_grad_(False)
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x) * self.scale + torch.tensor([1.0, 2.0, 3.0, 4.0])
        with torch.no_grad():
            norm = self.second(hidden).norm()
            with torch.enable_grad():
                extra = self.second(x)
        return {"hidden": hidden, "loss": (self.second(hidden) / norm + extra).sum()}


def test_gradients_flow_where_the_model_lets_them() -> None:
    model, x = Frozen(), torch.randn(2, 4)
    captured = capture(model, (x,))
    graph = verify(captured.graph)
    assert not graph["first_weight"].requires_grad
    assert {"scale"} < set(captured.buffers)
    values = {"x": x, **dict(model.named_parameters()), **captured.buffers}
    mine, theirs = run(graph, values), model(x)
    assert [user for user, _ in graph.outputs] == ["loss", "hidden"]
    torch.testing.assert_close(mine, theirs)
    learned = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(mine["loss"], learned)
    torch.testing.assert_close(gradients, torch.autograd.grad(theirs["loss"], learned))


@dataclass
class Scores:
    logits: Tensor
    parts: list[Tensor]


class Nested(nn.Module):
    """Takes a nested batch, a constant and keywords; returns what `build` makes of two tensors."""

    def __init__(self, build: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.build = nn.Linear(4, 4), build

    def forward(
        self, batch: dict[str, Any], scale: float, *, shift: Tensor, **extra: Tensor
    ) -> Any:
        x, (y, _) = batch["x"], batch["pair"]
        hidden = self.layer(x) * scale + shift + y + extra["more"]
        return self.build(hidden, hidden.mean())


@pytest.mark.parametrize(
    ("make", "names", "loss"),
    [
        (lambda hidden, mean: hidden, ["output"], None),
        (lambda hidden, mean: mean, ["loss"], "loss"),
        (lambda hidden, mean: (hidden, mean), ["1", "0"], "1"),
        (lambda hidden, mean: (mean, hidden), ["0", "1"], "0"),
        (lambda hidden, mean: {"loss": mean, "h": [hidden, 3]}, ["loss", "h.0"], "loss"),
        (lambda hidden, mean: {"mean": mean}, ["mean"], None),
        (lambda hidden, mean: {"loss": hidden}, ["loss"], None),
        (lambda hidden, mean: Scores(hidden, [mean]), ["logits", "parts.0"], None),
        (lambda hidden, mean: (hidden.argmax(), hidden), ["0", "1"], None),
    ],
)
def test_nested_batches_and_every_kind_of_output(
    make: Callable[[Tensor, Tensor], Any], names: list[str], loss: str | None
) -> None:
    model = Nested(make)
    nested = {"x": torch.randn(2, 4), "pair": (torch.randn(2, 4), "tag")}
    kwargs = {"shift": torch.randn(4), "more": torch.randn(2, 4), "scale": 0.5}
    captured = capture(model, (nested,), kwargs)
    graph = verify(captured.graph)
    assert captured.inputs.names == ("batch.x", "batch.pair.0", "shift", "more")
    assert [user for user, _ in graph.outputs] == names
    assert graph.loss == dict(graph.outputs).get(loss or "")
    inputs = captured.inputs.flatten((nested,), kwargs)
    outputs = run(graph, {**inputs, **dict(model.named_parameters()), **captured.buffers})
    again = captured.output.rebuild(outputs)
    expected = model(nested, **kwargs)
    assert type(again) is type(expected)
    torch.testing.assert_close(outputs, captured.output.flatten(expected))
    with pytest.raises(BatchError, match=r"scale is 0\.25"):
        captured.inputs.flatten((nested,), {**kwargs, "scale": 0.25})


def test_one_tensor_passed_twice_is_two_inputs() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x - y

    x, y = torch.randn(3), torch.randn(3)
    captured = capture(Model(), (x, x))
    assert torch.equal(run(captured.graph, {"x": x, "y": y})["output"], x - y)


def test_every_operator_names_its_module_and_the_user_s_line() -> None:
    model, batch = models.mlp(sizes=(8, 8, 8))
    graph = capture(model, (), batch, loss_fn=models.squared_error).graph
    source = graph["gelu"].source
    assert (source.file, source.text) == ("models.py", "x = F.gelu(layer(x))")
    assert graph["linear"].source.module == "layers.0"
    for node in graph.nodes:
        assert node.is_leaf or node.source.line or node.source.module == "loss_fn"


def test_a_trace_that_loses_a_constant_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.export does so now and then; a second loss is an error."""
    export, lost = torch.export.export, [1]

    def losing(*args: Any, **kwargs: Any) -> Any:
        if lost[0]:
            lost[0] -= 1
            raise RuntimeError("We found a fake tensor in the exported program constant's list.")
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", losing)
    assert capture(nn.Linear(2, 2), (torch.ones(1, 2),)).graph.nodes
    lost[0] = 2
    with pytest.raises(CaptureError, match="cannot trace"):
        capture(nn.Linear(2, 2), (torch.ones(1, 2),))


def test_losses_of_alignments_are_those_of_torch() -> None:
    """CTC, of padded labels and of labels that a mask selects, as in transformers' models."""

    class Speech(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Any:
            spoken = labels >= 0
            scores, lengths = x.log_softmax(-1).transpose(0, 1), spoken.sum(-1)
            count = torch.full((4,), 6)
            chosen = labels.masked_select(spoken)
            one = F.ctc_loss(scores, chosen, count, lengths, zero_infinity=True)
            padded = F.pad(labels, (0, 1))[:, 1:].clamp(min=1)
            frames, sizes = cast(Any, (6, 5, 6, 6)), cast(Any, (2, 1, 2, 0))
            each = F.ctc_loss(scores, padded, frames, sizes, reduction="none")
            return one, each

    x = torch.randn(4, 6, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[1, -1, 3], [-1, 2, 4], [2, 2, 2], [-1, -1, -1]])
    captured = capture(Speech(), (x, labels))
    values = values_of(captured, Speech(), {"x": x, "labels": labels})
    for mine, theirs in zip(run(captured.graph, values).values(), Speech()(x, labels), strict=True):
        torch.testing.assert_close(mine, theirs)
        own, wanted = (
            torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (mine, theirs)
        )
        torch.testing.assert_close(own, wanted)


class Placed(nn.Module):
    """Adds the positions of its columns, which begin at a value; `late` of them after a write."""

    def __init__(self, late: int = 0) -> None:
        super().__init__()
        self.scale, self.late = nn.Parameter(torch.ones(3)), late

    def forward(self, x: Tensor, start: Tensor) -> Tensor:
        first: Any = start[0]
        end = first + 3 - self.late if self.late else first + 3
        if self.late:
            end += self.late
        places = torch.arange(first, end, dtype=torch.float32)
        loss: Tensor = (x * self.scale + places).square().mean()
        return loss


def test_a_range_of_known_length_begins_at_a_value() -> None:
    model, x = Placed(), torch.randn(4, 3)
    captured = capture(model, (x, torch.tensor([2])))
    for start in (2, 9):
        batch = {"x": x, "start": torch.tensor([start])}
        mine = run(captured.graph, values_of(captured, model, batch))["loss"]
        assert_close(mine, model(**batch))
    with pytest.raises(CaptureError, match="sizes"):
        capture(Placed(late=1), (x, torch.tensor([2])))

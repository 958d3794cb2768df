"""Generated source: what was priced, what the model computes, and fit to read."""

from __future__ import annotations

import ast
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.codegen.emit import emit
from autopar.codegen.load import load
from autopar.codegen.runtime import Runtime
from autopar.codegen.state import Parameter
from autopar.cost.model import AnalyticModel
from autopar.explain.moves import moves
from autopar.intra_op.build import build, layouts
from autopar.intra_op.rules import rules
from autopar.ir.across import Across, Axes
from autopar.ir.capture import Captured, capture
from autopar.ir.collective import Collective, Resharder
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.passes import prepare
from autopar.ir.storage import Hop
from autopar.ir.tensor import Layout
from autopar.ir.text import fingerprint, parse_graph
from autopar.plan import NodePlan, Plan
from autopar.planning.single import Options, Trace, make_plan
from tests import models
from tests.intra_op.test_folding import random_choice

FAST = "H100: a=2, b=2"
# A slow device with quick links: even small models are worth splitting.
SLOW = "toy[2TFLOP/s 1GiB 20GB/s]: a=2 @5GB/s 1us, b=2 @20GB/s 100ns"
ONE = "cpu: x=1"


@dataclass(frozen=True)
class Case:
    """A model in float64, its batch and its graph."""

    model: nn.Module
    batch: dict[str, Tensor]
    captured: Captured
    graph: Graph

    @cached_property
    def plans(self) -> dict[str, Plan]:
        return {}

    def plan(self, mesh: str) -> Plan:
        if mesh not in self.plans:
            self.plans[mesh] = make_plan(self.graph, Mesh.parse(mesh), Options(), Trace(None))
        return self.plans[mesh]

    def source(self, mesh: str) -> str:
        return emit(self.graph, self.plan(mesh), AnalyticModel(Mesh.parse(mesh)).collective)


def case_of(model: nn.Module, batch: dict[str, Tensor]) -> Case:
    model = model.double()
    batch = pytree.tree_map(lambda v: v.double() if v.is_floating_point() else v, batch)
    captured = capture(model, (), batch)
    return Case(model, batch, captured, prepare(captured.graph))


@cache
def family(name: str) -> Case:
    torch.manual_seed(0)
    return case_of(*models.MODELS[name](layers=3))


def local_values(case: Case, table: list[Parameter], mesh: Mesh) -> dict[str, Tensor]:
    """The first device's part of every parameter and buffer, by key."""
    whole = {**dict(case.model.named_parameters()), **case.captured.buffers}
    values = {}
    for parameter in table:
        value = whole[parameter.name].detach()
        if parameter.piece is not None:
            piece = parameter.piece
            value = value.narrow(piece.dim, piece.start, piece.length)
        shape = parameter.layout.local_shape(tuple(value.shape), mesh)
        for dim, length in enumerate(shape):
            value = value.narrow(dim, 0, length)
        values[parameter.key] = value.clone().requires_grad_(parameter.trainable)
    return values


class Peers:
    """The devices that hold the parts of a dimension, of which only the first is there."""

    def __init__(self, ledger: Ledger, axes: tuple[str, ...]) -> None:
        self.ledger, self.axes = ledger, axes
        self.size = math.prod(ledger.mesh.axis_size(axis) for axis in axes)

    def own(self, extent: int) -> tuple[int, int]:
        return 0, self.ledger.part(extent, self.axes)

    def reduce(self, x: Tensor) -> Tensor:
        self.ledger.calls.append(Collective("all_reduce", self.axes, x.nbytes))
        return x * self.size

    def maximum(self, x: Tensor) -> Tensor:
        self.ledger.calls.append(Collective("all_reduce", self.axes, x.nbytes))
        return x

    def neighbours(self, before: Tensor, after: Tensor) -> tuple[Tensor | None, Tensor | None]:
        for border in (before, after):
            if border.numel():
                self.ledger.calls.append(Collective("send", self.axes, border.nbytes))
        return None, before  # the first device has nobody before it


class Ledger(Across):
    """Stands for the first device of a mesh: shapes as there, and a list of what would be sent.

    It shares nothing with the runtime or the planner but the table in `autopar/ir/collective.py`:
    what each move sends forwards, what backwards, and what becomes of the shape.
    """

    MOVES: ClassVar = {
        "all_reduce": ("all_reduce", None, "same"),
        "to_varying": (None, "all_reduce", "same"),
        "from_varying": (None, None, "same"),
        "to_partial": (None, None, "same"),
        "reduce_scatter": ("reduce_scatter", "all_gather", "cut"),
        "all_gather": ("all_gather", "reduce_scatter", "join"),
        "all_gather_invariant": ("all_gather", None, "join"),
        "slice_invariant": (None, "all_gather", "cut"),
        "slice_varying": (None, None, "cut"),
        "all_to_all": ("all_to_all", "all_to_all", "both"),
    }

    def __init__(self, mesh: Mesh, parameters: Mapping[int, Parameter] | None = None) -> None:
        self.mesh, self.device = mesh, torch.device("cpu")
        self.calls: list[Collective] = []
        self.parameters = parameters or {}  # by the id of what is held of them
        self.together: list[Hop] = []  # what several parameters send at once

    def use(self, x: Tensor, parameter: Parameter) -> Tensor:
        """A parameter as operators use it; its gradient takes the way that its table tells."""
        hops = parameter.storage.hops(parameter.type, self.mesh, trained=parameter.trainable)
        self.calls += [hop.call for hop in hops if hop.when == "forward"]
        out = x
        for dim, size in enumerate(parameter.storage.used.local_shape(parameter.shape, self.mesh)):
            out = torch.cat([out] * (-(-size // out.shape[dim])), dim).narrow(dim, 0, size)
        out = out.clone()
        if out.requires_grad:
            later = [hop for hop in hops if hop.when != "forward"]
            out.register_hook(lambda grad: self.together.extend(later))
        return out

    def part(self, size: int, axis: Any) -> int:
        """The first device's part, which is the longest."""
        for name in (axis,) if isinstance(axis, str) else axis:
            size = -(-size // self.mesh.axis_size(name))
        return size

    def group(self, axes: Axes) -> Peers:
        return Peers(self, (axes,) if isinstance(axes, str) else axes)

    def __getattr__(self, op: str) -> Callable[..., Tensor]:
        forward, backward, shape = self.MOVES[op]

        def move(
            x: Tensor,
            *,
            axis: Any,
            dim: int = 0,
            to_dim: int | None = None,
            size: int | None = None,
        ) -> Tensor:
            axes = (axis,) if isinstance(axis, str) else axis
            parameter = self.parameters.get(id(x))
            if parameter is not None and parameter.storage.moves:
                return self.use(x, parameter)
            if forward is not None:
                self.calls.append(Collective(forward, axes, x.nbytes))
            count = 1
            for name in axes:
                count *= self.mesh.axis_size(name)
            out = torch.cat([x] * count, dim) if shape in ("join", "both") else x.clone()
            out = out if size is None else out.narrow(dim, 0, size)
            cut = {"cut": dim, "both": to_dim}.get(shape)
            if cut is not None:
                out = out.narrow(cut, 0, self.part(out.shape[cut], axes))
            if backward is not None and out.requires_grad:
                kind = backward
                out.register_hook(
                    lambda grad: self.calls.append(Collective(kind, axes, grad.nbytes))
                )
            return out

        return move


def sent(case: Case, source: str, mesh: Mesh) -> tuple[list[Collective], list[Hop]]:
    """The collectives of one training step of a program, as it runs, and those of parameters."""
    program = load(source, "<ledger>")
    table = program.parameters()
    values = local_values(case, table, mesh)
    ledger = Ledger(mesh, {id(values[one.key]): one for one in table})
    outputs = program.forward(ledger, values, case.captured.inputs.flatten((), case.batch))
    torch.autograd.backward(outputs[program.LOSS])
    return ledger.calls, ledger.together


def seconds(sent: tuple[list[Collective], list[Hop]], plan: Plan, model: AnalyticModel) -> float:
    """What all of them take."""
    calls, together = sent
    return sum(map(model.collective, calls)) + sum(
        hop.seconds(model.collective, plan.bucket) for hop in together
    )


def priced(graph: Graph, plan: Plan, model: AnalyticModel) -> float:
    """Seconds of communication that the plan predicts, that of the loss included."""
    assert graph.loss is not None
    loss, made = graph[graph.loss], plan.nodes[graph.loss].results[0][1]
    ending = Resharder(plan.mesh, model.collective).cost(loss.type, made, Layout.replicated(0))
    causes = ("parameter_seconds", "reshard_seconds", "exchange_seconds")
    return sum(plan.predicted[cause] for cause in causes) + ending


@pytest.mark.parametrize("name", models.MODELS)
def test_what_is_sent_is_what_was_priced(name: str) -> None:
    case, mesh = family(name), Mesh.parse(SLOW)
    plan, model = case.plan(SLOW), AnalyticModel(mesh)
    calls = sent(case, emit(case.graph, plan, model.collective), mesh)
    assert sum(map(len, calls)) > 20
    total = seconds(calls, plan, model)
    once = priced(case.graph, plan, model) - twice(case.graph, plan, model)
    assert total == pytest.approx(once, rel=1e-9, abs=0.0)


def twice(graph: Graph, plan: Plan, model: AnalyticModel) -> float:
    """What the price holds for further readers that want a value in one layout: it is sent once."""
    found: dict[tuple[str, str, int], float] = {}
    more = 0.0
    for move in moves(graph, plan, model.collective):
        key = (move.value, move.after, move.times)
        if not move.inside and not move.parameter:
            more += move.seconds if key in found else 0.0
            found[key] = move.seconds
    return more


@pytest.mark.parametrize("name", models.MODELS)
def test_no_plan_sends_more_than_was_priced(name: str) -> None:
    """Two readers that want one layout are served by one resharding; the price may hold two."""
    case, mesh, generator = family(name), Mesh.parse(SLOW), random.Random(0)
    model = AnalyticModel(mesh)
    built = build(case.graph, mesh, model, rules())
    for _ in range(2):
        choice = random_choice(built.problem, generator)
        made = layouts(built, case.graph, choice)
        plan = Plan(fingerprint(case.graph), mesh, made, built.figures(choice))
        calls = sent(case, emit(case.graph, plan, model.collective), mesh)
        total, price = seconds(calls, plan, model), priced(case.graph, plan, model)
        assert 0.9 * price <= total <= price * (1 + 1e-9)


def written(code: str) -> Counter[tuple[str, ...]]:
    """(operation, axes, dim, to_dim) of every `mesh.` call in a source."""
    found: Counter[tuple[str, ...]] = Counter()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("mesh."):
            given = {k.arg: ast.literal_eval(k.value) for k in node.keywords}
            axes = given["axis"] if isinstance(given["axis"], tuple) else (given["axis"],)
            place = (given.get("dim"), given.get("to_dim"))
            found[ast.unparse(node.func)[5:], str(axes), *map(str, place)] += 1
    return found


def test_calls_are_written_as_the_resharder_says() -> None:
    """One value that is read in another layout than it is made in: its steps, in order."""
    text = """
        graph 'one'
        %x = input('x') : f64[8, 16]
        %w = param('w') : f64[16, 16] grad
        %w_share = autopar.share(%w) : f64[16, 16] grad
        %h = aten.matmul(%x, %w_share) : f64[8, 16] grad
        %y = aten.exp(%h) : f64[8, 16] grad
        output 'y' = %y
    """
    graph = parse_graph(text)
    mesh = Mesh.parse(SLOW)
    price = AnalyticModel(mesh).collective
    whole = "[8, 16]; [16, 16] -> [8, 16]"
    moves = [
        (whole, "[8@a, 16] -> [8@a, 16]"),
        ("[8@a, 16]; [16, 16] -sum(a) -> [8@a, 16]", "[8, 16@a] -> [8, 16@a]"),
        ("[8, 16@a]; [16@a, 16] -> [8, 16] +sum(a)", "[8, 16@b@a] -> [8, 16@b@a]"),
        ("[8@a@b, 16]; [16, 16] -sum(a, b) -> [8@a@b, 16]", "[8, 16@a@b] -> [8, 16@a@b]"),
        ("[8@a, 16]; [16, 16@b] -sum(a) -> [8@a, 16@b]", "[8, 16] -sum(a) -> [8, 16] -sum(a)"),
    ]
    for product, reader in moves:
        entries = {
            "x": NodePlan.parse("[8, 16]"),
            "w": NodePlan.parse("[16, 16]"),
            "w_share": NodePlan.parse("[16, 16] -> [16, 16]"),
            "h": NodePlan.parse(product),
            "y": NodePlan.parse(reader),
        }
        code = emit(graph, Plan(fingerprint(graph), mesh, entries), price)
        resharder = Resharder(mesh, price)
        expected: Counter[tuple[str, ...]] = Counter()
        pairs = [
            ("x", entries["x"].results[0], entries["h"].operands[0]),
            ("w_share", entries["w_share"].results[0], entries["h"].operands[1]),
            ("h", entries["h"].results[0], entries["y"].operands[0]),
        ]
        for name, (_, src), (_, dst) in pairs:
            node = graph[name]
            for step in resharder.steps(node.type, src, dst, node.requires_grad):
                expected[step.op, str(step.axes), str(step.dim), str(step.to_dim)] += 1
        assert written(code) == expected
        assert expected


@pytest.mark.parametrize("mesh", [FAST, SLOW])
@pytest.mark.parametrize("name", models.MODELS)
def test_source_is_short_and_loops_over_one_function(name: str, mesh: str) -> None:
    case = family(name)
    source = case.source(mesh)
    assert len(source.splitlines()) < 500
    tree = ast.parse(source)
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert len(functions) == 2 + len(case.graph.repeats)
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    called = [
        ast.unparse(node.func)
        for loop in loops
        for node in ast.walk(loop)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in functions
    ]
    assert sorted(called) == sorted(functions - {"parameters", "forward"})
    for forward in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        assert ast.get_docstring(forward)


def test_source_is_clean_python(tmp_path: Path) -> None:
    for name in models.MODELS:
        for number, mesh in enumerate((FAST, SLOW)):
            (tmp_path / f"{name}_{number}.py").write_text(family(name).source(mesh))
    run = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


def assert_equals_model(case: Case) -> ModuleType:
    """On one device the program gives the model's outputs and gradients."""
    mesh = Mesh.parse(ONE)
    program = load(case.source(ONE), "<one device>")
    values = local_values(case, program.parameters(), mesh)
    runtime = Runtime(mesh, torch.device("cpu"))
    found = program.forward(runtime, values, case.captured.inputs.flatten((), case.batch))
    expected = case.captured.output.flatten(case.model(**case.batch))
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)
    scalar = sum(value.square().sum() for value in found.values() if value.is_floating_point())
    whole = sum(expected[name].square().sum() for name, v in found.items() if v.requires_grad)
    torch.autograd.backward(scalar)
    parameters = dict(case.model.named_parameters())
    gradients = torch.autograd.grad(whole, list(parameters.values()))
    for (name, _), gradient in zip(parameters.items(), gradients, strict=True):
        joined = gradient.new_full(gradient.shape, torch.nan)
        for parameter in (p for p in program.parameters() if p.name == name):
            part, piece = values[parameter.key].grad, parameter.piece
            assert part is not None
            place = joined
            if piece is not None:
                place = place.narrow(piece.dim, piece.start, piece.length)
            place.copy_(part)
        torch.testing.assert_close(joined, gradient, rtol=1e-10, atol=1e-12)
    return program


@pytest.mark.parametrize("name", models.MODELS)
def test_on_one_device_it_equals_the_model(name: str) -> None:
    assert_equals_model(family(name))


class Block(nn.Module):
    """A residual block that may also read what all blocks read."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        h = F.gelu(self.up(x)) if context is None else torch.tanh(self.up(x * context))
        return x + self.down(h) + self.shift  # type: ignore[no-any-return]


class Named(nn.Module):
    """Equal blocks whose names do not count up."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.stem, self.names = nn.Linear(8, 8), names
        for name in names:
            self.add_module(name, Block())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for name in self.names:
            x = self.get_submodule(name)(x)
        return x.square().mean()


class Two(nn.Module):
    """An encoder, and a decoder each block of which reads what the encoder gave."""

    def __init__(self, encoder: str, decoder: str) -> None:
        super().__init__()
        self.names = (encoder, decoder)
        self.stem, self.begin = nn.Linear(8, 8), nn.Linear(8, 8)
        for name in self.names:
            parent = nn.Module()
            parent.add_module("layers", nn.ModuleList(Block() for _ in range(3)))
            self.add_module(name, parent)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        encoder, decoder = (self.get_submodule(f"{name}.layers") for name in self.names)
        x, y = self.stem(x), self.begin(y)
        for layer in encoder.children():
            x = layer(x)
        for layer in decoder.children():
            y = layer(y, x)
        return y.square().mean(), x


class Carrying(nn.Module):
    """Blocks that hand on two values."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = torch.sin(x)
        for layer in self.layers:
            x, y = layer(x) * y, torch.cos(y)
        return (x * y).square().mean()


X = torch.randn(4, 8)


@pytest.mark.parametrize(
    "names", [("a", "b", "c"), ("3", "7", "1"), ("2", "1", "0"), ("b0", "b1", "b2")]
)
def test_blocks_whose_names_do_not_count_up_are_listed(names: tuple[str, ...]) -> None:
    program = assert_equals_model(case_of(Named(names), {"x": X}))
    (table,) = (value for key, value in vars(program).items() if key.endswith("_NAMES"))
    assert [{key.partition(".")[0] for key in row} for row in table] == [{n} for n in names]


def test_names_that_count_from_another_number_are_a_range() -> None:
    """With a layer of its own first: the loop starts at one."""
    model = nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(3)), nn.Linear(8, 4))
    case = case_of(model, {"input": X})
    program = assert_equals_model(case)
    assert not any(key.endswith("_NAMES") for key in vars(program))
    assert "for i in range(1, 4):" in case.source(ONE)


@pytest.mark.parametrize("names", [("encoder", "decoder"), ("forward_", "layers_block")])
def test_two_runs_of_blocks_have_functions_of_their_own(names: tuple[str, str]) -> None:
    case = case_of(Two(*names), {"x": X, "y": X + 1})
    assert [repeat.count for repeat in case.graph.repeats] == [3, 3]
    assert_equals_model(case)


def test_blocks_with_two_carried_values() -> None:
    case = case_of(Carrying(), {"x": X})
    assert [(r.count, len(r.carried)) for r in case.graph.repeats] == [(4, 2)]
    assert_equals_model(case)


class Keyed(nn.Module):
    """Modules, batch and outputs under names that are no words."""

    def __init__(self, names: tuple[str, ...], lists: bool) -> None:
        super().__init__()
        made = (nn.ModuleList([Block(), Block()]) if lists else Block() for _ in names)
        self.stem, self.names = nn.Linear(8, 8), names
        self.blocks = nn.ModuleDict(dict(zip(names, made, strict=True)))

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        x = self.stem(given[self.names[0]])
        for name in self.names:
            block = self.blocks[name]
            for layer in block if isinstance(block, nn.ModuleList) else [block]:
                x = layer(x)
        return {"loss": x.square().mean(), self.names[0]: x}


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize("name", ["it's", 'say "so"', "q{0}", "a\\b", "a\nb", "[0:2]", "é ü", "#"])
def test_names_of_any_characters_are_quoted(name: str, lists: bool) -> None:
    case = case_of(Keyed((name, "other"), lists), {"given": {name: X.double()}})  # type: ignore[dict-item]
    assert case.graph.repeats
    assert_equals_model(case)

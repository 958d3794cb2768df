"""Generated source computes what the model computes, and is readable."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.codegen.emit import emit
from autopar.cost.model import AnalyticModel
from autopar.ir.graph_text import fingerprint, parse_graph
from autopar.ir.mesh import Mesh
from autopar.ir.resharding import Resharder
from autopar.plan_entries import NodePlan
from autopar.runtime.module_loader import load
from autopar.runtime.runtime import Runtime
from autopar.stage_plan import StagePlan
from tests.support import models
from tests.support.emitted import FAST, ONE, SLOW, Case, case_of, family, local_values


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
        code = emit(graph, StagePlan(fingerprint(graph), mesh, entries), price)
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

"""The user's names and lines in generated programs stay data, whatever they contain."""

from __future__ import annotations

import ast
import io
import os
import sys
import tokenize
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar
from autopar.codegen.allowed import check_source
from autopar.codegen.emit import emit
from autopar.cost.model import AnalyticModel
from autopar.errors import ProgramError
from autopar.ir.action import parse_row
from autopar.ir.graph import Graph, Node, Source
from autopar.ir.graph_text import format_graph, parse_graph
from autopar.ir.mesh import Mesh
from autopar.lower.parameter_keys import key_of
from autopar.plan import Plan
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.runtime.folder import standalone
from autopar.runtime.module_loader import load
from autopar.runtime.pipeline.folder import program_source
from autopar.runtime.pipeline.routes import Placement
from autopar.stage_plan import StagePlan
from tests.fuzz.hostile import PAYLOADS, RUN, TEXTS
from tests.support.emitted import family
from tests.support.ranks import run_ranks

MESH = "toy[2TFLOP/s 1GiB 20GB/s]: a=2 @5GB/s 1us, b=2 @20GB/s 100ns"


class Skeleton(ast.NodeTransformer):
    """A program without its texts and the names of its variables."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("" if isinstance(node.value, str) else node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        fields = [part for part in node.values if not isinstance(part, ast.Constant)]
        values = {ast.unparse(field.value) for field in fields}  # type: ignore[attr-defined]
        assert values <= {"i", "number", "loss.item()"}  # the last two are of the training loop
        return ast.Constant("")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        kept = node.id in ("torch", "F", "mesh", "kernels", "p", "batch", "aten", "range")
        return ast.Name(node.id if kept else "v", node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg("v")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = node.name if node.name in ("parameters", "forward", "draw") else "block"
        return self.generic_visit(node)


def skeleton(source: str) -> str:
    return ast.dump(Skeleton().visit(ast.parse(source)))


def comments(source: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def renamed(graph: Graph, texts: list[str]) -> tuple[Graph, dict[str, str]]:
    """The graph with other texts wherever a user's stand, and the new names of its leaves."""
    names: dict[str, str] = {}
    nodes: list[Node] = []
    for number, node in enumerate(graph.nodes):
        text = texts[number % len(texts)]
        if node.is_leaf:
            # Pieces of one parameter stay pieces of one.
            name = names.setdefault(node.target, f"{text}{len(names)}" + text)
            node = replace(node, args=(name, *node.args[1:]))
        source = Source(node.source.module and text, text, node.source.line, text)
        nodes.append(replace(node, source=source))
    outputs = tuple((f"{texts[0]}{n}", name) for n, (_, name) in enumerate(graph.outputs))
    return replace(graph, name=texts[-1], nodes=tuple(nodes), outputs=outputs), names


@pytest.fixture(scope="module")
def planned() -> tuple[Graph, StagePlan]:
    graph = family("gpt2").graph
    return graph, make_plan(graph, Mesh.parse(MESH), Options(), Trace(None))


FEW = settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),  # what is found is short as it is
)


@FEW
@given(texts=st.lists(TEXTS, min_size=1, max_size=8))
def test_a_program_is_the_same_under_any_names(
    planned: tuple[Graph, StagePlan], texts: list[str]
) -> None:
    graph, plan = planned
    price = AnalyticModel(plan.mesh).collective
    other, _ = renamed(graph, texts)
    plain, _ = renamed(graph, [f"n{number}" for number in range(len(texts))])
    source = emit(other, plan, price)
    assert skeleton(source) == skeleton(emit(plain, plan, price))
    source.encode("utf-8")
    assert all(line.isprintable() for line in source.split("\n"))
    assert comments(source) > 0
    module = load(source, "<hostile>")
    leaves = [leaf.target for kind in ("param", "buffer") for leaf in other.leaves(kind)]
    assert {p.name for p in module.parameters()} == set(leaves)
    assert len({p.key for p in module.parameters()}) == len(module.parameters())
    assert list(module.INPUTS) == [leaf.target for leaf in other.leaves("input")]
    assert list(module.OUTPUTS) == [name for name, _ in other.outputs]
    assert (module.__doc__ or "").startswith(other.name.replace("\r\n", "\n"))
    folder = standalone(source)
    assert skeleton(folder) == skeleton(standalone(emit(plain, plan, price)))
    assert parse_graph(format_graph(other)) == other


@FEW
@given(title=TEXTS, name=TEXTS, kind=TEXTS)
def test_a_pipeline_is_the_same_under_any_names(title: str, name: str, kind: str) -> None:
    placement = Placement((((0,), (1,)),), (parse_row("F0.0 B0.0"), parse_row("F1.0 B1.0")), 1)

    def written(title: str, name: str, kind: str) -> str:
        return program_source(title, ["stage_0.py"] * 2, placement, {name: kind}, ["|", "|"])

    source = written(title, name, kind)
    assert ast.dump(ast.parse(source)).count("Call(") == ast.dump(
        ast.parse(written("t", "x", "f32[8]"))
    ).count("Call(")
    tree = {
        node.targets[0].id: node.value  # type: ignore[attr-defined]
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
    }
    assert ast.literal_eval(tree["INPUTS"]) == {name: kind}


@given(st.lists(TEXTS, min_size=2, max_size=6, unique=True), st.integers(0, 2), st.integers(0, 9))
def test_no_two_tensors_have_one_key(names: list[str], dim: int, start: int) -> None:
    keys = [key_of(name) for name in names]
    keys += [key_of(name, (dim, start, start + 8)) for name in names]
    # A parameter may be called as a piece of another is.
    keys += [key_of(key) for key in keys if key not in names]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("line", [
    "import os", "from os import system", "x = __import__('os')", "x = eval('1')", RUN,
    "def forward(mesh):\n    return mesh.group.process_group",
    "def forward(mesh):\n    return torch.load('x')",
    "import torch\nx = torch.hub.load('x')",
    "import torch\ndef f(x):\n    return torch.load(x)",
    "import torch\nx = torch.ops.aten.__class__",
    "x = ().__class__.__bases__", "x = [y for y in ()]", "x = lambda: 0", "range = 3",
    "@f\ndef f():\n    pass", "class A:\n    pass", "exec = 3", "x = (y := 3)", "global x",
    "import torch\nx = getattr(torch, 'load')", "print('x')", "def f(:", "x = '\x00'",
])  # fmt: skip
def test_what_no_program_needs_is_never_written(line: str) -> None:
    with pytest.raises(ProgramError):
        check_source(f"{line}\n")


# Events of the interpreter itself, of the collector and of torch's bindings.
QUIET = (
    "object.", "sys._", "builtins.id", "cpython", "gc.", "sys.setprofile", "code.__new__",
    "array.__new__", "marshal.loads", "ctypes.", "sys.unraisablehook",
)  # fmt: skip


class Block(nn.Module):
    """Parameters of any names."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.eye(8).double() * 1.1))
        self.names = names

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = torch.tanh(x @ getattr(self, name))
        return x


class Named(nn.Module):
    """Two equal blocks with parameters of any names, and modules of these names."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        # torch takes neither of these, and torch.export reads numbers in names.
        names = [t for t in texts if t and "." not in t and len(t) < 1000]
        names = [name for name in names if not hasattr(nn.ModuleDict, name)]
        self.blocks = nn.ModuleList(Block(names) for _ in range(2))
        self.more = nn.ModuleDict({name: nn.Linear(8, 8).double() for name in names})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        for layer in self.more.values():
            x = layer(x)
        return x.square().mean()


def model_of(texts: Sequence[str]) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model whose class, file, parameters and modules are called so."""
    torch.manual_seed(0)
    space: dict[str, Any] = {"torch": torch, "inner": Named.forward}
    # Neither files nor classes are called by nulls, nor classes by surrogates.
    code = "def forward(self, x):\n    return inner(self, torch.sigmoid(x) * 2)\n"
    exec(compile(code, texts[0].replace("\x00", ""), "exec"), space)
    kind = type("A", (Named,), {"forward": space["forward"]})
    kind.__name__ = texts[0].replace("\x00", "").encode("utf-8", "replace").decode("utf-8")
    return kind(texts), {"x": torch.linspace(-1, 1, 32).reshape(4, 8).double()}


def audited(folder: str) -> list[tuple[str, str]]:
    """Returns what Python runs and opens while a program of hostile names loads and makes a step.

    It trains as the model in torch does. In a process of its own, since a hook stays as long.
    """
    os.chdir(folder)
    seen, watched = list[tuple[str, str]](), False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if watched and not event.startswith(QUIET):
            seen.append((event, str(args)[:200]))

    sys.addaudithook(hook)

    @contextmanager
    def watch(program: Any) -> Iterator[None]:
        nonlocal watched
        source, executor = program.source, program._executor
        watched = True
        module = load(source, "<hostile>")
        executor.program.module.forward = module.forward  # the same, loaded under the hook
        module.parameters()
        yield
        watched = False

    train(PAYLOADS, watch)
    return seen


def test_programs_of_hostile_names_train_as_torch_does_and_run_nothing_of_them(
    tmp_path: Path,
) -> None:
    (seen,) = run_ranks(audited, str(tmp_path), count=1)
    events = [event for event, _ in seen]
    assert [event for event in events if event in ("compile", "exec")] == ["compile", "exec"], seen
    assert {*events} <= {"compile", "exec", "import"}, seen
    assert not (tmp_path / "ran").exists()


def train(
    texts: Sequence[str], around: Callable[[Any], AbstractContextManager[Any]] = nullcontext
) -> None:
    """Trains a program and the model in torch, for two steps; `around` is entered for the second.

    What torch imports late is there after the first.
    """
    model, batch = model_of(texts)
    plain, _ = model_of(texts)
    program = autopar.compile(
        model, "cpu: x=1", example_inputs=batch, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for context in (nullcontext, around):
        with context(program):
            found = program.step(**batch)
        optimizer.zero_grad()
        loss = plain(**batch)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=1e-12)
    trained = program.state_dict()
    assert list(trained) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-12, atol=1e-12)
    assert Plan.from_toml(program.plan.to_toml()) == program.plan


@pytest.mark.slow
@pytest.mark.parametrize("text", PAYLOADS)
def test_every_such_name_by_itself(text: str) -> None:
    train([text or "A"])

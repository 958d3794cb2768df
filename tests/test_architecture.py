"""Enforces the architecture: sizes of files, functions and folders, names, cycles, imports."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
LINES_A_FILE, LINES_A_FUNCTION, FILES_A_FOLDER, PARAMETERS = 400, 60, 20, 8

# Every exception has its reason. One that no longer applies fails, too.
LONG_FILES = {
    "autopar.errors": "a catalogue of small classes, each with its example",
}
LONG_FUNCTIONS = {
    "autopar.inter_op.dynamic_program:sums": "one compiled loop",
    "autopar.planning.pipelines.search:search": "its parameters become one value",
    "autopar.planning.pipelines.stages:plan_stages": "its parameters become one value",
    "autopar.runtime.pipeline.pipeline:Pipeline.__init__": "makes the stages in one order",
}
_COMMAND = "the options of a command"
_COMPILED = "compiled code takes flat arrays"
_OPERATOR = "the operands of an operator"
_PLANNING = "its parameters become one value"
MANY_PARAMETERS = {
    "autopar.runtime.pipeline.pipeline:Pipeline.__init__": "a program, its values and its ranks",
    "autopar.cli.diff:command": _COMMAND,
    "autopar.cli.explain:command": _COMMAND,
    "autopar.cli.plan:command": _COMMAND,
    "autopar.cli.rules:command": _COMMAND,
    "autopar.cli.schedules:command": _COMMAND,
    "autopar.cli.simulate:command": _COMMAND,
    "autopar.inter_op.dynamic_program:sums": _COMPILED,
    "autopar.inter_op.dynamic_program:sums_before": _COMPILED,
    "autopar.inter_op.dynamic_program:trace": _COMPILED,
    "autopar.inter_op.partition:partition": _PLANNING,
    "autopar.inter_op.single_chunk:_Program.__init__": _PLANNING,
    "autopar.operators.sharded_operators:ShardedOperators.mixture": _OPERATOR,
    "autopar.planning.pipelines.search:search": _PLANNING,
    "autopar.planning.pipelines.stages:plan_stages": _PLANNING,
}
FULL_FOLDERS: dict[str, str] = {}
SAME_NAMES = {
    "emit": "a command and what it calls",
    "folder": "of one program and of the stages of a pipeline",
    "frontier": "a command and what it calls",
    "kernels": "the kernels and the rules of them",
    "pipeline": "a command and what runs",
    "plan": "a command and the value",
    "random": "rules of random operators and what runs",
    "recompute": "the choice and what runs",
    "rules": "a command and the folder",
}
_REPORTS = "reports the seconds of a solve"
CLOCKS = {
    "autopar.inter_op.placement.methods.metropolis": "a search that is asked for by name",
    "autopar.intra_op.solvers._budget": "a time limit if the caller sets one",
    "autopar.intra_op.solvers._sampling": "a time limit if the caller sets one",
    "autopar.intra_op.solvers.brute_force": _REPORTS,
    "autopar.intra_op.solvers.elimination": _REPORTS,
    "autopar.intra_op.solvers.greedy": _REPORTS,
    "autopar.intra_op.solvers.propagate": _REPORTS,
    "autopar.intra_op.solvers.pulp": _REPORTS,
}
_LOOKS = "looks again and again whether something has ended, and kills what hangs"
CLOCKS_OF_TESTS = {
    "tests.cost.test_measured_host": "a slow operator, whose least seconds are known",
    "tests.intra_op.test_budget": "replaces a clock",
    "tests.programs.test_lost_replicas": "replaces a clock",
    "tests.programs.test_step_metrics": "a late rank, for which another has begun to wait",
    "tests.runtime.ranks.kills": _LOOKS,
    "tests.runtime.ranks.test_endings": "a loader that never ends",
    "tests.runtime.ranks.test_failure": _LOOKS,
    "tests.runtime.ranks.test_shared": _LOOKS,
}
_TRACES = "traces models and operators without values"
PRIVATE_TORCH = {
    "autopar.capture.dtypes.autocast": "asks autocast what it casts",
    "autopar.capture.autograd_functions": _TRACES,
    "autopar.capture.composite": _TRACES,
    "autopar.capture.decompose": _TRACES,
    "autopar.capture.joint": _TRACES,
    "autopar.capture.lowering": "names the type of torch's operators",
    "autopar.capture.watch": "asks whether torch.func transforms a call",
    "autopar.operators.sharded_operators": "asserts on the device; torch has no public function",
    "autopar.operators.assume": _TRACES,
    "autopar.operators.interpret": _TRACES,
    "autopar.runtime.recompute": "sees the operators that a block runs",
    "autopar.capture.stand_ins.flex": "traces with torch's modes switched off",
    "autopar.runtime.torch_private": "the corners that the runtime needs",
}
CYCLES: dict[frozenset[str], str] = {}


@cache
def modules(folder: str = "autopar") -> dict[str, tuple[Path, ast.Module]]:
    """Module -> its file and its syntax tree."""
    made = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        made[name] = (path, ast.parse(path.read_text()))
    return made


@cache
def functions() -> tuple[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef], ...]:
    """All functions, named "module:function" or "module:Class.method"."""
    return tuple(_functions())


def _functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for module, (_, tree) in modules().items():
        owners = {
            child: f"{owner.name}."
            for owner in ast.walk(tree)
            if isinstance(owner, ast.ClassDef)
            for child in owner.body
        }
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{module}:{owners.get(node, '')}{node.name}", node


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring and its signature."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def parameter_count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters of a function besides `self` and `cls`."""
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len(every) - sum(argument.arg in ("self", "cls") for argument in every[:1])


def check(found: dict[str, object], allowed: dict[str, str]) -> None:
    """Compare what breaks a rule with the exceptions from it."""
    new = {name: value for name, value in found.items() if name not in allowed}
    assert not new, f"over the limit: {new}"
    gone = sorted(set(allowed) - set(found))
    assert not gone, f"exceptions that are no longer needed: {gone}"


def test_files_are_short() -> None:
    lengths = {
        module: len(path.read_text().splitlines()) for module, (path, _) in modules().items()
    }
    check({m: n for m, n in lengths.items() if n > LINES_A_FILE}, LONG_FILES)


def test_functions_are_short() -> None:
    lengths = {name: code_lines(node) for name, node in functions()}
    check({f: n for f, n in lengths.items() if n > LINES_A_FUNCTION}, LONG_FUNCTIONS)


def test_functions_take_few_parameters() -> None:
    counts = {name: parameter_count(node) for name, node in functions()}
    check({f: n for f, n in counts.items() if n > PARAMETERS}, MANY_PARAMETERS)


def test_folders_are_small() -> None:
    sizes: dict[str, int] = defaultdict(int)
    for path, _ in modules().values():
        sizes[str(path.parent.relative_to(ROOT))] += 1
    check({folder: n for folder, n in sizes.items() if n > FILES_A_FOLDER}, FULL_FOLDERS)


def test_one_base_name_has_one_meaning() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path, _ in modules().values():
        if path.name != "__init__.py":
            homes[path.stem].append(str(path.relative_to(ROOT)))
    check({name: paths for name, paths in homes.items() if len(paths) > 1}, SAME_NAMES)


def imported(module: str) -> set[str]:
    """The modules of autopar that a module imports when it is loaded."""
    tree = modules()[module][1]
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules() else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(modules()) - {module}


def test_imports_have_no_cycles() -> None:
    graph = nx.DiGraph((module, used) for module in modules() for used in imported(module))
    cycles = {frozenset(c) for c in nx.strongly_connected_components(graph) if len(c) > 1}
    check({str(sorted(c)): c for c in cycles}, {str(sorted(c)): why for c, why in CYCLES.items()})


def private_torch(tree: ast.Module) -> set[str]:
    """The private modules and attributes of torch that a file names."""
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            names = [text] if re.match(r"(torch|dist)\.(?!ops\.)", text) else []
        found |= {n for n in names if re.fullmatch(r"[\w.]*\._(?!_)[\w.]*", n)}
    return found


def test_private_torch_stays_in_named_files() -> None:
    used = {module: private_torch(tree) for module, (_, tree) in modules().items()}
    check({module: names for module, names in used.items() if names}, PRIVATE_TORCH)


def test_planning_reads_no_clock() -> None:
    """A clock that decides what is planned makes plans depend on what else the machine does."""
    rooms = ("cli", "session", "runtime", "launch")
    planning = {
        name: "time"
        for name in read_clocks("autopar")
        if name.split(".")[1:2] and name.split(".")[1] not in rooms
    }
    check(dict(planning), CLOCKS)


def read_clocks(folder: str) -> list[str]:
    """The modules that import Python's clocks."""
    return [
        name
        for name, (_, tree) in modules(folder).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) and "time" in {alias.name for alias in node.names}
    ]


def test_tests_read_no_clock() -> None:
    """A test that measures seconds fails on a busy machine; `tests.support.work` counts calls."""
    check(dict.fromkeys(read_clocks("tests"), "time"), CLOCKS_OF_TESTS)


@pytest.mark.parametrize("room", ["ir", "plan"])
def test_values_are_readable_without_torch(room: str) -> None:
    """`lint-imports` checks the contract; this checks that the contract names the rooms."""
    contracts = (ROOT / "pyproject.toml").read_text()
    assert f'"autopar.{room}",' in contracts

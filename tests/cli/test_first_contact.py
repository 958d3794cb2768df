"""First contact: imports, help and versions, without torch, a home or a cache."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import autopar
from autopar.cli import main

# Solves a problem by compiled loops, and prints the choice and which packages were imported.
SOLVE = """
import json, sys
import numpy as np
from autopar.intra_op.problem import Choices, Edge, Problem
from autopar.intra_op.solvers import solve

draw = np.random.default_rng(0)
nodes = tuple(
    Choices(f"n{i}", ("a", "b", "c"), tuple(draw.random(3)), tuple(draw.random(3)), (0, 9))
    for i in range(9)
)
edges = tuple(
    Edge(i, j, draw.random((3, 3))) for i in range(9) for j in range(i) if draw.random() < 0.5
)
solution = solve(Problem("p", nodes, edges, 5.0), solver=sys.argv[1])
print(json.dumps([list(solution.choice), "numba" in sys.modules]))
"""


def run(code: str, *words: str, **changed: str | None) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process of its own, with changes of its environment."""
    environment = {name: value for name, value in {**os.environ, **changed}.items() if value}
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("code", ["import autopar", "from autopar.cli import main; main()"])
def test_the_first_seconds_need_no_torch(code: str) -> None:
    told = "import atexit, sys; atexit.register(lambda: print('\\n', *sys.modules))"
    done = run(f"{told}; {code}", *(["--help"] if "main" in code else []))
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.splitlines()[-1].split())
    assert "autopar" in imported
    assert not {"torch", "numba", "rich", "numpy"} & imported
    assert len(imported) < 200, "a module takes about a millisecond"


def test_public_names_are_those_of_their_modules() -> None:
    code = (
        "import autopar, autopar.plan, autopar.compile, inspect\n"
        "for name in autopar.__all__: getattr(autopar, name)\n"
        "assert set(autopar.__all__) <= set(dir(autopar))\n"
        "assert inspect.isfunction(autopar.plan) and inspect.isfunction(autopar.compile)\n"
        "from autopar import plan, Plan\n"
        "assert plan is autopar.plan and Plan.__module__ == 'autopar.plan'\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = autopar.nothing


def test_no_import_needs_a_home_or_a_cache() -> None:
    done = run(BLOCKED + LOOPS, HOME=None, XDG_CACHE_HOME=None)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_loops_compile_without_a_cache() -> None:
    gone = run(SOLVE.replace("import json, sys", BLOCKED), "ilp", HOME=None, XDG_CACHE_HOME=None)
    assert gone.returncode == 0, gone.stderr
    assert json.loads(gone.stdout) == [json.loads(run(SOLVE, "brute_force").stdout)[0], True]


# As where neither the package's folder nor a home can be written.
BLOCKED = """
import json, sys
from numba.core import caching

def refused(*_): raise OSError("read-only file system")

for each in caching.CompileResultCacheImpl._locator_classes:
    each.ensure_cache_path = refused
"""


LOOPS = """
import autopar.intra_op.solvers._moves, autopar.intra_op.solvers._trws
import autopar.inter_op.schedule_time, autopar.inter_op.dynamic_program, autopar.intra_op.reduce.run
from autopar.loops import entry
assert entry(lambda x: x + 1)(1) == 2
"""


def test_numba_is_optional() -> None:
    without = SOLVE.replace("import json, sys", "import json, sys\nsys.modules['numba'] = None")
    done = run(without.replace('"numba" in sys.modules', "False"), "ilp")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0] == json.loads(run(SOLVE, "brute_force").stdout)[0]


def test_version_and_interruption() -> None:
    assert re.fullmatch(r"autopar \d+\.\d+.*\n", run(MAIN, "--version").stdout)
    # Ctrl-C while a command runs.
    interrupted = (
        "import click\nfrom autopar.cli import main\n"
        "@click.command()\ndef stop(): raise KeyboardInterrupt\n"
        "type(main).get_command = lambda *_: stop\nmain()\n"
    )
    done = run(interrupted, "stop")
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr


MAIN = "from autopar.cli import main; main()"


def _examples() -> list[tuple[str, list[str]]]:
    """The lines of every command's help that begin with `autopar`."""
    context, found = click.Context(main), []
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        for text in (line.strip() for line in (command.help or "").splitlines()):
            if text.startswith("autopar "):
                found.append((name, shlex.split(text)[1:]))
    return found


def test_examples_of_the_help_are_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("path/to/model").mkdir(parents=True)  # examples name it, and the file
    Path("batch.safetensors").touch()
    examples = _examples()
    assert {name for name, _ in examples} >= {"plan", "explain"}
    for name, words in examples:
        command = main.get_command(click.Context(main), words[0])
        assert command is not None, (name, words)
        command.make_context(words[0], list(words[1:]))


def test_planning_is_imported_without_torch() -> None:
    code = "import sys, autopar.cli.plan\nfrom autopar.operators.forms import forms\n"
    code += "from autopar.intra_op.rule_table import table\ntable(), forms()\n"
    done = run(code + "assert not {'torch', 'transformers', 'sympy'} & set(sys.modules)")
    assert done.returncode == 0, done.stderr


def test_commands_on_a_model_that_was_planned_before_need_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import atexit, sys\n"
        "from autopar.cli import main\n"
        "names = 'torch', 'transformers', 'numba'\n"
        "atexit.register(lambda: print([n for n in names if n in sys.modules], file=sys.stderr))\n"
        "main(sys.argv[1:])\n"
    )
    file = str(tmp_path / "plan.toml")
    words = ("plan", "gpt2", "--layers", "2", "--seq", "64", "--mesh", "H100: gpu=2", "-o", file)
    pipeline = str(tmp_path / "pipeline.toml")
    stages = (*words[:-2], "--global-batch", "8", "-o", pipeline)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for each in (words, stages):
        first = CliRunner().invoke(main, each)
        assert first.exit_code == 0, first.output
    solving = (words, stages, ("why", file, "transformer.wte.weight"), ("simulate", pipeline))
    for each in (*solving, ("explain", file), ("simulate", file), ("diff", file, file)):
        done = run(code, *each)
        assert done.returncode == 0, done.stderr
        expected = ["numba"] if each in solving else []
        assert done.stderr.splitlines()[-1] == str(expected)

"""Commands and calls that the pages print exist, with those options and arguments.

Nothing is run: commands are parsed, and the names and keywords of calls are looked up.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click
import pytest

import autopar
from autopar.cli import main
from autopar.session.keywords import CompileKeywords

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.M | re.S)
CALL = re.compile("autopar ")
SPAN = re.compile(r"`(autopar [^`]+)`")
FILE = re.compile(r"[\w./-]+\.(toml|json|json\.gz|csv|py|html)")
SESSIONS = {"session", "program", "other"}  # what the pages call a session


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def printed(page: Path) -> Iterator[list[str]]:
    """The commands in the blocks of a page, as words."""
    for kind, block in BLOCK.findall(page.read_text("utf-8")):
        if kind in ("", "sh"):
            lines = [line for line in block.replace("\\\n", " ").splitlines() if CALL.match(line)]
            yield from (shlex.split(line, comments=True)[1:] for line in lines)


def command(name: str) -> click.Command:
    with click.Context(main) as context:
        found = main.get_command(context, name)
    assert found is not None, name
    return found


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_parse(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dumps").mkdir()
    for name, *words in printed(page):
        if name.startswith("--"):
            continue
        for word in words:
            if FILE.fullmatch(word):
                Path(word).touch()
        try:
            command(name).make_context(name, list(words))
        except click.ClickException as error:
            pytest.fail(f"autopar {name} {shlex.join(words)}: {error.format_message()}")


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_options_in_the_text_exist(page: Path) -> None:
    """The text speaks of a command with some of its options."""
    for span in SPAN.findall(BLOCK.sub("", page.read_text("utf-8"))):
        _, name, *words = span.split()
        if not name.startswith("--"):
            known = {option for parameter in command(name).params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known, span


def calls(page: Path) -> Iterator[ast.Call]:
    """The calls in a page's Python, of which a block may be the difference of two scripts."""
    for kind, block in BLOCK.findall(page.read_text("utf-8")):
        if kind != "python":
            continue
        if re.search(r"^[+-] ", block, re.M):
            block = re.sub(r"^- .*\n", "", block, flags=re.M)
            block = re.sub(r"^[+ ] ", "", block, flags=re.M)
        block = textwrap.dedent(block)
        if re.search(r"^return ", block, re.M):
            block = "def shown():\n" + textwrap.indent(block, "    ")
        yield from (node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call))
    for span in re.findall(r"`(autopar\.[^`]+)`", page.read_text("utf-8")):
        tree = ast.parse(span.replace(", ...)", ")"), mode="eval")
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def called(call: ast.Call) -> Any:
    """The function that a call of autopar calls; None for any other call."""
    chain, node = list[str](), call.func
    while isinstance(node, ast.Attribute):
        chain, node = [node.attr, *chain], node.value
    if not isinstance(node, ast.Name) or not chain or chain[0] == "hf":
        return None  # the Trainer's module takes seconds to import
    if node.id in SESSIONS:
        found: Any = autopar.Session
    elif node.id in ("autopar", "pins"):
        found = autopar if node.id == "autopar" else autopar.pins
    else:
        return None
    for name in chain:
        if found is not autopar.Session and not hasattr(found, name) and not name[0].islower():
            pytest.fail(f"{ast.unparse(call)}: there is no {name}")
        if isinstance(found, property):
            return None
        found = getattr(found, name)
    return found


def keywords(function: Any) -> set[str] | None:
    """The keywords of a function; None if it takes any."""
    signature = inspect.signature(function)
    names = set(signature.parameters)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            hint = get_type_hints(function, include_extras=True).get(parameter.name)
            if not get_args(hint):
                return None
            names |= set(get_type_hints(get_args(hint)[0]))
    return names


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_calls_have_arguments_that_exist(page: Path) -> None:
    for call in calls(page):
        function = called(call)
        if function is None or isinstance(function, property):
            continue
        known = keywords(function)
        given = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
        assert known is None or given <= known, ast.unparse(call)


def test_options_of_a_ported_script_exist() -> None:
    """The right columns of the tables state options of `compile`, in place of other libraries'."""
    known, text = set(get_type_hints(CompileKeywords)), (ROOT / "docs/port.md").read_text("utf-8")
    cells = [row.split("|")[2] for row in text.splitlines() if row.startswith("|")]
    spans = [span for cell in cells for span in re.findall(r"`(\w+=[^`]*)`", cell)]
    assert len(spans) > 20
    for span in spans:
        (call,) = ast.parse(f"compile({span or 'None'})".replace("=)", "=None)")).body
        assert isinstance(call, ast.Expr)
        assert isinstance(call.value, ast.Call)
        given = {keyword.arg for keyword in call.value.keywords}
        assert given <= known, span

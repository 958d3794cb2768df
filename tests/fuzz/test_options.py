"""Arguments of wrong types, and invalid values of right ones, raise a named error quickly."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any, get_type_hints

import click
import pytest
import torch
from click.testing import CliRunner

import autopar
from autopar.cli import main
from autopar.errors import AutoparError
from autopar.session.keywords import CompileKeywords
from tests.fuzz.hostile import PAYLOADS
from tests.support.refusals import BATCH, Net, squared


class Silent:
    """A value that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("nothing to show")


LONG = "9" * 5000
WRONG: tuple[Any, ...] = (
    3.7, -1, 10**30, math.nan, math.inf, b"x", [1], {1: 2}, {"a": 1}, object(), Silent(),
    torch.ones(2), lambda: 0, ["nope"], {"nope": True}, "nonsense", "\0", "\ud800", "x" * 200_000,
    f"full {LONG}", f"activations {LONG}", f"1f1b chunks={LONG}", "interleaved_1f1b chunks=x",
    "bf16 =", "bf16 master=", "zero3 over", f"mics in groups of {LONG}", "[8", "full 0",
)  # fmt: skip
ARGUMENTS = sorted(
    {*inspect.signature(autopar.compile).parameters} - {"options"}
    | {*get_type_hints(CompileKeywords)}
)
# What each of these takes beside its own words: any text, any number, or any function.
TAKEN: dict[str, tuple[Any, ...]] = {
    "trace": tuple(word for word in WRONG if isinstance(word, str)),
    "dump": tuple(word for word in WRONG if isinstance(word, str)),
    "memory": (10**30,),
    "clip_norm": (3.7, 10**30),
    "optimizer": (),
    "example_inputs": (),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_is_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in WRONG:
        if any(value is taken for taken in TAKEN.get(name, ())):
            continue
        if name in ("model", "loss_fn", "groups", "pins", "optimizer") and callable(value):
            continue  # a function of the user's own; what it does is seen later
        options: dict[str, Any] = {
            "model": Net(), "mesh": "cpu: x=1", "example_inputs": BATCH, "loss_fn": squared,
        }  # fmt: skip
        options[name] = value
        with pytest.raises(AutoparError) as caught:
            autopar.compile(**options)
        assert caught.value.why or caught.value.todo
        assert len(str(caught.value)) < 10_000


def _command(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, arguments, catch_exceptions=True)


COMMANDS = {
    "plan": ["gpt2", "--mesh", "cpu: x=1"], "explain": [], "simulate": [], "why": [], "diff": [],
    "emit": [], "solve": [], "schedules": ["1f1b"], "calibrate": ["--quick"], "rules": [],
}  # fmt: skip


FREE = ("output", "trace", "trace_json", "profile_planning", "solver", "model")  # take any text
OFTEN_FREE = ("name", "transfer", "expert_load")  # some of the texts
SLOW = ("plan",)  # which traces a model where a text happens to say something


@pytest.mark.parametrize("text", ["nan", "-1", "inf", "1e999", "9" * 30, LONG, "nonsense"])
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW))
        for name in COMMANDS
        if name != "calibrate"  # which would measure
    ],
)
def test_every_option_of_the_command_line_is_refused_by_name(
    command: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for parameter in _command(command).params:
        if parameter.param_type_name != "option" or getattr(parameter, "is_flag", False):
            continue
        if parameter.name in FREE:
            continue
        arguments = COMMANDS[command] or ["missing.toml", "x"][: 1 + (command in ("why", "diff"))]
        done = run(command, *arguments, parameter.opts[-1], text)
        assert done.exit_code != 0 or parameter.name in OFTEN_FREE, done.output[:500]
        assert done.exception is None or isinstance(done.exception, SystemExit), done.output[:500]


# What a command line can hold: the system passes neither nulls nor halves of pairs.
SAID = [text for text in PAYLOADS if "\0" not in text and text != "\ud800"]


@pytest.mark.parametrize("text", SAID)
def test_what_is_printed_steers_no_terminal(text: str) -> None:
    for arguments in (["explain", text], ["plan", text, "--mesh", "cpu: x=1"], ["solve", text]):
        done = run(*arguments)
        assert done.exception is None or isinstance(done.exception, SystemExit)
        signs = {sign for sign in done.output if not sign.isprintable() and sign != "\n"}
        assert not signs, (arguments, signs)

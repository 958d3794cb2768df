"""Runs the code blocks of README and of the tutorial."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r'^```(python|sh)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.M | re.S
)
# Commands of the README that install or test this project, or plan for 64 GPUs.
ELSEWHERE: tuple[str, ...] = (
    "pip install",
    "make ",
    "autopar plan llama",
    "autopar explain plan",
    "autopar why",
)
ELSEWHERE = (*ELSEWHERE, "autopar emit")


def written(page: str, folder: Path) -> list[re.Match[str]]:
    """The blocks of a page, of which those with a title are written to files of the folder."""
    blocks = list(BLOCK.finditer((ROOT / page).read_text("utf-8")))
    for block in blocks:
        if block["title"] is not None:
            (folder / block["title"]).write_text(block["text"], encoding="utf-8")
    return blocks


def in_shell(command: str, folder: Path) -> str:
    """Runs a command in a folder and returns what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    result = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


def run(page: str, folder: Path) -> list[str]:
    """Write the files of a page to a folder and run its commands there, one after another."""
    done = []
    for block in written(page, folder):
        commands = block["text"].splitlines() if block[1] == "sh" else []
        for command in commands:
            if command.startswith(ELSEWHERE):
                continue
            in_shell(command, folder)
            done.append(command)
    return done


def train_in(folder: Path) -> None:
    os.chdir(folder)
    runpy.run_path("train.py", run_name="__main__")


def test_the_readme_trains(tmp_path: Path) -> None:
    written("README.md", tmp_path)
    script = tmp_path / "train.py"
    text = script.read_text("utf-8")
    # Two steps, on the words that its batch has.
    for said, quick in (("range(10)", "range(2)"), ("n_head=4", "n_head=4, vocab_size=1024")):
        assert text.count(said) == 1
        text = text.replace(said, quick)
    script.write_text(text, encoding="utf-8")
    run_ranks(train_in, tmp_path)
    assert (tmp_path / "plan.toml").exists()
    assert (tmp_path / "out" / "program.py").exists()


@pytest.mark.slow  # torchrun starts four processes that import torch and transformers
def test_the_command_of_the_readme_trains(tmp_path: Path) -> None:
    assert run("README.md", tmp_path) == ["torchrun --standalone --nproc-per-node 4 train.py"]
    assert (tmp_path / "out" / "program.py").exists()


@pytest.mark.slow  # six processes import torch, and four train
def test_the_tutorial_runs(tmp_path: Path) -> None:
    done = run("docs/tutorial.md", tmp_path)
    assert len(done) == 6
    assert (tmp_path / "checkpoint").is_dir()


FENCED = re.compile(r"^(```[^\n]*\n).*?^```$", re.M | re.S)
# Parameters that the worked example of docs/how-to/explain.md shows.
PARAMETERS = r"parameter |model\.embed_tokens|.*\.(q|k|o|gate|down)_proj"


def summary(printed: str) -> str:
    """Returns what the worked example shows of the output of `plan`."""
    lines = [line.rstrip() for line in printed.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("time a step"))
    memory = next(i for i, line in enumerate(lines) if line.startswith("memory a device"))
    table = lines[lines.index("Parameters") + 1 :]
    rows = [row for row in table if re.match(PARAMETERS, row)]
    solver = re.sub(r", [\d.]+ s(?=[;,]|$)", "", next(row for row in table if row[:4] == "ilp:"))
    parts = [*lines[start:memory], lines[memory], "", *rows, "...", solver]
    return "".join(f"{line}\n" for line in parts)


def second_half(program: str) -> str:
    """Returns what the worked example shows of a program: its block from the MLP's norm on."""
    start = re.search(r"^ +\w+ = post_attention_layernorm_weight \*", program, re.M)
    assert start is not None
    rest = program[start.start() :]
    end = re.search(r"^    return .*\n", rest, re.M)
    assert end is not None
    return rest[: end.end()]


@pytest.mark.slow  # plans a model of 80 layers for 64 devices
def test_the_worked_example_is_what_the_commands_print(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    page, front = ROOT / "docs/how-to/explain.md", ROOT / "README.md"
    text, readme = page.read_text("utf-8"), front.read_text("utf-8")
    head, title, example = text.partition("## An example")
    command = re.search(r"`(autopar plan [^`]+)`", example)
    assert command is not None
    printed = in_shell(f"COLUMNS=160 {command[1]}", tmp_path)
    in_shell("autopar emit plan.toml -o out", tmp_path)
    block = second_half((tmp_path / "out" / "program.py").read_text("utf-8"))
    now = iter([summary(printed), block])
    example = FENCED.sub(lambda old: f"{old[1]}{next(now)}```", example)
    line = textwrap.dedent("".join(block.splitlines(keepends=True)[-5:-2]))
    wanted = {
        page: f"{head}{title}{example}",
        front: FENCED.sub(
            lambda old: f"```\n{line}```" if "reduce_scatter" in old[0] else old[0], readme
        ),
    }
    if request.config.getoption("--update-golden"):
        for path, words in wanted.items():
            path.write_text(words, encoding="utf-8")
    assert wanted == {path: path.read_text("utf-8") for path in wanted}


def test_the_readme_is_a_front_page() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 200


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_links_between_pages_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", (ROOT / page).read_text("utf-8"))
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_architecture_names_files_that_exist() -> None:
    named = re.findall(
        r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    )
    assert len(named) > 50
    missing = [
        path for path in named if not ((ROOT / "autopar" / path).exists() or (ROOT / path).exists())
    ]
    assert not missing

"""Runs the code blocks of README and of the tutorial."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r'^```(python|sh)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.M | re.S
)
# Commands of the README that install or test this project, or plan for 64 GPUs.
ELSEWHERE = ("pip install", "make ", "autopar plan llama", "autopar explain plan", "autopar why")
ELSEWHERE = (*ELSEWHERE, "autopar emit")


def written(page: str, folder: Path) -> list[re.Match[str]]:
    """The blocks of a page, of which those with a title are written to files of the folder."""
    blocks = list(BLOCK.finditer((ROOT / page).read_text("utf-8")))
    for block in blocks:
        if block["title"] is not None:
            (folder / block["title"]).write_text(block["text"], encoding="utf-8")
    return blocks


def run(page: str, folder: Path) -> list[str]:
    """Write the files of a page to a folder and run its commands there, one after another."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = []
    for block in written(page, folder):
        commands = block["text"].splitlines() if block[1] == "sh" else []
        for command in commands:
            if command.startswith(ELSEWHERE):
                continue
            result = subprocess.run(
                command, shell=True, cwd=folder, env=environment, capture_output=True, text=True,
                timeout=300,
            )  # fmt: skip
            assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
            done.append(command)
    return done


def train_in(folder: Path) -> None:
    os.chdir(folder)
    runpy.run_path("train.py", run_name="__main__")


def test_the_readme_trains(tmp_path: Path) -> None:
    written("README.md", tmp_path)
    script = tmp_path / "train.py"
    text = script.read_text("utf-8")
    assert "range(10)" in text
    script.write_text(text.replace("range(10)", "range(2)"), encoding="utf-8")
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

"""The command that tests versions of Python and torch, with environments that only pretend."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import version_matrix


def pretend(folder: Path, name: str, versions: str, code: int) -> None:
    python = folder / name / "bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo {versions} && exit 0\nexit {code}\n')
    python.chmod(0o755)


def test_it_says_what_ran_and_what_is_not_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(tmp_path, "python3.12-torch2.11", "3 12 2 11", 0)
    pretend(tmp_path, "python3.12-torch2.12", "3 12 2 12", 1)
    pretend(tmp_path, "python3.13-torch2.13", "3 13 2 11", 0)  # not what its name says
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    monkeypatch.setattr(version_matrix.shutil, "which", lambda name: None)
    results = version_matrix.run(tmp_path, ["tests"])
    assert len(results) == 9
    assert results.pop("python 3.12 torch 2.11") == "passed"
    assert results.pop("python 3.12 torch 2.12") == "failed"
    assert all(result.startswith("not at hand: there is no python3") for result in results.values())

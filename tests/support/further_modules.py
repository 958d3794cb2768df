"""Modules that a test adds to a package which finds its modules by their folder."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest


def find_also(monkeypatch: pytest.MonkeyPatch, package: ModuleType, folder: Path) -> None:
    """Lets a package also find the modules of a folder, whatever other tests called theirs."""
    for path in folder.glob("*.py"):
        sys.modules.pop(f"{package.__name__}.{path.stem}", None)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])

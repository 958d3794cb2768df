"""Runs tests under every version of Python and torch that is at hand, and says which are not.

    python -m tests.version_matrix                  # make matrix
    python -m tests.version_matrix --install        # makes the missing environments, by pip

Environments lie in `.matrix/python3.12-torch2.11` and the like; that of the call counts, too.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.11", "2.12", "2.13")
FOLDER = Path(".matrix")
TESTS = ("tests/test_tiny.py", "tests/capture", "tests/programs/test_checkpoints.py")
VERSIONS = """
import sys, importlib.metadata
print(*sys.version_info[:2], *importlib.metadata.version("torch").split(".")[:2])
"""


def versions_of(python: str | Path) -> tuple[str, str] | None:
    """Returns the versions of Python and torch of an environment; None if it has no torch."""
    try:
        told = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    major, minor, *torch = told.stdout.split()
    return f"{major}.{minor}", ".".join(torch)


def install(python: str, torch: str, folder: Path) -> None:
    """Makes an environment with this version of torch, and autopar with what its tests need."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip = [folder / "bin/python", "-m", "pip", "install", "-q"]
    subprocess.run([*pip, f"torch=={torch}.*"], check=True)
    subprocess.run([*pip, "-e", ".[dev]"], check=True)


def run(folder: Path, tests: Sequence[str], make: bool = False) -> dict[str, str]:
    """Returns for each pair of versions "passed", "failed", or why it is not at hand."""
    own = versions_of(sys.executable)
    results = {}
    for python in PYTHONS:
        for torch in TORCHES:
            place = folder / f"python{python}-torch{torch}"
            interpreter = shutil.which(f"python{python}")
            if make and own != (python, torch) and interpreter and not place.exists():
                install(interpreter, torch, place)
            used = sys.executable if own == (python, torch) else place / "bin/python"
            name = f"python {python} torch {torch}"
            if versions_of(used) == (python, torch):
                print(f"{name}: running", flush=True)
                code = subprocess.run([used, "-m", "pytest", *tests], check=False).returncode
                results[name] = "failed" if code else "passed"
            elif interpreter is None or versions_of_python(interpreter) != python:
                results[name] = f"not at hand: there is no python{python}"
            else:
                results[name] = f"not at hand: there is no {place}"
    return results


def versions_of_python(interpreter: str) -> str:
    """Returns the version of an interpreter, "" if it does not start."""
    told = subprocess.run(
        [interpreter, "-c", "import sys; print(*sys.version_info[:2], sep='.')"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return told.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--install", action="store_true", help="make missing environments by pip")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("tests", nargs="*", default=TESTS)
    given = parser.parse_args()
    results = run(given.folder, given.tests, given.install)
    print(*(f"{name}: {result}" for name, result in results.items()), sep="\n")
    sys.exit("failed" in results.values() or "passed" not in results.values())


if __name__ == "__main__":
    main()

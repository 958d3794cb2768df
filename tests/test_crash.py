"""A test that crashes its process fails `make test`, which names it and ends."""

import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]
PASSING = "def test_one(): pass\ndef test_two(): pass\ndef test_three(): pass\n"
CRASHING = "import os\ndef test_before(): pass\ndef test_crash(): os.abort()\n"


def test_a_crash_ends_the_run_and_is_named(tmp_path: Path) -> None:
    recipe = [
        "make",
        "-n",
        "--no-print-directory",
        "-o",
        ".venv/.installed",
        "-o",
        ".venv/.prepared",
        "pytest",
    ]
    printed = subprocess.run(recipe, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    options = printed.partition(" -m pytest ")[2].splitlines()[0].split()
    (tmp_path / "test_a.py").write_text(CRASHING)
    for name in "bcde":
        (tmp_path / f"test_{name}.py").write_text(PASSING)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,  # a run that waits for its crashed process never ends
    )
    assert ran.returncode == 1, ran.stdout
    assert "crashed while running 'test_a.py::test_crash'" in ran.stdout
    assert "Fatal Python error: Aborted" in ran.stderr  # with the line that crashed

"""The contents of an installed autopar, and its `kernels` folder, which hides no other package."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def run(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_transformers_imports_from_the_root() -> None:
    # From the root our folder is what `import kernels` finds, here as by pytest's option
    # `pythonpath`; transformers asks for that name.
    found = importlib.util.find_spec("kernels")
    assert found is not None
    assert found.origin == str(ROOT / "kernels" / "__init__.py")
    assert importlib.import_module("transformers").LlamaForCausalLM.__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("from_root", [True, False])
def test_kernels_are_imported_as_autopar_kernels(from_root: bool, tmp_path: Path) -> None:
    program = "import autopar, autopar_kernels as k; print(autopar.__file__); print(k.__file__)"
    ours, kernels = run(program, ROOT if from_root else tmp_path).splitlines()
    assert Path(ours) == ROOT / "autopar" / "__init__.py"
    assert Path(kernels) == ROOT / "kernels" / "__init__.py"


def test_importing_the_kernels_brings_in_nothing() -> None:
    program = (
        "import sys, autopar_kernels; print({'torch', 'triton', 'autopar'} & set(sys.modules))"
    )
    assert run(program, ROOT) == "set()"


def test_a_wheel_holds_every_module_and_its_data(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    without_caches = shutil.ignore_patterns("__pycache__")
    for name in ("autopar", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=without_caches)
    for name in ("pyproject.toml", "setup.py", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run("from setuptools import build_meta; build_meta.build_wheel('..')", source)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())

    def installed(folder: str, name: str) -> set[str]:
        files = (p.relative_to(ROOT / folder) for p in (ROOT / folder).rglob("*") if p.is_file())
        return {f"{name}/{p.as_posix()}" for p in files if "__pycache__" not in p.parts}

    expected = installed("autopar", "autopar") | installed("kernels", "autopar_kernels")
    data = {"autopar/py.typed", "autopar/zoo/models.toml", "autopar/cost/tables/links.csv"}
    assert data <= expected
    assert expected == {name for name in held if ".dist-info/" not in name}
    assert any(name.endswith("LICENSE") for name in held)


def test_the_installed_metadata_is_that_of_the_project() -> None:
    assert importlib.metadata.version("autopar") == PROJECT["version"]
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="autopar")
    assert script.value == PROJECT["scripts"]["autopar"]


def test_every_requirement_is_pinned_to_a_version_it_admits() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").split()
    pins = {pin.name.lower(): pin for pin in map(Requirement, lines)}
    for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]:
        requirement = Requirement(text)
        (pin,) = pins[requirement.name.lower()].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version)
        assert "+" not in pin.version, "a local build cannot be had from a registry"

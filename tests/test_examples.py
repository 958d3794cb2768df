"""Compares the examples with their DDP originals: few lines differ, and the losses are the same."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
PAIRS = ("gpt", "lora", "finetuning", "vision", "mixture", "long_context", "grpo", "ppo")
OF_TRANSFORMERS = ("lora", "finetuning", "mixture", "long_context")  # whose losses are in float32


def load(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent))
    try:
        found = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(path.parent))
        sys.modules.pop("model", None)  # each example has its own


@pytest.mark.parametrize("name", PAIRS)
def test_a_port_changes_few_lines(name: str) -> None:
    before, after = (
        (EXAMPLES / name / file).read_text().splitlines() for file in ("train_ddp.py", "train.py")
    )
    changes = [
        line
        for line in difflib.unified_diff(before, after, n=0, lineterm="")
        if line[:1] in "+-" and line[:3] not in ("+++", "---") and line[1:].strip()
    ]
    for sign in "+-":
        assert len([line for line in changes if line[0] == sign]) < 15


def losses(folder: Path) -> list[tuple[list[float], list[float]]]:
    torch.set_default_dtype(torch.float64)
    found = []
    for name in PAIRS:
        more = (str(folder / name),) if name == "lora" else ()
        plain, own = (
            load(EXAMPLES / name / f"{file}.py").train(*more) for file in ("train_ddp", "train")
        )
        means = torch.tensor(plain)
        dist.all_reduce(means)
        found.append(((means / dist.get_world_size()).tolist(), own))
    return found


@pytest.mark.slow
def test_losses_are_those_of_the_originals(tmp_path: Path) -> None:
    found = run_ranks(losses, tmp_path, count=2)[0]
    for name, (plain, own) in zip(PAIRS, found, strict=True):
        assert len(own) > 5
        exact = 1e-6 if name in OF_TRANSFORMERS else 1e-9
        assert own == pytest.approx(plain, rel=exact, abs=1e-12), name
        if name == "ppo":  # the score of every turn, and then losses of four updates
            scores = own[::9]
            assert sum(scores[-3:]) > sum(scores[:3]) + 0.1
        elif name != "grpo":  # whose losses are not comparable from step to step
            assert sum(own[-3:]) < sum(own[:3]), name
    assert (tmp_path / "lora" / "adapter_config.json").exists()

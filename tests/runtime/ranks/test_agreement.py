"""Ranks with different arguments, batches or calls: all ranks refuse, and name the difference."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, BatchError, RanksDifferError
from autopar.runtime.calls.batches import _checksum
from autopar.runtime.ranks.agreement import compare_ranks, text_of
from tests.support.ranks import run_ranks

MESH = "cpu[1GFLOP/s 64GiB 1GB/s]: gpu=2 @10GB/s 1us"
ADAMW = functools.partial(torch.optim.AdamW, lr=0.1)


class Net(nn.Module):
    def __init__(self, width: int = 8, depth: int = 2, frozen: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        self.layers[0].weight.requires_grad_(not frozen)
        self.sign = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (self.sign * self.layers(x)).square().mean()


def net(**how: Any) -> Net:
    torch.manual_seed(0)
    return Net(**how)


def batch(seed: int = 0, size: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 8, generator=torch.Generator().manual_seed(int(seed)))}


def plan(word: Callable[..., Any]) -> autopar.Plan:
    made = autopar.plan(net(), MESH, example_inputs=batch(), pins=word("gpu"))
    assert isinstance(made, autopar.Plan)
    return made


def negative(output: Tensor) -> Tensor:
    return -output


def doubled(rate: float) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=2 * rate)


@contextmanager
def settings(how: dict[str, Any]) -> Iterator[None]:
    """Torch's own settings, for a while."""
    if how.pop("float64", False):
        torch.set_default_dtype(torch.float64)
    if how.pop("deterministic", False):
        torch.use_deterministic_algorithms(True)
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


# What rank 1 is given where rank 0 is given nothing of it, and what the message says.
DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "optimizer": ({"optimizer": torch.optim.SGD}, "optimizer.*torch.optim.sgd.SGD"),
    "rate": ({"optimizer": functools.partial(ADAMW, lr=0.2)}, "optimizer.*lr 0.1.*lr 0.2"),
    "decay": ({"optimizer": functools.partial(ADAMW, weight_decay=0.5)}, "weight_decay 0.5"),
    "closure": ({"optimizer": doubled(1.0)}, "optimizer.*SGD"),
    "clipping": ({"clip_norm": 0.5}, r"clip_norm.*rank 0 has None, rank 1 has 0.5"),
    "average": ({"ema": 0.9}, "ema.*rank 1 has 0.9"),
    "groups": ({"groups": autopar.groups({"*.bias": {"lr": 1.0}})}, "groups.*bias"),
    "a function of groups": ({"groups": lambda name, p: {}}, "groups.*lambda"),
    "mesh": ({"mesh": "cpu: x=2"}, "mesh.*gpu=2.*cpu: x=2"),
    "size of the mesh": ({"mesh": "cpu: gpu=4"}, "mesh.*gpu=2.*gpu=4"),
    "pins": ({"pins": autopar.pins.data_parallel("gpu")}, "pins.*DataParallel"),
    "pins by name": ({"pins": {"layers.0.weight": "[8@gpu, 8]"}}, "pins.*layers.0.weight"),
    "plan": ({"plan": autopar.pins.fsdp}, "plan.*rank 0 has None"),
    "schedule": ({"stages": 2, "microbatches": 2, "schedule": "gpipe"}, "stages.*1.*2"),
    "microbatches": ({"microbatches": 2}, "microbatches.*1.*2"),
    "state": ({"state": "zero3"}, "state.*zero3"),
    "precision": ({"precision": "bf16"}, "precision.*bf16"),
    "fuse": ({"fuse": ["adamw"]}, "fuse.*adamw"),
    "backend": ({"backend": "inductor"}, "backend.*eager.*inductor"),
    "graph": ({"cuda_graph": True}, "cuda_graph.*False.*True"),
    "offload": ({"offload": "optimizer"}, "offload.*optimizer"),
    "recompute": ({"recompute": "full"}, "recompute.*auto.*full"),
    "memory": ({"memory": "1GiB"}, "memory.*1GiB"),
    "solver": ({"solver": "propagate"}, "solver.*ilp.*propagate"),
    "rules": ({"rules": [autopar.rule("my.op", "a -> a")]}, "rules.*my.op"),
    "loss": ({"loss_fn": negative}, "loss_fn.*negative"),
    "operators": ({"unknown_ops": "error"}, "unknown_ops.*replicate.*error"),
    "policy": ({"on_nonfinite": "skip"}, "on_nonfinite.*raise.*skip"),
    "calibration": ({"calibration": "nowhere.toml"}, "calibration.*FileNotFoundError"),
    "shape": ({"example_inputs": batch(size=8)}, r"example_inputs.*\[4, 8\].*\[8, 8\]"),
    "no example": ({"example_inputs": None}, "example_inputs.*None"),
    "width": ({"model": {"depth": 3}}, "model.*layers.2.weight"),
    "frozen": ({"model": {"frozen": True}}, "model.*layers.0.weight.*frozen"),
    "evaluation": ({"model": "eval"}, "model.*in evaluation"),
    "dtype": ({"float64": True}, "default dtype.*float32.*float64"),
    "determinism": ({"deterministic": True}, "deterministic algorithms.*False.*True"),
}  # fmt: skip


def compiled(**how: Any) -> autopar.Session:
    made = how.pop("model", {})
    model = net().eval() if made == "eval" else net(**made)
    if "plan" in how:
        how["plan"] = plan(how["plan"])
    how = {"mesh": MESH, "optimizer": ADAMW, "example_inputs": batch(), **how}
    return autopar.compile(model, **how)


def all_different() -> dict[str, tuple[str, str]]:
    """The error of each case on this rank, its class and text in a line."""
    found = {}
    for name, (how, _) in DIFFERENT.items():
        mine = dict(how) if dist.get_rank() else {}
        with settings(mine):
            try:
                compiled(**mine)
            except AutoparError as error:
                found[name] = (type(error).__name__, " ".join(str(error).split()))
    return found


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, tuple[str, str]]]:
    return run_ranks(all_different, count=2)


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_compare_what_they_are_called_with(
    name: str, refusals: list[dict[str, tuple[str, str]]]
) -> None:
    first, second = (rank[name] for rank in refusals)
    assert first == second
    kind, text = first
    assert kind == "RanksDifferError"
    assert "rank 1" in text
    assert re.search(DIFFERENT[name][1], text), text


# In a run ----------------------------------------------------------------------------------------


def parted(folder: str) -> dict[str, tuple[str, str]]:
    """What each way of parting in a run raises on this rank; the run goes on after each."""
    odd = dist.get_rank() == 1
    program = compiled()
    for _ in range(12):  # more than are compared at once on accelerators
        program.step(**batch())
    before = {name: value.clone() for name, value in program.state_dict().items()}
    optimizer = program.optimizer
    large = torch.randn(200, 200)

    def rate() -> None:
        optimizer.param_groups[0]["lr"] = 0.3 if odd else 0.1
        program.step(**batch())

    def option() -> None:
        optimizer.param_groups[0]["betas"] = (0.8, 0.99) if odd else (0.9, 0.999)
        program.step(**batch())

    ways: dict[str, Callable[[], Any]] = {
        "batch": lambda: program.step(**batch(seed=odd)),
        "one number": lambda: program.step(x=batch()["x"] + 1e-6 * odd * torch.eye(4, 8)),
        "order": lambda: program.step(x=batch()["x"].flip(0) if odd else batch()["x"]),
        "shape": lambda: program.step(**batch(size=8 if odd else 4)),
        "rate": rate,
        "option": option,
        "call": lambda: program(**batch()) if odd else program.step(**batch()),
        "state_dict": lambda: program.state_dict() if odd else program.step(**batch()),
        "save": lambda: program.save_checkpoint(f"{folder}/a") if odd else program.step(**batch()),
        "evaluation": lambda: program(**batch(seed=odd)),
    }
    found = {}
    for name, way in ways.items():
        try:
            way()
        except AutoparError as error:
            found[name] = (type(error).__name__, " ".join(str(error).split()))
        optimizer.param_groups[0].update(lr=0.1, betas=(0.9, 0.999))
    # On accelerators nothing waits for the device: tokens part within the step.
    program._executor._intake._alike = lambda: True  # type: ignore[union-attr, method-assign]
    try:
        program.step(**batch(seed=odd))
    except AutoparError as error:
        found["token"] = (type(error).__name__, " ".join(str(error).split()))
    # A seed of its own draws no masks of its own, and no large batch is mistaken for another.
    assert _checksum(large, 0) == _checksum(large.clone(), 0)
    assert _checksum(large, 0) != _checksum(large.roll(1, 0), 0)
    assert _checksum(large, 0) != _checksum(large.index_fill(0, torch.tensor([7]), 0.0), 0)
    same = [torch.equal(value, program.state_dict()[name]) for name, value in before.items()]
    assert all(same)  # nothing was trained
    program.step(**batch())
    assert not all(torch.equal(v, program.state_dict()[k]) for k, v in before.items())
    return found


def test_ranks_that_part_in_a_run_are_named_and_nothing_is_trained() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = run_ranks(parted, folder, count=2)
    assert first == second
    for name in ("batch", "one number", "order", "shape", "evaluation", "token"):
        kind, text = first[name]
        assert kind == BatchError.__name__
        assert "'x' of rank 1" in text, text
    for name, says in {
        "rate": "lr of the optimizer's group 0 .*rank 0 has 0.1, rank 1 has 0.3",
        "option": r"betas of the optimizer's group 0 .*\(0.8, 0.99\)",
        "call": "rank 0 calls step, rank 1 calls forward",
        "state_dict": "rank 0 calls step, rank 1 calls state_dict",
        "save": "rank 0 calls step, rank 1 calls a checkpoint's method",
    }.items():
        kind, text = first[name]
        assert kind == RanksDifferError.__name__
        assert re.search(says, text), text


def captured_apart() -> str:
    model = net()
    model.sign = 1.0 - 2.0 * dist.get_rank()  # Python's own state, which a trace freezes
    with pytest.raises(BatchError) as caught:
        autopar.compile(model, MESH, example_inputs=batch())
    return " ".join(str(caught.value).split())


def test_a_difference_in_python_state_is_shown_by_the_line_of_the_graph() -> None:
    first, second = run_ranks(captured_apart, count=2, captures=True)
    assert first == second
    assert "the captured graph" in first
    assert "1.0" in first
    assert "-1.0" in first


def one_stays_away() -> str:
    if dist.get_rank() == 1:
        return ""
    from autopar.runtime.ranks import agreement as alike

    alike.group_timeout = lambda: timedelta(seconds=1)
    with pytest.raises(RanksDifferError) as caught:
        compare_ranks({"a": "b"})
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named_within_the_time_out() -> None:
    message = run_ranks(one_stays_away, count=2)[0]
    assert "rank 1 has not reached the point" in message
    assert "1 s" in message


def test_texts_tell_functions_and_tensors_apart_and_know_equal_ones() -> None:
    def close(value: Any) -> Callable[[], Any]:
        return lambda: value

    for one, other in [
        (close(1), close(2)),
        (lambda: 1, lambda: 2),
        (functools.partial(close, 1), functools.partial(close, 2)),
        (torch.zeros(2), torch.ones(2)),
        ({"a": 1}, {"a": 2}),
        ([1, 2], [2, 1]),
    ]:
        assert text_of(one) != text_of(other)
    assert text_of(close(1)) == text_of(close(1))
    assert text_of({"a": 1, "b": {2, 3}}) == text_of({"b": {3, 2}, "a": 1})
    assert " at 0x" not in text_of([close(object()), object(), nn.Linear])

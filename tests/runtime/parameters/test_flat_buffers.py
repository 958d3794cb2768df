"""Flat buffers: one launch of AdamW's kernel for a group, and a step that never waits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.runtime.calls.batches import TOKEN
from autopar.runtime.parameters import flat_buffers as flat
from autopar.runtime.parameters.flat_buffers import Flat, neighbours
from autopar.runtime.update import adamw
from autopar.runtime.update.adamw import AdamW
from autopar.runtime.update.step_check import StepPart
from tests.support.mixed import ADAMW, GROUPS, PAIR, error, judge, net, no_decay, used_whole
from tests.support.ranks import run_ranks

# The buffers --------------------------------------------------------------------------------------


def test_neighbours_are_the_same_elements_in_fewer_tensors() -> None:
    one, other = torch.arange(24.0), torch.arange(24.0, 40.0)
    parts = [one[8:12].view(2, 2), one[:8], one[14:24], other.view(4, 4).T, other[:0]]
    rows = neighbours(parts)
    assert sorted(torch.cat(rows).tolist()) == sorted(torch.cat([p.reshape(-1) for p in parts]))
    lengths = sorted(row.numel() for row in rows if row.numel())
    assert lengths == [10, 12, 16]
    (joined,) = [row for row in rows if row.numel() == 12]
    assert joined.data_ptr() == one.data_ptr()


def given(*sizes: int) -> list[nn.Parameter]:
    """Parameters whose gradients lie in one buffer, from the last one to the first."""
    torch.manual_seed(0)
    found = [nn.Parameter(torch.randn(size)) for size in sizes]
    buffer, start = torch.randn(sum(sizes)), 0
    for parameter in reversed(found):
        parameter.grad = buffer[start : start + parameter.numel()]
        start += parameter.numel()
    return found


@contextmanager
def launched() -> Iterator[Counter[str]]:
    """How often which kernel is launched inside."""
    ops, found = adamw._OPS, Counter[str]()

    def counted(name: str, *args: Tensor) -> Any:
        found[name] += 1
        return getattr(ops, name)(*args)

    names = ("adamw_", "square_sum")
    adamw._OPS = SimpleNamespace(**{name: partial(counted, name) for name in names})
    try:
        yield found
    finally:
        adamw._OPS = ops


def test_a_group_is_one_launch_and_every_tensor_keeps_its_place() -> None:
    mine = given(40, 24, 16)
    before, gradients = [p.clone() for p in mine], [p.grad for p in mine]
    optimizer = AdamW(torch.optim.AdamW(mine), {})
    with launched() as found:
        optimizer.step()
    assert found == {"adamw_": 1}
    assert [p.grad is g for p, g in zip(mine, gradients, strict=True)] == [True] * 3
    storages = {p.untyped_storage().data_ptr() for p in mine}
    assert len(storages) == 1
    assert [p.data_ptr() % 16 for p in mine] == [0] * 3
    theirs = [nn.Parameter(p.detach().clone()) for p in before]
    for parameter, gradient in zip(theirs, gradients, strict=True):
        parameter.grad = gradient
    torch.optim.AdamW(theirs).step()
    for parameter, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-6, atol=1e-7)


def test_what_has_no_gradient_keeps_every_bit() -> None:
    """In the middle of a buffer as well, and when it is the only one that has one."""
    for without in ((1,), (0, 2)):
        mine = given(40, 24, 16)
        optimizer = AdamW(torch.optim.AdamW(mine), {})
        optimizer.step()
        rest = [mine[number] for number in without]
        for parameter in rest:
            parameter.grad = None
        kept = [(p.clone(), {k: t.clone() for k, t in optimizer.state[p].items()}) for p in rest]
        others = [p.clone() for p in mine]
        optimizer.step()
        for parameter, (value, state) in zip(rest, kept, strict=True):
            assert torch.equal(parameter, value)
            assert all(torch.equal(optimizer.state[parameter][k], v) for k, v in state.items())
        moved = [not torch.equal(p, q) for p, q in zip(mine, others, strict=True)]
        assert moved == [number not in without for number in range(3)]


def test_gradients_made_apart_are_copied_where_they_are_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flat, "COPIED", 4 * 100)
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.randn(size)) for size in (200, 5, 3, 150, 7)]
    optimizer = AdamW(torch.optim.AdamW(mine), {})
    for _ in range(2):
        gradients = [torch.randn_like(p) for p in mine]
        for parameter, gradient in zip(mine, gradients, strict=True):
            parameter.grad = gradient
        with launched() as found:
            optimizer.step()
        assert found == {"adamw_": 3}
        for parameter, gradient in zip(mine, gradients, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, gradient)
            assert (parameter.grad is gradient) == (parameter.numel() >= 100)


def test_what_is_loaded_is_moved_to_the_buffers_again() -> None:
    mine, theirs = given(40, 24), given(40, 24)
    optimizer, other = AdamW(torch.optim.AdamW(mine), {}), AdamW(torch.optim.AdamW(theirs), {})
    optimizer.step()
    for to, parameter in zip(theirs, mine, strict=True):
        to.data = parameter.detach().clone()  # someone puts others in their place
    other.load_state_dict(optimizer.state_dict())
    for one in (optimizer, other):
        with launched() as found:
            one.step()
        assert found == {"adamw_": 1}
    for to, parameter in zip(theirs, mine, strict=True):
        assert torch.equal(to, parameter)


def test_what_lies_elsewhere_is_seen() -> None:
    mine = given(8, 16)
    state: Any = {p: {} for p in mine}
    made = Flat.of(mine, state, {})
    assert made.stands(state)
    state[mine[0]]["exp_avg"] = state[mine[0]]["exp_avg"].clone()
    assert not made.stands(state)
    assert Flat.of(mine, state, {}).stands(state)
    mine[1].data = mine[1].detach().clone()
    assert not made.stands(state)


# Programs -----------------------------------------------------------------------------------------


class NoWaiting(TorchDispatchMode):
    """Inside, no number of a tensor is taken to the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = str(func)
        assert "_local_scalar_dense" not in name, name
        assert "is_nonzero" not in name, name
        return func(*args, **(kwargs or {}))


def prepared(**how: Any) -> tuple[Any, dict[str, Tensor]]:
    """A program of data parallelism on two ranks, or of one device, after two steps."""
    model, batch = net()
    ranks = torch.distributed.is_initialized()
    mesh = PAIR if ranks else "cpu: gpu=1"
    how |= {"pins": [used_whole]} if ranks else {}
    how = {"optimizer": ADAMW, "fuse": ["adamw"], **how}
    program = autopar.compile(model, mesh, example_inputs=batch, **how)
    for _ in range(2):
        program.step(**batch)
    return program, batch


@pytest.mark.parametrize("how", [{}, {"microbatches": 2}], ids=["one piece", "microbatches"])
def test_a_scaled_and_clipped_step_waits_for_nothing(how: dict[str, Any]) -> None:
    program, batch = prepared(precision="fp16", clip_norm=0.5, ema=0.9, **how)
    good = program.scaler.good
    executor = program._executor
    executor.update.check.late = True  # as on a CUDA device
    before = {name: value.clone() for name, value in program.state_dict().items()}
    inputs = executor._prepare(executor.main, batch, "step")
    if how:
        loss, token = torch.ones(()), inputs[TOKEN]
        seen = StepPart(
            loss, token, inputs, 1, executor._add_up, executor._intake.differences, lambda x: [x]
        )
        with NoWaiting():
            executor.update.step(executor._squares, seen)
    else:
        with NoWaiting():
            executor._step(executor.main, inputs)
    assert program.scaler.good == good + 1
    assert not program.scaler.skipped
    assert any(not torch.equal(v, before[k]) for k, v in program.state_dict().items())


def counted(state: str, **how: Any) -> tuple[Counter[str], dict[str, Tensor], bool]:
    """Launches of the third step on two ranks, parameters then, and whether they lie together.

    Nothing is copied that is scattered: however small it is, it stays where it came.
    """
    program, batch = prepared(state=state, groups=autopar.groups(GROUPS), **how)
    flat.COPIED = 0 if state != "ddp" else flat.COPIED
    with launched() as found:
        program.step(**batch)
    rows = [len({p.untyped_storage().data_ptr() for p in group["params"]})
            for group in program.optimizer.param_groups]  # fmt: skip
    return found, program.state_dict(), rows == [1] * len(rows)


def every(cases: list[tuple[str, int]]) -> list[Any]:
    """`counted` under some states, with so many microbatches."""
    return [
        counted(state, **({"microbatches": number} if number > 1 else {}))
        for state, number in cases
    ]


ZERO = ["zero1", "zero2", "zero3"]


@pytest.mark.parametrize(
    ("states", "times", "number"),
    [
        (["ddp"], 2, 1),
        (ZERO, 3, 2),
        pytest.param(["ddp"], 2, 2, marks=pytest.mark.slow),
        pytest.param(ZERO, 3, 1, marks=pytest.mark.slow),
    ],
    ids=["ddp", "zero, microbatches", "ddp, microbatches", "zero"],
)
def test_two_ranks_launch_once_for_each_group_of_the_optimizer(
    states: list[str], times: int, number: int
) -> None:
    ranks = run_ranks(every, [(state, number) for state in states], count=2)
    model, batch = net()
    wanted = judge(model, batch, autopar.Precision(), groups=no_decay, microbatches=number)
    for launches, found, together in (case for rank in ranks for case in rank):
        # Of two groups; in one a part of a bias, 6 elements, leaves a gap behind it.
        assert launches == {"adamw_": times, "square_sum": 2}
        assert together
        assert error(found, wanted.state) < 1e-5


def loaded(folder: str) -> list[dict[str, Tensor]]:
    """A step after weights and checkpoints were loaded into a program that has trained."""
    found = []
    program, batch = prepared(state="zero1")
    program.save_checkpoint(folder)
    saved = {name: value.clone() for name, value in program.state_dict().items()}
    for load in (
        lambda: program.load_state_dict(saved),
        lambda: program.load_weights(folder),
        lambda: program.load_checkpoint(folder),
    ):
        program.step(**batch)
        load()
        for _ in range(2):
            found.append({name: value.clone() for name, value in program.state_dict().items()})
            program.step(**batch)
    return [saved, *found]


def test_parts_that_lie_apart_follow_what_is_loaded(tmp_path: Any) -> None:
    """ZeRO-1 without masters: what is updated is no longer a part of what is held."""
    for saved, *found in run_ranks(loaded, str(tmp_path / "saved"), count=2):
        for state in found[::2]:
            assert all(torch.equal(state[name], value) for name, value in saved.items())
        for state in found[1::2]:
            assert any(not torch.equal(state[name], value) for name, value in saved.items())
        # Three ways to go on, of which the last one has the moments as well.
        assert all(math.isfinite(float(v.sum())) for state in found for v in state.values())

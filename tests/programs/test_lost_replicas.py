"""A killed replica is left out of the averages, and the others do what they would without it."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.errors import OptionError, ProgramError
from autopar.ir.replicas.outer_value import Outer
from autopar.runtime.outer import membership, survivors
from autopar.runtime.outer.membership import Attendance
from tests.programs.test_outer import OPTIMIZERS, loss, model
from tests.support.ranks import forking

STEPS, KILLED_AT, ROWS, TAU = 8, 5, 4, 2
HANG = 600.0  # seconds after which a process counts as hanging


def batch(step: int, replicas: int) -> dict[str, Tensor]:
    torch.manual_seed(100 + step)
    return {"input": torch.randn(ROWS * replicas, 8).double(),
            "labels": torch.randint(4, (ROWS * replicas,))}  # fmt: skip


def count_heartbeats(living: Sequence[int]) -> None:
    """Lets heartbeats of the slowest of these ranks be the clock, by which others fall silent."""
    lost, now = Attendance._lost, 0.0

    def by_heartbeats(self: Attendance, again: bool = False) -> set[int]:
        nonlocal now
        signs = [self._sign(rank) for rank in living]
        counts = [int(self._board.get(s)) if self._board.check(s) else 0 for s in signs]
        now = membership._BEAT * min(counts)
        return lost(self, again)

    membership.time = SimpleNamespace(monotonic=lambda: now, sleep=time.sleep)  # type: ignore
    Attendance._lost = by_heartbeats  # type: ignore[method-assign]


def run(rank: int, folder: str, outer: str, mesh: str, victim: int, how: dict[str, Any]) -> None:
    """Trains on one rank, of which one kills itself, and writes what it has in the end."""
    survivors.SILENT = 3.0
    torch.set_num_threads(1)
    devices = autopar.Mesh.parse(mesh)
    every = Outer.parse(outer).replicas(devices)
    count_heartbeats([rank for ranks in every if victim not in ranks for rank in ranks])
    replicas = len(every)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=devices.size
    )
    session = autopar.compile(
        model(), mesh, example_inputs=batch(0, replicas), loss_fn=loss, outer=outer,
        on_loss="continue", optimizer=OPTIMIZERS["sgd"], **how,
    )  # fmt: skip
    session.eval_step(**batch(0, replicas))  # after a loss nothing is compiled any more
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            if rank == victim and step == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            session.step(**batch(step, replicas))
    text = "; ".join(str(one.message) for one in caught)
    with pytest.raises(ProgramError, match="needs all ranks"):
        session.save_checkpoint(Path(folder, "checkpoint"))
    own = session._executor.program.state_dict()  # type: ignore[union-attr]
    evaluated = session.eval_step(**batch(0, replicas)).loss
    torch.save((own, session.state_dict(), text, evaluated), Path(folder, f"{rank}.pt"))
    session.close()
    dist.destroy_process_group()


def survive(outer: str, mesh: str, victim: int, how: dict[str, Any]) -> dict[int, Any]:
    """Returns what the ranks that are left have written; all others must have ended."""
    size = autopar.Mesh.parse(mesh).size
    with tempfile.TemporaryDirectory() as folder:
        with forking() as context:
            processes = [
                context.Process(target=run, args=(rank, folder, outer, mesh, victim, how))
                for rank in range(size)
            ]
            for process in processes:
                process.start()
        for process in processes:
            process.join(HANG)
        running = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for rank in running:
            processes[rank].kill()
        assert not running, f"the ranks {running} hang"
        return {
            rank: torch.load(Path(folder, f"{rank}.pt"))
            for rank in range(size)
            if Path(folder, f"{rank}.pt").exists()
        }


def averaged(replicas: int, lost: int) -> dict[str, Tensor]:
    """LocalSGD by plain torch: from the first synchronisation after the loss, without one."""
    networks = [model() for _ in range(replicas)]
    optimizers = [OPTIMIZERS["sgd"](network.parameters()) for network in networks]
    for step in range(STEPS):
        given = batch(step, replicas)
        for own, (network, optimizer) in enumerate(zip(networks, optimizers, strict=True)):
            part = slice(own * ROWS, (own + 1) * ROWS)
            optimizer.zero_grad()
            loss(network(given["input"][part]), given["labels"][part]).backward()
            optimizer.step()
        if (step + 1) % TAU == 0:
            left = [n for at, n in enumerate(networks) if step < KILLED_AT or at != lost]
            with torch.no_grad():
                for parameters in zip(*(n.parameters() for n in left), strict=True):
                    mean = torch.stack([p.detach() for p in parameters]).mean(0)
                    for parameter in parameters:
                        parameter.copy_(mean)
    kept = networks[0 if lost else 1]
    return {name: value.detach() for name, value in kept.named_parameters()}


def test_averages_go_on_without_a_killed_replica() -> None:
    left = survive(f"local over node, tau={TAU}", "cpu: node=3", 1, {"state": "ddp"})
    assert sorted(left) == [0, 2]
    wanted = averaged(3, lost=1)
    for own, agreed, text, _ in left.values():
        assert "ranks 1 are lost; averages go on over 2" in text
        for name, value in wanted.items():
            torch.testing.assert_close(own[name], value, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(agreed[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outer", "mesh", "victim", "lost", "how"),
    [
        ("co2 over node, tau=2", "cpu: node=3", 2, {2}, {}),
        ("slowmo over node, tau=2", "cpu: node=2", 1, {1}, {}),
        ("overlap over node, tau=3", "cpu: node=3", 1, {1}, {}),
        ("diloco over node, tau=4, fragments=2, delay=1", "cpu: node=3, gpu=2", 3, {2, 3},
         {"state": "zero3"}),
        ("local over node, tau=2", "cpu: node=3, gpu=2", 4, {4, 5}, {"state": "zero1"}),
    ],
)  # fmt: skip
def test_every_method_goes_on(
    outer: str, mesh: str, victim: int, lost: set[int], how: dict[str, Any]
) -> None:
    left = survive(outer, mesh, victim, how)
    size = autopar.Mesh.parse(mesh).size
    assert set(left) == set(range(size)) - lost
    first = next(iter(left.values()))
    for _, agreed, text, evaluated in left.values():
        assert "lost" in text
        assert torch.isfinite(evaluated)
        for name, value in first[1].items():
            torch.testing.assert_close(agreed[name], value, rtol=0, atol=0)


def test_on_loss_is_part_of_the_method() -> None:
    outer = Outer.parse("co2 over node, tau=3, on_loss=continue")
    assert outer.goes_on
    assert Outer.parse(str(outer)) == outer
    assert "on_loss" not in str(Outer.parse("co2 over node, tau=3"))
    with pytest.raises(OptionError, match="on_loss"):
        Outer.parse("co2 over node, tau=3, on_loss=stop")

"""Trains the same cases by autopar on four ranks, many cases in one start."""

from __future__ import annotations

import importlib
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.capture.capture import Captured
from autopar.errors import AutoparError
from autopar.ir.graph_text import fingerprint
from autopar.runtime.checkpoint import publish
from autopar.runtime.checkpoint.boxes import Box
from autopar.runtime.checkpoint.dcp import read_parts
from autopar.runtime.checkpoint.plans import Part
from autopar.runtime.checkpoint.safetensors_files import Reader
from autopar.runtime.checkpoint.values import DTYPES
from tests.features.feature import Case
from tests.features.models import OPTIMIZERS, batches, family, make, schedule
from tests.features.oracle import SEED, STEPS, Trained, train
from tests.features.table import REFUSED
from tests.support.ranks import run_ranks

# Slow devices on fast links: even small tensors are worth splitting.
DEVICE = "toy[1GFLOP/s 64GiB 1GB/s]"
MESH = f"{DEVICE}: data=2 @10GB/s 1us, tensor=2 @10GB/s 1us"
ANOTHER = f"{DEVICE}: tensor=2 @10GB/s 1us, data=2 @10GB/s 1us"
MIDDLE = STEPS // 2


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case on a rank.

    Attributes:
        errors: by part, see `Trained.errors`; empty if it failed.
        plan: that it was trained under, as a file has it, and the generated source.
        refused: an error of autopar, "PlanError: ...".
        failed: any error, with its traceback.
    """

    errors: Mapping[str, float] = field(default_factory=dict)
    plan: str = ""
    refused: str = ""
    failed: str = ""

    @property
    def error(self) -> float:
        """The largest error."""
        return max(self.errors.values(), default=float("inf"))


def assert_right(case: Case, ranks: Sequence[Outcome]) -> None:
    """Every rank trained like the oracle, or refused as it should."""
    refused = [why for names, why in REFUSED.items() if names <= set(case.features)]
    for outcome in ranks:
        for kind, reason in refused[:1]:
            assert outcome.refused.startswith(kind), (str(case), outcome.failed)
            assert reason in outcome.refused, (str(case), outcome.refused)
        if not refused:
            assert not outcome.failed, f"{case}\n{outcome.failed}"
            assert outcome.error <= case.run.within, (str(case), outcome.errors)
            for pattern in case.seen:
                assert re.search(pattern, outcome.plan), f"{case}: no {pattern}"


def judged(cases: Sequence[Case], at_once: int = 40) -> Iterator[tuple[Case, list[Outcome]]]:
    """Every case with its outcome on every rank.

    What follows a failure on the same ranks says little, so they are started anew behind one.
    """
    left = list(cases)
    while left:
        some = left[:at_once]
        with tempfile.TemporaryDirectory() as place:
            torch.save([train(case.recipe) for case in some], Path(place) / "oracles.pt")
            ranks = run_ranks(outcomes, some, place)
        for number in range(len(ranks[0])):
            yield some[number], [rank[number] for rank in ranks]
        left = left[len(ranks[0]) :]


def outcomes(cases: Sequence[Case], place: str) -> list[Outcome]:
    """The outcomes of this rank, up to the first case that fails; the folder has the oracles."""
    found = []
    oracles: list[Trained] = torch.load(Path(place) / "oracles.pt", weights_only=False)
    with made_once() as key:
        for number, (case, oracle) in enumerate(zip(cases, oracles, strict=True)):
            r = case.recipe
            key[:] = [r.model, r.tied, r.dropout, r.frozen, r.uneven, r.second, r.compute]
            try:
                program, trained = _train(case, Path(place) / str(number))
                plan = f"{program.plan.to_toml()}\n{program.source}"
                if case.run.replicas:  # each has moments of its own, of its own gradients
                    trained, oracle = replace(trained, moments={}), replace(oracle, moments={})
                found.append(Outcome(trained.errors(oracle), plan))
            except Exception as error:
                named = isinstance(error, AutoparError)
                refused = f"{type(error).__name__}: {error}" if named else ""
                found.append(Outcome(refused=refused, failed=traceback.format_exc()))
                break
        dist.barrier()
    return found


@contextmanager
def made_once() -> Iterator[list[Any]]:
    """Captures and plans what is alike once; `run_ranks` lets the first rank do it for all.

    Models are alike that have one key, which is yielded and to be filled.
    """
    compiler = importlib.import_module("autopar.session.compiler")
    sizing = importlib.import_module("autopar.planning.local_batches")
    capture, plan = sizing.capture_call, compiler.plan_captured
    known: dict[str, Any] = {}
    key: list[Any] = []

    def once(what: object, make: Callable[[], Any]) -> Any:
        if repr(what) not in known:
            known[repr(what)] = make()
        return known[repr(what)]

    def captured(call: Any, options: Any, trace: Any, microbatches: int | None) -> Captured:
        sizes = {name: value.shape for name, value in call.kwargs.items()}
        what = (key, sizes, replace(options, table={}), microbatches)
        return once(what, lambda: capture(call, options, trace, microbatches))

    def planned(found: Captured, mesh: Any, options: Any, trace: Any) -> Any:
        what = (key, fingerprint(found.graph), mesh, replace(options, table={}))
        return once(what, lambda: plan(found, mesh, options, trace))

    captures = patch.object(sizing, "capture_call", captured)
    with captures, patch.object(compiler, "plan_captured", planned):
        yield key


def _compiled(case: Case, mesh: str, seed: int) -> Any:
    recipe = case.recipe
    given: dict[str, Any] = {"microbatches": recipe.microbatches, **case.options}
    if recipe.grouped:
        given["groups"] = autopar.groups(family(recipe).groups)
    return autopar.compile(
        make(recipe, seed),
        mesh,
        optimizer=OPTIMIZERS[recipe.optimizer],
        example_inputs=batches(recipe, 1)[0],
        clip_norm=recipe.clip,
        ema=recipe.ema,
        **given,
    )


def _train(case: Case, place: Path) -> tuple[Any, Trained]:
    """The program, and what it leaves."""
    recipe = case.recipe
    program = _compiled(case, MESH, 0)
    rates = schedule(program.optimizer) if recipe.scheduled else None
    losses, norms = [], []
    torch.manual_seed(SEED)
    for step, batch in enumerate(batches(recipe, STEPS)):
        if case.run.resumed and step == MIDDLE:
            saving = program.save_checkpoint(
                place, scheduler=rates, asynchronous=case.run.asynchronous
            )
            saving.result()
            # Another model and another seed: whatever goes on comes from the checkpoint.
            program = _compiled(case, ANOTHER, 3)
            rates = schedule(program.optimizer) if recipe.scheduled else None
            torch.manual_seed(4)
            program.load_checkpoint(place, scheduler=rates)
        loss = program.step(**batch)
        if case.run.replicas:
            dist.all_reduce(loss := loss.detach().clone(), dist.ReduceOp.AVG)
        losses.append(loss.item())
        if recipe.clip is not None:
            norms.append(float(program.grad_norm))
        if rates is not None:
            rates.step()
    program.save_checkpoint(place.with_suffix(".end"))
    return program, Trained(
        losses,
        program.state_dict(),
        {} if recipe.ema is None else program.ema_state_dict(),
        _moments(place.with_suffix(".end")),
        norms,
        sorted(group["lr"] for group in program.optimizer.param_groups),
    )


def _moments(path: Path) -> dict[str, Tensor]:
    """The optimizer's state in a checkpoint."""
    index = publish.read(path)
    found = {
        f"{name} {key}": (f"optimizer.{name}.{key}", torch.empty(s.shape, dtype=DTYPES[s.dtype]))
        for name, states in index.optimizer_state().items()
        for key, s in states.items()
        if s.shape
    }
    parts = [
        Part(key, value, Box.whole(tuple(value.shape)), tuple(value.shape))
        for key, value in found.values()
    ]
    read_parts(Reader(path, index), lambda: parts, None)
    return {name: value for name, (_, value) in found.items()}

"""Trains under random settings on several ranks, and compares with a plain loop on one process.

`python -m tests.fuzz.training 0 60` tests the settings of these seeds and prints what is said of
each; `0 60 apart` those of replicas that train apart, and `0 60 stale` those of pipelines that do
not wait. A setting that is refused is no fault; it is printed with the error.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR

import autopar
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from tests.fuzz.expected import expected
from tests.fuzz.loops import GAMMA, Run, group_of
from tests.fuzz.settings import OPTIMIZERS, Settings
from tests.support.ranks import run_ranks

TOLERANCE, REFUSED = 1e-8, "refused: "
# Options that a session keeps when it is replaced by one with another plan.
KEPT = ("clip_norm", "ema", "fuse", "backend", "shapes", "batches", "outer")


@dataclass
class Training:
    """The training of one rank, through a session and perhaps a second one."""

    settings: Settings
    folder: str

    def __post_init__(self) -> None:
        self.options, self.found = dict(self.settings.options), Run()
        self.batches = list(self.settings.batches())
        self._open()

    def _open(self) -> None:
        settings, given = self.settings, {k: v for k, v in self.options.items() if v is not None}
        if settings.grouped:
            given["groups"] = group_of
        self.session = autopar.compile(
            settings.made(),
            settings.mesh,
            optimizer=OPTIMIZERS[settings.optimizer],
            example_inputs=self._part(self.batches[0], 0),
            **given,
        )
        self.scheduler = None
        if settings.scheduled:
            self.scheduler = ExponentialLR(self.session.optimizer, GAMMA)

    def _part(self, batch: dict[str, Tensor], number: int) -> dict[str, Tensor]:
        """Returns the batch, or one part of it if every rank passes its own."""
        if self.options.get("batches") != "local":
            return batch
        parts = self.settings.parts(self.options)
        return {name: value.tensor_split(parts)[number] for name, value in batch.items()}

    def run(self) -> Run:
        """Trains, and returns the results."""
        torch.manual_seed(self.settings.seed)
        for number, batch in enumerate(self.batches):
            given = self._part(batch, self.session.data_rank)
            if self.settings.evaluated:
                loss = self.session.eval_step(**given).loss
                assert loss is not None
                self.found.evaluations.append(float(loss))
            self.found.losses.append(float(self.session.step(**given)))
            if self.scheduler is not None:
                self.scheduler.step()
            if self.settings.saved == number + 1:
                self._replace()
        if self.settings.method:
            self.found.stages = self._stages()
        self.found.weights = dict(self.session.state_dict())
        self.found.averages = dict(self.session.ema_state_dict()) if "ema" in self.options else {}
        self.session.close()
        return self.found

    def _stages(self) -> dict[str, int]:
        """Returns the stage of each parameter, as the pipeline holds them."""
        everywhere = self.session._executor.everywhere.items()
        return {key: number for (number, _), held in everywhere for key in held.state.names}

    def _replace(self) -> None:
        """Continues in a second session, from a checkpoint."""
        path = f"{self.folder}/{self.settings.seed}"
        self.session.save_checkpoint(path, scheduler=self.scheduler)
        self.session.close()
        if self.settings.again:
            kept = {name: value for name, value in self.options.items() if name in KEPT}
            if self.settings.again.get("stages") == "auto":  # a search takes whole batches
                kept.pop("batches", None)
            self.options = {**kept, **self.settings.again}
        self._open()
        self.session.load_checkpoint(path, scheduler=self.scheduler)


def together(jobs: list[Settings], folder: str) -> list[Run]:
    """Returns the trainings of this rank."""
    warnings.simplefilter("ignore")
    found = []
    for settings in jobs:
        try:
            found.append(Training(settings, folder).run())
        except AutoparError as error:
            found.append(Run(refused=f"{type(error).__name__}: {error}"))
        except Exception:
            found.append(Run(crashed=traceback.format_exc()))
    return found


def _differences(run: Run, wanted: Run) -> Iterator[str]:
    """Yields what is wrong in the results of a rank."""
    pairs = [
        (f"{kind} {number}", mine, its)
        for kind in ("losses", "evaluations")
        for number, (mine, its) in enumerate(
            zip(getattr(run, kind), getattr(wanted, kind), strict=True)
        )
    ]
    for kind in ("weights", "averages"):
        mine, its = getattr(run, kind), getattr(wanted, kind)
        if bool(mine) != bool(its) or (kind == "weights" and mine.keys() != its.keys()):
            yield f"names of {kind}: {sorted(mine.keys() ^ its.keys())}"
        pairs += [(f"{kind} {name}", mine[name], its[name]) for name in mine.keys() & its.keys()]
    for what, mine, its in pairs:
        one, other = torch.as_tensor(mine), torch.as_tensor(its)
        if other.isnan().any() and not other.dim():  # a loss that is not compared
            continue
        off = float((one - other).abs().max() / other.abs().max().clamp(min=1.0))
        if not off <= TOLERANCE:
            yield f"{what} off by {off:.2g}"


def fault(settings: Settings, runs: list[Run]) -> str:
    """Returns what is wrong, "" for nothing, or by what error the settings are refused."""
    if crashed := next((run.crashed for run in runs if run.crashed), ""):
        return crashed
    refused = {run.refused for run in runs}
    if "" not in refused:
        return f"{REFUSED}{runs[0].refused}"
    if len(refused) > 1:
        return f"only some ranks refuse: {[run.refused for run in runs]}"
    loops = expected(settings, runs[0].stages)
    wrong = [
        said
        for rank, run in enumerate(runs)
        for said in _differences(run, loops[settings.replica_of(rank)])
    ]
    return "; ".join(wrong[:4])


def judge(jobs: Sequence[Settings], start: str = "forkserver") -> dict[int, str]:
    """Returns what is said of settings, by their seeds; see `fault`."""
    said: dict[int, str] = {}
    with warnings.catch_warnings(action="ignore"), tempfile.TemporaryDirectory() as folder:
        for count in sorted({Mesh.parse(job.mesh).size for job in jobs}):
            alike = [job for job in jobs if Mesh.parse(job.mesh).size == count]
            said |= _said(alike, folder, count, start)
    return said


def _said(jobs: list[Settings], folder: str, count: int, start: str) -> dict[int, str]:
    """Returns what is said of jobs of so many ranks; where processes die, each by itself."""
    try:
        ranks = run_ranks(together, jobs, folder, count=count, start=start)
    except Exception as error:  # of any rank
        if len(jobs) == 1:
            return {jobs[0].seed: f"the processes died: {error}"[-2000:]}
        return {s: text for job in jobs for s, text in _said([job], folder, count, start).items()}
    return {job.seed: fault(job, list(runs)) for job, *runs in zip(jobs, *ranks, strict=True)}


def main() -> None:
    """Prints what is said of a range of seeds."""
    first, last = int(sys.argv[1]), int(sys.argv[2])
    make = getattr(Settings, sys.argv[3] if len(sys.argv) > 3 else "of")
    for place in range(first, last, 12):
        jobs = [make(seed) for seed in range(place, min(place + 12, last))]
        for seed, text in sorted(judge(jobs).items()):
            print(seed, f"{text}\n    {make(seed)}" if text else "ok", flush=True)


if __name__ == "__main__":
    main()

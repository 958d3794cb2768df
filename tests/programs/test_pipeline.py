"""Training in stages equals training on one device with the same microbatches."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from autopar.errors import ScheduleError, StageError
from autopar.inter_op.schedules import exact
from autopar.planning.pipelines.stages import schedule_of
from tests.support.pipelines import Case, Jobs, unsharded
from tests.support.ranks import run_ranks

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
QUICK = [
    Case("gpt2", "zb_h1", dropout=0.1, clip=0.5),
    Case("llama", "gpipe", (1, 1, 2)),
]


def test_training() -> None:
    check(QUICK)


def check(cases: list[Case]) -> None:
    """Trains all cases in one process group, and checks each of them."""
    jobs = Jobs(cases)
    references = {}
    for case in cases:
        key = (*case.key, case.clip)
        if key not in references:
            references[key] = unsharded(case)
    wrong = {}
    (count,) = {sum(case.groups) for case in cases}
    ranks = run_ranks(jobs.train, count=count)
    for number, case in enumerate(cases):
        runs, reference = [rank[number] for rank in ranks], references[*case.key, case.clip]
        error = max(run.error(reference) for run in runs)
        if not error <= TOLERANCE[case.dtype]:
            wrong[case] = f"off by {error:.2g}"
        elif any(run.losses != runs[0].losses for run in runs):
            wrong[case] = "the ranks report different losses"
    assert not wrong, "\n".join(f"{case}: {fault}" for case, fault in wrong.items())


SCHEDULES = sorted(exact())
GROUPS = ((1, 1, 1, 1), (2, 2), (1, 1, 2))


def legal(case: Case) -> bool:
    """Whether the schedule exists for the case, and has a copy of a stage on one kind of mesh."""
    try:
        made = schedule_of(case.schedule, len(case.groups), case.microbatches)
    except ScheduleError:
        return False
    sizes = [{case.groups[rank] for rank in ranks} for ranks in zip(*made.placement, strict=True)]
    return all(len(found) == 1 for found in sizes)


def cases_of(model: str, plans: tuple[str, ...] = ("free",)) -> list[Case]:
    """Every schedule on every division of four devices."""
    cases = [
        Case(model, schedule, groups, 4 if len(groups) == 2 else 8, plan)
        for schedule, groups, plan in product(SCHEDULES, GROUPS, plans)
        if plan == "free" or groups == (2, 2)
    ]
    return [case for case in cases if legal(case) and case not in QUICK]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gpt2_by_every_schedule(schedule: str) -> None:
    cases = cases_of("gpt2", ("free", "data", "tensor"))
    more = [replace(case, dropout=0.1, clip=0.5) for case in cases if case.plan == "tensor"]
    check([case for case in [*cases, *more] if case.schedule == schedule])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "t5"])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_other_models_by_every_schedule(model: str, groups: tuple[int, ...]) -> None:
    check([case for case in cases_of(model) if case.groups == groups])


@pytest.mark.slow
def test_resnet() -> None:
    """Running statistics are those of the microbatches, one after another, on one copy."""
    cases = [replace(case, cut="operators") for case in cases_of("resnet")]
    check([case for case in cases if case.schedule != "chimera"])


def test_two_copies_write_no_statistics() -> None:
    with pytest.raises(StageError, match="copies of the stage on two groups") as told:
        Jobs([Case("resnet", "chimera", cut="operators")])
    assert told.value.where.endswith(("running_mean", "running_var", "num_batches_tracked"))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "llama", "t5", "resnet"])
def test_in_single_precision(model: str) -> None:
    if model == "resnet":
        cases = [Case(model, name, (2, 2), 4, cut="operators") for name in ("1f1b", "zb_v")]
    else:
        cases = [case for case in cases_of(model) if case.groups != (1, 1, 2)]
    check([replace(case, dtype=torch.float32) for case in cases])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_on_eight_ranks(model: str) -> None:
    """Every schedule on four groups of two, and some on other divisions of eight devices."""
    cases = [Case(model, schedule, (2, 2, 2, 2), 4) for schedule in SCHEDULES]
    cases += [
        Case(model, "1f1b", (1, 1, 2, 4), 4),
        Case(model, "zb_h1", (4, 2, 1, 1), 4),
        Case(model, "interleaved_1f1b chunks=2", (4, 4), 4),
        Case(model, "gpipe", (1,) * 8, 8, cut="operators"),
        Case(model, "zb_h2", (1,) * 8, 8, cut="operators"),
    ]
    check([case for case in cases if legal(case)])

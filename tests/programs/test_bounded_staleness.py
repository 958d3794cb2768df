"""Bounded staleness: a replica runs up to s steps ahead of the slowest one, and then waits."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest
from torch.distributed import FileStore

import autopar
from autopar.inter_op.checkers.deadlock_checker import check
from autopar.ir.action import SYNC_AWAIT, SYNC_BEGIN, Action
from autopar.ir.pipeline_step import Step, Wiring, unrolled
from autopar.runtime.pipeline.sums import Sums
from tests.programs.test_asynchronous import check as check_method
from tests.support.ranks import run_ranks
from tests.support.stale_weights import METHODS, Method, program_of, simulated

PINS = autopar.pins.data_parallel("gpu")


def apart(folder: str, ahead: int) -> tuple[int, int, float]:
    """A slow replica and a fast one, which begins to wait before the slow one goes on.

    Returns:
        The steps that this rank had made when the fast one began to wait, those of the fast one,
        and the seconds that this rank waited.
    """
    store = FileStore(f"{folder}/store{ahead}", 2)
    method = Method(f"bounded_staleness ahead={ahead}", 4, 0, lambda *_: 0, lambda *_: 0)
    program, batches = program_of(method, 1, "sgd", 2, pins=PINS)
    pipeline, arrive, done = program._executor, Sums.arrive, 0

    def waits(sums: Sums) -> None:
        """Replaces the wait of the fast one for the sums of the slow one's second step."""
        if done == ahead + 1:
            (part,) = sums.parts
            assert part.waiting is not None
            assert not part.waiting.is_completed()
            store.set("fast", str(done))
        arrive(sums)

    told = (0, 0)
    for step, batch in enumerate(batches):
        if pipeline.rank == 0 and step == 1:
            told = step, int(store.get("fast"))  # waits for it
        with patch.object(Sums, "arrive", waits if pipeline.rank else arrive):
            program.step(**batch)
        done += 1
    waited: float = pipeline.continuous.waited
    program.close()
    return *told, waited


@pytest.mark.parametrize("ahead", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_replica_is_ahead_by_as_many_steps_as_allowed_and_then_waits(
    tmp_path: Path, ahead: int
) -> None:
    """Neither could go on if replicas met anywhere else: the slow one waits for the fast one."""
    (slow, fast, _), (_, _, waited) = run_ranks(apart, str(tmp_path), ahead, count=2)
    assert fast - slow == ahead
    assert waited > 0


def profiled(file: str) -> None:
    """A profile of a step that takes sums of the one before."""
    program, batches = program_of(METHODS["bounded"], 1, "sgd", 2, pins=PINS)
    for batch in batches[:-1]:
        program.step(**batch)
    program.step(**batches[-1], profile=Path(file))


def test_a_profile_shows_how_long_a_rank_waits(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    run_ranks(profiled, str(file), count=2)
    events = json.loads(file.read_text())["traceEvents"]
    waits = [event for event in events if event.get("cat") == "wait"]
    for rank in range(2):
        own = [event for event in waits if event["pid"] == rank]
        assert [event["name"] for event in own] == [
            "SYNC_AWAIT0.31 waits for its sums", "waits for the report of a step",
        ]  # fmt: skip
        (named,) = (
            e["args"]["name"] for e in events if e["name"] == "process_name" and e["pid"] == rank
        )
        seconds = sum(event["dur"] for event in own) / 1e6
        assert named.endswith(f"waits {seconds:.6f} s for others")


# Of two microbatches, so that each has a sample for every one of four devices.
FEW = Method(
    "bounded_staleness ahead=2 outer=1", 2, 0, *[lambda s, p, k: max(0, k // 2 - 2)] * 2, late=2
)


def by_names(axes: dict[str, int], names: tuple[str, ...]) -> float:
    """Largest error of the weights where named gradients are summed apart from the others, at once
    or late, over the axes of a mesh."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in axes.items())
    pins = autopar.pins.data_parallel(*axes)
    program, batches = program_of(FEW, 1, "adamw", mesh=f"cpu: {mesh}", pins=pins)
    continuous, row = program._executor.continuous, list[Action]()
    for action in continuous._row:
        row.append(action)
        if names and action.kind in (SYNC_BEGIN, SYNC_AWAIT):
            # The others follow by themselves.
            row[-1:] = [action._replace(names=tuple(f"layers.0.{n}" for n in names)), action]
    continuous._row = tuple(row)
    count = FEW.microbatches
    check(Step(unrolled([row], count, 5), ((0,),), 5 * count, Wiring((), ((),), (tuple(axes),))))
    for batch in batches:
        program.step(**batch)
    state = program.state_dict()
    program.close()
    _, weights = simulated(FEW, 1, "adamw")
    return max(float((state[name].cpu() - value).abs().max()) for name, value in weights.items())


def test_named_gradients_are_summed_apart() -> None:
    assert max(run_ranks(by_names, {"gpu": 2}, ("bias",), count=2)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("names", [(), ("weight",)])
def test_replicas_of_a_host_do_not_get_apart(names: tuple[str, ...]) -> None:
    """Sums inside a host are made at once, those between hosts are late."""
    assert max(run_ranks(by_names, {"node": 2, "gpu": 2}, names, count=4)) < 1e-12


@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.slow), 0.1])
def test_replicas_of_one_stage_train_as_stale_weights_do(clip: float | None) -> None:
    check_method(["bounded"], 1, 2, pins=PINS, clip_norm=clip)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.1])
def test_four_replicas_of_one_stage_train_as_stale_weights_do(clip: float | None) -> None:
    check_method(["far ahead"], 1, 4, pins=PINS, clip_norm=clip)

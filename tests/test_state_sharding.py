"""Every state sharding trains as one device does, and sends what PaRO's tables say."""

from __future__ import annotations

from autopar.ir.state import shardings
from tests.ranks import run_ranks
from tests.state_sharding import Case, Jobs, unsharded

STATES = [str(one) for one in shardings()]


def check(cases: list[Case]) -> None:
    """Train all cases in one process group."""
    jobs = Jobs(cases)
    whole = {(c.make, c.microbatches, c.optimizer): unsharded(c) for c in cases}
    wrong = {}
    for rank in run_ranks(jobs.train):
        for case, (run, _) in zip(cases, rank, strict=True):
            error = run.error(whole[case.make, case.microbatches, case.optimizer])
            if not error <= 1e-9:
                wrong[case.state, case.microbatches, case.tensor] = error
    assert not wrong


def test_all_fourteen_train_as_one_device_does() -> None:
    check([Case(state, count) for state in STATES for count in (1, 4)])

"""Training in stages is training on one device with the same microbatches."""

from __future__ import annotations

from tests.pipelines import Case, Jobs, unsharded
from tests.ranks import run_ranks

TOLERANCE = 1e-9
QUICK = [
    Case("gpt2", "1f1b", (2, 2), plan="data"),
    Case("gpt2", "zb_h1", dropout=0.1, clip=0.5),
    Case("llama", "gpipe", (1, 1, 2)),
    Case("llama", "chimera"),
    Case("t5", "interleaved_1f1b", (2, 2)),
]


def test_training() -> None:
    check(QUICK)


def check(cases: list[Case]) -> None:
    """Train all cases in one process group, and judge every one of them."""
    jobs = Jobs(cases)
    references = {}
    for case in cases:
        key = (*case.key, case.clip)
        if key not in references:
            references[key] = unsharded(case)
    wrong = {}
    ranks = run_ranks(jobs.train)
    for number, case in enumerate(cases):
        runs, reference = [rank[number] for rank in ranks], references[*case.key, case.clip]
        error = max(run.error(reference) for run in runs)
        if not error <= TOLERANCE:
            wrong[case] = f"off by {error:.2g}"
        elif any(run.losses != runs[0].losses for run in runs):
            wrong[case] = "the ranks report different losses"
    assert not wrong, "\n".join(f"{case}: {fault}" for case, fault in wrong.items())

"""Every state sharding trains as one device does, and sends what PaRO's tables say."""

from __future__ import annotations

from collections import Counter
from math import prod

from autopar.ir.mesh import Mesh
from autopar.ir.state import StateSharding, shardings
from tests.ranks import run_ranks
from tests.state_sharding import MESH, Calls, Case, Jobs, Run, unsharded

STATES = [str(one) for one in shardings()]


def trained(cases: list[Case]) -> list[list[tuple[Run, Calls]]]:
    """Train all cases in one process group, and compare each with one device."""
    jobs = Jobs(cases)
    ranks = run_ranks(jobs.train)
    wrong = {}
    for number, case in enumerate(cases):
        whole = unsharded(case)
        error = max(rank[number][0].error(whole) for rank in ranks)
        if not error <= 1e-9:
            wrong[case.state, case.microbatches, case.tensor] = error
    assert not wrong
    return ranks


def sent(calls: Calls) -> Counter[tuple[str, tuple[str, ...]]]:
    """Bytes of each kind of collective over each set of axes."""
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for kind, axes, nbytes in calls:
        found[kind, axes] += nbytes
    return found


def test_all_fourteen_train_as_one_device_does_and_send_what_is_counted() -> None:
    """What the loss, the norm and the watch over batches send is left out: the same for all."""
    cases = [Case(state, count) for state in STATES for count in (1, 4)]
    mesh = Mesh.parse(MESH)
    model, _ = cases[0].make()
    numel = sum(prod(parameter.shape) for parameter in model.parameters())
    for rank in trained(cases):
        common: dict[int, Counter[tuple[str, tuple[str, ...]]]] = {}
        for case, (_, calls) in zip(cases, rank, strict=True):
            sharding = StateSharding.parse(case.state)
            counted: Counter[tuple[str, tuple[str, ...]]] = Counter()
            for call, made in sharding.collectives(
                numel, mesh, ("node",), case.microbatches, element=8
            ):
                if call.when != "backward":  # what was gathered is kept
                    axes = tuple(name for name in mesh.names if name in made.axes)
                    counted[made.kind, axes] += call.times * made.nbytes
            found = sent(calls)
            found.subtract(counted)
            beside = Counter({key: nbytes for key, nbytes in found.items() if nbytes})
            assert beside == common.setdefault(case.microbatches, beside), case
            assert sum(beside.values()) < 1000

"""Every state sharding trains like one device, and sends what PaRO's tables say."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product

import pytest

from autopar.ir.mesh import Mesh
from autopar.ir.state_sharding import StateSharding, shardings
from tests.support.ranks import run_ranks
from tests.support.state_sharding import MESH, Calls, Case, Jobs, Run, unsharded

STATES = [str(one) for one in shardings()]
Bytes = Counter[tuple[str, tuple[str, ...]]]


def trained(cases: list[Case]) -> list[list[tuple[Run, Calls]]]:
    """Train all cases in one process group, and compare each with one device."""
    jobs = Jobs(cases)
    ranks = run_ranks(jobs.train)
    wrong = {}
    for number, case in enumerate(cases):
        whole = unsharded(case)
        error = max(rank[number][0].error(whole) for rank in ranks)
        if not error <= 1e-9:
            wrong[case] = error
    assert not wrong
    return ranks


def sent(calls: Calls) -> Bytes:
    """Bytes of each kind of collective over each set of axes."""
    found: Bytes = Counter()
    for kind, axes, nbytes in calls:
        found[kind, axes] += nbytes
    return found


def counted(case: Case) -> Bytes:
    """What PaRO's Table 3 says, as calls: of float64, with what is gathered again if it is.

    The table gathers everything again; a backward asks for what autograd keeps, which is neither
    an embedding nor the bias of a linear.
    """
    mesh, found = Mesh.parse(MESH), Bytes()
    named = dict(case.make()[0].named_parameters())
    unread = re.compile(r"embed\.weight|(up|head)\.bias")
    every = sum(p.numel() for p in named.values())
    read = sum(p.numel() for name, p in named.items() if not unread.search(name))
    sharding = StateSharding.parse(case.state)
    again = case.again or sharding.secondary
    for numel, when in (
        (every, ("forward", "accumulate", "reduce", "update")),
        (read, ("backward",)),
    ):
        calls = sharding.collectives(numel, mesh, ("node",), case.microbatches, element=8)
        for call, made in calls:
            if call.when in when and (again or call.when != "backward"):
                axes = tuple(name for name in mesh.names if name in made.axes)
                found[made.kind, axes] += call.times * made.nbytes
    return found


def check(cases: list[Case]) -> None:
    """What the loss, the norm and the watch over batches send is the same for all, and little."""
    for rank in trained(cases):
        common: dict[int, Bytes] = {}
        for case, (_, calls) in zip(cases, rank, strict=True):
            found = sent(calls)
            found.subtract(counted(case))
            beside = Bytes({key: nbytes for key, nbytes in found.items() if nbytes})
            assert beside == common.setdefault(case.microbatches, beside), case
            assert 0 <= sum(beside.values()) < 1000


def test_state_shardings_train_as_one_device_does_and_send_what_is_counted() -> None:
    """Those of PaRO, ZeRO++ and full sharding that gathers again, with and without accumulation."""
    later = [Case("GGG", 4, again=True), Case("GGG+I", ahead=True)]
    check([Case("IGG", 4), *later])


@pytest.mark.slow
def test_all_fourteen_train_as_one_device_does_and_send_what_is_counted() -> None:
    cases = [
        Case(state, count, again=again)
        for state, count, again in product(STATES, (1, 4), (False, True))
        if not again or state[0] != "N"
    ]
    check([*cases, Case("GGG+I", 1), Case("GGG+I", 4), Case("GGG", 4, again=True, ahead=True)])

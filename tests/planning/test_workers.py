"""Processes that share the work of planning."""

from __future__ import annotations

import gc
import os
import pickle
from dataclasses import replace
from functools import partial
from multiprocessing import parent_process

import pytest

from autopar.errors import AutoparError
from autopar.intra_op.rule_table import table
from autopar.planning.options import Options
from autopar.planning.workers import Workers

HERE = os.getpid()


def square(number: int) -> tuple[int, int]:
    """The square, and the process that worked it out; below zero an error, at zero in one alone."""
    if number < 0:
        raise AutoparError("a number below zero")
    if number == 0 and parent_process() is not None:
        os._exit(1)
    return number**2, os.getpid()


def test_one_process_does_everything() -> None:
    assert Workers(0).run([[partial(square, 2), partial(square, 3)]]) == [[(4, HERE), (9, HERE)]]


def test_options_travel_with_the_rules_that_only_this_process_has() -> None:
    """Without this no stage is priced elsewhere: some of autopar's own rules are closures."""
    own = replace(table()["aten.relu"], op="mine.relu")
    options = Options(table={**table(), own.op: own}, memory=1e9)
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.slow
def test_rows_are_worked_on_by_a_process_each() -> None:
    with Workers(2) as workers:
        rows = [[partial(square, 10 * row + at) for at in range(3)] for row in range(3)]
        found = workers.run(rows)
        assert [[number for number, _ in row] for row in found] == [
            [0, 1, 4], [100, 121, 144], [400, 441, 484]
        ]  # fmt: skip
        places = [{place for _, place in row} for row in found]
        assert [len(row) for row in places] == [1, 1, 1]
        assert len(set.union(*places)) == 3
        assert places[0] == {HERE}


@pytest.mark.slow
def test_what_is_not_answered_is_worked_out_here() -> None:
    with Workers(1) as workers:
        assert workers.run([[], [lambda: (1, HERE)]]) == [[], [(1, HERE)]]  # cannot be pickled
        with pytest.raises(AutoparError, match="below zero"):
            workers.run([[], [partial(square, -1)]])
        with pytest.raises(AutoparError, match="below zero"):
            workers.run([[partial(square, -1)], [partial(square, 5)]])
        ((_, place),) = workers.run([[], [partial(square, 6)]])[1]
        assert place != HERE  # and not the answer to what was asked before
        for number in (0, 7):  # it has ended
            assert workers.run([[], [partial(square, number)]])[1] == [(number**2, HERE)]


def test_other_processes_collect_garbage_as_rarely_as_this_one() -> None:
    before = gc.get_threshold()
    gc.set_threshold(54_321, 12, 34)
    try:
        with Workers(1) as workers:
            (here,), (there,) = workers.run([[gc.get_threshold], [gc.get_threshold]])
    finally:
        gc.set_threshold(*before)
    assert here == there == (54_321, 12, 34)

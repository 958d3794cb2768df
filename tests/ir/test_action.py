"""Actions as text, and what comes before what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.ir.action import (
    ALL,
    COMPUTE,
    REDUCE,
    TRANSFER,
    Action,
    dependencies,
    format_row,
    parse_row,
)

NUMBER = st.integers(0, 1000)
ACTIONS = st.builds(
    Action, st.sampled_from((*COMPUTE, *TRANSFER)), NUMBER, NUMBER, st.integers(0, 3)
) | st.builds(Action, st.just(REDUCE), NUMBER, st.just(ALL), st.integers(0, 3))


@given(st.lists(ACTIONS))
def test_rows_read_back_what_they_print(row: list[Action]) -> None:
    assert parse_row(format_row(row)) == tuple(row)


def test_text_is_kind_stage_and_microbatch() -> None:
    assert Action.parse("F2.5") == ("F", 2, 5, 0)
    assert Action.parse("SEND_B13.0'") == ("SEND_B", 13, 0, 1)
    assert Action.parse("REDUCE2") == ("REDUCE", 2, ALL, 0)


@pytest.mark.parametrize("text", ["", "2F5", "F2", "F2.", "F.5", "G2.5", "REDUCE2.5", "F2.5''x"])
def test_other_text_is_refused_by_name(text: str) -> None:
    with pytest.raises(ScheduleError, match="cannot read the action") as caught:
        Action.parse(text)
    assert repr(text) in str(caught.value)
    assert "F2.5" in caught.value.todo


def test_dependencies_lead_down_and_back_up() -> None:
    """Followed from the last weight backward, they are the whole training of one microbatch."""
    stages = 4
    before = {Action("W", 0, 3)}
    queue = list(before)
    while queue:
        for alternatives in dependencies(queue.pop(), stages):
            action = next(one for one in alternatives if one.kind != "B")
            if action not in before:
                before.add(action)
                queue.append(action)
    expected = {Action(kind, stage, 3) for kind in "FI" for stage in range(stages)}
    assert before == expected | {Action("W", 0, 3)}
    assert dependencies(Action("F", 0, 3), stages) == ()
    assert dependencies(Action("B", 3, 1, 1), stages) == ((Action("F", 3, 1, 1),),)
    assert dependencies(Action("B", 2, 1), stages)[1] == (Action("B", 3, 1), Action("I", 3, 1))

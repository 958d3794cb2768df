"""Actions as text, and refusals of malformed text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.ir.action import (
    ALL,
    COMPUTE,
    COPIES,
    ENDING,
    SYNC,
    SYNC_AWAIT,
    SYNC_BEGIN,
    TRANSFER,
    Action,
    format_row,
    parse_row,
)
from autopar.ir.pipeline_step import Edge, Wiring

NUMBER, COPY = st.integers(0, 1000), st.integers(0, 3)
BATCH = st.integers(-1000, 1000)
NAMES = st.lists(st.text(min_size=1), max_size=3).map(tuple)
ACTIONS = st.one_of(
    st.tuples(st.sampled_from(COMPUTE), NUMBER, BATCH, COPY, NUMBER).map(lambda one: Action(*one)),
    st.builds(
        lambda to, *rest: Action(*rest).towards(to),
        NUMBER, st.sampled_from(TRANSFER), NUMBER, BATCH, COPY,
    ),
    st.tuples(st.sampled_from(ENDING), NUMBER, BATCH | st.just(ALL), COPY).map(
        lambda one: Action(*one)
    ),
    st.builds(
        lambda stage, names: Action(SYNC, stage, over=COPIES, names=names), NUMBER, NAMES
    ),
    st.builds(
        lambda kind, stage, batch, axes, names: Action(kind, stage, batch, 0, 0, -1, axes, names),
        st.sampled_from((SYNC, SYNC_BEGIN, SYNC_AWAIT)), NUMBER, BATCH,
        st.sampled_from(("", "@gpu", "@node@gpu_2")), NAMES,
    ),
)  # fmt: skip


@given(st.lists(ACTIONS))
def test_rows_read_back_what_they_print(row: list[Action]) -> None:
    assert parse_row(format_row(row)) == tuple(row)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("F2.5", ("F", 2, 5)),
        ("SEND_B13.0'", ("SEND_B", 13, 0, 1)),
        ("UPDATE2", ("UPDATE", 2)),
        ("UPDATE2.7", ("UPDATE", 2, 7)),
        ("B2.-1@3", ("B", 2, -1, 0, 3)),
        ("SEND_F2.5>4", ("SEND_F", 2, 5, 0, 0, 4)),
        ("RECV_F4.5<2", ("RECV_F", 4, 5, 0, 0, 2)),
        ("SYNC_BEGIN2.5", ("SYNC_BEGIN", 2, 5)),
        ("SYNC0/copies", ("SYNC", 0, ALL, 0, 0, -1, "copies")),
        ("SYNC0/copies(a.w,b)", ("SYNC", 0, ALL, 0, 0, -1, "copies", ("a.w", "b"))),
        ("SYNC0.7/@gpu", ("SYNC", 0, 7, 0, 0, -1, "@gpu")),
        ("SYNC_BEGIN0.7/@node@rack(a.w)", ("SYNC_BEGIN", 0, 7, 0, 0, -1, "@node@rack", ("a.w",))),
        ("SYNC_AWAIT0.-1/(a.w)", ("SYNC_AWAIT", 0, -1, 0, 0, -1, "", ("a.w",))),
    ],
)
def test_text_is_kind_stage_and_microbatch(text: str, fields: tuple[object, ...]) -> None:
    assert Action.parse(text) == Action(*fields)  # type: ignore[arg-type]
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "2F5", "F2", "F2.", "F.5", "G2.5", "F2.5''x", "REDUCE2", "SEND_F2.5@1", "UPDATE2@1",
        "F2.5>3", "SEND_F2.5<3", "RECV_F2.5>1", "SYNC2/axis", "SYNC2/@", "SYNC2/",
        "UPDATE2/@gpu", "F2.5/@gpu", "SYNC_BEGIN2/copies",
        "UPDATE2/copies", "SYNC2/copies()",
    ],
)  # fmt: skip
def test_other_text_is_refused_by_name(text: str) -> None:
    with pytest.raises(ScheduleError, match="cannot read the action") as caught:
        Action.parse(text)
    assert repr(text) in str(caught.value)
    assert "F2.5" in caught.value.todo


def test_a_transfer_knows_its_other_side() -> None:
    for text, other in (
        ("SEND_F2.5", "RECV_F3.5"),
        ("SEND_B2.5'", "RECV_B1.5'"),
        ("SEND_F2.5>4", "RECV_F4.5<2"),
        ("SEND_B4.5>2", "RECV_B2.5<4"),
    ):
        action = Action.parse(text)
        assert str(action.counterpart) == other
        assert action.counterpart.counterpart == action
        assert action.towards(action.partner) == action


def test_what_a_stage_needs_leads_down_and_back_up() -> None:
    """Followed from the last weight backward, it is the whole training of one microbatch."""
    stages = 4
    wiring = Wiring.chain(stages)
    before = {Action("W", 0, 3)}
    queue = list(before)
    while queue:
        for alternatives in wiring.needs(queue.pop()):
            action = next(one for one in alternatives if one.kind != "B")
            if action not in before:
                before.add(action)
                queue.append(action)
    expected = {Action(kind, stage, 3) for kind in "FI" for stage in range(stages)}
    assert before == expected | {Action("W", 0, 3)}
    assert wiring.needs(Action("F", 0, 3)) == ()
    assert wiring.needs(Action("B", 3, 1, 1)) == ((Action("F", 3, 1, 1),),)
    assert wiring.needs(Action("B", 2, 1))[1] == (Action("B", 3, 1), Action("I", 3, 1))
    skips = Wiring((Edge(0, 1), Edge(1, 2), Edge(0, 2, gradient=False)), ((),) * 3)
    assert skips.needs(Action("F", 2, 0)) == ((Action("F", 1, 0),), (Action("F", 0, 0),))
    assert len(skips.needs(Action("B", 0, 0))) == 2

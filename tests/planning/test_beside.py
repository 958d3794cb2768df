"""A function that another process calls."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable

import pytest

from autopar.errors import AutoparError
from autopar.planning.beside import Beside


def maker() -> Callable[[int], tuple[int, int]]:
    asked = []

    def square(number: int) -> tuple[int, int]:
        if number < 0:
            raise AutoparError("a number below zero")
        if number == 0:
            os._exit(1)
        asked.append(number)
        return sum(asked) ** 2, os.getpid()

    return square


@pytest.mark.slow
def test_another_process_answers_until_it_has_ended() -> None:
    other = Beside(maker)
    found = []
    for number in (2, 3, -1, 1):
        other.ask(number)
        found.append(other.answer())
    squares = [None if one is None else one[0] for one in found]
    assert squares == [4, 25, None, 36]  # it remembers what it was asked
    assert os.getpid() not in [one[1] for one in found if one is not None]
    other.ask(0)
    assert other.answer() is None
    other.ask(1)
    assert other.answer() is None


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        Beside(lambda: maker())

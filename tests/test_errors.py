"""The catalogue of errors: each has an example, which raises it with the message shown."""

from __future__ import annotations

import doctest
import inspect

import pytest

from autopar import errors
from autopar.errors import AutoparError

CLASSES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, AutoparError) and kind is not AutoparError
]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_is_shown_with_what_raises_it(kind: type[AutoparError]) -> None:
    (found,) = doctest.DocTestFinder(recurse=False).find(
        kind, kind.__name__, errors, globs=vars(errors).copy()
    )
    assert found.examples, "its docstring has no example"
    last = found.examples[-1]
    assert last.exc_msg is not None, "the last line of its example raises nothing"
    assert last.exc_msg.startswith(f"autopar.errors.{kind.__name__}: ")
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(found, out=told.append)
    assert runner.failures == 0, "".join(told)


def test_the_form_of_a_message_is_shown() -> None:
    (found,) = doctest.DocTestFinder(recurse=False).find(errors, "errors")
    assert found.examples
    assert doctest.DocTestRunner().run(found).failed == 0

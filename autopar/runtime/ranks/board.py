"""Messages between the ranks of a program, in the store that all processes share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from autopar.runtime.torch_private import Store

Answer = TypeVar("Answer")


class Board:
    """A store whose every request ends in time.

    torch's store waits for ever if the process that serves it is stopped, or if another thread's
    request on the same connection does. So each request runs in its own thread.

    Args:
        store: a connection with no other user.
        seconds: time-out of one request.

    A request raises RuntimeError once the store is gone.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._gone = False

    def check(self, key: str) -> bool:
        """Returns whether the key is set."""
        return self._ask(lambda: self._store.check([key]))

    def get(self, key: str) -> str:
        """Returns the text under an existing key."""
        return self._ask(lambda: self._store.get(key)).decode(errors="replace")

    def set(self, key: str, text: str) -> None:
        """Sets the text under the key."""
        self._ask(lambda: self._store.set(key, text))

    def first(self, key: str, text: str, before: str = "") -> str:
        """Sets the key to `text` if it was `before` or unset; returns its value."""
        return self._ask(lambda: self._store.compare_set(key, before, text)).decode()

    def present(self, keys: Sequence[str]) -> list[str]:
        """Returns the keys that are set."""
        return [key for key in keys if self.check(key)]

    def _ask(self, request: Callable[[], Answer]) -> Answer:
        if self._gone:
            raise RuntimeError("the store is gone")
        answers: list[Answer] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                answers.append(request())
            except Exception as error:  # torch's stores raise various kinds
                errors.append(error)

        thread = threading.Thread(target=run, name="autopar-board", daemon=True)
        thread.start()
        thread.join(self._seconds)
        if not answers:
            self._gone = True
            raise RuntimeError("the store is gone") from (errors[0] if errors else None)
        return answers[0]

"""What the ranks of a program leave for one another in the store that all processes share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from autopar.runtime.torch_private import Store

Answer = TypeVar("Answer")


class Board:
    """A store whose every request ends in time.

    torch's store waits for ever where the process that serves it is stopped, or where another
    thread's request on the same connection does. So each request runs in a thread of its own.

    Args:
        store: a connection that nobody else uses.
        seconds: for one request.

    A request raises RuntimeError once the store is gone.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._gone = False

    def check(self, key: str) -> bool:
        """Whether there is something under the key."""
        return self._ask(lambda: self._store.check([key]))

    def get(self, key: str) -> str:
        """The text under a key that is there."""
        return self._ask(lambda: self._store.get(key)).decode(errors="replace")

    def set(self, key: str, text: str) -> None:
        """Leave a text under the key."""
        self._ask(lambda: self._store.set(key, text))

    def first(self, key: str, text: str, before: str = "") -> str:
        """What is under the key: `text` if `before` was there, or nothing at all."""
        return self._ask(lambda: self._store.compare_set(key, before, text)).decode()

    def present(self, keys: Sequence[str]) -> list[str]:
        """Those keys that are there."""
        return [key for key in keys if self.check(key)]

    def _ask(self, request: Callable[[], Answer]) -> Answer:
        if self._gone:
            raise RuntimeError("the store is gone")
        answers: list[Answer] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                answers.append(request())
            except Exception as error:  # of any kind that torch's stores raise
                errors.append(error)

        thread = threading.Thread(target=run, name="autopar-board", daemon=True)
        thread.start()
        thread.join(self._seconds)
        if not answers:
            self._gone = True
            raise RuntimeError("the store is gone") from (errors[0] if errors else None)
        return answers[0]

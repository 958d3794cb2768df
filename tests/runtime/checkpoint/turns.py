"""Runs programs on a shared file system, one operation at a time, in an order drawn from a seed.

Each program is a thread, of which one runs at a time: it stops before every operation, and the next
one to run is drawn. A program may be killed at an operation. Then it does nothing more to the disk,
even to clean up, and its locks are released like those of a dead process.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from autopar.files import atomic
from autopar.runtime.checkpoint import publish
from autopar.runtime.checkpoint import safetensors_files as storage

OPERATIONS = frozenset(
    {"open", "close", "fsync", "rename", "unlink", "rmdir", "mkdir", "makedirs", "listdir", "lstat"}
    | {"isdir", "exists", "lexists", "isfile", "realpath", "write"}
)


class Killed(BaseException):
    """What an actor meets after its death."""


@dataclass
class Actor:
    """A program.

    Attributes:
        run: what it does.
        dies: the number of the operation at which it is killed, -1 for none.
        name: of what it saves, say.
    """

    run: Callable[[], Any]
    dies: int = -1
    name: Any = None
    operations: int = 0
    dead: bool = False
    ended: bool = False
    error: BaseException | None = None
    result: Any = None
    handles: set[int] = field(default_factory=set)


class Turns:
    """Who may do the next operation.

    Attributes:
        time: operations so far.
        renames: the time, the actor and the new name of every rename.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._actors: dict[int, Actor] = {}
        self._waiting: list[Actor] = []
        self._turn: Actor | None = None
        self._change = threading.Condition()
        self.time = 0
        self.renames: list[tuple[int, Actor, Path]] = []

    def token_hex(self, size: int) -> str:
        """A name that differs from all others, in place of `secrets`."""
        return self._random.randbytes(size).hex()

    def run(self, actors: list[Actor]) -> None:
        """Until all have ended."""
        threads = [threading.Thread(target=self._play, args=(a,), daemon=True) for a in actors]
        for thread in threads:
            thread.start()
        while True:
            with self._change:
                living = [a for a in actors if not a.ended]
                arrived = self._change.wait_for(
                    lambda: (
                        self._turn is None
                        and len(self._waiting) == sum(not a.ended for a in actors)
                    ),
                    120,
                )
                assert arrived, f"{living} are stuck"
                if not self._waiting:
                    break
                self._turn = self._random.choice(self._waiting)
                self._waiting.remove(self._turn)
                self._change.notify_all()
        for thread in threads:
            thread.join()

    def _play(self, actor: Actor) -> None:
        self._actors[threading.get_ident()] = actor
        try:
            self._wait(actor)
            actor.result = actor.run()
        except BaseException as error:
            actor.error = error
        with self._change:
            actor.ended = True
            self._turn = None
            self._change.notify_all()

    def _wait(self, actor: Actor) -> None:
        with self._change:
            self._waiting.append(actor)
            # Threads start in any order; the draw is to depend on the seed alone.
            self._waiting.sort(key=lambda a: str(a.name))
            self._turn = None if self._turn in (None, actor) else self._turn
            self._change.notify_all()
            self._change.wait_for(lambda: self._turn is actor)

    def step(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do an operation when it is the actor's turn."""
        actor = self._actors.get(threading.get_ident())
        if actor is None:
            return call(*args, **kwargs)
        if actor.dead:
            raise Killed
        self._wait(actor)
        self.time += 1
        actor.operations += 1
        if actor.operations == actor.dies:
            actor.dead = True
            for handle in actor.handles:
                os.close(handle)
            raise Killed
        result = call(*args, **kwargs)
        if name == "open":
            actor.handles.add(result)
        elif name in ("close", "fdopen"):
            actor.handles.discard(args[0])
        elif name == "rename":
            self.renames.append((self.time, actor, Path(args[1])))
        return result


class Stepped:
    """A module whose operations wait for their turn."""

    def __init__(self, module: ModuleType, turns: Turns) -> None:
        self._module, self._turns = module, turns

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if name == "path":
            return Stepped(found, self._turns)
        if name == "fdopen":  # the file closes it

            def opened(handle: int, *args: Any, **kwargs: Any) -> Any:
                actor = self._turns._actors.get(threading.get_ident())
                if actor is not None:
                    actor.handles.discard(handle)
                return found(handle, *args, **kwargs)

            return opened
        if name not in OPERATIONS:
            return found
        return lambda *args, **kwargs: self._turns.step(name, found, *args, **kwargs)


@contextmanager
def stepping(turns: Turns) -> Iterator[None]:
    """Inside, what saves and loads checkpoints takes turns."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (atomic, publish):
            patch.setattr(module, "os", Stepped(os, turns))
        # Names are drawn too: a folder's order depends on them.
        patch.setattr(atomic, "secrets", turns)
        for name in ("save_file", "safe_open"):
            call = getattr(storage, name)
            patch.setattr(storage, name, lambda *a, n=name, c=call, **k: turns.step(n, c, *a, **k))
        yield

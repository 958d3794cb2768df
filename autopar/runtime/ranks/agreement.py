"""Compares the arguments of all ranks through the process group's store.

Ranks with different options plan, emit or update differently, and then hang or diverge. So they
compare their arguments before the first collective that depends on them. The store needs no device
and shows which ranks are missing. Digests are compared first, and the texts only if they differ, so
that equal ranks exchange only a few bytes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import types
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError, RanksDifferError
from autopar.runtime.ranks.shared import backend
from autopar.runtime.torch_private import Store, group_timeout, own_store

_GRACE = timedelta(seconds=10)  # the other ranks wait longer than the first by this
_TAG = 1972  # the first tag of messages that announce a rank, unused by others
_NEVER = timedelta(days=1)
_SHOWN = 160  # most characters of a value in a message

Items = Mapping[str, str]


def compare_ranks(
    items: Items, kind: Callable[..., AutoparError] = RanksDifferError, todo: str = ""
) -> None:
    """Returns if every rank of torch's process group passes the same items.

    Args:
        items: texts by description, in the order of comparison.
        kind: the error's class.
        todo: the error's advice.

    Raises:
        AutoparError: of that kind, equal on every rank. Names the first item that differs, a rank
            on which it does, and both values. Or a rank did not arrive within the time-out of the
            process group.
    """
    if _alone():
        return
    board = _Board(own_store(), dist.get_rank(), dist.get_world_size(), group_timeout())
    board.meet()
    text = json.dumps(dict(items))
    board.put("digest", hashlib.sha256(text.encode()).hexdigest())
    if board.settle("digest", lambda found: "" if len(set(found)) == 1 else "differ"):
        board.put("text", text)
        message = board.settle("text", _difference)
        what, where, why = json.loads(message)
        raise kind(what, where=where, why=why, todo=todo or "call every rank alike")


def _alone() -> bool:
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    return alone or backend() == "fake"


class _Board:
    """Exchange of texts, and of the first rank's answer to them, through the store."""

    def __init__(self, store: Store, rank: int, world: int, wait: timedelta) -> None:
        self._store, self._rank, self._world, self._wait = store, rank, world, wait
        self._number = store.add(f"autopar/alike/{rank}", 1)
        self._key = f"autopar/alike/{self._number}"

    def meet(self) -> None:
        """Waits until all ranks have arrived, by gloo's connections, which break if a rank dies.

        Raises:
            RanksDifferError: one does not come in time.
            RuntimeError: one is lost; gloo's own error, for a watch to call the roll.
        """
        if "gloo" not in str(dist.get_backend_config()):
            return
        word, first = torch.zeros(1, dtype=torch.uint8), self._rank == 0
        for rank in range(1, self._world) if first else [0]:
            send = dist.irecv if first else dist.isend
            message = send(word, rank, tag=_TAG + self._number)
            assert message is not None
            self._await(message, rank)

    def _await(self, message: dist.Work, rank: int) -> None:
        """Waits for a message in another thread, since an aborted message breaks a gloo group."""
        errors: list[Exception] = []
        arrived = threading.Event()

        def run() -> None:
            try:
                message.wait(_NEVER)
            except RuntimeError as error:
                errors.append(error)
            arrived.set()

        threading.Thread(target=run, name="autopar-meeting", daemon=True).start()
        if not arrived.wait(self._wait.total_seconds()):
            raise self._late(rank)
        if errors:
            raise errors[0]

    def put(self, name: str, text: str) -> None:
        """Publishes this rank's text."""
        self._store.set(f"{self._key}/{name}/{self._rank}", text)

    def settle(self, name: str, answer: Callable[[Sequence[str]], str]) -> str:
        """Returns the first rank's answer to the texts of all ranks, on every rank."""
        place = f"{self._key}/{name}/answer"
        if self._rank:
            self._store.set_timeout(self._wait + _GRACE)
            return self._get(place, 0)
        self._store.set_timeout(self._wait)
        reply = answer([self._get(f"{self._key}/{name}/{r}", r) for r in range(self._world)])
        self._store.set(place, reply)
        return reply

    def _get(self, place: str, rank: int) -> str:
        try:
            return self._store.get(place).decode()
        except RuntimeError as error:  # such as a store's time-out
            raise self._late(rank) from error

    def _late(self, rank: int) -> RanksDifferError:
        seconds = self._wait.total_seconds()
        return RanksDifferError(
            f"rank {rank} has not reached the point where the others wait",
            where=f"rank {rank}",
            why=f"the others waited {seconds:.0f} s, the time-out of the process group, to "
            "compare their arguments",
            todo="call compile and the first step on every rank, in the same order",
        )


def _difference(found: Sequence[str]) -> str:
    """Returns the fields what, where and why of the first difference, as JSON."""
    ranks: list[dict[str, str]] = [json.loads(text) for text in found]
    for name in dict.fromkeys(name for items in ranks for name in items):
        first = ranks[0].get(name, "nothing")
        for rank, items in enumerate(ranks):
            other = items.get(name, "nothing")
            if other != first:
                here, there = shortened(first, other)
                why = f"rank 0 has {here}, rank {rank} has {there}"
                return json.dumps([f"the ranks differ in {name}", f"rank {rank}", why])
    return json.dumps(["the ranks differ in the order of their arguments", "", ""])


def shortened(one: str, other: str) -> tuple[str, str]:
    """Returns two texts, cut to the first lines that differ, from shortly before the difference."""
    if "\n" in one or "\n" in other:
        ours, its = one.splitlines(), other.splitlines()
        at = next(
            (n for n, (a, b) in enumerate(zip(ours, its, strict=False)) if a != b),
            min(len(ours), len(its)),
        )
        one, other = (" ".join(lines[at : at + 1]) or "no such line" for lines in (ours, its))
    if max(len(one), len(other)) > _SHOWN:
        pairs = enumerate(zip(one, other, strict=False))
        at = next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
        start = max(at - _SHOWN // 4, 0)
        cut = ("..." * (start > 0) + text[start : start + _SHOWN] for text in (one, other))
        one, other = cut
    return one.strip(), other.strip()


def gathered(value: Any) -> list[Any]:
    """Returns the values of all ranks of torch's process group, by rank."""
    if _alone():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# Texts of what users pass, alike in every process ------------------------------------------------


def text_of(value: Any) -> str:
    """Returns a text of a value that is equal in all processes that create the value equally.

    Functions are identified by their names, code and closures, since their `repr` is an address.
    """
    if isinstance(value, (str, int, float, complex, bool, type(None), torch.dtype, Path)):
        return repr(value)
    if isinstance(value, functools.partial):
        return f"partial({text_of(value.func)}, {text_of(value.args)}, {text_of(value.keywords)})"
    if isinstance(value, Mapping):
        pairs = sorted((text_of(k), text_of(v)) for k, v in value.items())
        return "{" + ", ".join(f"{k}: {v}" for k, v in pairs) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(text_of, value)) + "]"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(text_of, value))) + "}"
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, types.MethodType):
        return f"{text_of(value.__self__)}.{text_of(value.__func__)}"
    if isinstance(value, types.FunctionType):
        return _function(value)
    if is_dataclass(value):
        given = {field.name: getattr(value, field.name) for field in fields(value) if field.compare}
        return f"{type(value).__qualname__}({text_of(given)})"
    try:
        text = repr(value)
    except Exception:  # a user's object may raise anything
        return f"{text_of(type(value))}()"
    return f"{text_of(type(value))}()" if " at 0x" in text else text


def _function(function: types.FunctionType) -> str:
    closed = [_cell(cell) for cell in function.__closure__ or ()]
    more = [text_of(function.__defaults__), text_of(function.__kwdefaults__), *closed]
    return f"{_named(function)}({', '.join(more)})"


def _named(function: types.FunctionType) -> str:
    code = zlib.crc32(_code(function.__code__).encode())
    return f"{function.__module__}.{function.__qualname__}#{code:08x}"


def _cell(cell: types.CellType) -> str:
    try:
        value = cell.cell_contents
    except ValueError:  # not assigned yet
        return "nothing"
    if isinstance(value, types.FunctionType):  # a function may close over itself
        return _named(value)
    plain = isinstance(value, (str, int, float, bool, type(None), tuple, list, dict))
    return text_of(value) if plain else text_of(type(value))


def _code(code: types.CodeType) -> str:
    """Returns a function's behaviour: instructions, names and constants, but no line numbers."""
    constants = [
        _code(constant) if isinstance(constant, types.CodeType) else text_of(constant)
        for constant in code.co_consts
    ]
    return repr((code.co_code, code.co_names, constants))


def _tensor(tensor: Tensor) -> str:
    kind = f"{tensor.dtype}{list(tensor.shape)}"
    if tensor.is_meta:
        return kind
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{kind}#{zlib.crc32(content.numpy().tobytes()):08x}"

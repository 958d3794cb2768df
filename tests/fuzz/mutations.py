"""Damaged copies of a text or a value: bytes, characters, numbers, entries, nesting."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from tests.fuzz.hostile import PAYLOADS

NUMBERS = (
    0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 3.7, -0.0, 1e300, 5e-324, True, False,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
VALUES: tuple[Any, ...] = (*NUMBERS, *PAYLOADS, [], {}, [[]], {"": {}}, ["nope"], [1, "a", None])
SPELLINGS = ("9" * 5000, "1e999", "-", "0x10", "1_000", "0b1", "nan", "inf", "1e-999", "00", "٣")


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Bytes or characters of a file changed in a few places."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(out) + 1)
        length = draw.choice((0, 1, 1, 4, 64, len(out) // 2))
        kind = draw.randrange(7)
        if kind == 0:
            out[at : at + length] = b""
        elif kind == 1:
            out[at : at + length] = draw.randbytes(draw.choice((1, 4, 64)))
        elif kind == 2:
            out[at:at] = draw.choice(PAYLOADS).encode("utf-8", "surrogatepass")
        elif kind == 3:
            out[at:at] = out[max(at - length, 0) : at]
        elif kind == 4:
            sign = draw.choice((b"[", b"{", b"(", b'{"a":', b"-", b"%", b"\x00"))
            out[at:at] = sign * draw.choice((1, 50, 5000))
        elif kind == 5:
            out = out[:at]
        else:
            _number(out, draw)
    return bytes(out)


def _number(out: bytearray, draw: random.Random) -> None:
    """Another number in place of one that stands there."""
    places = [at for at, sign in enumerate(out) if chr(sign).isdigit()]
    if places:
        begin = end = draw.choice(places)
        while end < len(out) and (chr(out[end]).isdigit() or out[end : end + 1] in b".e"):
            end += 1
        word = draw.choice((*SPELLINGS, *map(str, NUMBERS)))
        out[begin:end] = word.encode()


def changed(value: Any, draw: random.Random) -> Any:
    """A tree of tables and lists with some entries changed, removed, doubled or moved."""
    tree = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        places = list(_places(tree))
        if not places:
            return tree
        table, key = draw.choice(places)
        kind = draw.randrange(6)
        if kind == 0:
            del table[key]
        elif kind == 1:
            other, place = draw.choice(places)
            table[key] = copy.deepcopy(other[place])
        elif kind == 2 and isinstance(table, dict):
            table[draw.choice(PAYLOADS)] = table.pop(key)
        elif kind == 3 and isinstance(table[key], str):
            text = bytes(table[key], "utf-8", "surrogatepass")
            table[key] = damaged(text, draw).decode("utf-8", "replace")
        elif kind == 4:
            for _ in range(draw.choice((1, 3, 60))):
                table[key] = [table[key]]
        else:
            table[key] = draw.choice(VALUES)
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with each of its keys."""
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            items: list[tuple[Any, Any]] = list(value.items())
        elif isinstance(value, list):
            items = list(enumerate(value))
        else:
            continue
        yield from ((value, key) for key, _ in items)
        waiting += [entry for _, entry in items]


def toml(value: Any, depth: int = 0) -> str:
    """TOML of a tree, written without a library that would refuse what is odd in it."""
    if isinstance(value, dict):
        if depth:
            inner = ", ".join(f"{_text(k)} = {toml(v, depth + 1)}" for k, v in value.items())
            return f"{{{inner}}}"
        return "".join(f"{_text(k)} = {toml(v, 1)}\n" for k, v in value.items())
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml(item, depth + 1) for item in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _text(value)
    return '""' if value is None else repr(value)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

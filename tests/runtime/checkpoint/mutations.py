"""Files after an accident or an attack, generated from a seed."""

from __future__ import annotations

import copy
import json
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

Draw = random.Random
HOSTILE: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1.5, 1e308, "", "x", "../x", "/etc/passwd", "a\0b",
    "\ud800", "float64", "bool", "rank_0.safetensors", [], {}, [[]], [0], [-1], [2**62, 2**62],
    {"tensor": ["float32", [2**40], []]}, {"tuple": 3}, {"dict": [[[], 1]]}, {"float": "nan"},
]  # fmt: skip


def flip(content: bytes, draw: Draw) -> bytes:
    """One bit is another."""
    place = draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]


def cut(content: bytes, draw: Draw) -> bytes:
    """The end is missing."""
    return content[: draw.randrange(len(content))]


def swap(content: bytes, draw: Draw) -> bytes:
    """Two stretches change places."""
    a, b, c, d = sorted(draw.randrange(len(content) + 1) for _ in range(4))
    return content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:]


def blank(content: bytes, draw: Draw) -> bytes:
    """A stretch is zeros, as after a crash."""
    a, b = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    return content[:a] + bytes(b - a) + content[b:]


def insert(content: bytes, draw: Draw) -> bytes:
    """A stretch is there twice, or other bytes are."""
    place = draw.randrange(len(content) + 1)
    more = draw.choice([content[place : place + 50], draw.randbytes(9), b"\xff" * 8, b"[" * 5000])
    return content[:place] + more + content[place:]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])


def edit(document: Any, draw: Draw) -> Any:
    """A value is replaced, removed, renamed, or changes places with another."""
    document = copy.deepcopy(document)
    spots = list(places(document))
    holder, key = draw.choice(spots)
    kind = draw.randrange(5)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        other, place = draw.choice(spots)
        holder[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(holder[key])
    elif kind == 2 and isinstance(holder, dict):
        holder[str(draw.choice(HOSTILE))] = holder.pop(key)
    elif kind == 3 and type(holder[key]) is int:
        holder[key] += draw.choice((-1, 1))
    else:
        holder[key] = draw.choice(HOSTILE)
    return document


def forged(text: bytes, draw: Draw) -> bytes:
    """A checkpoint.json that somebody edited, checksum and all."""
    document = json.loads(text)
    document["content"] = edit(document["content"], draw)
    document["checksum"] = zlib.crc32(json.dumps(document["content"], sort_keys=True).encode())
    return json.dumps(document).encode()


def lying_header(content: bytes, draw: Draw) -> bytes:
    """A safetensors file whose header somebody edited."""
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(edit(json.loads(content[8 : 8 + length]), draw)).encode()
    size = draw.choice([len(header), 2**62, length]) if draw.random() < 0.2 else len(header)
    return size.to_bytes(8, "little") + header + content[8 + length :]


DAMAGES: list[Callable[[bytes, Draw], bytes]] = [flip, flip, cut, swap, blank, insert]


def mutated(files: dict[str, bytes], draw: Draw) -> dict[str, bytes]:
    """The files of a checkpoint, one of them damaged, forged or missing."""
    name = draw.choice(sorted(files))
    kind = draw.random()
    if kind < 0.02:
        return {other: content for other, content in files.items() if other != name}
    if kind < 0.5:
        return {**files, name: draw.choice(DAMAGES)(files[name], draw)}
    forge = forged if name.endswith(".json") else lying_header
    return {**files, name: forge(files[name], draw)}

"""The contents of a checkpoint, and checkpoint.json, their text, which is strictly validated.

The text has a checksum of itself and of every box of every tensor. Checksums detect damage, not
forgery: whoever can write the file can also write the checksum. Therefore boxes must tile their
tensors exactly, and each box is stored under a key with its tensor and place, so that no other box
can replace it.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.runtime.checkpoint.boxes import Box, tile
from autopar.runtime.checkpoint.values import DTYPES

MARKER = "checkpoint.json"
FORMAT = "autopar checkpoint 1"
HEAD = f'{{"format": {json.dumps(FORMAT)}'  # the start of the text
_KINDS = ("model", "buffer", "ema", "optimizer", "residual", "under_way", "replica", "outer")
_FILE = re.compile(r"(save-[0-9a-f]{16}/)?[A-Za-z0-9_]+\.safetensors")
_LARGEST = 2**63 - 1  # torch's limit for byte counts
_DIMENSIONS = 64
_DIGITS = 1000  # most digits of a number, as Python's parsing time grows with their square


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor in a file.

    Attributes:
        box: its place in the whole tensor.
        file: a path in the folder.
        key: its key in that file.
        checksum: CRC-32 of its bytes; None if not recorded.
        stacked: whether the file has it without its first dimension, along which it is one element.
    """

    box: Box
    file: str
    key: str
    checksum: int | None = None
    stacked: bool = False

    def in_file(self, box: Box) -> Box:
        """Returns a box of the chunk as one of the tensor in the file."""
        return Box(box.offsets[self.stacked :], box.sizes[self.stacked :])


@dataclass(frozen=True)
class Stored:
    """A tensor in a folder: dtype (a key of DTYPES), shape, and the boxes that tile it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def bytes_of(self, chunk: Chunk) -> int:
        """Returns the bytes of one of its chunks in a file."""
        return chunk.box.volume * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Index:
    """The contents of a folder: tensors by name, and other values as JSON.

    `details` of a checkpoint: `names`, the names of the state_dict in order; `tied`, further names
    of tensors; `optimizer`, its kind, groups and values other than tensors; `scheduler`, `values`,
    `random`; `loader`, by the part of a batch; `update`, the scale of the loss. Tensors are those
    of `model`, as trained, `buffer`s, `ema` (averages of the former), those of `optimizer`, and
    what compressed reductions keep as `residual`; of an asynchronous pipeline also what is
    `under_way`, by rank, which only the program can use that `details` names there.
    """

    tensors: Mapping[str, Stored]
    details: Mapping[str, Any]

    def under(self, prefix: str) -> dict[str, Stored]:
        """Returns the tensors whose names begin with `prefix.`, without the prefix."""
        start = f"{prefix}."
        return {k.removeprefix(start): v for k, v in self.tensors.items() if k.startswith(start)}

    def optimizer_state(self) -> dict[str, dict[str, Stored]]:
        """Returns for each parameter's name the tensors of its optimizer state, by their names."""
        state: dict[str, dict[str, Stored]] = {}
        for name, stored in self.under("optimizer").items():
            parameter, _, key = name.rpartition(".")
            state.setdefault(parameter, {})[key] = stored
        return state

    @property
    def model(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the state_dict."""
        return model_of(self.details, {name: s.shape for name, s in self.under("model").items()})

    @property
    def files(self) -> dict[str, int]:
        """Returns every file, with the total bytes of its tensors."""
        nbytes: dict[str, int] = {}
        for stored in self.tensors.values():
            for chunk in stored.chunks:
                nbytes[chunk.file] = nbytes.get(chunk.file, 0) + stored.bytes_of(chunk)
        return nbytes


def model_of(
    details: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a state_dict, including tied names whatever the saved one."""
    return {name: shapes[details["tied"].get(name, name)] for name in details["names"]}


def key_of(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """Returns a key in a file: the tensor's name, with the range of each dimension for a part."""
    if box == Box.whole(shape):
        return name
    return f"{name}[{', '.join(f'{s.start}:{s.stop}' for s in box.slices)}]"


def to_json(index: Index) -> str:
    """Returns the text of checkpoint.json."""
    tensors = {
        name: {
            "dtype": stored.dtype,
            "shape": stored.shape,
            "chunks": [
                [chunk.box.offsets, chunk.box.sizes, chunk.file, chunk.key, chunk.checksum]
                for chunk in stored.chunks
            ],
        }
        for name, stored in index.tensors.items()
    }
    content = {"tensors": tensors, "details": dict(index.details)}
    return json.dumps({"format": FORMAT, "checksum": _checksum(content), "content": content})


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def from_json(text: str) -> Index:
    """Parses the text of `to_json`.

    Raises:
        ValueError: anything that `to_json` does not write.
    """
    if not text.startswith(HEAD):
        raise ValueError(f"it does not begin with {HEAD}")
    try:
        document = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_real,
            parse_constant=_real,
        )
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    document = _table(document, "format", "checksum", "content")
    if document["checksum"] != _checksum(document["content"]):
        raise ValueError("its checksum differs")
    content = _table(document["content"], "tensors", "details")
    tensors = {name: _stored(name, item) for name, item in _table(content["tensors"]).items()}
    details = _table(content["details"], "names", "tied", "optimizer", "scheduler", "values")
    index = Index(tensors, details)
    _check_details(index)
    return index


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("an object has two values of one name")
    return table


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number has {len(text)} digits")
    return int(text)


def _real(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def _table(value: Any, *keys: str) -> dict[str, Any]:
    """Returns an object that has at least these keys."""
    if not isinstance(value, dict) or any(key not in value for key in keys):
        raise ValueError(f"an object with {', '.join(keys) or 'names'} was expected")
    return value


def _list(value: Any, kind: type, most: float = math.inf) -> list[Any]:
    """Returns a list whose items are all of one type."""
    if not isinstance(value, list) or len(value) > most:
        raise ValueError("a list was expected, not too long")
    if any(type(item) is not kind for item in value):
        raise ValueError(f"a list of {kind.__name__} was expected")
    return value


def _extents(value: Any) -> tuple[int, ...]:
    """Returns offsets or sizes along the dimensions of a tensor."""
    numbers = _list(value, int, _DIMENSIONS)
    if any(not 0 <= number <= _LARGEST for number in numbers):
        raise ValueError("a size or an offset is negative or too large")
    return tuple(numbers)


def _stored(name: str, item: Any) -> Stored:
    item = _table(item, "dtype", "shape", "chunks")
    shape = _extents(item["shape"])
    name.encode()  # raises where it is no text
    if not isinstance(item["dtype"], str) or item["dtype"] not in DTYPES or "\0" in name:
        raise ValueError(f"tensor {name!r} has no known dtype")
    if math.prod(max(n, 1) for n in shape) * DTYPES[item["dtype"]].itemsize > _LARGEST:
        raise ValueError(f"tensor {name!r} has too many elements")
    chunks = tuple(_chunk(name, shape, part) for part in _list(item["chunks"], list))
    if not tile([chunk.box for chunk in chunks], shape):
        raise ValueError(f"the parts of tensor {name!r} overlap, leave gaps or lie outside")
    return Stored(item["dtype"], shape, chunks)


def _chunk(name: str, shape: tuple[int, ...], part: list[Any]) -> Chunk:
    if len(part) != 5:
        raise ValueError(f"a part of tensor {name!r} has {len(part)} values")
    offsets, sizes, file, key, checksum = part
    box = Box(_extents(offsets), _extents(sizes))
    if not isinstance(file, str) or not _FILE.fullmatch(file):
        raise ValueError(f"{file!r} is not a file name")
    if not box.inside(shape) or key != key_of(name, box, shape) or type(checksum) is not int:
        raise ValueError(f"a part of tensor {name!r} is not what its name says")
    return Chunk(box, file, key, checksum)


def _check_details(index: Index) -> None:
    """Raises ValueError unless the details fit the tensors."""
    details = index.details
    names, tied = _list(details["names"], str), _table(details["tied"])
    _list(list(tied.values()), str)
    strange = [name for name in index.tensors if name.partition(".")[0] not in _KINDS]
    if strange:
        raise ValueError(f"tensor {strange[0]!r} does not belong in a checkpoint")
    model = set(index.under("model"))
    if len(set(names)) != len(names) or {tied.get(name, name) for name in names} != model:
        raise ValueError("its names are not those of its tensors")
    for name, mean in index.under("ema").items():
        if name not in model or mean.shape != index.tensors[f"model.{name}"].shape:
            raise ValueError(f"the average of {name!r} has no parameter")
    optimizer = _table(details["optimizer"], "kind", "groups", "values")
    for group in _list(optimizer["groups"], dict):
        _list(_table(group, "options", "parameters")["parameters"], str)
    for values in _table(optimizer["values"]).values():
        _table(values)
    if not isinstance(details.get("random"), str):
        raise ValueError("it has no state of the random numbers")

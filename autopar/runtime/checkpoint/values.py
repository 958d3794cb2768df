"""Converts Python values to JSON and back exactly, for the state of schedulers and optimizers.

Loading builds only plain values, so that it cannot execute anything. JSON has no tuples, no keys
but strings and no tensors; such values become an object with one key that names their kind:
{"tuple": [0.9, 0.999]}.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.errors import CheckpointError

_ELEMENTS = 1_000_000  # most elements of a tensor in JSON
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32,
        torch.float64, torch.complex64,
    )
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name in DTYPES.

    Raises:
        CheckpointError: safetensors has no such dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"a tensor of {dtype} cannot be saved", why="safetensors lacks it")
    return name


def encode(value: Any, where: str) -> Any:
    """Converts a value of plain Python types and small tensors for `json.dumps`.

    Args:
        value: numbers, strings, bytes, None, lists, tuples, mappings, sets, small tensors.
        where: a description, for errors.

    Raises:
        CheckpointError: anything else; names its place.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        return {"tensor": _encode_tensor(value, where)}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [encode(item, f"{where}[{n}]") for n, item in enumerate(value)]
        kind = next(k for k in _SEQUENCES if isinstance(value, _SEQUENCES[k]))
        return items if kind == "list" else {kind: items}
    if isinstance(value, Mapping):
        pairs = [
            [encode(k, f"a key of {where}"), encode(v, f"{where}[{k!r}]")] for k, v in value.items()
        ]
        return {"counter" if isinstance(value, Counter) else "dict": pairs}
    raise CheckpointError(
        f"{where} cannot be saved",
        why=f"it is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint contains "
        "numbers, strings, bytes, lists, mappings and tensors only, so that loading one executes "
        "nothing",
        todo="save what it was made from",
    )


def _encode_tensor(value: Tensor, where: str) -> list[Any]:
    if value.numel() > _ELEMENTS:
        raise CheckpointError(
            f"{where} cannot be saved",
            why=f"a tensor of {value.numel()} elements is too large for JSON",
            todo="make it a buffer of the model",
        )
    plain = value.detach().cpu()
    numbers = torch.view_as_real(plain) if plain.is_complex() else plain
    items = [encode(n, where) for n in numbers.flatten().tolist()]
    return [dtype_name(value.dtype), list(value.shape), items]


def _decode_tensor(content: list[Any]) -> Tensor:
    name, shape, items = content
    dtype = DTYPES[name]
    numbers = [decode(item) for item in items]
    if dtype.is_complex:
        pairs = torch.tensor(numbers, dtype=torch.float32).reshape(*shape, 2)
        return torch.view_as_complex(pairs)
    # Small floats are cast from float64: torch cannot create all of them from Python numbers.
    wide = torch.tensor(numbers, dtype=torch.float64) if dtype.is_floating_point else None
    tensor = torch.tensor(numbers, dtype=dtype) if wide is None else wide.to(dtype)
    return tensor.reshape(shape)


def decode(value: Any) -> Any:
    """Inverts `encode`.

    Raises:
        CheckpointError: anything that `encode` does not write.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        ((kind, content),) = value.items()
        return _READERS[kind](content)
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            "a value of the checkpoint cannot be read", why=f"{str(value)[:200]}: {error}"
        ) from error


def _mapping(pairs: list[Any]) -> dict[Any, Any]:
    return {decode(key): decode(item) for key, item in pairs}


_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_READERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "tensor": _decode_tensor,
    "tuple": lambda items: tuple(map(decode, items)),
    "set": lambda items: set(map(decode, items)),
    "frozenset": lambda items: frozenset(map(decode, items)),
    "dict": _mapping,
    "counter": lambda pairs: Counter(_mapping(pairs)),
}


def random_state_text(state: Tensor) -> str:
    """Returns the state of a torch generator, a tensor of bytes, as text."""
    return base64.b64encode(bytes(state.numpy())).decode()


def random_state_of(text: str) -> Tensor:
    """Returns the state that `random_state_text` wrote; CheckpointError if it is invalid."""
    try:
        raw = bytearray(base64.b64decode(text, validate=True))
        state = torch.frombuffer(raw, dtype=torch.uint8)
        torch.Generator().set_state(state)
    except (binascii.Error, ValueError, RuntimeError) as error:
        raise CheckpointError(
            "the checkpoint's state of the random numbers cannot be read", why=str(error)
        ) from error
    return state

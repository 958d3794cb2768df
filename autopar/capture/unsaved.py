"""Computes buffers that no state_dict has, for models on the meta device.

`register_buffer(..., persistent=False)` is used for values derived from the configuration: the
frequencies of a rotary embedding, a causal mask. A model on the meta device has no such values, and
loading weights brings none. Those that a method of the model initialises are computed by it here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def computed(model: nn.Module, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns `buffers` with values for those on the meta device that are in no state_dict.

    Calls a module's `reset_buffers` or `reset_parameters`, or the model's `_init_weights(module)`,
    on a copy. Buffers that these leave unchanged, or set to random numbers, stay without values.
    """
    saved = set(model.state_dict())
    filled = dict(buffers)
    for name, buffer in buffers.items():
        if buffer.is_meta and name not in saved:
            path, _, key = name.rpartition(".")
            module = model.get_submodule(path)
            values = (_value(module, key, method) for method in _methods(model, module))
            filled[name] = next((value for value in values if value is not None), buffer)
    return filled


def _methods(model: nn.Module, module: nn.Module) -> Iterator[Callable[[nn.Module], object]]:
    """Yields the methods that may set a module's buffers."""
    for name in ("reset_buffers", "reset_parameters"):
        if callable(getattr(type(module), name, None)):
            yield lambda made, name=name: getattr(made, name)()  # type: ignore[misc]
    method: Any = getattr(model, "_init_weights", None)
    if callable(method):
        yield method


def _value(module: nn.Module, key: str, method: Callable[[nn.Module], object]) -> Tensor | None:
    """Returns the buffer as a method sets it, None if the result depends on its old value."""
    values = []
    for filled in (0, 1):
        fresh = copy.deepcopy(module).to_empty(device="cpu")
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(filled)
            for tensor in (*fresh.parameters(), *fresh.buffers()):
                tensor.fill_(filled)
            try:
                method(fresh)
            except Exception:  # user code, on a module that it may not support
                return None
        values.append(fresh.get_buffer(key).detach())
    same = values[0].device.type == "cpu" and torch.equal(*values)
    return values[0] if same else None

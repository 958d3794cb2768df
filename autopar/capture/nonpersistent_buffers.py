"""Computes non-persistent buffers, which no state_dict contains, for models on the meta device.

Models use `register_buffer(..., persistent=False)` for values that follow from the configuration:
the frequencies of a rotary embedding, a causal mask. On the meta device these buffers have no
values, and loading weights does not set them. If a method of the model initialises them, this file
calls it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def computed(model: nn.Module, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns `buffers` with values for non-persistent buffers on the meta device.

    Calls a module's `reset_buffers` or `reset_parameters`, or the model's `_init_weights(module)`,
    on a copy. A buffer gets no value if these leave it unchanged or set it to random numbers.
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
    """Returns the value that a method gives to the buffer; None if it depends on the old value."""
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

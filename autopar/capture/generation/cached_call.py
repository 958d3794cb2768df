"""Calls of a model with a cache of keys and values of fixed length.

    prefill   reads a prompt, writes its keys and values, and returns the logits of the next token
    decode    reads one token, extends keys and values by its own, and attends to all of them

A cache is a buffer of `CachedCall`, so in a graph it is a leaf with its own layout. One prefill
without caches records which tensors a model keeps. A model of transformers gets the library's own
`Cache`; any other model gets a `KeyValueCache` as its argument `past_key_values`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import CaptureError

CACHES = "caches."  # prefix of the names of caches in graphs
PREFILL, DECODE = "prefill", "decode"
ROWS = -2  # the dimension of keys and values along which tokens follow one another


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Sets a model to evaluation without gradients, and restores it on exit."""
    modules = [(module, module.training) for module in model.modules()]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for module, _ in modules:
            module.training = False
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for module, training in modules:
            module.training = training
        for parameter in trained:
            parameter.requires_grad_(True)


@dataclass(frozen=True)
class KeptTensor:
    """One tensor that a model keeps between tokens.

    Attributes:
        shape: shape of the cache; of keys and values, with their length along `ROWS`.
        dtype: dtype of its elements.
        crosses: whether it belongs to cross-attention, whose cache only a prefill writes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    crosses: bool = False


@dataclass
class Traced:
    """Inputs and results of a traced call; torch.export would restore a module's attributes.

    Attributes:
        positions: positions of the tokens of a decode, i64[tokens].
        recorded: what a call without caches would keep, by name.
    """

    positions: Tensor | None = None
    recorded: dict[str, KeptTensor] = field(default_factory=dict)


class CachedCall(nn.Module, ABC):
    """A call of a model with caches.

    Args:
        step: PREFILL or DECODE.
        length: number of tokens that the caches hold.
        kept: the caches by name, such as "keys_0"; None to record which caches the model uses.
    """

    def __init__(
        self, step: str, length: int, kept: Mapping[str, KeptTensor] | None, device: torch.device
    ) -> None:
        super().__init__()
        self.step, self.length, self.kept = step, length, kept
        self.trace = Traced()
        for name, tensor in (kept or {}).items():
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            self.register_buffer(name, empty, persistent=False)

    @property
    @abstractmethod
    def signature(self) -> inspect.Signature:
        """The arguments of a call, without the model."""

    @property
    def decodes(self) -> bool:
        """Returns whether it reads tokens after a prompt."""
        return self.step == DECODE

    @property
    def attends(self) -> bool:
        """Returns whether a layer keeps keys of tokens, and not only states."""
        return any("keys_" in name for name in self.kept or {})

    def extend(self, keys: Tensor, values: Tensor, layer: int, crosses: bool = False) -> Any:
        """Writes keys and values into the caches of a layer; returns those to attend to.

        Args:
            keys, values: keys and values of the tokens of this call, along dimension `ROWS`.
            layer: number of the layer.
            crosses: whether they belong to the encoder's tokens.

        Raises:
            CaptureError: their types differ from those of the recorded call.
        """
        results = []
        for kind, rows in (("keys", keys), ("values", values)):
            name = f"{'cross_' if crosses else ''}{kind}_{layer}"
            results.append(self.extended(name, rows, crosses))
        return tuple(results)

    def extended(self, name: str, rows: Tensor, crosses: bool = False) -> Tensor:
        """Writes rows, in dimension `ROWS`, into a cache; returns those to attend to.

        Args:
            name: of the cache, "keys_0".
            rows: of the tokens of this call.
            crosses: whether they are of the encoder's tokens.

        Raises:
            CaptureError: they are not like those that were recorded.
        """
        shape = list(rows.shape)
        shape[ROWS] = rows.shape[ROWS] if crosses else self.length
        if not self._keeps(name, KeptTensor(tuple(shape), rows.dtype, crosses)):
            return rows
        cache: Tensor = getattr(self, name)
        at = torch.arange(rows.shape[ROWS], device=rows.device)
        if self.decodes:
            assert self.trace.positions is not None
            at = self.trace.positions
        cache.index_copy_(cache.dim() + ROWS, at, rows)
        return cache if self.decodes else rows  # a prompt attends to itself only

    def state(self, name: str) -> Tensor | None:
        """Returns a state as the tokens before this call have left it; None in a prefill."""
        return getattr(self, name) if self.decodes else None

    def keep(self, name: str, value: Tensor) -> None:
        """Replaces a state by the one after the tokens of this call.

        Raises:
            CaptureError: it is not like the one that was recorded.
        """
        if self._keeps(name, KeptTensor(tuple(value.shape), value.dtype)):
            getattr(self, name).copy_(value)

    def _keeps(self, name: str, now: KeptTensor) -> bool:
        """Returns whether there is a cache; else records it.

        Raises:
            CaptureError: it has another shape or dtype.
        """
        if self.kept is None:
            self.trace.recorded[name] = now
            return False
        if self.kept.get(name) != now:
            raise CaptureError(
                f"the model keeps {name} as {now}",
                why=f"a prefill keeps {self.kept.get(name, 'nothing')}",
                todo="keep the same tensors for every token",
            )
        return True

    def mask_sizes(self, queries: int) -> tuple[int, int]:
        """Returns the number of keys that a call attends to, and the position of the first."""
        return (self.length if self.decodes else queries), 0

    def seen(self) -> Any:
        """Returns the number of tokens before this call, a number or a scalar tensor."""
        return self.trace.positions[0] if self.trace.positions is not None and self.decodes else 0


@dataclass
class KeyValueCache:
    """The cache passed as `past_key_values` to a model that is not from transformers.

    Attributes:
        call: the call that it belongs to.
    """

    call: CachedCall
    layers: list[Any] = field(default_factory=list)

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Adds a layer's keys and values; returns those to attend to.

        Args:
            keys, values: of this call's tokens, of equal length in the last dimension but one.
            layer: number of the layer; every layer calls this once.
        """
        keys, values = self.call.extend(keys, values, layer)
        return keys, values

    def get_seq_length(self, layer: int = 0) -> Any:
        """Returns the number of tokens before this call, a number or a scalar tensor."""
        return self.call.seen()

    def get_mask_sizes(self, queries: int, layer: int = 0) -> tuple[int, int]:
        """Returns the number of keys that `update` returns, and the position of the first."""
        return self.call.mask_sizes(queries)

"""Layers of transformers' caches whose tensors a generating call keeps.

The library finds out by their classes what layers are. These are made in functions, because it is
imported only for models of its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar.capture.generation.cached_call import CachedCall


def attending(call: CachedCall, number: int, crosses: bool = False) -> Any:
    """Returns a layer with keys and values; all tokens stay, also where a window is shorter.

    Args:
        call: keeps the tensors.
        number: of the layer.
        crosses: whether keys and values are of the encoder's tokens.
    """
    return _attending()(call, number, crosses)


def recurrent(call: CachedCall, number: int, states: int) -> Any:
    """Returns a layer with the states of some recurrences, and of the convolutions before them."""
    return _recurrent()(call, number, states)


def attending_and_recurrent(call: CachedCall, number: int, states: int) -> Any:
    """Returns a layer with both."""
    return _both()(call, number, states)


class _Keys:
    """One layer's keys and values, kept by the call."""

    is_compileable = True
    is_sliding = False
    call: CachedCall

    def attend(self, call: CachedCall, number: int, crosses: bool) -> None:
        """Shows the caches as transformers' layers do."""
        self.call, self.number, self.crosses = call, number, crosses
        prefix = "cross_" if crosses else ""
        self.keys = getattr(call, f"{prefix}keys_{number}", None)
        self.values = getattr(call, f"{prefix}values_{number}", None)
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the caches exist before."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Adds keys and values; returns those to attend to."""
        given = key_states, value_states, self.number, self.crosses
        keys, values = self.call.extend(*given)
        return keys, values

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Adds the keys of an indexer; returns all of them."""
        return self.call.extended(f"indexer_{self.number}", indexer_key_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the number of keys to attend to, and the position of the first."""
        return self.call.mask_sizes(query_length)

    def get_seq_length(self) -> Any:
        """Returns the number of tokens before this call."""
        return 0 if self.crosses else self.call.seen()

    def get_max_length(self) -> int:
        """Returns the number of tokens that the cache holds."""
        return self.call.length


class _States:
    """One layer's states, kept by the call."""

    call: CachedCall
    number: int
    conv_states: dict[int, Tensor | None]
    recurrent_states: dict[int, Tensor | None]
    has_previous_state: dict[int, bool]

    def recur(self, call: CachedCall, number: int, states: int) -> None:
        """Shows the states as transformers' layers do."""
        self.call, self.number = call, number
        for index in range(states):
            for kind, own in (("conv", self.conv_states), ("state", self.recurrent_states)):
                if hasattr(call, _name(kind, number, index)):
                    own[index] = call.state(_name(kind, number, index))
            self.has_previous_state[index] = call.decodes

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the states exist before."""

    def update_conv_state(
        self,
        conv_states: Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Adds columns to the last ones; returns both, and keeps as many as it had."""
        before = self.conv_states[state_idx]
        if before is None:
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            lacking = max(size - conv_states.shape[-1], 0)
            whole = torch.nn.functional.pad(conv_states, (lacking, 0))
        else:
            size, whole = before.shape[-1], torch.cat([before, conv_states], -1)
        self.has_previous_state[state_idx] = True
        self.call.keep(_name("conv", self.number, state_idx), whole[..., -size:])
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Replaces a state; returns it."""
        self.call.keep(_name("state", self.number, state_idx), recurrent_states)
        return recurrent_states


@cache
def _attending() -> Any:
    from transformers.cache_utils import CacheLayerMixin

    class Attending(_Keys, CacheLayerMixin):  # type: ignore[misc]
        """A layer of attention."""

        def __init__(self, call: CachedCall, number: int, crosses: bool = False) -> None:
            super().__init__()
            self.attend(call, number, crosses)

    return Attending


@cache
def _recurrent() -> Any:
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    class Recurrent(_States, LinearAttentionCacheLayerMixin):  # type: ignore[misc]
        """A layer of recurrences."""

        def __init__(self, call: CachedCall, number: int, states: int) -> None:
            super().__init__(states)
            self.recur(call, number, states)

    return Recurrent


@cache
def _both() -> Any:
    from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

    class Both(_Keys, _States, CacheLayerMixin, LinearAttentionCacheLayerMixin):  # type: ignore[misc]
        """A layer of both."""

        def __init__(self, call: CachedCall, number: int, states: int) -> None:
            CacheLayerMixin.__init__(self)
            LinearAttentionCacheLayerMixin.__init__(self, states)
            self.attend(call, number, crosses=False)
            self.recur(call, number, states)

    return Both


def _name(kind: str, layer: int, index: int) -> str:
    """Returns the name of a state, "conv_0_0"."""
    return f"{kind}_{layer}_{index}"

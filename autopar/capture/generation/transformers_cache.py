"""The cache of a generating call as a `Cache` of transformers, which is imported only here."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from autopar.capture.generation.cached_call import CachedCall


def is_of_transformers(model: nn.Module) -> bool:
    """Returns whether a model's class derives from transformers' PreTrainedModel."""
    library = sys.modules.get("transformers")
    kind = getattr(library, "PreTrainedModel", None)
    return isinstance(kind, type) and isinstance(model, kind)


def cache_of(call: CachedCall) -> Any:
    """Returns the cache of a decoder's own attention."""
    return _cache(call, crosses=False)


def crossing_cache_of(call: CachedCall) -> Any:
    """Returns the cache of a decoder's own attention and of that to an encoder."""
    from transformers.cache_utils import EncoderDecoderCache

    both = EncoderDecoderCache(_cache(call, crosses=False), _cache(call, crosses=True))
    for layer in range(_layers(call, crosses=True)):
        both.is_updated[layer] = call.decodes
    return both


def encoded(rows: Tensor) -> Any:
    """Returns the output of an encoder with these hidden states."""
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=rows)


def _layers(call: CachedCall, crosses: bool) -> int:
    """Returns the number of layers that keep something; 0 while it is recorded."""
    numbers = [
        int(name.rpartition("_")[2])
        for name, tensor in (call.kept or {}).items()
        if tensor.crosses == crosses
    ]
    return max(numbers, default=-1) + 1


def _cache(call: CachedCall, crosses: bool) -> Any:
    """Returns a cache with one layer for each that keeps something.

    While it is recorded which do, layers are added when they are first updated.
    """
    from transformers.cache_utils import Cache

    layers: Iterator[Any] = (_layer(call, number, crosses) for number in itertools.count())
    if call.kept is None:
        replicated: Callable[[], Any] = layers.__next__
        return Cache(layer_class_to_replicate=replicated)
    return Cache(layers=list(itertools.islice(layers, _layers(call, crosses))))


def _layer(call: CachedCall, number: int, crosses: bool) -> Any:
    from transformers.cache_utils import CacheLayerMixin

    class Layer(CacheLayerMixin):  # type: ignore[misc]
        """One layer's keys and values, kept by the call."""

        is_compileable = True
        is_sliding = False

        def __init__(self) -> None:
            super().__init__()
            prefix = "cross_" if crosses else ""
            self.keys = getattr(call, f"{prefix}keys_{number}", None)
            self.values = getattr(call, f"{prefix}values_{number}", None)
            self.is_initialized = True

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            """Nothing: the caches exist before."""

        def update(
            self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            """Adds keys and values; returns those to attend to."""
            keys, values = call.extend(key_states, value_states, number, crosses)
            return keys, values

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            """Returns the number of keys to attend to, and the position of the first."""
            return call.mask_sizes(query_length)

        def get_seq_length(self) -> Any:
            """Returns the number of tokens before this call."""
            return 0 if crosses else call.seen()

        def get_max_length(self) -> int:
            """Returns the number of tokens that the cache holds."""
            return call.length

    return Layer()

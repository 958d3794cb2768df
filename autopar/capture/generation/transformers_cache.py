"""The cache of a generating call as a `Cache` of transformers."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from autopar.capture.generation.cached_call import CachedCall
from autopar.capture.generation.transformers_layers import (
    attending,
    attending_and_recurrent,
    recurrent,
)
from autopar.errors import CaptureError


def is_of_transformers(model: nn.Module) -> bool:
    """Returns whether a model's class derives from transformers' PreTrainedModel."""
    library = sys.modules.get("transformers")
    kind = getattr(library, "PreTrainedModel", None)
    return isinstance(kind, type) and isinstance(model, kind)


def cache_of(call: CachedCall, model: nn.Module) -> Any:
    """Returns the cache of a decoder: a layer for each of the model's, of the same kind.

    Raises:
        CaptureError: the model has a kind of layer that is not known here, or relies on a cache
            that forgets tokens.
    """
    from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

    config: Any = model.config
    known = DynamicCache(config=config.get_text_config(decoder=True)).layers
    _refuse_unmasked_windows(call, model, known)
    layers = (_layer(call, number, each) for number, each in enumerate(known))
    if known:
        return Cache(layers=list(layers))
    numbers = itertools.count()
    return Cache(layer_class_to_replicate=lambda: _layer(call, next(numbers), DynamicLayer()))


def _refuse_unmasked_windows(call: CachedCall, model: nn.Module, known: list[Any]) -> None:
    """Raises CaptureError if only transformers' cache, and no mask, limits attention to a window.

    Caches keep all tokens here. Models with windows mask what is outside, except for Moshi, which
    sees the keys that transformers' cache has not dropped yet.
    """
    windows = [layer.sliding_window for layer in known if hasattr(layer, "sliding_window")]
    if min(windows, default=call.length) >= call.length:
        return
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    modules = {sys.modules[kind.__module__] for kind in kinds if kind.__module__ in sys.modules}
    names = {name for module in modules for name in vars(module) if name.startswith("create_")}
    if not any("sliding" in name or "chunked" in name for name in names):
        raise CaptureError(
            f"{type(model).__name__} cannot generate beyond {min(windows)} tokens with its prompt",
            why="transformers' cache drops earlier tokens, and the model has no mask that hides "
            f"them in a cache of {call.length} tokens",
            todo="generate with transformers, or fewer tokens",
        )


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
    """Returns a cache of an encoder-decoder, with one layer for each that keeps something.

    While it is recorded which do, layers are added when they are first updated.
    """
    from transformers.cache_utils import Cache

    layers: Iterator[Any] = (attending(call, number, crosses) for number in itertools.count())
    if call.kept is None:
        replicated: Callable[[], Any] = layers.__next__
        return Cache(layer_class_to_replicate=replicated)
    return Cache(layers=list(itertools.islice(layers, _layers(call, crosses))))


# By name, since versions of transformers differ in which of them they have.
_ATTENDING = {"DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer"}
_RECURRENT = {"LinearAttentionLayer"}
_BOTH = {"LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"}


def _layer(call: CachedCall, number: int, known: Any) -> Any:
    """Returns a layer whose tensors a call keeps.

    Args:
        call: keeps the tensors.
        number: of the layer.
        known: the layer of transformers' own cache.
    """
    kind = type(known)
    name = kind.__name__ if kind.__module__ == "transformers.cache_utils" else ""
    if name == "DummyLayer":  # it keeps nothing
        return known
    if name in _ATTENDING:
        return attending(call, number)
    if name in _RECURRENT:
        return recurrent(call, number, known.number_of_states)
    if name in _BOTH:
        return attending_and_recurrent(call, number, known.number_of_states)
    raise CaptureError(
        f"layer {number} keeps a cache of the kind {type(known).__name__}",
        why="caches hold keys and values, or the states of a recurrence",
        todo="generate with transformers",
    )

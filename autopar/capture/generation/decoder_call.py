"""A call with caches of a decoder, a model that continues its own prompt."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from autopar.capture.generation.cached_call import CachedCall, KeyValueCache
from autopar.capture.generation.transformers_cache import cache_of, is_of_transformers
from autopar.errors import CaptureError

IDS, MASK, POSITIONS, START = "input_ids", "attention_mask", "position_ids", "start"
PAST = "past_key_values"
PARAMS = "cache_params"  # the name of the argument in models without attention, such as Mamba


class DecoderCall(CachedCall):
    """Calls a model on tokens, with their positions and a mask of the keys to attend to."""

    @property
    def signature(self) -> inspect.Signature:
        """Ids and positions [batch, tokens], the mask [batch, keys], the position to write [1]."""
        names = [IDS, MASK, POSITIONS, *([START] if self.decodes else [])]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(name, kind) for name in names])

    def forward(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        start: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Returns the logits of the token after the last one, [batch, vocabulary]."""
        self.trace.positions = start
        given = {MASK: attention_mask, POSITIONS: position_ids, "use_cache": True}
        given |= {"logits_to_keep": 1, "return_dict": True}
        taken = taken_by(model)
        theirs = is_of_transformers(model)
        name = PARAMS if theirs and PARAMS in taken else PAST
        if name not in taken:
            raise no_cache(model)
        if self.decodes and not self.attends:  # the mask is for keys; a generated token counts
            del given[MASK]
        known = {name: value for name, value in given.items() if name in taken}
        cache = cache_of(self, model) if theirs else KeyValueCache(self)
        return {"logits": last_logits(model(input_ids, **{name: cache}, **known))}


def taken_by(model: nn.Module) -> frozenset[str]:
    """Returns the names of the arguments of a model's forward."""
    return frozenset(inspect.signature(model.forward).parameters)


def last_logits(output: Any) -> Tensor:
    """Returns the logits after the last token, [batch, vocabulary], of a model's output."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None and isinstance(output, dict):
        logits = output.get("logits")
    if logits is None and isinstance(output, (tuple, list)) and output:
        logits = output[0]
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise CaptureError(
            "the model returns no logits to generate from",
            why=f"it returns a {type(output).__name__}",
            todo="return logits [batch, tokens, vocabulary], alone or as output.logits, "
            'output["logits"] or the first of a tuple',
        )
    return logits[:, -1]


def no_cache(model: nn.Module) -> CaptureError:
    """Returns the error for a model whose forward takes no cache."""
    own = (
        "add it, and in every attention layer attend to past_key_values.update(keys, values, "
        "layer); see docs/how-to/generation.md"
    )
    return CaptureError(
        f"{type(model).__name__} cannot generate",
        why=f"its forward has no argument {PAST!r} for keys and values of earlier tokens",
        todo="generate with transformers" if is_of_transformers(model) else own,
    )

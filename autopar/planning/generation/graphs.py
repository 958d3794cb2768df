"""The graphs of a model's prefill and decode."""

from __future__ import annotations

from torch import nn

from autopar.capture.capture import Captured
from autopar.capture.generation.cached_call import CachedCall
from autopar.capture.generation.calls import Arguments, Sizes, steps_of
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.trace import Trace

__all__ = ["Sizes", "capture_generation"]


def capture_generation(
    model: nn.Module, sizes: Sizes, options: Options
) -> tuple[Captured, Captured]:
    """Captures the prefill and the decode of a model.

    Args:
        model: takes `past_key_values`.
        sizes: of the prompts.
        options: of planning, from `generating_options`.

    Raises:
        CaptureError: the model cannot be traced, or keeps nothing between tokens.
    """

    def captured(caches: CachedCall, arguments: Arguments) -> Captured:
        return capture_call(Call(model, (), dict(arguments), caches), options, Trace(None))

    prefill, decode = (captured(*step) for step in steps_of(model, sizes, captured))
    return prefill, decode

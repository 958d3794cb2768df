"""The graphs of a model's prefill and decode."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from autopar.capture.attributes import CHANGES
from autopar.capture.capture import Captured
from autopar.capture.generation.cached_call import CachedCall
from autopar.capture.generation.calls import Arguments, Sizes, length_of, steps_of
from autopar.capture.generation.decoder_call import POSITIONS, START
from autopar.errors import BatchError, CaptureError
from autopar.ir.graph import Graph
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.stored import without_unread
from autopar.planning.trace import Trace

__all__ = ["Sizes", "capture_generation"]


def capture_generation(
    model: nn.Module, sizes: Sizes, options: Options
) -> tuple[Captured, Captured]:
    """Captures the prefill and the decode of a model.

    Args:
        model: takes `past_key_values`.
        sizes: sizes of the prompts.
        options: options of planning, from `generating_options`.

    Raises:
        CaptureError: the model cannot be traced, keeps nothing between tokens, or counts keys to
            find the place of a token.
        BatchError: there are more tokens than the model has positions.
    """

    def captured(caches: CachedCall, arguments: Arguments) -> Captured:
        call = Call(model, (), dict(arguments), caches)
        try:
            return capture_call(call, options, Trace(None), 1 if options.is_pipeline else None)
        except CaptureError as error:
            raise _reason(error, model, caches) from error

    prefill, decode = (captured(*step) for step in steps_of(model, sizes, captured))
    _refuse_long(decode.graph, length_of(model, sizes))
    _refuse_last_place(decode.graph, length_of(model, sizes))
    # A decode does not read an encoder, so only the prefill determines how it is stored.
    return prefill, replace(decode, graph=without_unread(decode.graph))


def _reason(error: CaptureError, model: nn.Module, caches: CachedCall) -> CaptureError:
    """Returns the error of a trace in terms of a generation."""
    name = type(model).__name__
    if error.what.startswith(CHANGES):
        return CaptureError(
            f"{name} keeps a state in itself",
            where=error.where,
            why=f"{error.what}; a generation keeps what past_key_values is given",
            todo="keep it by past_key_values, or generate with transformers",
        )
    if not caches.decodes:
        return error
    return CaptureError(
        f"a decode of {name} cannot be traced: {error.what}",
        where=error.where,
        why="one program decodes every token, so that the number of tokens before is a value in "
        f"it, and no size; {error.why}",
        todo="use past_key_values.get_seq_length() as a tensor, and mask what is still to come, or "
        "generate with transformers",
    )


# Operators behind which positions are still positions, perhaps with an offset.
_PASSED = (
    "autopar.share", "aten.add.Tensor", "aten.select.int", "aten.reshape", "aten.unsqueeze",
    "aten.to.dtype", "aten.expand", "aten.slice.Tensor",
)  # fmt: skip


def _refuse_long(decode: Graph, length: int) -> None:
    """Raises BatchError if a table of positions is shorter than a generation.

    A program with a split table would take zeros for positions beyond it.
    """
    leaves = [leaf for leaf in decode.leaves("input") if leaf.target in (POSITIONS, START)]
    positions = {leaf.name for leaf in leaves}
    for node in decode.nodes:
        if node.op in _PASSED and positions & set(node.inputs):
            positions.add(node.name)
        if node.op == "aten.embedding" and node.inputs[1] in positions:
            rows = decode[node.inputs[0]].type.shape[0]
            if rows < length - 1:  # the last token is not read
                raise BatchError(
                    f"prompts and new tokens are {length} tokens",
                    where=str(node.source),
                    why=f"the model has {rows} positions",
                    todo="shorten the prompts, or ask for fewer new tokens",
                )


def _refuse_last_place(decode: Graph, length: int) -> None:
    """Raises CaptureError if a decode takes the last place of its caches for that of its token.

    Caches have one length for all tokens. A model that finds the row of a table by the number of
    keys, such as the mask of a window, would read the last row for every token.
    """
    for node in decode.nodes:
        last = node.op == "aten.slice.Tensor" and node.args[2:4] == (length - 1, length)
        if not last and not (node.op == "aten.select.int" and node.args[2] == length - 1):
            continue
        table = decode[node.inputs[0]]
        while table.op in _PASSED and len(table.inputs) == 1:
            table = decode[table.inputs[0]]
        if table.op == "buffer" and not table.is_cache:
            raise CaptureError(
                f"the model reads {table.target!r} at a place that the number of keys gives",
                where=str(node.source),
                why=f"a decode attends to {length} places for every token, and masks those to come",
                todo="find the place by past_key_values.get_seq_length(), or generate with "
                "transformers",
            )

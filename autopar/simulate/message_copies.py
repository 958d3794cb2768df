"""Copies of gradients into the messages that reduce them, where a system makes them."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.work import copy_work
from autopar.ir.tensor import DTYPE_BYTES
from autopar.simulate.buffers import Buffer, Recorder
from autopar.simulate.parameter import Weight, titled


def copy_in(
    recorder: Recorder, weights: Sequence[Weight], sent: Sequence[Buffer], dtype: str, ready: int
) -> None:
    """Copies gradients, as operators compute them, into a message, in the dtype that is sent."""
    given = [weight.leaf.type.dtype for weight in weights]
    works = tuple(
        copy_work(buffer.nbytes * DTYPE_BYTES[own] / DTYPE_BYTES[dtype], buffer.nbytes, own)
        for own, buffer in zip(given, sent, strict=True)
    )
    recorder.compute(f"copy of {titled('gradient', weights)} into a message", "", works, [ready])

"""Copies of gradients into messages and of parameters out of them, where a system makes them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost.work import copy_work
from autopar.ir.mesh import Mesh
from autopar.ir.storage import Hop
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


def copy_out(recorder: Recorder, weights: Sequence[Weight], nbytes: Sequence[float]) -> None:
    """Copies updated parameters of `nbytes` bytes each out of the message that gathers them."""
    works = tuple(
        copy_work(each, each, weight.leaf.type.dtype)
        for weight, each in zip(weights, nbytes, strict=True)
    )
    recorder.compute(f"copy of {titled('parameter', weights)} out of a message", "", works)


def arriving(hop: Hop, whole: float, part: float, alone: bool, ends: bool, mesh: Mesh) -> float:
    """Returns the bytes of the buffers through which an updated parameter is gathered.

    Parts of rows, and several tensors of one call, are sent from a staging buffer and arrive in
    another. Rows arrive where they are stored, if they split evenly.

    Args:
        hop: the collective.
        whole, part: bytes of the parameter behind it and before it.
        alone: whether the call has no other tensor.
        ends: whether it is the last one, which ends in the stored parameter.
        mesh: the devices.
    """
    joined = bool(hop.dim) or not alone
    even = whole == part * math.prod(map(mesh.axis_size, hop.call.axes))
    staging = (whole + part) * joined + whole * (not joined and ends and not even)
    return staging + whole * (not ends)

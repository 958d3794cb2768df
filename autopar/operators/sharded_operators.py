"""Operators that reduce or index a split dimension, and therefore communicate.

A device with a part of the vocabulary looks up the words of this part. The cross entropy of
Megatron-LM (arXiv:1909.08053, section 3, "fuse the output of the parallel GEMM with the cross
entropy loss") exchanges a maximum and a sum for every row, but no logits. A convolution on a part
of an image needs its neighbours' borders. `exchange.py` lists these operators.

    rows = mesh.embedding(weight, ids, axis="gpu", size=50257)      # a partial sum

Generated programs and the proofs of the rules run the same code, on different `Peers`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.errors import ProgramError
from autopar.ir.mesh import Mesh
from autopar.operators.attention.sink_attention import sink_attention
from autopar.operators.device_work import CHUNK
from autopar.operators.dispatch import Hop, dispatched, takers
from autopar.operators.forms import method
from autopar.operators.mixture import Biases, Experts, mixture
from autopar.operators.narrow.float8_linear import Scaling, float8_linear
from autopar.operators.peer_devices import (
    Axes,
    Peers,
    cross_entropy,
    halo,
    softmax,
    summed,
    widened,
)

__all__ = ["CHUNK", "Axes", "ShardedOperators"]

Stages = tuple[tuple[str, ...], ...]


class ShardedOperators(ABC):
    """The sharded operators, as methods of an object that has the devices along each axis."""

    mesh: Mesh
    coordinate: dict[str, int]
    seen: list[Tensor] | None = None  # if a list, mixtures append their numbers of tokens by expert
    running: object | None = None  # identifies the call of a form while it runs

    @abstractmethod
    def group(self, axes: Axes) -> Peers:
        """Returns the devices along one axis or several, outermost first."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Returns the method of a form (see `forms/`), bound to this object."""
            run = None if name.startswith("_") else method(name)
            if run is None:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            return functools.partial(_identified, run, self)

    def embedding(
        self, weight: Tensor, ids: Tensor, padding_idx: int = -1, *, axis: Axes, size: int
    ) -> Tensor:
        """Looks up rows in this device's part of a table; zeros for rows of other devices."""
        own, elsewhere, start = _local(self.group(axis), ids, size)
        padding = padding_idx - start
        padding = padding if 0 <= padding < weight.shape[0] else -1
        rows = torch.embedding(weight, own, padding)
        return rows.masked_fill(elsewhere.unsqueeze(-1), 0)

    def gather(self, x: Tensor, dim: int, index: Tensor, *, axis: Axes, size: int) -> Tensor:
        """Returns torch.gather along a split dimension, with zeros for absent elements."""
        own, elsewhere, _ = _local(self.group(axis), index, size)
        return x.gather(dim, own).masked_fill(elsewhere, 0)

    def index_select(self, x: Tensor, dim: int, index: Tensor, *, axis: Axes, size: int) -> Tensor:
        """Returns torch.index_select along a split dimension, with zeros for absent slices."""
        own, elsewhere, _ = _local(self.group(axis), index, size)
        shape = [1] * x.dim()
        shape[dim] = -1
        return x.index_select(dim, own).masked_fill(elsewhere.view(shape), 0)

    def nll_loss(
        self,
        scores: Tensor,
        labels: Tensor,
        weight: Tensor | None = None,
        *,
        reduction: str,
        ignore_index: int = -100,
        axis: Axes,
        size: int,
    ) -> Tensor:
        """Returns the loss of labels among this device's classes, a partial sum over `axis`."""
        ignored = labels == ignore_index
        own, elsewhere, _ = _local(self.group(axis), labels.masked_fill(ignored, 0), size)
        own = own.masked_fill(elsewhere | ignored, -100)
        return F.nll_loss(scores, own, weight, reduction=reduction)

    def cross_entropy(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        reduction: str,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        axis: Axes,
        size: int,
    ) -> Tensor:
        """Returns the loss of logits whose classes are split, replicated on every device."""
        ignored = labels == ignore_index
        peers = self.group(axis)
        own, elsewhere, _ = _local(peers, labels.masked_fill(ignored, 0), size)
        losses = cross_entropy(logits, own, elsewhere, ignored, label_smoothing, peers, size)
        total: Tensor = losses if reduction == "none" else losses.sum()
        return total

    def linear_cross_entropy(
        self, x: Tensor, weight: Tensor, labels: Tensor, ignored: int, *, axis: Axes, size: int
    ) -> Tensor:
        """Returns the summed losses of logits x weightᵀ, where the vocabulary is split.

        The gradient of x is a partial sum.
        """
        # Imported here because Triton takes a second to import.
        from autopar_kernels.linear_cross_entropy import parallel_linear_cross_entropy

        peers = self.group(axis)
        loss: Tensor = parallel_linear_cross_entropy(
            x.reshape(-1, x.shape[-1]),
            weight,
            labels.reshape(-1),
            start=peers.own(size)[0],
            vocabulary=size,
            gather=lambda part: peers.stack(part)(),
            ignored=ignored,
            chunk=CHUNK,
        )
        return loss

    def softmax(self, x: Tensor, dim: int, dtype: Any = None, *, axis: Axes) -> Tensor:
        """Returns softmax over a split dimension; the result is split like x."""
        x = x if dtype is None else x.to(dtype)
        return softmax(x, dim, False, self.group(axis))

    def log_softmax(self, x: Tensor, dim: int, dtype: Any = None, *, axis: Axes) -> Tensor:
        """Returns log_softmax over a split dimension; the result is split like x."""
        x = x if dtype is None else x.to(dtype)
        return softmax(x, dim, True, self.group(axis))

    def logsumexp(
        self, x: Tensor, dim: tuple[int, ...], keepdim: bool = False, *, axis: Axes
    ) -> Tensor:
        """Returns logsumexp over dimensions, some of them split, replicated on every device."""
        peers, wide = self.group(axis), widened(x)
        largest = peers.maximum(wide.detach().amax(dim, keepdim=True))
        largest = largest.masked_fill(largest.isinf(), 0)
        total = summed((wide - largest).exp().sum(dim, keepdim=True), peers).log() + largest
        return (total if keepdim else _squeezed(total, dim)).to(x.dtype)

    def amax(
        self, x: Tensor, dim: tuple[int, ...] = (), keepdim: bool = False, *, axis: Axes
    ) -> Tensor:
        """Returns the maximum over dimensions, some of them split, replicated on every device.

        Equal maxima share the gradient, as in torch.
        """
        peers = self.group(axis)
        dim = tuple(dim) or tuple(range(x.dim()))
        largest = peers.maximum(x.detach().amax(dim, keepdim=True))
        taken = x == largest
        count = peers.reduce(taken.sum(dim, keepdim=True))
        if x.requires_grad:
            largest = summed(
                (x * taken).sum(dim, keepdim=True), peers, count.to(x.dtype).reciprocal(), largest
            )
        return largest if keepdim else _squeezed(largest, dim)

    def amin(
        self, x: Tensor, dim: tuple[int, ...] = (), keepdim: bool = False, *, axis: Axes
    ) -> Tensor:
        """Returns the minimum; otherwise like `amax`."""
        return -self.amax(-x, dim, keepdim, axis=axis)

    def max(
        self, x: Tensor, dim: int, keepdim: bool = False, *, axis: Axes, size: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the maximum along a split dimension and its first index, replicated."""
        at = self.argmax(x, dim, True, axis=axis, size=size)
        own, elsewhere, _ = _local(self.group(axis), at, size)
        values = summed(x.gather(dim, own).masked_fill(elsewhere, 0), self.group(axis))
        return (values, at) if keepdim else (values.squeeze(dim), at.squeeze(dim))

    def min(
        self, x: Tensor, dim: int, keepdim: bool = False, *, axis: Axes, size: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the minimum; otherwise like `max`."""
        values, at = self.max(-x, dim, keepdim, axis=axis, size=size)
        return -values, at

    def argmax(
        self, x: Tensor, dim: int, keepdim: bool = False, *, axis: Axes, size: int
    ) -> Tensor:
        """Returns the first index of the maximum along a split dimension, replicated.

        NaN is larger than any number, as in torch.
        """
        peers, x = self.group(axis), x.detach()
        values, at = x.max(dim, keepdim=True)
        start, _ = peers.own(size)
        odd = values.isnan()
        values = values.masked_fill(odd, torch.inf) if x.is_floating_point() else values
        # The maximum of negated indices is the first index; keys of NaN exceed all others.
        is_best = values == peers.maximum(values)
        key = peers.maximum((odd * size - (at + start)).masked_fill(~is_best, -size))
        first = torch.where(key > 0, size - key, -key)
        return first if keepdim else first.squeeze(dim)

    def argmin(
        self, x: Tensor, dim: int, keepdim: bool = False, *, axis: Axes, size: int
    ) -> Tensor:
        """Returns the first index of the minimum; otherwise like `argmax`."""
        return self.argmax(-x, dim, keepdim, axis=axis, size=size)

    def float8_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        by_row: bool = False,
        rows: Axes = (),
        columns: Axes = (),
        contracted: Axes = (),
    ) -> Tensor:
        """F.linear with products in 8 bits; axes split dimensions, see `float8_linear.py`."""
        split = map(_axes, (rows, columns, contracted))
        result = float8_linear(x, weight, Scaling(self, by_row, *split))
        return result if bias is None else result + bias

    def sink_attention(self, *operands: Any, **how: Any) -> Tensor:
        """Returns attention with sinks, see `sink_attention.py`."""
        return sink_attention(*operands, **how)

    def mixture(
        self,
        gate: Tensor | None,
        up: Tensor,
        down: Tensor,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        act: str,
        *biases: Tensor | None,
        kernels: bool = False,
        axis: Axes = (),
        size: int = 0,
        over: Axes | tuple[Axes, ...] = (),
    ) -> Tensor:
        """Computes a mixture of experts, or this device's part of the experts; see `mixture.py`.

        Along the axes `over`, tokens are split as well, and their rows are sent to the experts: in
        one hop, or in one hop for each inner tuple of axes; see `dispatch.py`.
        """
        if self.seen is not None:
            self.seen.append(torch.bincount(ids[ids >= 0], minlength=size or up.shape[0]))
        if axis:
            _refuse_capture(x)
        experts = Experts(gate, up, down, act, _three(*biases))
        first = self.group(axis).own(size)[0] if axis else 0
        if not over:
            return mixture(experts, x, ids, weights, first, size, kernels)
        hops = self.hops(_axes(axis), _stages(over), size)
        return dispatched(experts, x, ids, weights, hops, first, kernels)

    def hops(self, axes: tuple[str, ...], stages: Stages, size: int) -> list[Hop]:
        """Returns one hop per stage, for `size` experts that are split over `axes`."""
        moved = {axis for stage in stages for axis in stage}
        own = tuple((a, self.coordinate[a]) for a in axes if a not in moved)
        return [
            Hop(self.group(stage), takers(self.mesh, axes, stage, own, size)) for stage in stages
        ]

    def halo(
        self, x: Tensor, dim: int, before: int, after: int, fill: float = 0.0, *, axis: Axes
    ) -> Tensor:
        """Returns x with `before` and `after` elements of its neighbours along a split dimension.

        The ends are filled with `fill`. A negative number removes that many elements of x instead.
        """
        if before < 0 or after < 0:
            x = x.narrow(dim, max(-before, 0), x.shape[dim] + min(before, 0) + min(after, 0))
        return halo(x, dim, max(before, 0), max(after, 0), fill, self.group(axis))


def _identified(run: Callable[..., Any], mesh: ShardedOperators, *args: Any, **how: Any) -> Any:
    """Returns the result of a form, during whose call `mesh.running` identifies the call."""
    before = mesh.running
    mesh.running = before or object()
    try:
        return run(mesh, *args, **how)
    finally:
        mesh.running = before


def _refuse_capture(x: Tensor) -> None:
    """Raises ProgramError during CUDA graph capture: a graph would repeat one number of rows."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ProgramError(
            "experts that are split over devices cannot be in a CUDA graph",
            why="the host reads in every step how many rows they have",
            todo="omit cuda_graph",
        )


def _three(
    gate: Tensor | None = None, up: Tensor | None = None, down: Tensor | None = None
) -> Biases:
    return gate, up, down


def _axes(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _stages(over: Axes | tuple[Axes, ...]) -> Stages:
    """Returns the axes of each hop: ("node", "gpu") is one, (("gpu",), ("node",)) are two."""
    if isinstance(over, str) or all(isinstance(axis, str) for axis in over):
        return (_axes(over),)  # type: ignore[arg-type]
    return tuple(map(_axes, over))


def _local(peers: Peers, index: Tensor, size: int) -> tuple[Tensor, Tensor, int]:
    """Returns local indices (0 for other devices' elements), that mask, and the part's start."""
    torch._assert_async(((index >= 0) & (index < size)).all(), "index out of range")
    start, length = peers.own(size)
    own = index - start
    elsewhere = (own < 0) | (own >= length)
    return own.masked_fill(elsewhere, 0), elsewhere, start


def _squeezed(x: Tensor, dim: tuple[int, ...]) -> Tensor:
    return x.squeeze(tuple(dim))

"""Operators on a dimension that is split between devices, which tell one another what they need.

A device that holds a part of the vocabulary looks up the words it has; the losses of Megatron-LM
(arXiv:1909.08053, section 3, "fuse the output of the parallel GEMM with the cross entropy loss")
exchange a maximum and a sum for every row and never the logits; a convolution on a part of an image
needs its neighbours' borders. `exchange.py` says which operators have such a form.

    found = mesh.embedding(weight, ids, axis="gpu", size=50257)      # a part of a sum

Generated programs and the proofs of the rules run the same code, on different `Peers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.operators.mixture import mixture
from autopar.operators.peer_devices import Peers, cross_entropy, halo, softmax, summed, widened

Axes = str | tuple[str, ...]
CHUNK = 2048  # rows of logits that exist at a time: as many as keep a GPU busy


class Across(ABC):
    """The operators, as methods of whoever knows the devices along an axis."""

    @abstractmethod
    def group(self, axes: Axes) -> Peers:
        """The devices along one axis or several, outermost first."""

    def embedding(
        self, weight: Tensor, ids: Tensor, padding_idx: int = -1, *, axis: Axes, size: int
    ) -> Tensor:
        """Rows of a table of which this device holds a part; zeros for the others' rows."""
        own, elsewhere, start = _local(self.group(axis), ids, size)
        padding = padding_idx - start
        padding = padding if 0 <= padding < weight.shape[0] else -1
        found = torch.embedding(weight, own, padding)
        return found.masked_fill(elsewhere.unsqueeze(-1), 0)

    def gather(self, x: Tensor, dim: int, index: Tensor, *, axis: Axes, size: int) -> Tensor:
        """torch.gather along a split dimension; zeros for elements that others hold."""
        own, elsewhere, _ = _local(self.group(axis), index, size)
        return x.gather(dim, own).masked_fill(elsewhere, 0)

    def index_select(self, x: Tensor, dim: int, index: Tensor, *, axis: Axes, size: int) -> Tensor:
        """torch.index_select along a split dimension; zeros for slices that others hold."""
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
        """This device's classes' part of the loss, whose sum over `axis` is the whole."""
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
        """The loss of logits whose classes are split; whole on every device."""
        ignored = labels == ignore_index
        peers = self.group(axis)
        own, elsewhere, _ = _local(peers, labels.masked_fill(ignored, 0), size)
        losses = cross_entropy(logits, own, elsewhere, ignored, label_smoothing, peers, size)
        total: Tensor = losses if reduction == "none" else losses.sum()
        return total

    def linear_cross_entropy(
        self, x: Tensor, weight: Tensor, labels: Tensor, ignored: int, *, axis: Axes, size: int
    ) -> Tensor:
        """The sum of the losses of logits x weightᵀ, of which this device has a part of the words.

        The gradient of x is this device's part of a sum.
        """
        # Not at the top: it brings Triton, which takes a second.
        from autopar_kernels.linear_cross_entropy import parallel_linear_cross_entropy

        peers = self.group(axis)
        found: Tensor = parallel_linear_cross_entropy(
            x.reshape(-1, x.shape[-1]),
            weight,
            labels.reshape(-1),
            start=peers.own(size)[0],
            vocabulary=size,
            gather=peers.stack,
            ignored=ignored,
            chunk=CHUNK,
        )
        return found

    def softmax(self, x: Tensor, dim: int, dtype: Any = None, *, axis: Axes) -> Tensor:
        """softmax over a split dimension, which stays split."""
        x = x if dtype is None else x.to(dtype)
        return softmax(x, dim, False, self.group(axis))

    def log_softmax(self, x: Tensor, dim: int, dtype: Any = None, *, axis: Axes) -> Tensor:
        """log_softmax over a split dimension, which stays split."""
        x = x if dtype is None else x.to(dtype)
        return softmax(x, dim, True, self.group(axis))

    def logsumexp(
        self, x: Tensor, dim: tuple[int, ...], keepdim: bool = False, *, axis: Axes
    ) -> Tensor:
        """logsumexp over dimensions of which some are split; whole on every device."""
        peers, wide = self.group(axis), widened(x)
        largest = peers.maximum(wide.detach().amax(dim, keepdim=True))
        largest = largest.masked_fill(largest.isinf(), 0)
        total = summed((wide - largest).exp().sum(dim, keepdim=True), peers).log() + largest
        return (total if keepdim else _squeezed(total, dim)).to(x.dtype)

    def amax(
        self, x: Tensor, dim: tuple[int, ...] = (), keepdim: bool = False, *, axis: Axes
    ) -> Tensor:
        """The largest over dimensions of which some are split; whole on every device.

        Where there are several, each has its part of the gradient, as in torch.
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
        """The smallest; as `amax`."""
        return -self.amax(-x, dim, keepdim, axis=axis)

    def max(
        self, x: Tensor, dim: int, keepdim: bool = False, *, axis: Axes, size: int
    ) -> tuple[Tensor, Tensor]:
        """The largest along a split dimension and where it is first; whole on every device."""
        at = self.argmax(x, dim, True, axis=axis, size=size)
        own, elsewhere, _ = _local(self.group(axis), at, size)
        values = summed(x.gather(dim, own).masked_fill(elsewhere, 0), self.group(axis))
        return (values, at) if keepdim else (values.squeeze(dim), at.squeeze(dim))

    def min(
        self, x: Tensor, dim: int, keepdim: bool = False, *, axis: Axes, size: int
    ) -> tuple[Tensor, Tensor]:
        """The smallest; as `max`."""
        values, at = self.max(-x, dim, keepdim, axis=axis, size=size)
        return -values, at

    def argmax(
        self, x: Tensor, dim: int, keepdim: bool = False, *, axis: Axes, size: int
    ) -> Tensor:
        """Where along a split dimension the largest is first; whole on every device.

        NaN counts as larger than anything, as in torch.
        """
        peers, x = self.group(axis), x.detach()
        values, at = x.max(dim, keepdim=True)
        start, _ = peers.own(size)
        odd = values.isnan()
        values = values.masked_fill(odd, torch.inf) if x.is_floating_point() else values
        # The largest of negative places is the first place; that of a NaN is above all others.
        held = values == peers.maximum(values)
        key = peers.maximum((odd * size - (at + start)).masked_fill(~held, -size))
        first = torch.where(key > 0, size - key, -key)
        return first if keepdim else first.squeeze(dim)

    def argmin(
        self, x: Tensor, dim: int, keepdim: bool = False, *, axis: Axes, size: int
    ) -> Tensor:
        """Where the smallest is first; as `argmax`."""
        return self.argmax(-x, dim, keepdim, axis=axis, size=size)

    def mixture(
        self,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        act: str,
        *,
        kernels: bool = False,
        axis: Axes = (),
        size: int = 0,
    ) -> Tensor:
        """A mixture of experts, see `mixture.py`; of the part of them that this device holds."""
        first = self.group(axis).own(size)[0] if axis else 0
        return mixture(gate, up, down, x, ids, weights, act, first, size, kernels)

    def halo(
        self, x: Tensor, dim: int, before: int, after: int, fill: float = 0.0, *, axis: Axes
    ) -> Tensor:
        """x with that many elements of its neighbours along a split dimension; `fill` at the ends.

        A negative number cuts that many of its own off instead.
        """
        if before < 0 or after < 0:
            x = x.narrow(dim, max(-before, 0), x.shape[dim] + min(before, 0) + min(after, 0))
        return halo(x, dim, max(before, 0), max(after, 0), fill, self.group(axis))


def _local(peers: Peers, index: Tensor, size: int) -> tuple[Tensor, Tensor, int]:
    """Indices into this device's part, 0 where they point elsewhere; where that is; its start."""
    torch._assert_async(((index >= 0) & (index < size)).all(), "index out of range")
    start, length = peers.own(size)
    own = index - start
    elsewhere = (own < 0) | (own >= length)
    return own.masked_fill(elsewhere, 0), elsewhere, start


def _squeezed(x: Tensor, dim: tuple[int, ...]) -> Tensor:
    return x.squeeze(tuple(dim))

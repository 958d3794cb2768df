"""Operators on a dimension that is split between devices, which tell one another what they need.

A device that holds a part of the vocabulary looks up the words it has; the losses of Megatron-LM
(arXiv:1909.08053, section 3, "fuse the output of the parallel GEMM with the cross entropy loss")
exchange a maximum and a sum for every row and never the logits; a convolution on a part of an image
needs its neighbours' borders. `autopar/ir/exchange.py` says which operators have such a form.

    found = mesh.embedding(weight, ids, axis="gpu", size=50257)      # a part of a sum

Generated programs and the proofs of the rules run the same code, on different `Peers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.mixture import mixture

Axes = str | tuple[str, ...]
CHUNK = 2048  # rows of logits that exist at a time: as many as keep a GPU busy


class Peers(Protocol):
    """The devices that hold the parts of one dimension, seen from one of them."""

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def own(self, extent: int) -> tuple[int, int]:
        """(start, length) of this device's part of a dimension of `extent` elements."""
        ...

    def reduce(self, x: Tensor) -> Tensor:
        """The sum over all devices, on each."""
        ...

    def maximum(self, x: Tensor) -> Tensor:
        """The largest over all devices, on each."""
        ...

    def stack(self, x: Tensor) -> Tensor:
        """What each device has, all of equal shapes, side by side along a new first dimension."""
        ...

    def neighbours(self, before: Tensor, after: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What the devices before and after this one sent here, None at the ends.

        `before` goes to the device before, `after` to the one after. All devices send equal shapes.
        """
        ...


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
        losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits, own, elsewhere, ignored, label_smoothing, peers, size
        )
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
        found: Tensor = _Softmax.apply(x, dim, False, self.group(axis))  # type: ignore[no-untyped-call]
        return found

    def log_softmax(self, x: Tensor, dim: int, dtype: Any = None, *, axis: Axes) -> Tensor:
        """log_softmax over a split dimension, which stays split."""
        x = x if dtype is None else x.to(dtype)
        found: Tensor = _Softmax.apply(x, dim, True, self.group(axis))  # type: ignore[no-untyped-call]
        return found

    def logsumexp(
        self, x: Tensor, dim: tuple[int, ...], keepdim: bool = False, *, axis: Axes
    ) -> Tensor:
        """logsumexp over dimensions of which some are split; whole on every device."""
        peers, wide = self.group(axis), _wide(x)
        largest = peers.maximum(wide.detach().amax(dim, keepdim=True))
        largest = largest.masked_fill(largest.isinf(), 0)
        total = _total((wide - largest).exp().sum(dim, keepdim=True), peers).log() + largest
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
            largest = _total(
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
        values = _total(x.gather(dim, own).masked_fill(elsewhere, 0), self.group(axis))
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
        axis: Axes = (),
        size: int = 0,
    ) -> Tensor:
        """A mixture of experts, see `mixture.py`; of the part of them that this device holds."""
        first = self.group(axis).own(size)[0] if axis else 0
        return mixture(gate, up, down, x, ids, weights, act, first, size)

    def halo(
        self, x: Tensor, dim: int, before: int, after: int, fill: float = 0.0, *, axis: Axes
    ) -> Tensor:
        """x with that many elements of its neighbours along a split dimension; `fill` at the ends.

        A negative number cuts that many of its own off instead.
        """
        if before < 0 or after < 0:
            x = x.narrow(dim, max(-before, 0), x.shape[dim] + min(before, 0) + min(after, 0))
        found: Tensor = _Halo.apply(  # type: ignore[no-untyped-call]
            x, dim, max(before, 0), max(after, 0), fill, self.group(axis)
        )
        return found


def _local(peers: Peers, index: Tensor, size: int) -> tuple[Tensor, Tensor, int]:
    """Indices into this device's part, 0 where they point elsewhere; where that is; its start."""
    torch._assert_async(((index >= 0) & (index < size)).all(), "index out of range")
    start, length = peers.own(size)
    own = index - start
    elsewhere = (own < 0) | (own >= length)
    return own.masked_fill(elsewhere, 0), elsewhere, start


def _squeezed(x: Tensor, dim: tuple[int, ...]) -> Tensor:
    return x.squeeze(tuple(dim))


def _wide(x: Tensor) -> Tensor:
    """Sums of half precision are made in float32, as torch's own kernels do."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _total(
    x: Tensor, peers: Peers, share: Tensor | float = 1.0, known: Tensor | None = None
) -> Tensor:
    """The sum over the devices, or what it is `known` to be; x gets `share` of the gradient."""
    total: Tensor = _Total.apply(x, peers, share, known)  # type: ignore[no-untyped-call]
    return total


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, peers: Peers, share: Tensor | float, known: Tensor | None
    ) -> Tensor:
        ctx.share = share
        return peers.reduce(x) if known is None else known.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0] * ctx.share, None, None, None


class _Softmax(torch.autograd.Function):
    """softmax and its logarithm: a maximum and a sum forwards, a sum backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, log: bool, peers: Peers) -> Tensor:
        wide = _wide(x)
        shifted = wide - peers.maximum(wide.amax(dim, keepdim=True))
        powers = shifted.exp()
        total = peers.reduce(powers.sum(dim, keepdim=True))
        found = (shifted - total.log() if log else powers / total).to(x.dtype)
        ctx.save_for_backward(found)
        ctx.dim, ctx.log, ctx.peers = dim, log, peers
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (found,), gradient = ctx.saved_tensors, gradients[0]
        y, g = _wide(found), _wide(gradient)
        if ctx.log:
            into = g - y.exp() * ctx.peers.reduce(g.sum(ctx.dim, keepdim=True))
        else:
            into = y * (g - ctx.peers.reduce((g * y).sum(ctx.dim, keepdim=True)))
        return into.to(gradient.dtype), None, None, None


class _CrossEntropy(torch.autograd.Function):
    """One loss for each label: a maximum and two or three sums forwards, nothing backwards."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        own: Tensor,
        elsewhere: Tensor,
        ignored: Tensor,
        smoothing: float,
        peers: Peers,
        size: int,
    ) -> Tensor:
        dim = 1 if logits.dim() > 1 else 0
        wide = _wide(logits)
        largest = peers.maximum(wide.amax(dim, keepdim=True))
        powers = (wide - largest).exp()
        labelled = wide.gather(dim, own.unsqueeze(dim)).masked_fill(elsewhere.unsqueeze(dim), 0)
        sums = [powers.sum(dim, keepdim=True), labelled]
        sums += [wide.sum(dim, keepdim=True)] if smoothing else []
        total, label, *every = peers.reduce(torch.stack(sums))
        losses = total.log() + largest - (1 - smoothing) * label
        if smoothing:
            losses = losses - smoothing * every[0] / size
        ctx.save_for_backward(powers.div_(total), own, elsewhere, ignored)
        ctx.dim, ctx.smoothing, ctx.size, ctx.dtype = dim, smoothing, size, logits.dtype
        kept: Tensor = losses.squeeze(dim).masked_fill(ignored, 0).to(logits.dtype)
        return kept

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        softmax, own, elsewhere, ignored = ctx.saved_tensors
        dim, smoothing = ctx.dim, ctx.smoothing
        # d loss / d logit = softmax - (1 - smoothing) [it is the label] - smoothing / size
        label = (~elsewhere).to(softmax.dtype).unsqueeze(dim) * (smoothing - 1)
        into = (softmax - smoothing / ctx.size).scatter_add_(dim, own.unsqueeze(dim), label)
        owed = gradients[0].masked_fill(ignored, 0).unsqueeze(dim)
        return (into * owed).to(ctx.dtype), *[None] * 6


class _Halo(torch.autograd.Function):
    """Borders travel to the neighbours, their gradients travel back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, before: int, after: int, fill: float, peers: Peers
    ) -> Tensor:
        ctx.dim, ctx.before, ctx.after, ctx.peers = dim, before, after, peers
        length = x.shape[dim]
        # The device before needs this one's first elements after its own.
        first, last = x.narrow(dim, 0, after), x.narrow(dim, length - before, before)
        head, tail = peers.neighbours(first, last)
        parts = [last.new_full(last.shape, fill) if head is None else head, x]
        parts.append(first.new_full(first.shape, fill) if tail is None else tail)
        return torch.cat(parts, dim)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, dim, before, after = gradients[0], ctx.dim, ctx.before, ctx.after
        length = gradient.shape[dim] - before - after
        into = gradient.narrow(dim, before, length).clone()
        borders = gradient.narrow(dim, 0, before), gradient.narrow(dim, before + length, after)
        head, tail = ctx.peers.neighbours(*borders)
        if head is not None:
            into.narrow(dim, 0, after).add_(head)
        if tail is not None:
            into.narrow(dim, length - before, before).add_(tail)
        return into, *[None] * 5

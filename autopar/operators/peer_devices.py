"""Devices along a split dimension, and differentiable functions across them.

autograd does not differentiate communication between devices, so each function defines both its
forward communication and that of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Axes = str | tuple[str, ...]


class Peers(Protocol):
    """The devices that hold the parts of one dimension, seen from one of them."""

    @property
    def size(self) -> int:
        """Returns the number of devices."""
        ...

    def own(self, extent: int) -> tuple[int, int]:
        """Returns (start, length) of this device's part of a dimension of `extent` elements."""
        ...

    def reduce(self, x: Tensor) -> Tensor:
        """Returns the sum over all devices, on each."""
        ...

    def maximum(self, x: Tensor) -> Tensor:
        """Returns the maximum over all devices, on each."""
        ...

    def stack(self, x: Tensor) -> Callable[[], Tensor]:
        """Starts to stack the tensors of all devices, of equal shapes, along a new dimension 0.

        Returns a function that waits for the stack and returns it.
        """
        ...

    def blocks(self, extent: int) -> list[tuple[int, int]]:
        """Returns (start, length) of every device's part, in the order of the parts."""
        ...

    @property
    def index(self) -> int:
        """Returns the number of this device's part."""
        ...

    def order_of_blocks(self) -> Sequence[int]:
        """Returns, for each part, the index of its device's tensor in the result of `stack`."""
        ...

    def deal(
        self, sent: Sequence[Sequence[Tensor]], takes: Sequence[int]
    ) -> Callable[[], list[Tensor]]:
        """Starts to send tensors `sent[i]` to the device with part i.

        At least one tensor must be given; it may be empty. Returns a function that waits for the
        other devices' messages and returns them as flat tensors, `takes[i]` elements from part i.
        Tensors for this device itself are not copied: their message is an empty tensor.
        """
        ...

    def sum_parts(self, x: Tensor) -> Tensor:
        """Returns the sum over all devices of x[i], where i is this device's part."""
        ...

    def neighbours(self, before: Tensor, after: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns the tensors sent by the previous and the next device, None at the ends.

        `before` is sent to the previous device, `after` to the next. All devices send equal shapes.
        """
        ...

    def swap(self, x: Tensor) -> Tensor:
        """Sends x[i] to device i; returns a tensor whose element i is the message of device i."""
        ...

    def rows(self, x: Tensor, sends: Sequence[int], takes: Sequence[int]) -> Tensor:
        """Sends the first sends[0] rows of x to device 0, the next sends[1] to device 1, and so on.

        Returns the received rows: takes[0] from device 0, and so on.
        """
        ...


class Devices(Protocol):
    """The devices of a mesh, seen from one of them."""

    def group(self, axes: Axes) -> Peers:
        """Returns the devices along one axis or several, outermost first."""
        ...


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the elements of all tensors as one flat tensor; copies each at most once."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    row = tensors[0].new_empty(sum(x.numel() for x in tensors))
    for x, part in zip(tensors, row.split([x.numel() for x in tensors]), strict=True):
        part.view(x.shape).copy_(x)
    return row


def widened(x: Tensor) -> Tensor:
    """Widens half precision to float32 for sums, as torch's own kernels do."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def summed(
    x: Tensor, peers: Peers, share: Tensor | float = 1.0, known: Tensor | None = None
) -> Tensor:
    """Returns the sum over devices, or its `known` value; x gets `share` times the gradient."""
    total: Tensor = _Total.apply(x, peers, share, known)  # type: ignore[no-untyped-call]
    return total


def softmax(x: Tensor, dim: int, log: bool, peers: Peers) -> Tensor:
    """Returns softmax, or its logarithm, over a dimension that is split over the devices."""
    result: Tensor = _Softmax.apply(x, dim, log, peers)  # type: ignore[no-untyped-call]
    return result


def cross_entropy(
    logits: Tensor,
    own: Tensor,
    elsewhere: Tensor,
    ignored: Tensor,
    smoothing: float,
    peers: Peers,
    size: int,
) -> Tensor:
    """Returns one loss per label, for logits whose classes are split over the devices.

    Args:
        logits: logits of this device's classes, in dimension 1 or in the only dimension.
        own: local class index of each label; 0 where the label is `elsewhere`.
        elsewhere: whether another device holds the class of the label.
        ignored: whether the label is ignored.
        smoothing: label smoothing, the share of a label that is spread over all classes.
        peers: the devices.
        size: the total number of classes.
    """
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, own, elsewhere, ignored, smoothing, peers, size
    )
    return losses


def halo(x: Tensor, dim: int, before: int, after: int, fill: float, peers: Peers) -> Tensor:
    """Returns x extended by elements of its neighbours on both sides, by `fill` at the ends."""
    result: Tensor = _Halo.apply(x, dim, before, after, fill, peers)  # type: ignore[no-untyped-call]
    return result


def travelled(
    xs: tuple[Tensor, ...], sends: Sequence[int], takes: Sequence[int], peers: Peers
) -> tuple[Tensor, ...]:
    """Exchanges rows of several tensors, see `Peers.rows`; the backward returns their gradients.

    The tensors are sent in the same order in both directions, independent of autograd's order.
    """
    result: tuple[Tensor, ...] = _Travelled.apply(  # type: ignore[no-untyped-call]
        sends, takes, peers, *xs
    )
    return result


class _Travelled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sends: Sequence[int], takes: Sequence[int], peers: Peers, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sends, ctx.takes, ctx.peers = sends, takes, peers
        return tuple(peers.rows(x, sends, takes) for x in xs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back = (ctx.peers.rows(gradient, ctx.takes, ctx.sends) for gradient in gradients)
        return None, None, None, *back


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
    """softmax and its logarithm; reduces a maximum and a sum forwards, a sum backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, log: bool, peers: Peers) -> Tensor:
        wide = widened(x)
        shifted = wide - peers.maximum(wide.amax(dim, keepdim=True))
        powers = shifted.exp() if log else shifted.exp_()
        total = peers.reduce(powers.sum(dim, keepdim=True))
        result = (shifted.sub_(total.log()) if log else powers.div_(total)).to(x.dtype)
        ctx.save_for_backward(result)
        ctx.dim, ctx.log, ctx.peers = dim, log, peers
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (result,), gradient = ctx.saved_tensors, gradients[0]
        y, g = widened(result), widened(gradient)
        if ctx.log:
            into = g - y.exp() * ctx.peers.reduce(g.sum(ctx.dim, keepdim=True))
        else:
            into = y * (g - ctx.peers.reduce((g * y).sum(ctx.dim, keepdim=True)))
        return into.to(gradient.dtype), None, None, None


class _CrossEntropy(torch.autograd.Function):
    """One loss per label; reduces a maximum and two or three sums forwards, nothing backwards."""

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
        wide = widened(logits)
        largest = peers.maximum(wide.amax(dim, keepdim=True))
        powers = (wide - largest).exp_()
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
    """Sends borders to the neighbours, and their gradients back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, before: int, after: int, fill: float, peers: Peers
    ) -> Tensor:
        ctx.dim, ctx.before, ctx.after, ctx.peers = dim, before, after, peers
        length = x.shape[dim]
        # The previous device appends this device's first elements to its own.
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

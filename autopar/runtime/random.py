"""Dropout and attention whose random masks do not depend on how the mesh splits the tensor.

On the CPU, every rank draws the mask of the whole tensor from torch's default generator and keeps
its own part. While the ranks' generators agree (see `synchronised`), a sharded run draws the same
numbers as the unsharded one, and its generators advance in the same way.

On other devices, drawing the whole mask would cost too much. Each shard draws its own from the
device's generator, seeded for that call by a number from the CPU's generator and by the shard's
coordinate. So shards differ, replicas agree, and a forward that is recomputed from a restored CPU
state (activation checkpointing) draws the same masks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.errors import LayoutError
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout, TensorType
from autopar.operators.interpret import TORCH_DTYPES
from autopar.runtime.communication.communicator import Communicator


@dataclass(frozen=True)
class _Held:
    """A parsed layout: the global shape and the splits."""

    text: str
    shape: tuple[int, ...]
    layout: Layout

    def fit(self, local: tuple[int, ...], comm: Communicator, what: str) -> None:
        """Raises LayoutError unless `local` is the shape of this rank's part."""
        expected = self.layout.local_shape(self.shape, comm.mesh, comm.coordinate)
        if local != expected:
            raise LayoutError(
                f"{what} has the local shape {list(local)}",
                where=f"layout {self.text}",
                why=f"this rank's part is {list(expected)}",
            )


@cache
def _read(text: str, mesh: Mesh) -> _Held:
    shape, layout = Layout.parse(text)
    layout.check(shape, mesh)
    return _Held(text, shape, layout)


class Random:
    """The random operators of a program on one mesh.

    Layouts are texts such as "[8@data, 16, 64@tensor]"; the sizes are global.

    Args:
        comm: the mesh.
        seed: seed of masks on devices other than the CPU, in addition to the CPU's generator;
            concurrent meshes (stages of a pipeline) use different seeds.
    """

    def __init__(self, comm: Communicator, seed: int = 0) -> None:
        self.comm, self.seed = comm, seed

    def dropout(self, x: Tensor, p: float, layout: str) -> Tensor:
        """Applies dropout: zeroes elements with probability p, and scales the others by 1/(1-p).

        Args:
            x: local part of a tensor in `layout`. Dropout is linear, so all parts of a partial sum
                use one mask and give the parts of the result's partial sum.
            p: probability of a zero.
            layout: global shape and layout of x and of the result.

        Raises:
            LayoutError: the layout fits neither the mesh nor x.
            ValueError: p is not in [0, 1].
        """
        held = _read(layout, self.comm.mesh)
        held.fit(tuple(x.shape), self.comm, "the input of dropout")
        if p == 0.0:
            return x
        if x.device.type == "cpu":
            return x * self._mask(p, held, x.dtype)
        with self.of_shard(x.device, held.layout):
            return F.dropout(x, p)

    def draw(self, p: float, text: str, device: torch.device) -> None:
        """Advances the CPU's generator as `dropout` of such a tensor does.

        Args:
            p: probability of a zero.
            text: dtype and global shape, "f32[8, 16]"; for attention, of its weights.
            device: the tensor's device.
        """
        if p == 0.0:
            return
        if device.type == "cpu":
            tensor = TensorType.parse(text)
            F.dropout(torch.ones(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype]), p)
        else:
            torch.randint(2**62, ())

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        p: float = 0.0,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        layout: str,
    ) -> Tensor:
        """Computes scaled dot product attention, like torch's function of that name.

        Args:
            q: local [..., heads, queries, width].
            k: local [..., key heads, keys, width]; the key heads divide the heads, and each serves
                equally many neighbouring heads (grouped-query attention).
            v: local [..., key heads, keys, value width].
            mask: local, broadcast to the weights: values to add to the scores, or booleans that
                select keys.
            p: probability of dropping a weight.
            is_causal: whether query i sees only the keys up to i.
            scale: scale of the scores; None for 1/sqrt(width).
            layout: global shape and layout of the weights, [..., heads, queries, keys].

        Returns:
            Local [..., heads, queries, value width]. A query that sees no key gets zeros.

        Raises:
            LayoutError: the layout does not fit the mesh or the inputs, splits the keys, or leaves
                the scores as partial sums (softmax is not linear).
        """
        held = _read(layout, self.comm.mesh)
        held.fit((*q.shape[:-1], k.shape[-2]), self.comm, "the weights of attention")
        if held.layout.dims[-1] or held.layout.partial:
            raise LayoutError(
                "attention needs whole scores of all its keys",
                where=f"layout {layout}",
                why="softmax runs over the keys and is not linear",
                todo="split the batch, the heads or the queries",
            )
        if is_causal and held.layout.dims[-2]:
            mask, is_causal = self._causal(held, mask, q), False
        grouped = q.dim() > 2 and q.shape[-3] != k.shape[-3]
        if p > 0.0 and q.device.type == "cpu":
            if grouped:
                k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
            exact = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
            drop = self._mask(p, held, exact)
            mask = self._causal(held, mask, q) if is_causal else mask
            y = _attend(q.to(exact), k.to(exact), v.to(exact), mask, drop, scale)
            return y.to(q.dtype)
        with self.of_shard(q.device, held.layout, when=p > 0.0):
            return F.scaled_dot_product_attention(
                q, k, v, mask, p, is_causal, scale=scale, enable_gqa=grouped
            )

    def _mask(self, p: float, held: _Held, dtype: torch.dtype) -> Tensor:
        """Returns this rank's part of a CPU mask of zeros and 1/(1-p), drawn in dimension order."""
        whole = F.dropout(torch.ones(held.shape, dtype=dtype), p)
        return self.comm.shard(whole, Layout(held.layout.dims))

    def _causal(self, held: _Held, mask: Tensor | None, q: Tensor) -> Tensor:
        """Returns `mask` with later keys masked out for this rank's queries."""
        seen = torch.ones(held.shape[-2:], dtype=torch.bool, device=q.device).tril()
        seen = self.comm.shard(seen, Layout(held.layout.dims[-2:]))
        if mask is None:
            return seen
        return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)

    @contextmanager
    def of_shard(self, device: torch.device, layout: Layout, when: bool = True) -> Iterator[None]:
        """Returns a context in which generators are seeded for this rank's shard.

        They are those of the CPU and of `device`. The seed is the same on the shard's replicas, and
        differs between shards and between calls. Afterwards the generators are as before, except
        that every rank has drawn one number from the CPU's.

        Args:
            device: the device whose generator is used.
            layout: layout of the tensor; its sharded axes identify the shard.
            when: whether to do anything.
        """
        if not when:
            yield
            return
        place = [(axis, self.comm.coordinate[axis]) for axis in sorted(layout.sharded_axes)]
        text = repr((self.seed, int(torch.randint(2**62, ())), place))
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=device.type):
            torch.manual_seed(seed)
            yield


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, drop: Tensor, scale: float | None
) -> Tensor:
    """Computes attention from single operators, multiplying its weights by `drop`."""
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if mask is None:
        return scores.softmax(-1) * drop @ v
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    else:
        scores = scores + mask
    blind = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return weights * drop @ v


@contextmanager
def synchronised(comm: Communicator) -> Iterator[None]:
    """Returns a context at whose start all ranks take the first rank's state of the CPU generator.

    The other ranks' states are not restored at the end. A sharded program behaves like one process,
    whose generator is the first rank's; between steps, the ranks then also agree on what the caller
    draws (the order of batches). Numbers that must differ between ranks need a `torch.Generator` of
    their own.
    """
    group = comm.group(comm.mesh.names)
    if group.size > 1:
        state = [torch.get_rng_state()]
        group.calls.broadcast_objects(state, comm.ranks[0])
        torch.set_rng_state(state[0])
    yield

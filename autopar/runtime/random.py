"""Dropout and attention whose random masks do not depend on how the mesh splits the tensor.

On the CPU every rank draws the mask of the whole tensor from torch's default generator and keeps
its own part. As long as the ranks' generators agree (see `synchronised`), a sharded run sees the
very numbers of the unsharded one, and its generators advance alike.

On other devices the whole mask would cost too much. Each shard draws its own from the device's
generator, seeded for that call by a number of the CPU's generator and by the shard's place: shards
differ, replicas agree, and a forward that is run again from a restored CPU state (activation
checkpointing) draws the same masks.
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
    """A layout's text, read: the global shape and the splits."""

    text: str
    shape: tuple[int, ...]
    layout: Layout

    def fit(self, local: tuple[int, ...], comm: Communicator, what: str) -> None:
        """LayoutError unless `local` is the shape of this rank's part."""
        expected = self.layout.local_shape(self.shape, comm.mesh, comm.coordinate)
        if local != expected:
            raise LayoutError(
                f"{what} has the local shape {list(local)}",
                where=f"layout {self.text}",
                why=f"this rank holds {list(expected)} of it",
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
        seed: of masks on other devices than the CPU, besides the CPU's generator; meshes that work
            side by side (the stages of a pipeline) take different ones.
    """

    def __init__(self, comm: Communicator, seed: int = 0) -> None:
        self.comm, self.seed = comm, seed

    def dropout(self, x: Tensor, p: float, layout: str) -> Tensor:
        """Dropout in training: elements of x are zero with probability p, else scaled by 1/(1-p).

        Args:
            x: local part of a tensor held in `layout`. Dropout is linear, so that parts of a sum
                that is still owed are dropped by one mask and give the parts of the dropped sum.
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
        """Leave the CPU's generator as `dropout`, of a tensor of a type on a device, leaves it.

        Args:
            p: probability of a zero.
            text: dtype and global shape, "f32[8, 16]"; for attention those of its weights.
            device: where the tensor is.
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
        """Scaled dot product attention, as torch's function of that name computes it.

        Args:
            q: local [..., heads, queries, width].
            k: local [..., key heads, keys, width]; the key heads divide the heads, and each serves
                equally many neighbouring heads (grouped-query attention).
            v: local [..., key heads, keys, value width].
            mask: local, broadcast to the weights: what to add to the scores, or booleans that say
                which keys take part.
            p: probability of dropping a weight.
            is_causal: whether query i sees the keys up to i only.
            scale: of the scores; None stands for 1/sqrt(width).
            layout: global shape and layout of the weights, [..., heads, queries, keys].

        Returns:
            Local [..., heads, queries, value width]. A query that sees no key gets zeros.

        Raises:
            LayoutError: the layout does not fit the mesh or the inputs, splits the keys, or leaves
                a sum of the scores owed (softmax is not linear).
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
        """This rank's part of a CPU mask of zeros and 1/(1-p), drawn along the dimensions."""
        whole = F.dropout(torch.ones(held.shape, dtype=dtype), p)
        return self.comm.shard(whole, Layout(held.layout.dims))

    def _causal(self, held: _Held, mask: Tensor | None, q: Tensor) -> Tensor:
        """`mask` with the later keys forbidden to this rank's queries."""
        seen = torch.ones(held.shape[-2:], dtype=torch.bool, device=q.device).tril()
        seen = self.comm.shard(seen, Layout(held.layout.dims[-2:]))
        if mask is None:
            return seen
        return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)

    @contextmanager
    def of_shard(self, device: torch.device, layout: Layout, when: bool = True) -> Iterator[None]:
        """Inside, the generators of CPU and `device` are seeded for this rank's shard of `layout`.

        Alike on the shard's replicas, different between shards and between calls. Afterwards the
        generators are as before, but for one number drawn from the CPU's on every rank.

        Args:
            device: where numbers are drawn.
            layout: which axes split the tensor.
            when: whether to do so at all.
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
    """Attention written out: its weights times `drop` before they meet the values."""
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
    """Inside, the CPU generators of the mesh's ranks agree: all take the first rank's state.

    The others' states are not restored at the end. A sharded program stands for one process, whose
    generator is the first rank's; left alone, the ranks also agree on what the caller draws between
    steps (the order of batches). Numbers that shall differ between ranks need a `torch.Generator`
    of their own.
    """
    group = comm.group(comm.mesh.names)
    if group.size > 1:
        state = [torch.get_rng_state()]
        group.calls.broadcast_objects(state, comm.ranks[0])
        torch.set_rng_state(state[0])
    yield

"""Runtime: the `mesh` of a generated program, with collectives, random operators and offloading.

h = mesh.dropout(h, 0.1, "[8@data, 1024, 2048]")
y = mesh.all_reduce(y, axis="gpu")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout
from autopar.operators.assume import assume
from autopar.runtime.communication.communicator import Communicator
from autopar.runtime.communication.fetch import Fetch
from autopar.runtime.communication.refetch import Refetch, unpack
from autopar.runtime.offload.activations import SavedTensorOffload
from autopar.runtime.parameters.buffer_writes import Writes
from autopar.runtime.parameters.pieces import Parameter, Piece
from autopar.runtime.parameters.shards import Weight, Weights
from autopar.runtime.random import Random
from autopar.runtime.ranks.shared import Peers


class LocalParameters(Mapping[str, Tensor]):
    """Local parameters, of which some are collected from the place where they are first read.

    Autograd runs the latest node of a forward first. The gradient of a parameter that the program
    took before its first operator would therefore be held until the end of the backward.

    Args:
        named: all parameters and buffers.
        collected: those whose gradients are collected.
        use: returns a parameter as operators use it.
    """

    def __init__(
        self,
        named: Mapping[str, Tensor],
        collected: Mapping[str, Weight],
        use: Callable[[Tensor, Weight], Tensor],
    ) -> None:
        self._named, self._collected, self._use = named, collected, use
        self._used: dict[str, Tensor] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._collected:
            return self._named[key]
        if key not in self._used:
            self._used[key] = self._use(self._named[key], self._collected[key])
        return self._used[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)


class Runtime(Communicator):
    """One device of the mesh, for `forward(mesh, p, batch)` of a generated program.

    It serves one program, whose parameters' gradients it collects.

    Args:
        mesh: the grid.
        device: the device of this process.
        ranks: global ranks of the grid's devices, row-major; by default 0, 1, ...
        seed: seed of random masks on devices other than the CPU.
        peers: the processes that construct it; by default all.

    Raises:
        MeshError: the mesh and the number of ranks differ in size.
    """

    fetch: Fetch

    def __init__(
        self,
        mesh: Mesh,
        device: torch.device,
        ranks: Sequence[int] | None = None,
        seed: int = 0,
        peers: Peers | None = None,
    ) -> None:
        super().__init__(mesh, ranks, peers)
        self.device = device
        self.fetch = Fetch(self)
        self.random = Random(self, seed)
        self.stow = SavedTensorOffload(device)
        self._writes: Writes | None = None  # of the running forward

    def given(self, named: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the local parameters as a program takes them.

        For a parameter that is used as stored, the program runs no collective. If it has a master,
        its gradient is nevertheless collected like other gradients, because it is accumulated in
        another dtype.
        """
        if self.gradients is None or not torch.is_grad_enabled():
            return named
        known = self.gradients.weights
        collected = {k: known[id(tensor)] for k, tensor in named.items() if id(tensor) in known}
        return LocalParameters(
            named, {k: w for k, w in collected.items() if not w.storage.moves}, self.use
        )

    @contextmanager
    def writing(self, writes: Writes) -> Iterator[None]:
        """Returns the context of a forward, which collects its writes."""
        self._writes = writes
        try:
            yield
        finally:
            self._writes = None

    def write(self, key: str, value: Tensor) -> None:
        """Sets a buffer's value at the end of the step.

        When a block is recomputed in the backward, this has been done before.
        """
        if self._writes is not None:
            self._writes.put(key, value)

    @contextmanager
    def stowed(self) -> Iterator[None]:
        """Returns the context of a block whose saved activations are offloaded."""
        if self.stow is None or not torch.is_grad_enabled():
            yield
            return
        gathered = self.refetch  # replaces gathered parameters among the saved tensors
        with self.stow.block((lambda x: x) if gathered is None else gathered.pack, unpack):
            yield

    @contextmanager
    def saving(self, weights: Weights, batch: Iterable[Tensor]) -> Iterator[None]:
        """Returns the context of a forward, which saves parameters in their storage layouts."""
        assert self.stow is not None
        staying = (*batch, *(weight.held for weight in weights.all))
        with self.fetch.forward(), self.stow.forward(staying):
            if not (weights.fetched_again and torch.is_grad_enabled()):
                yield
                return
            self.refetch = self.refetch or Refetch(self, self.device.type != "cpu")
            with self.refetch.instead(weights.bucket):
                yield

    def dropout(self, x: Tensor, p: float, layout: str) -> Tensor:
        """Applies dropout with a mask that does not depend on the mesh; see `runtime.random`."""
        return self.random.dropout(x, p, layout)

    def assume(self, x: Tensor, condition: Tensor, expected: bool, where: str) -> Tensor:
        """Returns x if a condition is as expected; else raises AssumptionError."""
        return assume(x, condition, expected, where)

    def draw(self, p: float, text: str) -> None:
        """Draws and discards the mask of a dropout of a tensor such as "f32[8, 16]"."""
        self.random.draw(p, text, self.device)

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
        """Computes attention with dropout of the weights in `layout`; see `runtime.random`."""
        return self.random.attention(
            q, k, v, mask, p, is_causal=is_causal, scale=scale, layout=layout
        )


def typed(text: str) -> tuple[str, tuple[int, ...], Layout]:
    """Parses dtype, global shape and layout from "f32[768, 3072@gpu]".

    Raises:
        LayoutError: `text` is malformed.
    """
    dtype, bracket, rest = text.partition("[")
    return (dtype, *Layout.parse(bracket + rest))


@dataclass(frozen=True)
class Received:
    """A value that another stage of the pipeline sends.

    Attributes:
        dtype: as in `autopar.ir.tensor.DTYPE_BYTES`.
        shape: global.
        layout: layout of the value, and of its gradient, which is sent back.
        gradient: whether there is one.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: Layout
    gradient: bool = True


def received(text: str, *, gradient: bool = True) -> Received:
    """Parses one entry of a stage's RECEIVED, "f32[8, 16@gpu, 64]".

    Raises:
        LayoutError: `text` is malformed.
    """
    dtype, shape, layout = typed(text)
    return Received(dtype, shape, layout, gradient)


def stored(
    name: str,
    text: str,
    *,
    grads: str = "",
    updated: str = "",
    kept: str = "",
    piece: Piece | None = None,
    trainable: bool = True,
    cache: bool = False,
) -> Parameter:
    """Returns one entry of a program's table of parameters.

    Args:
        name: in the model's state_dict.
        text: dtype, global shape and stored layout, "f32[768, 3072@gpu]", followed by "=>" and the
            layout in which operators use it, if that differs.
        grads, updated: layouts in which gradients are accumulated over microbatches and in which
            the optimizer updates; by default the stored layout.
        kept: layout between forward and backward; by default the used layout.
        piece: the slice of the tensor `name` that it is.
        trainable: whether it has a gradient.
        cache: whether it is a cache that calls of a generating program extend.

    Raises:
        LayoutError: a text is malformed, or the layouts do not fit one another.
    """
    first, arrow, second = text.partition("=>")
    dtype, shape, held = typed(first)
    used = Layout.parse(second)[1] if arrow else Layout(held.dims)
    layouts = [held]
    if grads or updated or kept:
        layouts += [Layout.parse(state)[1] if state else held for state in (grads, updated)]
        layouts += [Layout.parse(kept)[1]] if kept else []
    storage = Storage.of(used, layouts)
    return Parameter(name, shape, dtype, storage, piece, trainable, cache=cache)


def together(parameters: list[Parameter]) -> list[Parameter]:
    """Marks the parameters of a repeated block, which are gathered together."""
    return [replace(parameter, block=parameters[0].key) for parameter in parameters]

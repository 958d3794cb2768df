"""What a generated program is written against: one `mesh` that communicates, drops and knows where.

h = mesh.dropout(h, 0.1, "[8@data, 1024, 2048]")
y = mesh.all_reduce(y, axis="gpu")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from autopar.runtime.offload.activations import Stow
from autopar.runtime.parameters.buffer_writes import Writes
from autopar.runtime.parameters.pieces import Parameter, Piece
from autopar.runtime.parameters.shards import Weights
from autopar.runtime.random import Random
from autopar.runtime.ranks.shared import Peers


class Runtime(Communicator):
    """One device of the mesh, for `forward(mesh, p, batch)` of a generated program.

    It serves one program: the gradients that it takes are those of its parameters.

    Args:
        mesh: the grid.
        device: where this process computes.
        ranks: global ranks of the grid's devices, row-major; by default 0, 1, ...
        seed: of random masks on other devices than the CPU.
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
        self.stow = Stow(device)
        self._writes: Writes | None = None  # of the program whose forward runs

    def given(self, named: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The local parameters as a program takes them.

        Of one that is used as it is held the program makes no exchange. Where it has a master, its
        gradient goes the way of the others nevertheless, since it is added up in another dtype.
        """
        if self.gradients is None or not torch.is_grad_enabled():
            return named
        given = dict(named)
        for key, tensor in named.items():
            weight = self.gradients.weights.get(id(tensor))
            if weight is not None and not weight.storage.moves:
                given[key] = self.use(tensor, weight)
        return given

    @contextmanager
    def writing(self, writes: Writes) -> Iterator[None]:
        """Inside is a forward, whose writes go there."""
        self._writes = writes
        try:
            yield
        finally:
            self._writes = None

    def write(self, key: str, value: Tensor) -> None:
        """Leave a value in a buffer, for when the step is over.

        A block that is computed again in the backward has left it before.
        """
        if self._writes is not None:
            self._writes.put(key, value)

    @contextmanager
    def stowed(self) -> Iterator[None]:
        """Inside is a block; what autograd keeps of it lies in host memory until its backward."""
        if self.stow is None or not torch.is_grad_enabled():
            yield
            return
        gathered = self.refetch  # in its place nothing else is kept
        with self.stow.block((lambda x: x) if gathered is None else gathered.pack, unpack):
            yield

    @contextmanager
    def saving(self, weights: Weights, batch: Iterable[Tensor]) -> Iterator[None]:
        """Inside is a forward of a batch; autograd keeps of parameters what their storage says."""
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
        """Dropout whose mask does not depend on the mesh; see `codegen.random`."""
        return self.random.dropout(x, p, layout)

    def assume(self, x: Tensor, condition: Tensor, expected: bool, where: str) -> Tensor:
        """x, if a condition of the model's own is as expected; else AssumptionError."""
        return assume(x, condition, expected, where)

    def draw(self, p: float, text: str) -> None:
        """Draw, and forget, the mask of a dropout of a tensor such as "f32[8, 16]"."""
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
        """Attention that drops weights; `layout` is that of the weights; see `codegen.random`."""
        return self.random.attention(
            q, k, v, mask, p, is_causal=is_causal, scale=scale, layout=layout
        )


def typed(text: str) -> tuple[str, tuple[int, ...], Layout]:
    """dtype, global shape and layout of "f32[768, 3072@gpu]".

    Raises:
        LayoutError: `text` is no layout.
    """
    dtype, bracket, rest = text.partition("[")
    return (dtype, *Layout.parse(bracket + rest))


@dataclass(frozen=True)
class Received:
    """A value that a stage of a pipeline has from another stage.

    Attributes:
        dtype: as in `autopar.ir.tensor.DTYPE_BYTES`.
        shape: global.
        layout: of the value and of its gradient, which goes back.
        gradient: whether there is one.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: Layout
    gradient: bool = True


def received(text: str, *, gradient: bool = True) -> Received:
    """One line of a stage's table of what it receives, "f32[8, 16@gpu, 64]".

    Raises:
        LayoutError: `text` is no layout.
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
) -> Parameter:
    """One line of a program's table of parameters.

    Args:
        name: its name in the model's state_dict.
        text: dtype, global shape and layout between steps, "f32[768, 3072@gpu]", and behind "=>"
            the layout in which operators use it, where that is another.
        grads, updated: where its gradients are added up over microbatches, and where its optimizer
            state lies; by default as the parameter does.
        kept: how it lies between the forward and the backward; by default as it is used.
        piece: the part of the tensor called `name` that it is.
        trainable: whether it has a gradient.

    Raises:
        LayoutError: a text is no layout, or the layouts do not fit one another.
    """
    first, arrow, second = text.partition("=>")
    dtype, shape, held = typed(first)
    used = Layout.parse(second)[1] if arrow else Layout(held.dims)
    layouts = [held]
    if grads or updated or kept:
        layouts += [Layout.parse(state)[1] if state else held for state in (grads, updated)]
        layouts += [Layout.parse(kept)[1]] if kept else []
    return Parameter(name, shape, dtype, Storage.of(used, layouts), piece, trainable)


def together(parameters: list[Parameter]) -> list[Parameter]:
    """The table of a repeated block, whose parameters are gathered together."""
    return [replace(parameter, block=parameters[0].key) for parameter in parameters]

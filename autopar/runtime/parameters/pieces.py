"""Parameters of a generated program: sharded from a state_dict, gathered into one, clipped.

A program stores each parameter as a local shard. A fused parameter (query, key and value weights in
one matrix) may be stored as several pieces; a state_dict has it joined, so that checkpoints of the
original model load and save unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import StateError
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout, TensorType
from autopar.lower.parameter_keys import key_of
from autopar.operators.interpret import TORCH_DTYPES
from autopar.runtime import torch_private
from autopar.runtime.communication.communicator import Communicator


@dataclass(frozen=True)
class Piece:
    """The part [start, start + length) of dimension `dim` of a fused parameter."""

    dim: int
    start: int
    length: int


@dataclass(frozen=True)
class Parameter:
    """One stored tensor of a program.

    Attributes:
        name: its name in the model's state_dict.
        shape: global shape, of the piece if it is one.
        dtype: as in `autopar.ir.tensor.DTYPE_BYTES`, e.g. "bf16".
        storage: layouts of the parameter, its gradient and its optimizer state.
        piece: the part of the tensor called `name`, or None for all of it.
        trainable: whether it is a parameter with a gradient, not a buffer.
        block: the repeated block that it belongs to, "" for none.
        cache: whether it is a cache that calls of a generating program extend.
        precision: precision of the program.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: Storage
    piece: Piece | None = None
    trainable: bool = True
    block: str = ""
    cache: bool = False
    precision: Precision = AS_IS

    @property
    def layout(self) -> Layout:
        """Layout between steps."""
        return self.storage.held

    @property
    def type(self) -> TensorType:
        """Dtype and global shape."""
        return TensorType(self.dtype, self.shape)

    @property
    def has_master(self) -> bool:
        """Returns whether the optimizer updates a copy of it in another dtype."""
        return self.precision.has_master(self.type, self.trainable)

    @property
    def master(self) -> Parameter:
        """The part that the optimizer updates, as a parameter stored in that layout."""
        kind = self.precision.updated(self.type, self.trainable)
        return replace(self, dtype=kind.dtype, storage=Storage.as_is(self.storage.updated))

    @property
    def key(self) -> str:
        """Name in the program; see `autopar/lower/parameter_keys.py`."""
        if self.piece is None:
            return key_of(self.name)
        stop = self.piece.start + self.piece.length
        return key_of(self.name, (self.piece.dim, self.piece.start, stop))


Squares = Callable[[Sequence[Tensor]], Tensor]


def squares_of(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the squares of all elements, of complex ones of both parts, f64[]."""
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    tensors = [torch.view_as_real(each) if each.is_complex() else each for each in tensors]
    exact = [tensor for tensor in tensors if tensor.dtype == torch.float64]
    others = [tensor for tensor in tensors if tensor.dtype != torch.float64]
    for alike, dtype in ((exact, torch.float64), (others, torch.float32)):
        if alike:
            total += torch_private.norms(alike, dtype).double().square().sum()
    return total


class State:
    """The state of one program on one mesh.

    Args:
        comm: the mesh that stores the parameters.
        parameters: the stored tensors, in the order of all lists of local tensors below.
        tied: other names of parameters in the state_dict, each with its name in `parameters`.

    Raises:
        StateError: the pieces of a parameter do not join without gaps.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[Parameter],
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self.comm = comm
        self.parameters = tuple(parameters)
        self.tied = dict(tied or {})
        self._pieces: dict[str, list[int]] = {}
        for number, parameter in enumerate(self.parameters):
            self._pieces.setdefault(parameter.name, []).append(number)
        self.shapes = {name: self._joined(name) for name in self._pieces}
        self.shapes |= {alias: self.shapes[name] for alias, name in self.tied.items()}

    def _joined(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the whole parameter, after sorting its pieces."""
        numbers = self._pieces[name]
        first = self.parameters[numbers[0]]
        if first.piece is None and len(numbers) == 1:
            return first.shape
        pieces = [self.parameters[n].piece for n in numbers]
        present = [piece for piece in pieces if piece is not None]
        present.sort(key=lambda piece: piece.start)
        end = 0
        for piece in present:
            if len(present) != len(pieces) or piece.dim != present[0].dim or piece.start != end:
                raise StateError(
                    f"the pieces of parameter {name!r} do not join",
                    why=", ".join(str(piece) for piece in pieces),
                )
            end += piece.length
        numbers.sort(key=lambda n: getattr(self.parameters[n].piece, "start", 0))
        dim = present[0].dim
        return (*first.shape[:dim], end, *first.shape[dim + 1 :])

    def load(
        self,
        state_dict: Mapping[str, Tensor],
        device: torch.device | str = "cpu",
        *,
        broadcast: bool = False,
    ) -> list[Tensor]:
        """Returns local shards of a full or DTensor state_dict, cast to the stored dtypes.

        Args:
            state_dict: the same names on every rank.
            device: device of the shards.
            broadcast: use the first rank's values on all ranks, as after a random initialisation.

        Raises:
            StateError: names what is missing, unexpected or of another shape.
        """
        shards: dict[int, Tensor] = {}
        for name, full in self.wholes(state_dict, device, broadcast=broadcast):
            shards |= self.shards(name, full, device)
        return [shards[number] for number in range(len(self.parameters))]

    def wholes(
        self,
        state_dict: Mapping[str, Tensor],
        device: torch.device | str = "cpu",
        *,
        broadcast: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields names and whole tensors of a state_dict, one after another; see `load`."""
        check_state_dict(state_dict, {n: self.shapes[n] for n in self._pieces}, self.tied)
        for name in self._pieces:
            full = whole(self._find(state_dict, name))
            yield name, self._from_first(full, device) if broadcast else full

    def shards(self, name: str, full: Tensor, device: torch.device | str) -> dict[int, Tensor]:
        """Returns local shards of one whole tensor of the state_dict, by index of the parameter."""
        return {n: self._shard(full, self.parameters[n], device) for n in self._pieces[name]}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors in the state_dict, without the tied ones."""
        return tuple(self._pieces)

    @cached_property
    def trained(self) -> State:
        """The state of the tensors that the optimizer updates, in their layouts."""
        return State(self.comm, [p.master for p in self.parameters if p.trainable])

    @cached_property
    def with_master(self) -> frozenset[str]:
        """Names of parameters that the optimizer updates in another dtype than the stored one."""
        return frozenset(p.name for p in self.parameters if p.has_master)

    def empty(self, device: torch.device | str = "cpu") -> list[Tensor]:
        """Returns local tensors of the right shapes and dtypes, to be loaded later."""
        return [
            torch.empty(
                p.layout.local_shape(p.shape, self.comm.mesh, self.comm.coordinate),
                dtype=TORCH_DTYPES[p.dtype],
                device=device,
            )
            for p in self.parameters
        ]

    def _find(self, state_dict: Mapping[str, Tensor], name: str) -> Tensor:
        """Returns the tensor called `name` or by one of its tied names."""
        names = [name, *(alias for alias, tied in self.tied.items() if tied == name)]
        return next(state_dict[n] for n in names if n in state_dict)

    def _from_first(self, full: Tensor, device: torch.device | str) -> Tensor:
        group = self.comm.group(self.comm.mesh.names)
        if group.size == 1:
            return full
        copy = full.detach().to(device, copy=True).contiguous()
        group.calls.broadcast(copy, self.comm.ranks[0])
        return copy

    def _shard(self, full: Tensor, parameter: Parameter, device: torch.device | str) -> Tensor:
        part = full.detach()
        if parameter.piece is not None:
            piece = parameter.piece
            part = part.narrow(piece.dim, piece.start, piece.length)
        local = self.comm.shard(part, Layout(parameter.layout.dims))
        return local.to(device, TORCH_DTYPES[parameter.dtype], copy=True)

    def state_dict(
        self,
        shards: Sequence[Tensor],
        trained: Sequence[Tensor] = (),
        names: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """Returns the full state_dict, pieces joined and tied names included, equal on every rank.

        Args:
            shards: local tensors of all parameters.
            trained, names: local tensors of `self.trained`, and the names of tensors to build from
                these.
        """
        full = dict(self.gathered(shards, trained, names))
        return full | {alias: full[name] for alias, name in self.tied.items()}

    def gathered(
        self,
        shards: Sequence[Tensor],
        trained: Sequence[Tensor] = (),
        names: Collection[str] = (),
        only: Collection[str] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of `state_dict` one at a time, without tied names.

        Args:
            shards, trained, names: as for `state_dict`.
            only: names to yield; None for all.
        """
        for name in self._pieces:
            if only is None or name in only:
                of_trained = name in names
                source, tensors = (self.trained, trained) if of_trained else (self, shards)
                yield name, source.whole(name, tensors)

    def whole(self, name: str, shards: Sequence[Tensor]) -> Tensor:
        """Returns one tensor of the full state_dict, pieces joined, on every rank of the mesh."""
        numbers = self._pieces[name]
        parts = [
            self.comm.unshard(shards[n], Layout(p.layout.dims), p.shape)
            for n, p in ((n, self.parameters[n]) for n in numbers)
        ]
        piece = self.parameters[numbers[0]].piece
        return parts[0] if piece is None else torch.cat(parts, piece.dim)

    def squares(
        self,
        gradients: Sequence[Tensor | None],
        without: Collection[str] = (),
        add: Squares = squares_of,
    ) -> Tensor:
        """Returns this device's part of the sum of squares of the gradients; the parts add up.

        Args:
            gradients: gradients of the parameters, in order, in the layout of the update.
            without: keys of parameters that are not counted.
            add: returns the sum of the squares of all elements of some tensors.

        Returns:
            A float64 scalar.
        """
        alike: dict[int, list[Tensor]] = {}  # by the number of distinct shards
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None and parameter.key not in without:
                axes = parameter.storage.updated.sharded_axes
                parts = math.prod(self.comm.mesh.axis_size(axis) for axis in axes)
                alike.setdefault(parts, []).append(gradient)
        device = next(iter(alike.values()))[0].device if alike else "cpu"
        total = torch.zeros((), dtype=torch.float64, device=device)
        for parts, tensors in alike.items():
            # Every replica counts the same elements again.
            total += add(tensors) * (parts / self.comm.mesh.size)
        return total


def clip(gradients: Sequence[Tensor | None], norm: Tensor, max_norm: float) -> None:
    """Scales gradients, whose norm is `norm`, in place so that it is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_` does for the unsharded model.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        if gradient is not None:
            gradient.mul_(factor.to(gradient.dtype))


def check_state_dict(
    state_dict: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
) -> None:
    """Compares a state_dict with the shapes of a program and its tied names.

    Raises:
        StateError: names what is missing, unexpected or of another shape.
    """
    present = {tied.get(name, name) for name in state_dict}
    known = {**shapes, **{alias: shapes[name] for alias, name in tied.items()}}
    faults = {
        "missing": [name for name in shapes if name not in present],
        "unexpected": [name for name in state_dict if name not in known],
        "mis-shaped": [
            f"{name} {list(value.shape)} instead of {list(known[name])}"
            for name, value in state_dict.items()
            if name in known and tuple(value.shape) != known[name]
        ],
    }
    if any(faults.values()):
        raise StateError(
            "the state_dict does not fit the model",
            why="; ".join(f"{k}: {', '.join(v)}" for k, v in faults.items() if v),
            todo="load a state_dict of the model that was compiled",
        )


def whole(tensor: Tensor) -> Tensor:
    """Returns a plain tensor, gathered if it is a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

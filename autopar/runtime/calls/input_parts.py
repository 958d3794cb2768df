"""This rank's part of the inputs of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.tensor import TensorType
from autopar.runtime.communication.communicator import Communicator
from autopar.runtime.runtime import typed


@dataclass(frozen=True)
class Part:
    """The part of a batch that a rank passes.

    Attributes:
        rank: number of the part, from 0; ranks that pass the same part share it.
        world: number of different parts; 1 if every rank passes the whole batch.
    """

    rank: int
    world: int


WHOLE = Part(0, 1)


def part_of(inputs: Mapping[str, str], comm: Communicator) -> Part:
    """Returns the part that this rank passes.

    Args:
        inputs: name -> dtype, global shape and layout, "i64[8@data, 16]".
        comm: the communicator of the mesh.
    """
    layouts = [typed(text)[2] for text in inputs.values()]
    split = {axis for layout in layouts for axis in layout.sharded_axes}
    rank, world = 0, 1
    for axis in comm.mesh.axes:
        if axis.name in split:
            rank = rank * axis.size + comm.coordinate[axis.name]
            world *= axis.size
    return Part(rank, world)


def parted_names(inputs: Mapping[str, str]) -> frozenset[str]:
    """Returns the names of the inputs of which ranks pass parts; `inputs` as in `part_of`."""
    return frozenset(name for name, text in inputs.items() if typed(text)[2].sharded_axes)


def local_types(inputs: Mapping[str, str], comm: Communicator) -> dict[str, TensorType]:
    """Returns the types of this rank's inputs by name; `inputs` as in `part_of`."""
    types = {}
    for name, text in inputs.items():
        dtype, shape, layout = typed(text)
        types[name] = TensorType(dtype, layout.local_shape(shape, comm.mesh, comm.coordinate))
    return types


def texts_of(inputs: Mapping[str, str], comm: Communicator) -> dict[str, str]:
    """Returns `local_types` as texts, "i64[4, 16]"."""
    return {name: str(kind) for name, kind in local_types(inputs, comm).items()}

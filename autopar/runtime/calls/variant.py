"""Variants: further programs over the parameters of one executor.

Evaluation, and training on batches of another shape, run different graphs. The program of a variant
stores every parameter exactly as the first program does, so both read the same tensors and share
the optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from autopar.cost.programs.row_check import checked
from autopar.errors import ProgramError
from autopar.ir.chosen_algorithms import ChosenAlgorithms
from autopar.ir.tensor import Layout, TensorType
from autopar.runtime.calls.input_parts import parted_names, texts_of
from autopar.runtime.cuda_graph import CudaGraph
from autopar.runtime.generated import Generated
from autopar.runtime.parameters.buffer_writes import Writes
from autopar.runtime.parameters.pieces import Parameter, State
from autopar.runtime.runtime import Runtime

Caches = dict[tuple[str, TensorType, Layout], Tensor]


@dataclass
class Variant:
    """One program over an executor's parameters.

    Attributes:
        program: the loaded program.
        types: dtypes and shapes of this rank's inputs by name, "i64[8, 16]".
        named: the tensors that it reads, by `Parameter.key`.
        writes: the new values of buffers within a step.
        caches: the tensors among `named` that a generating program extends.
        graph: captures and replays its step; None to run the step without a CUDA graph.
    """

    program: Generated
    types: Mapping[str, str]
    named: Mapping[str, Tensor]
    writes: Writes
    caches: Mapping[str, Tensor]
    graph: CudaGraph | None = None

    @cached_property
    def chosen(self) -> ChosenAlgorithms:
        """The algorithms of its collectives; CollectiveError if its mesh cannot run one."""
        return checked(self.program.collectives, self.program.mesh)

    @cached_property
    def parted(self) -> frozenset[str]:
        """The names of the inputs of which ranks pass parts."""
        return parted_names(self.program.inputs)

    @property
    def written(self) -> list[Tensor]:
        """The buffers that a forward writes."""
        return [self.named[key] for key in self.program.written]


def variant_of(
    program: Generated,
    runtime: Runtime,
    stored: Sequence[Parameter],
    named: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    caches: Caches,
) -> Variant:
    """Loads a program over the tensors of another program.

    Args:
        program: the loaded program.
        runtime: the mesh of both programs.
        stored: parameters of the first program.
        named: this device's tensors of these parameters, by key.
        values: constants that only the new program reads: whole tensors by name.
        caches: caches of all programs, to which the new one's are added.

    Raises:
        ProgramError: the program stores a parameter differently, or trains one that the first
            program does not train.
    """
    known = {parameter.key: parameter for parameter in stored}
    own = []
    for parameter in program.stored:
        shared = known.get(parameter.key)
        if shared is None and not parameter.trainable and parameter.name in values:
            own.append(parameter)
        elif shared is None or not _alike(shared, parameter):
            raise ProgramError(
                "two programs of a session store a parameter differently",
                where=parameter.key,
                why=f"one stores {shared and shared.storage}, the other {parameter.storage}",
                todo="compile both with the same options",
            )
    state = State(runtime, own)
    shards = state.load({p.name: values[p.name] for p in own}, runtime.device, broadcast=True)
    constants = dict(zip((p.key for p in own), shards, strict=True))
    return variant_over(program, runtime, {**named, **constants}, caches)


def variant_over(
    program: Generated, runtime: Runtime, named: Mapping[str, Tensor], caches: Caches
) -> Variant:
    """Returns a variant that reads these tensors, and caches of its types, which others share.

    Args:
        program: the loaded program.
        runtime: the mesh.
        named: this device's tensors of the program's parameters, by key.
        caches: caches of all programs; missing ones are added, filled with zeros.
    """
    own = caches_of(program, runtime, caches)
    tensors = {**named, **own}
    return Variant(program, texts_of(program.inputs, runtime), tensors, Writes(tensors), own)


def caches_of(program: Generated, runtime: Runtime, caches: Caches) -> dict[str, Tensor]:
    """Returns this device's caches of a program by key; adds those that are missing, with zeros."""
    own = {}
    for cache in program.caches:
        place = cache.key, cache.type, cache.layout
        if place not in caches:
            (caches[place],) = State(runtime, [cache]).empty(runtime.device)
            caches[place].zero_()
        own[cache.key] = caches[place]
    return own


def _alike(one: Parameter, other: Parameter) -> bool:
    """Returns whether both can read one tensor, regardless of how gradients are reduced."""
    same = (one.name, one.shape, one.dtype, one.piece) == (
        other.name, other.shape, other.dtype, other.piece
    )  # fmt: skip
    frozen = not other.trainable and one.layout == other.layout
    return same and (frozen or one.storage == other.storage)

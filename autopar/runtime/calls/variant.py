"""Variants: further programs over the parameters of one executor.

A model that is evaluated, or trained on batches of another shape, runs another graph. Its program
stores every parameter exactly as the first one does, so both read the same tensors, and what the
optimizer keeps belongs to both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from autopar.cost.programs.row_check import checked
from autopar.errors import ProgramError
from autopar.ir.chosen_algorithms import ChosenAlgorithms
from autopar.runtime.calls.input_parts import texts_of
from autopar.runtime.cuda_graph import CudaGraph
from autopar.runtime.generated import Generated
from autopar.runtime.parameters.buffer_writes import Writes
from autopar.runtime.parameters.pieces import Parameter, State
from autopar.runtime.runtime import Runtime


@dataclass
class Variant:
    """One program over an executor's parameters.

    Attributes:
        program: the loaded program.
        types: of this rank's inputs, by name, "i64[8, 16]".
        named: the tensors that it reads, by `Parameter.key`.
        writes: the new values of buffers within a step.
        graph: captures and replays its step; None to run the step as it is.
    """

    program: Generated
    types: Mapping[str, str]
    named: Mapping[str, Tensor]
    writes: Writes
    graph: CudaGraph | None = None

    @cached_property
    def chosen(self) -> ChosenAlgorithms:
        """The algorithms that run its collectives; CollectiveError if its mesh cannot run one."""
        return checked(self.program.collectives, self.program.mesh)

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
) -> Variant:
    """Returns a program over tensors that another program stores.

    Args:
        program: the loaded program.
        runtime: the mesh of both.
        stored: the table of parameters of the first program.
        named: this device's tensors of that table, by key.
        values: constants that only the new program reads, by name, whole.

    Raises:
        ProgramError: it stores a parameter in another way, or trains one that the first does not.
    """
    known = {parameter.key: parameter for parameter in stored}
    own = []
    for parameter in program.parameters:
        held = known.get(parameter.key)
        if held is None and not parameter.trainable and parameter.name in values:
            own.append(parameter)
        elif held is None or not _alike(held, parameter):
            raise ProgramError(
                "two programs of a session store a parameter differently",
                where=parameter.key,
                why=f"one stores {held and held.storage}, the other {parameter.storage}",
                todo="compile both with the same options",
            )
    state = State(runtime, own)
    shards = state.load({p.name: values[p.name] for p in own}, runtime.device, broadcast=True)
    constants = dict(zip((p.key for p in own), shards, strict=True))
    tensors = {**named, **constants}
    return Variant(program, texts_of(program.inputs, runtime), tensors, Writes(tensors))


def _alike(one: Parameter, other: Parameter) -> bool:
    """Returns whether one tensor serves both; what lies beside it matters to training alone."""
    same = (one.name, one.shape, one.dtype, one.piece) == (
        other.name, other.shape, other.dtype, other.piece
    )  # fmt: skip
    return same and one.storage == other.storage

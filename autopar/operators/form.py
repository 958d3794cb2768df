"""Form: one of several implementations of an operator that have the same layouts.

For example, attention can gather keys or send them around a ring. A form has its own factor string,
in which factors marked "~" are split inside the operator. It states its messages, its work and its
memory, and the method of `mesh` that a program calls. `forms/` contains one file for each form. An
operator without a form runs as its rule and `exchange.py` say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autopar.ir.collective import Collective
from autopar.ir.graph import Arg, Node
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout, TensorType
from autopar.operators.device_work import NodeWork

Types = tuple[TensorType, ...]
Layouts = tuple[Layout, ...]
Kwargs = tuple[tuple[str, Arg], ...]
Calls = tuple[tuple[Collective, ...], tuple[Collective, ...]]


@dataclass(frozen=True)
class Part:
    """One operator in layouts, as the busiest device runs it.

    Attributes:
        node: the operator, with global shapes.
        types, operands: types and layouts of the tensors that it reads.
        mesh: the devices.
    """

    node: Node
    types: Types
    operands: Layouts
    mesh: Mesh

    def operand(self, at: int) -> TensorType:
        """Returns the local type of an operand on the busiest device."""
        shape = self.operands[at].local_shape(self.types[at].shape, self.mesh)
        return TensorType(self.types[at].dtype, shape)

    def axes(self, at: int, dim: int) -> tuple[str, ...]:
        """Returns the mesh axes that split a dimension of an operand; () if none does."""
        dims = self.operands[at].dims
        return dims[dim] if -len(dims) <= dim < len(dims) else ()

    def ways(self, axes: tuple[str, ...]) -> int:
        """Returns the number of devices along axes."""
        count = 1
        for axis in axes:
            count *= self.mesh.axis_size(axis)
        return count


def _nothing(part: Part) -> tuple[float, float]:
    return 0.0, 0.0


def _one(part: Part) -> int:
    return 1


def _none(part: Part) -> tuple[int, int]:
    return 0, 0


@dataclass(frozen=True)
class Form:
    """One implementation of an operator.

    Attributes:
        name: its name in plans and pins, such as "ring zigzag".
        op: the operator, such as "aten.scaled_dot_product_attention".
        spec: returns its factor string for a node and its operand types, in the notation of
            `intra_op/rule.py`; "" if it does not apply to such a node.
        fits: returns whether it applies in given layouts.
        needs: requirements of `spec` and `fits`, as text for errors.
        method: name of the method of `mesh` that runs it.
        run: this method; takes the mesh, then the arguments that `write` returns.
        write: returns arguments and keywords of the call.
        sends: returns its collectives forwards and backwards.
        work: returns its kernels on the slowest device; None if they are those of the operator on
            shards.
        scratch: returns the bytes that it holds only while it runs, forwards and backwards.
        turns: returns the number of turns in which it computes; in all but the last, it also sends.
        examples: examples for its proof, in addition to those of the operator's rule.
        together: pairs of factors that one axis may split at once, as in `OpRule`.
        alone: returns the number of its first collectives, in each direction, that do not overlap
            with kernels.
        meshes: meshes for its proof, in addition to those with one and with two axes.
    """

    name: str
    op: str
    spec: Callable[[Node, Types], str]
    fits: Callable[[Part], bool]
    needs: str
    method: str
    run: Callable[..., Any]
    write: Callable[[Node, Types, Layouts], tuple[tuple[Arg, ...], Kwargs]]
    sends: Callable[[Part], Calls]
    work: Callable[[Part], NodeWork] | None = None
    scratch: Callable[[Part], tuple[float, float]] = _nothing
    turns: Callable[[Part], int] = _one
    examples: tuple[str, ...] = ()
    together: str = ""
    alone: Callable[[Part], tuple[int, int]] = _none
    meshes: tuple[str, ...] = ()

    def call(self, node: Node, types: Types, operands: Layouts) -> Node:
        """Returns the call of the method by which one device runs `node`."""
        args, kwargs = self.write(node, types, operands)
        return replace(node, op=f"mesh.{self.method}", args=args, kwargs=kwargs)

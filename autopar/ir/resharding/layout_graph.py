"""The steps between layouts, shared by tensors and by meshes that differ in sizes only.

The possible layouts of a tensor depend on its extents only through the sets of mesh axes that can
split each of them. The bytes of a step are those of the layout that it leaves (forward) or enters
(backward). Steps are therefore listed once for a class of tensors, and each tensor adds its bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable

from autopar.ir.collective import Step, moves
from autopar.ir.mesh import Mesh
from autopar.ir.resharding.step_arrays import StepArrays
from autopar.ir.tensor import Layout, TensorType


class LayoutGraphs:
    """The graphs of all classes of tensors, to be shared by meshes with axes of the same names."""

    def __init__(self) -> None:
        self._known: dict[Hashable, LayoutGraph] = {}
        self._arrays: dict[Hashable, StepArrays] = {}

    def of(self, mesh: Mesh, tensor: TensorType, grad: bool) -> LayoutGraph:
        """Returns the graph of a tensor's layouts.

        Args:
            mesh: the devices.
            tensor: its type.
            grad: whether gradients flow.
        """
        key = mesh.names, _possible(tensor, mesh), grad
        if key not in self._known:
            self._known[key] = LayoutGraph(mesh, tensor, grad)
        return self._known[key]

    def arrays(self, mesh: Mesh, tensor: TensorType, grad: bool) -> StepArrays:
        """Returns the steps between all layouts of tensors with as many dimensions."""
        key = mesh.names, len(tensor.shape), grad
        if key not in self._arrays:
            self._arrays[key] = StepArrays(*key)
        return self._arrays[key]


class LayoutGraph:
    """The layouts of a class of tensors and the steps that leave each, listed on demand.

    Args:
        mesh: the devices, or others on which the class has the same layouts.
        tensor: one tensor of the class.
        grad: whether gradients flow.
    """

    def __init__(self, mesh: Mesh, tensor: TensorType, grad: bool) -> None:
        self._mesh, self._grad, self._tensor = mesh, grad, tensor
        self._steps: dict[Layout, tuple[Step, ...]] = {}

    def steps(self, layout: Layout) -> tuple[Step, ...]:
        """Returns the steps that leave a layout; their bytes are those of another tensor."""
        if layout not in self._steps:
            self._steps[layout] = tuple(moves(layout, self._tensor, self._mesh, self._grad))
        return self._steps[layout]


def _possible(tensor: TensorType, mesh: Mesh) -> tuple[tuple[bool, ...], ...]:
    """Returns for each dimension whether it has an element for each device along sets of axes."""
    sizes = mesh.sizes.values()
    sets = (itertools.combinations(sizes, count) for count in range(len(mesh.axes) + 1))
    products = [math.prod(group) for groups in sets for group in groups]
    return tuple(tuple(product <= size for product in products) for size in tensor.shape)

"""One operator on the busiest device: its local types, FLOPs and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost.model import Gemm, Work
from autopar.intra_op.node_choices import operand_types
from autopar.intra_op.rule import Dims, Signature
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import Layout, TensorType

Layouts = Sequence[Layout]


class Local:
    """One node on the busiest device.

    Attributes:
        into: layouts of its inputs.
        operands, results: local types of its inputs and results; `read` and `written` are their
            bytes.
        wanted: whether each operand needs a gradient.
        saved: bytes saved for the backward, without `extra`, which no graph value holds.
        sizes: local elements of each factor of the signature.
        share: fraction of the whole operator's FLOPs; `flops` are local.
    """

    def __init__(
        self,
        graph: Graph,
        node: Node,
        operands: Layouts,
        results: Layouts,
        signature: Signature | None,
        mesh: Mesh,
    ) -> None:
        def part(layout: Layout, tensor: TensorType) -> TensorType:
            return TensorType(tensor.dtype, layout.local_shape(tensor.shape, mesh))

        self.graph, self.node, self.signature = graph, node, signature
        self.into, self.mesh = tuple(operands), mesh
        types = operand_types(graph, node)
        self.operands = tuple(map(part, operands, types))
        self.results = tuple(map(part, results, node.types))
        self.wanted = tuple(graph[name].requires_grad for name in node.inputs)
        self.sizes: dict[str, int] = {}
        self.share = 1.0
        if signature is not None:
            dims = (*signature.operands, *signature.results)
            self.sizes = _local_sizes(signature.sizes, dims, (*operands, *results), mesh)
            self.share = math.prod(
                size / whole
                for factor, size in self.sizes.items()
                if (whole := signature.sizes[factor])  # 0 of an empty tensor
            )
        self.flops = self.share * (signature.flops if signature else float(node.type.numel))
        self.read = sum(tensor.nbytes for tensor in self.operands)
        self.written = sum(tensor.nbytes for tensor in self.results)
        self.extra = self.share * sum(tensor.nbytes for tensor in node.saved_types)
        parts = dict(zip(node.inputs, self.operands, strict=True))
        parts[node.name] = self.results[0]
        self.saved = sum(parts[name].nbytes for name in node.saved if name in parts)

    def whole(self, place: int) -> TensorType:
        """Returns the whole type of an operand."""
        return self.graph[self.node.inputs[place]].type

    def work(self, flops: float, nbytes: float, gemm: Gemm | None = None) -> Work:
        """Returns a forward kernel."""
        dtype = self.operands[0].dtype if gemm and self.operands else self.node.type.dtype
        return Work(self.node.op, flops, nbytes, dtype, gemm)

    def gradient(self, flops: float, nbytes: float, gemm: Gemm | None = None) -> Work:
        """Returns a backward kernel."""
        work = self.work(flops, nbytes, gemm)
        return Work(f"{work.op} backward", flops, nbytes, work.dtype, gemm)


def _local_sizes(
    whole: dict[str, int], dims: Sequence[Dims], layouts: Layouts, mesh: Mesh
) -> dict[str, int]:
    """Returns each factor's elements on the busiest device; the first of a dimension is split."""
    sizes = dict(whole)
    for tensor, layout in zip(dims, layouts, strict=True):
        for dim, axes in zip(tensor, layout.dims, strict=True):
            solid = [factor for factor in dim if whole[factor] > 1] if axes else []
            if solid:
                size = whole[solid[0]]
                for axis in axes:
                    size = -(-size // mesh.axis_size(axis))
                sizes[solid[0]] = min(sizes[solid[0]], size)
    return sizes

"""One operator as the busiest device has it: the types of its parts, its FLOPs and its bytes."""

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
        operands, results: types of the parts that it reads and writes; `read` and `written` are
            their bytes.
        wanted: whether each operand needs a gradient.
        saved: bytes that are kept for the backward, but for `extra`, which no graph value holds.
        sizes: elements of each factor of the signature.
        share: the part of the whole operator's FLOPs, which `flops` are.
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
                size / signature.sizes[factor] for factor, size in self.sizes.items()
            )
        self.flops = self.share * (signature.flops if signature else float(node.type.numel))
        self.read = sum(tensor.nbytes for tensor in self.operands)
        self.written = sum(tensor.nbytes for tensor in self.results)
        self.extra = self.share * sum(tensor.nbytes for tensor in node.saved_types)
        parts = dict(zip(node.inputs, self.operands, strict=True))
        parts[node.name] = self.results[0]
        self.saved = sum(parts[name].nbytes for name in node.saved if name in parts)

    def work(self, flops: float, nbytes: float, gemm: Gemm | None = None) -> Work:
        """A kernel forwards."""
        dtype = self.operands[0].dtype if gemm and self.operands else self.node.type.dtype
        return Work(self.node.op, flops, nbytes, dtype, gemm)

    def gradient(self, flops: float, nbytes: float, gemm: Gemm | None = None) -> Work:
        """A kernel backwards."""
        made = self.work(flops, nbytes, gemm)
        return Work(f"{made.op} backward", flops, nbytes, made.dtype, gemm)


def _local_sizes(
    whole: dict[str, int], dims: Sequence[Dims], layouts: Layouts, mesh: Mesh
) -> dict[str, int]:
    """Elements of each factor on the busiest device: the first of a dimension is the one split."""
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

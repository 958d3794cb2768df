"""A pass that writes training batch norms as sums over the batch, which can be split.

A norm without running statistics is an `aten.batch_norm`; one with them returns the new ones among
its results, see `in_place.NORM`.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import Arg, Graph, Name, Node, Ref
from autopar.ir.rewrite import Editor, argument, rewrite
from autopar.ir.tensor import TensorType

_TRACKING = "aten._native_batch_norm_legit_functional"
_HALF = ("f16", "bf16")


def lower_batch_norms(graph: Graph) -> Graph:
    """Returns `graph` with batch norms that use batch statistics written out.

    The statistics are sums over the batch and over space, divided by their counts, as in "Batch
    Normalization" (Ioffe & Szegedy, arXiv:1502.03167, algorithm 1). Parts of a batch give partial
    sums, so that devices with parts of it agree on the statistics of the whole batch. Autograd
    saves one tensor of the input's size, the centred input.
    """

    tracking: dict[str, dict[int, Node]] = {}

    def lower(node: Node, editor: Editor) -> Node | Ref | None:
        if node.op == "getitem" and node.inputs[0] in tracking:
            # The name it has among the results.
            return replace(tracking[node.inputs[0]][int(str(node.args[1]))], name=node.name)
        if node.types[0].numel == 0:
            return None
        if node.op == _TRACKING:
            norm = _BatchNorm(node, editor)
            tracking[node.name] = {0: norm.result(), 3: norm.running(3), 4: norm.running(4)}
        elif node.op == "aten.batch_norm" and argument(node, 5, "training") is True:
            return _BatchNorm(node, editor).result()
        return None

    return rewrite(graph, lower)


class _BatchNorm:
    """One batch norm: (input, weight, bias, running_mean, running_var, training, momentum, eps)."""

    def __init__(self, node: Node, editor: Editor) -> None:
        self.node, self.editor = node, editor
        shape = node.type.shape
        self.dims = tuple(i for i in range(len(shape)) if i != 1)
        self.each = tuple(size if i == 1 else 1 for i, size in enumerate(shape))
        self.count = node.type.numel // shape[1]
        # Half precision would lose the statistics; torch computes them in float32 too.
        self.dtype = "f32" if node.type.dtype in _HALF else node.type.dtype
        x, eps = self._exact(node.args[0]), node.args[7]
        self.momentum = node.args[6]
        self.mean = self._mean(x, "mean")
        self.centred = self._new("centred", "aten.sub.Tensor", (x, self.mean), shape)
        power = self._new("power", "aten.pow.Tensor_Scalar", (self.centred, 2), shape)
        self.variance = self._mean(power, "variance")
        shifted = self._new("shifted", "aten.add.Tensor", (self.variance, eps), self.each)
        self.scale = self._new("scale", "aten.rsqrt", (shifted,), self.each)

    def result(self) -> Node:
        """Returns the normalised input, under the name of the norm."""
        node, scale = self.node, self.scale
        weight, bias = (self._affine(argument(node, i, name)) for i, name in _AFFINE)
        if weight is not None:
            scale = self._new("scale", "aten.mul.Tensor", (scale, weight), self.each)
        args: tuple[Arg, ...] = (self.centred, scale)
        args = args if bias is None else (bias, *args)
        op = "aten.mul.Tensor" if bias is None else "aten.addcmul"
        normalised = replace(node, types=node.types[:1])
        if self.dtype == node.type.dtype:
            return replace(normalised, op=op, args=args, kwargs=())
        exact = self._new("normal", op, args, node.type.shape)
        return replace(
            normalised, op="aten.to.dtype", args=(exact, Name(node.type.dtype)), kwargs=()
        )

    def running(self, place: int) -> Node:
        """Returns (1 - momentum) running + momentum new, for the mean (3) or the variance (4)."""
        running, momentum = self.node.args[place], self.momentum
        assert isinstance(running, Ref)
        assert isinstance(momentum, float)
        # The running variance is unbiased.
        correction = 1.0 if place == 3 else self.count / max(self.count - 1, 1)
        value = self.mean if place == 3 else self.variance
        kind = self.editor[running.name].type
        if self.editor[value.name].requires_grad:
            value = self._new("seen", "autopar.detach", (value,), self.each, grad=False)
        seen = self._new("seen", "aten.reshape", (value, kind.shape), kind.shape)
        if kind.dtype != self.dtype:
            cast = (seen, Name(kind.dtype))
            seen = self._new("seen", "aten.to.dtype", cast, kind.shape, kind.dtype)
        terms = []
        for term, factor in ((running, 1.0 - momentum), (seen, momentum * correction)):
            args = (term, factor)
            terms.append(self._new("part", "aten.mul.Tensor", args, kind.shape, kind.dtype))
        return Node("", "aten.add.Tensor", tuple(terms), (), (kind,), self.node.source)

    def _mean(self, value: Ref, name: str) -> Ref:
        total = self._new(
            f"{name}_sum", "aten.sum.dim_IntList", (value, self.dims, True), self.each
        )
        return self._new(name, "aten.div.Tensor", (total, self.count), self.each)

    def _affine(self, value: Arg) -> Ref | None:
        """Returns a weight or bias, aligned with the channels."""
        if not isinstance(value, Ref):
            return None
        return self._new("each", "aten.reshape", (self._exact(value), self.each), self.each)

    def _exact(self, value: Arg) -> Ref:
        assert isinstance(value, Ref)
        kind = self.editor[value.name].type
        if kind.dtype == self.dtype:
            return value
        return self._new("exact", "aten.to.dtype", (value, Name(self.dtype)), kind.shape)

    def _new(
        self, hint: str, op: str, args: tuple[Arg, ...], shape: tuple[int, ...],
        dtype: str = "", *, grad: bool = True,
    ) -> Ref:  # fmt: skip
        kind = TensorType(dtype or self.dtype, shape)
        result = self.editor.new(hint, op, args, kind, self.node)
        if not grad:
            self.editor.put(replace(self.editor[result.name], requires_grad=False))
        return result


_AFFINE = ((1, "weight"), (2, "bias"))

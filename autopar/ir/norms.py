"""A pass that writes batch norms in training as sums over the batch, which may then be split."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.graph import Arg, Graph, Name, Node, Ref
from autopar.ir.rewrite import Editor, argument, rewrite
from autopar.ir.tensor import TensorType

_HALF = ("f16", "bf16")


def lower_batch_norms(graph: Graph) -> Graph:
    """`graph` with batch norms that take their statistics from the batch written out.

    The statistics are sums over the batch and over space, divided by their counts, as in "Batch
    Normalization" (Ioffe & Szegedy, arXiv:1502.03167, algorithm 1). Parts of a batch owe parts of
    these sums, so devices that hold parts agree on statistics of the whole batch, as one device
    would have them. Autograd keeps one tensor of the input's size, the centred input.
    """

    def lower(node: Node, editor: Editor) -> Node | Ref | None:
        trains = argument(node, 5, "training") is True
        if node.op != "aten.batch_norm" or not trains or node.type.numel == 0:
            return None
        return _BatchNorm(node, editor).result()

    return rewrite(graph, lower)


class _BatchNorm:
    """One batch norm: (input, weight, bias, running_mean, running_var, training, momentum, eps)."""

    def __init__(self, node: Node, editor: Editor) -> None:
        self.node, self.editor = node, editor
        shape = node.type.shape
        self.dims = tuple(i for i in range(len(shape)) if i != 1)
        self.each = tuple(size if i == 1 else 1 for i, size in enumerate(shape))
        self.count = node.type.numel // shape[1]
        # Half precision would lose the statistics: torch takes them in float32 too.
        self.dtype = "f32" if node.type.dtype in _HALF else node.type.dtype

    def result(self) -> Node:
        """The normalised input, under the name of the norm."""
        node = self.node
        x, momentum, eps = self._exact(node.args[0]), node.args[6], node.args[7]
        mean = self._mean(x, "mean")
        centred = self._new("centred", "aten.sub.Tensor", (x, mean), node.type.shape)
        power = self._new("power", "aten.pow.Tensor_Scalar", (centred, 2), node.type.shape)
        variance = self._mean(power, "variance")
        self._track(argument(node, 3, "running_mean"), mean, momentum, 1.0)
        # The running variance is the unbiased one.
        correction = self.count / max(self.count - 1, 1)
        self._track(argument(node, 4, "running_var"), variance, momentum, correction)
        shifted = self._new("shifted", "aten.add.Tensor", (variance, eps), self.each)
        scale = self._new("scale", "aten.rsqrt", (shifted,), self.each)
        weight, bias = (self._affine(argument(node, i, name)) for i, name in _AFFINE)
        if weight is not None:
            scale = self._new("scale", "aten.mul.Tensor", (scale, weight), self.each)
        args: tuple[Arg, ...] = (centred, scale) if bias is None else (bias, centred, scale)
        op = "aten.mul.Tensor" if bias is None else "aten.addcmul"
        if self.dtype == node.type.dtype:
            return replace(node, op=op, args=args, kwargs=())
        exact = self._new("normal", op, args, node.type.shape)
        return replace(node, op="aten.to.dtype", args=(exact, Name(node.type.dtype)), kwargs=())

    def _mean(self, value: Ref, name: str) -> Ref:
        total = self._new(
            f"{name}_sum", "aten.sum.dim_IntList", (value, self.dims, True), self.each
        )
        return self._new(name, "aten.div.Tensor", (total, self.count), self.each)

    def _track(self, running: Arg, value: Ref, momentum: Arg, correction: float) -> None:
        """running = (1 - momentum) running + momentum correction value, in place."""
        if not isinstance(running, Ref) or not isinstance(momentum, float):
            return
        kind = self.editor[running.name].type
        if self.editor[value.name].requires_grad:
            value = self._new("seen", "autopar.detach", (value,), self.each, grad=False)
        flat = self._new("seen", "aten.reshape", (value, kind.shape), kind.shape)
        if kind.dtype != self.dtype:
            flat = self._new(
                "seen", "aten.to.dtype", (flat, Name(kind.dtype)), kind.shape, kind.dtype
            )
        self._write("aten.mul_.Tensor", (running, 1.0 - momentum), kind)
        new = self._new(
            "news", "aten.mul.Tensor", (flat, momentum * correction), kind.shape, kind.dtype
        )
        self._write("aten.add_.Tensor", (running, new), kind)

    def _write(self, op: str, args: tuple[Arg, ...], kind: TensorType) -> None:
        name = self.editor.fresh("tracked")
        self.editor.put(Node(name, op, args, (), (kind,), self.node.source))

    def _affine(self, value: Arg) -> Ref | None:
        """A weight or bias, aligned with the channels."""
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
        made = self.editor.new(hint, op, args, kind, self.node)
        if not grad:
            self.editor.put(replace(self.editor[made.name], requires_grad=False))
        return made


_AFFINE = ((1, "weight"), (2, "bias"))

"""Expands a kernel into the operators it replaced: its pattern's first spelling, as a graph."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.ir.fusion.match import HALF, INFIX, SPECIAL, parsed
from autopar.ir.fusion.patterns import patterns
from autopar.ir.graph import PREFIX, Arg, Graph, Name, Node, Ref
from autopar.ir.tensor import TensorType

_OVERLOADS = {
    "add": "add.Tensor", "sub": "sub.Tensor", "mul": "mul.Tensor", "div": "div.Tensor",
    "pow": "pow.Tensor_Scalar", "slice": "slice.Tensor",
}  # fmt: skip
_REST: dict[str, tuple[Arg, ...]] = {"cross_entropy_loss": (None, 2)}  # matched by `...`
_SCALE = 0.7978845608028654  # scale of a written-out GELU: the square root of 2 / π


def expand_kernel(node: Node, operands: Sequence[Node], types: Sequence[TensorType]) -> Graph:
    """Returns the operators that compute a kernel's first result, each with its saved tensors.

    Args:
        node: a call of a kernel that has a pattern.
        operands: the nodes that it reads.
        types: local types of the operands on one device.
    """
    from autopar.operators.interpret import annotate

    kernel = node.op.removeprefix(PREFIX)
    pattern = next(item for item in patterns() if item.kernel == kernel)
    spelled = _Written(_leaf_types(kernel, types))
    places = iter(zip(pattern.arguments, node.args, strict=False))
    given = iter(operands)
    for name, arg in places:
        spelled.leaf(name, next(given)) if isinstance(arg, Ref) else spelled.number(name, arg)
    width = spelled.types[0].shape[-1]
    for name, value in (
        ("width", width), ("half", width // 2), ("shape", (width,)), ("scale", _SCALE),
    ):  # fmt: skip
        spelled.number(name, value)
    result = spelled.value(parsed(pattern.spellings[0]))
    assert isinstance(result, Ref)
    return annotate(Graph(kernel, tuple(spelled.nodes), (("result", result.name),)))


def _leaf_types(kernel: str, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
    """Returns the types of the operands in the spelling."""
    if kernel == "rotary":  # (batch, row, head, width) and angles beside it
        x, *angles = types
        wide = (TensorType(t.dtype, (1, t.shape[0], 1, t.shape[1])) for t in angles)
        return (x, *wide)
    if kernel == "linear_cross_entropy":
        x, weight, labels = types
        rows = TensorType(x.dtype, (labels.numel, x.shape[-1]))
        return (rows, weight, TensorType(labels.dtype, (labels.numel,)))
    return tuple(types)


@dataclass
class _Written:
    """The nodes of a spelling."""

    types: tuple[TensorType, ...]
    nodes: list[Node] = field(default_factory=list)
    values: dict[str, Arg] = field(default_factory=dict)

    def leaf(self, name: str, like: Node) -> None:
        """Adds an operand."""
        kind = self.types[len(self.nodes)]
        op = "param" if like.requires_grad else "input"
        self.nodes.append(Node(name, op, (name,), (), (kind,), requires_grad=like.requires_grad))
        self.values[name] = Ref(name)

    def number(self, name: str, value: Arg) -> None:
        """Binds a name to a value, unless it is an operand."""
        self.values.setdefault(name, value)

    def value(self, text: ast.expr) -> Arg:
        """Returns the value of an expression, adding the nodes that compute it."""
        if isinstance(text, ast.Constant):
            assert isinstance(text.value, int | float | str)
            return text.value
        if isinstance(text, ast.Name):
            return self.values[text.id]
        if isinstance(text, ast.NamedExpr):
            self.values[text.target.id] = value = self.value(text.value)
            return value
        if isinstance(text, ast.Tuple):
            return tuple(self.value(item) for item in text.elts)
        if isinstance(text, ast.BinOp):
            return self._operator(INFIX[type(text.op)], [text.left, text.right], [])
        if isinstance(text, ast.UnaryOp):
            if isinstance(text.operand, ast.Constant) and isinstance(text.operand.value, int):
                return -text.operand.value
            return self._operator("neg", [text.operand], [])
        assert isinstance(text, ast.Call)
        assert isinstance(text.func, ast.Name)
        if text.func.id in SPECIAL:
            return self._special(text.func.id, self.value(text.args[0]))
        return self._operator(text.func.id, text.args, text.keywords)

    def _special(self, name: str, inner: Arg) -> Arg:
        half = self.types[0].dtype
        if name == "mean":
            total = self._new("sum.dim_IntList", (inner, (-1,), True))
            return self._new("div.Tensor", (total, self.types[0].shape[-1]))
        if name == "viewed" or half not in HALF:
            return inner
        return self._new("to.dtype", (inner, Name("f32" if name == "wide" else half)))

    def _operator(
        self, name: str, texts: Sequence[ast.expr], keywords: Sequence[ast.keyword]
    ) -> Ref:
        args: list[Arg] = []
        for text in texts:
            rest = isinstance(text, ast.Constant) and text.value is ...
            args += _REST.get(name, ()) if rest else (self.value(text),)
        if name in ("add", "mul") and not isinstance(args[0], Ref):
            args.reverse()
        kwargs = tuple((str(keyword.arg), self.value(keyword.value)) for keyword in keywords)
        return self._new(_OVERLOADS.get(name, name), tuple(args), kwargs)

    def _new(self, op: str, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...] = ()) -> Ref:
        new = Node(f"v{len(self.nodes)}", f"aten.{op}", args, kwargs, self.types[:1])
        grad = any(node.requires_grad for node in self.nodes if node.name in new.inputs)
        self.nodes.append(Node(new.name, new.op, args, kwargs, new.types, requires_grad=grad))
        return Ref(new.name)

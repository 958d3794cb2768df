"""A pass that replaces mixtures of experts by one operator, which can be split.

Sorting by expert moves a token's rows to arbitrary places, so no dimension between the sort and its
inverse can be split. The mixture as a whole can be split, see mixture.py. The pass matches
transformers' `grouped_mm_experts_forward`, up to casts: in bfloat16 with torch's grouped product,
in other dtypes with that of transformers; and rows that are sorted, cut by their counts and added
up again. `expert_body.py` reads what an expert itself computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.ir.graph import Arg, Graph, Node, Ref
from autopar.ir.rewrite import Editor, rewrite
from autopar.ir.tensor import TensorType
from autopar.operators.mixture import GROUPED, MIXTURE
from autopar.passes.experts.expert_body import Body, find_body
from autopar.passes.experts.parameter_pieces import halves_of, is_whole
from autopar.passes.template import Pattern

_TEXT = """
%flat = aten.reshape(%ids, ROWS) : ()
%sorted = aten.sort(%flat) : ()
%chosen = getitem(%sorted, 0) : ()
%places = getitem(%sorted, 1) : ()
%counts = aten.histc(%chosen, EXPERTS, 0, LAST) : ()
%ends = aten.cumsum(%counts, 0, dtype=i32) : ()
%tokens = aten.floor_divide(%places, CHOICES) : ()
%rows = aten.index.Tensor(%x, (%tokens,)) : ()
%weight = aten.reshape(%weights, ROWS) : ()
%picked = aten.index.Tensor(%weight, (%places,)) : ()
%scale = aten.unsqueeze(%picked, -1) : ()
%scaled = aten.mul.Tensor(%found, %scale) : ()
%empty = aten.empty_like(%places) : ()
%order = aten.arange(COUNT) : ()
%inverse = aten.index_put(%empty, (%places,), %order) : ()
%back = aten.index.Tensor(%scaled, (%inverse,)) : ()
%each = aten.reshape(%back, SHAPE) : ()
%total = aten.sum.dim_IntList(%each, (1,)) : ()
"""
# With counts by a scatter of ones, and without the inverse of the sort (JetMoe).
_SCATTERED = """
%flat = aten.reshape(%ids, ROWS) : ()
%sorted = aten.sort(%flat, 0) : ()
%places = getitem(%sorted, 1) : ()
%none = aten.zeros((TOKENS, EXPERTS)) : ()
%marked = aten.scatter.value(%none, 1, %ids, 1) : ()
%ones = aten.to.dtype(%marked, i64) : ()
%counts = aten.sum.dim_IntList(%ones, (0,)) : ()
%ends = aten.cumsum(%counts, 0, dtype=i32) : ()
%tokens = aten.div.Tensor_mode(%places, CHOICES, rounding_mode='trunc') : ()
%rows = aten.index.Tensor(%x, (%tokens,)) : ()
%weight = aten.reshape(%weights, ROWS) : ()
%picked = aten.index.Tensor(%weight, (%places,)) : ()
%scale = aten.unsqueeze(%picked, 1) : ()
%scaled = aten.mul.Tensor(%found, %scale) : ()
%empty = aten.zeros((TOKENS, WIDTH)) : ()
%total = aten.index_add(%empty, 0, %tokens, %scaled) : ()
"""
_PATTERNS = {
    "aten.sum.dim_IntList": Pattern(_TEXT, {}),
    "aten.index_add": Pattern(_SCATTERED, {}),
}
_LOOP = "transformers.grouped_mm_fallback"


@dataclass(frozen=True)
class _Mixture:
    """A mixture and names of its nodes.

    Attributes:
        total: the sum over a token's experts, in the dtype of its input.
        x, ids, weights: operands of the operator.
        body: the computation of an expert.
    """

    total: str
    x: str
    ids: str
    weights: str
    body: Body

    @property
    def fused(self) -> tuple[str, ...]:
        """Values that hold gates and others."""
        return (self.body.into.weight, self.body.into.bias) if self.body.halves else ()


def find_mixtures(graph: Graph) -> Graph:
    """Returns `graph` with each mixture as one operator, which has separate operands for gates.

    A parameter that holds the weights of gates and others, concatenated, becomes two pieces if it
    is used whole and has no other reader.
    """
    ends = [node for node in graph.nodes if node.op in _PATTERNS]
    mixtures = [mixture for node in ends if (mixture := _mixture(node, graph)) is not None]
    totals = {mixture.total: mixture for mixture in mixtures}
    apart = {
        name: 1 + mixture.body.into.turned * (name == mixture.body.into.weight)
        for mixture in mixtures
        for name in mixture.fused
        if mixture.body.halves == "concatenated" and name and is_whole(graph[name], graph)
    }
    halves: dict[str, tuple[Ref, Ref]] = {}

    def write(node: Node, editor: Editor) -> Node | Ref | None:
        if node.name in apart:
            halves[node.name] = halves_of(node, apart[node.name], editor)
            return halves[node.name][0]
        mixture = totals.get(node.name)
        return None if mixture is None else _written(mixture, node, halves, editor)

    return rewrite(graph, write)


def _written(
    mixture: _Mixture, node: Node, halves: dict[str, tuple[Ref, Ref]], editor: Editor
) -> Node:
    """Returns the operator."""
    into, out = mixture.body.into, mixture.body.out

    def both(name: str, turned: bool) -> tuple[Ref | None, Ref | None]:
        """Returns gates and others of a weight or a bias."""
        if not name:
            return None, None
        gate, up = halves.get(name) or _cut(
            Ref(editor.resolve(name)), mixture.body.halves, 1 + turned, node, editor
        )
        turn = turned and len(editor[up.name].type.shape) == 3
        return (gate and _turned(gate, turn, node, editor)), _turned(up, turn, node, editor)

    gate, up = both(into.weight, into.turned)
    down = _turned(Ref(editor.resolve(out.weight)), out.turned, node, editor)
    names = (mixture.x, mixture.ids, mixture.weights)
    args: tuple[Arg, ...] = (gate, up, down, *(Ref(editor.resolve(name)) for name in names))
    args = (*args, mixture.body.act)
    if into.bias or out.bias:
        last = Ref(editor.resolve(out.bias)) if out.bias else None
        args = (*args, *both(into.bias, False), last)
    return replace(node, op=MIXTURE, args=args, kwargs=())


def _cut(value: Ref, halves: str, dim: int, node: Node, editor: Editor) -> tuple[Ref | None, Ref]:
    """Returns gates and others of a value that holds both along `dim`."""
    if not halves:
        return None, value
    kind = editor[value.name].type
    shape, inner = kind.shape, kind.shape[dim] // 2
    part = TensorType(kind.dtype, (*shape[:dim], inner, *shape[dim + 1 :]))
    cuts: list[tuple[str, tuple[int, ...]]]
    if halves == "concatenated":
        cuts = [("aten.slice.Tensor", (dim, at, at + inner)) for at in (0, inner)]
    else:
        paired = TensorType(kind.dtype, (*shape[:dim], inner, 2, *shape[dim + 1 :]))
        value = editor.new(
            f"{value.name}_pairs", "aten.reshape", (value, paired.shape), paired, node
        )
        cuts = [("aten.select.int", (dim + 1, at)) for at in (0, 1)]
    gate, up = (editor.new(value.name, op, (value, *args), part, node) for op, args in cuts)
    return gate, up


def _turned(value: Ref, turned: bool, node: Node, editor: Editor) -> Ref:
    """Returns weights as [experts, out, in]."""
    if not turned:
        return value
    kind = editor[value.name].type
    experts, width, out = kind.shape
    kind = TensorType(kind.dtype, (experts, out, width))
    return editor.new(f"{value.name}_turned", "aten.transpose.int", (value, 1, 2), kind, node)


def lower_grouped(graph: Graph) -> Graph:
    """`graph` with grouped products that transformers loops over in Python as autopar's own."""

    def write(node: Node, editor: Editor) -> Node | Ref | None:
        if node.op != _LOOP:
            return None
        x, weight, ends = node.args
        assert isinstance(weight, Ref)
        kind = editor[weight.name].type
        experts, width, out = kind.shape
        turned = TensorType(kind.dtype, (experts, out, width))
        rows = editor.new(f"{node.name}_rows", "aten.transpose.int", (weight, 1, 2), turned, node)
        return replace(node, op=GROUPED, args=(x, rows, ends), kwargs=())

    return rewrite(graph, write)


def _mixture(node: Node, graph: Graph) -> _Mixture | None:
    """Returns the mixture that ends in a sum, None if there is none."""
    pattern = _PATTERNS[node.op]
    bound = pattern.match(node, graph)
    found = None if bound is None else bound["found"]
    body = find_body(found.name, graph) if isinstance(found, Ref) else None
    if bound is None or body is None:
        return None
    into, out = body.into, body.out
    parts = [("rows", into.rows), ("ends", into.ends)]
    parts += [("chosen", product.chosen) for product in (into, out) if product.bias]
    for at, name in parts:
        bound = bound and pattern.match(graph[name], graph, at, bound)
    if bound is None:
        return None
    values = {key: graph[ref.name] for key, ref in bound.items() if isinstance(ref, Ref)}
    x, ids = values["x"], values["ids"]
    experts, *sides = graph[out.weight].type.shape
    inner, width = sides if out.turned else sides[::-1]
    wide = inner * (2 if body.halves else 1)
    sizes: dict[str, Arg] = {"EXPERTS": experts, "LAST": experts - 1}
    sizes |= {"CHOICES": ids.type.shape[-1], "COUNT": ids.type.numel}
    sizes |= {"SHAPE": (*ids.type.shape, width), "ROWS": (ids.type.numel,)}
    sizes |= {"TOKENS": ids.type.shape[0], "WIDTH": width}
    total = _cast(node, graph, x.type.dtype)
    flat = len(x.type.shape) == len(ids.type.shape) == 2
    fits = flat and all(bound.get(key, size) == size for key, size in sizes.items())
    fits = fits and graph[into.weight].type.shape == (
        (experts, width, wide) if into.turned else (experts, wide, width)
    )
    if total is None or not fits:
        return None
    return _Mixture(total.name, x.name, ids.name, values["weights"].name, body)


def _cast(node: Node, graph: Graph, dtype: str) -> Node | None:
    """Returns a node, or the cast that is its only reader, if it has this dtype."""
    if node.type.dtype == dtype:
        return node
    readers = [graph[name] for name in graph.users[node.name]]
    is_cast = len(readers) == 1 and readers[0].op == "aten.to.dtype"
    return readers[0] if is_cast and readers[0].type.dtype == dtype else None

"""A pass that replaces mixtures of experts by one operator, which can be split.

Sorting by expert moves a token's rows anywhere, so that no dimension between the sort and its
inverse can be split. The mixture as a whole can be, see mixture.py. The pass matches transformers'
`grouped_mm_experts_forward`, up to casts: in bfloat16 with torch's grouped product, in other dtypes
with that of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.ir.graph import Arg, Graph, Node, Ref
from autopar.ir.rewrite import Editor, rewrite
from autopar.ir.tensor import TensorType
from autopar.operators.mixture import GROUPED, MIXTURE
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
%into = aten.transpose.int(%gate_up, 1, 2) : ()
%both = grouped(%rows, %into, %ends) : ()
%gate = aten.slice.Tensor(%both, 1, 0, INNER) : ()
%up = aten.slice.Tensor(%both, 1, INNER, WIDTH) : ()
%active = activation(%gate) : ()
%inner = aten.mul.Tensor(%active, %up) : ()
%out = aten.transpose.int(%down, 1, 2) : ()
%found = grouped(%inner, %out, %ends) : ()
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
_LOOP = "transformers.grouped_mm_fallback"
_PATTERN = Pattern(
    _TEXT,
    {
        "grouped": ("aten._grouped_mm", _LOOP),
        "activation": ("aten.silu", "aten.relu", "aten.gelu"),
    },
)
_OPERANDS = ("gate_up", "down", "x", "ids", "weights")


@dataclass(frozen=True)
class _Mixture:
    """Names of a mixture's nodes.

    Attributes:
        total: the sum over a token's experts, in the dtype of its input.
        gate_up: a parameter, first the gates, then the others.
        down, x, ids, weights: operands of the operator.
        act: the activation, as in `mixture.ACTIVATIONS`.
    """

    total: str
    gate_up: str
    down: str
    x: str
    ids: str
    weights: str
    act: str


def find_mixtures(graph: Graph) -> Graph:
    """Returns `graph` with each mixture as one operator, on halves of its first parameter.

    That parameter must be whole and have no other reader.
    """
    ends = [node for node in graph.nodes if node.op == "aten.sum.dim_IntList"]
    mixtures = [mixture for node in ends if (mixture := _mixture(node, graph)) is not None]
    totals = {mixture.total: mixture for mixture in mixtures}
    fused = {mixture.gate_up for mixture in mixtures}
    halves: dict[str, tuple[Ref, Ref]] = {}

    def write(node: Node, editor: Editor) -> Node | Ref | None:
        if node.name in fused:
            halves[node.name] = _halves(node, editor)
            return halves[node.name][0]
        mixture = totals.get(node.name)
        if mixture is None:
            return None
        names = (mixture.down, mixture.x, mixture.ids, mixture.weights)
        reads = [Ref(editor.resolve(name)) for name in names]
        args: tuple[Arg, ...] = (*halves[mixture.gate_up], *reads, mixture.act)
        return replace(node, op=MIXTURE, args=args, kwargs=())

    return rewrite(graph, write)


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


def _halves(node: Node, editor: Editor) -> tuple[Ref, Ref]:
    """Returns a parameter [experts, 2 inner, width] as two pieces."""
    experts, both, width = node.type.shape
    kind = TensorType(node.type.dtype, (experts, both // 2, width))
    refs = []
    for index, start in enumerate((0, both // 2)):
        name = editor.fresh(f"{node.name}_{index}")
        kwargs = (("dim", 1), ("start", start), ("length", both // 2))
        editor.put(replace(node, name=name, kwargs=kwargs, types=(kind,)))
        refs.append(Ref(name))
    return refs[0], refs[1]


def _mixture(node: Node, graph: Graph) -> _Mixture | None:
    """Returns the mixture that ends in a sum, None if there is none."""
    bound = _PATTERN.match(node, graph)
    if bound is None:
        return None
    values = {key: graph[ref.name] for key, ref in bound.items() if isinstance(ref, Ref)}
    gate_up, x, ids = (values[key] for key in ("gate_up", "x", "ids"))
    experts, both, width = gate_up.type.shape
    sizes: dict[str, Arg] = {"INNER": both // 2, "WIDTH": both, "EXPERTS": experts}
    sizes |= {"LAST": experts - 1, "CHOICES": ids.type.shape[-1], "COUNT": ids.type.numel}
    sizes |= {"SHAPE": (*ids.type.shape, width)}
    total = _cast(node, graph, x.type.dtype)
    flat = len(x.type.shape) == len(ids.type.shape) == 2
    fits = flat and all(bound[key] == size for key, size in sizes.items())
    if total is None or not fits or not _own(gate_up, graph):
        return None
    names = {key: values[key].name for key in _OPERANDS}
    return _Mixture(total.name, act=_activation(values["active"]), **names)


def _own(node: Node, graph: Graph) -> bool:
    """Returns whether a value is a whole parameter that is read once."""
    results = {name for _, name in graph.outputs}
    whole = node.op == "param" and not node.kwargs
    return whole and node.name not in results and len(graph.users[node.name]) == 1


def _cast(node: Node, graph: Graph, dtype: str) -> Node | None:
    """Returns a node, or the cast that is its only reader, if it has this dtype."""
    if node.type.dtype == dtype:
        return node
    readers = [graph[name] for name in graph.users[node.name]]
    is_cast = len(readers) == 1 and readers[0].op == "aten.to.dtype"
    return readers[0] if is_cast and readers[0].type.dtype == dtype else None


def _activation(node: Node) -> str:
    name = node.op.removeprefix("aten.")
    return "gelu_tanh" if node.keyword("approximate", "none") == "tanh" else name

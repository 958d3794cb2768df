"""A pass that writes experts in batched products, all of them on all tokens, as one mixture.

    %rows = reshape(repeat(%x, experts) * %scores, (experts, tokens, width))
    %y = sum(bmm(f(bmm(%rows, %gate_and_up)), %down), 0)

where a score is 0 for tokens that did not choose the expert, as Llama 4 computes its own. The
experts give 0 for a row of zeros, so that these tokens need not be computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.ir.graph import Arg, Graph, Name, Node, Ref
from autopar.ir.rewrite import Editor, argument, dimension, rewrite
from autopar.ir.tensor import TensorType
from autopar.operators.activation import activate
from autopar.operators.mixture import MIXTURE
from autopar.passes.experts.chosen_elements import EXPERT, TOKEN, ChosenElements, Ids
from autopar.passes.experts.expert_sums import bare, named_products, text_of
from autopar.passes.experts.parameter_pieces import halves_of, is_whole

_BMM = "aten.bmm"


@dataclass(frozen=True)
class _Batch:
    """Experts on all tokens.

    Attributes:
        x: the tokens, [tokens, width].
        table: their scores, [tokens, experts].
        ids: the experts that they chose.
        slots: number of experts that each token chose.
        gate, up: weights [experts, width, inner]; `up` holds both, gates first, if `gate` is "".
        down: [experts, inner, width].
        gated: whether there are gates.
        act: the operators between the products, see `operators/activation.py`.
    """

    x: str
    table: str
    ids: Ids
    slots: int
    gate: str
    up: str
    down: str
    gated: bool
    act: str


def find_batched(graph: Graph) -> Graph:
    """Returns `graph` with each sum of all experts, by batched products, as a mixture."""
    if not any(node.op == _BMM for node in graph.nodes):
        return graph
    chosen = ChosenElements(graph)
    sums = [node for node in graph.nodes if node.op == "aten.sum.dim_IntList"]
    batches = {node.name: batch for node in sums if (batch := _batch(node, chosen)) is not None}
    both = {batch.up for batch in batches.values() if batch.gated and not batch.gate}
    apart = {name for name in both if is_whole(graph[name], graph)}
    halves: dict[str, tuple[Ref, Ref]] = {}

    def write(node: Node, editor: Editor) -> Node | Ref | None:
        if node.name in apart:
            halves[node.name] = halves_of(node, 2, editor)
            return halves[node.name][0]
        batch = batches.get(node.name)
        return None if batch is None else _Writer(node, editor).mixture(batch, halves)

    return rewrite(graph, write) if batches else graph


def _batch(node: Node, chosen: ChosenElements) -> _Batch | None:
    """Returns the experts of which a value is the sum over the first dimension."""
    graph = chosen.graph
    out = graph[node.inputs[0]]
    if node.args[1:] != ((0,),) or node.kwargs or out.op != _BMM:
        return None
    products: list[str] = []
    text = text_of(graph[out.inputs[0]], lambda n: _leaf(n, graph, products), graph)
    sources = {graph[name.partition(":")[0]] for name in products}
    rows = {source.inputs[0] for source in sources}
    if not text or len(rows) != 1 or len(products) > 2:
        return None
    act, gate, up = named_products(text, products)
    weights = [graph[name.partition(":")[0]].inputs[1] if name else "" for name in (gate, up)]
    if gate and len(sources) == 1:
        if (gate.rpartition(":")[2], up.rpartition(":")[2]) != ("0", "1"):
            return None
        weights[0] = ""
    elif any(":" in name for name in products):
        return None
    scaled = _scaled(rows.pop(), chosen)
    if scaled is None or not _vanishes(act, bool(gate)):
        return None
    x, table, ids = scaled
    slots = graph[ids.source].type.numel // graph[x].type.shape[0]
    return _Batch(x, table, ids, slots, weights[0], weights[1], out.inputs[1], bool(gate), act)


def _leaf(node: Node, graph: Graph, products: list[str]) -> str:
    """Returns the number of a product, or of a half of one, "" for other values."""
    name, half = node, ""
    if node.op == "aten.slice.Tensor" and dimension(node.args[1], 3) == 2:
        name = graph[node.inputs[0]]
        start, width = argument(node, 2, "start"), node.type.shape[-1]
        if 2 * width != name.type.shape[-1] or start not in (0, width):
            return ""
        half = f":{int(start != 0)}"
    if name.op != _BMM:
        return ""
    key = f"{name.name}{half}"
    if key not in products:
        products.append(key)
    return f"@{products.index(key)}"


def _scaled(rows: str, chosen: ChosenElements) -> tuple[str, str, Ids] | None:
    """Returns tokens, scores [tokens, experts] and choices of rows [experts, tokens, width]."""
    graph = chosen.graph
    product = graph[bare(rows, graph)]
    if product.op != "aten.mul.Tensor" or len(product.inputs) != 2:
        return None
    for repeated, scale in (product.inputs, product.inputs[::-1]):
        turned = graph[bare(scale, graph)]
        swaps = turned.op in ("aten.transpose.int", "aten.permute", "aten.t", "aten.numpy_T")
        table = turned.inputs[0] if swaps and len(turned.type.shape) == 2 else ""
        support = chosen.of(table) if table else None
        x = _repeated(repeated, graph[rows].type.shape[0], graph)
        one = graph[scale].type.shape == (*product.type.shape[:-1], 1)
        fits = one and x and support is not None and support.dims == (TOKEN, EXPERT)
        if fits and support is not None and not support.ids.pairs:
            experts = graph[rows].type.shape[0] == support.ids.experts
            same = graph[table].type.shape == (graph[x].type.shape[0], support.ids.experts)
            return (x, table, support.ids) if experts and same else None
    return None


def _repeated(rows: str, experts: int, graph: Graph) -> str:
    """Returns the tokens that rows repeat for every expert, "" if they are no such rows."""
    node = graph[bare(rows, graph)]
    source = graph[node.inputs[0]] if node.inputs else node
    if node.op == "aten.repeat":
        fits = node.args[1] == (experts, 1) and len(source.type.shape) == 2
        return source.name if fits else ""
    if node.op != "aten.expand" or len(node.type.shape) != 3 or node.type.shape[0] != experts:
        return ""
    tokens = graph[bare(source.name, graph)]
    return tokens.name if tokens.type.shape == node.type.shape[1:] else ""


def _vanishes(act: str, gated: bool) -> bool:
    """Returns whether an expert without biases gives 0 for a row of zeros."""
    zero = torch.zeros(1)
    return bool((activate(act, zero if gated else None, zero) == 0).all())


class _Writer:
    """Writes a mixture in the place of a sum."""

    def __init__(self, node: Node, editor: Editor) -> None:
        self.node, self.editor = node, editor

    def new(self, op: str, args: tuple[Arg, ...], like: Ref, shape: tuple[int, ...]) -> Ref:
        kind = TensorType(self.editor[like.name].type.dtype, shape)
        return self.editor.new("experts", op, args, kind, self.node)

    def mixture(self, of: _Batch, halves: dict[str, tuple[Ref, Ref]]) -> Ref:
        """Returns the value of the sum, [tokens, width]."""
        x, table, ids = (Ref(self.editor.resolve(n)) for n in (of.x, of.table, of.ids.source))
        (tokens, width), slots = self.editor[x.name].type.shape, of.slots
        ids = self.new("aten.reshape", (ids, (tokens, slots)), ids, (tokens, slots))
        scores = self.new("aten.gather", (table, 1, ids), table, (tokens, slots))
        each = self.new("aten.unsqueeze", (scores, -1), scores, (tokens, slots, 1))
        rows = self.new("aten.unsqueeze", (x, 1), x, (tokens, 1, width))
        rows = self.new("aten.mul.Tensor", (rows, each), x, (tokens, slots, width))
        count = tokens * slots
        rows = self.new("aten.reshape", (rows, (count, width)), x, (count, width))
        ids = self.new("aten.reshape", (ids, (count, 1)), ids, (count, 1))
        ones = Node(
            self.editor.fresh("ones"), "aten.ones", ((count, 1),),
            (("dtype", Name(self.node.type.dtype)),),
            (TensorType(self.node.type.dtype, (count, 1)),), self.node.source,
        )  # fmt: skip
        self.editor.put(ones)
        gate, up = self.weights(of, halves)
        down = self.turned(Ref(self.editor.resolve(of.down)))
        args: tuple[Arg, ...] = (gate, up, down, rows, ids, Ref(ones.name), of.act)
        total = self.new(MIXTURE, args, x, (count, width))
        if slots == 1:
            return total
        total = self.new("aten.reshape", (total, (tokens, slots, width)), x, (tokens, slots, width))
        return self.new("aten.sum.dim_IntList", (total, (1,)), x, (tokens, width))

    def weights(self, of: _Batch, halves: dict[str, tuple[Ref, Ref]]) -> tuple[Ref | None, Ref]:
        """Returns weights of gates and others, [experts, inner, width]."""
        up = Ref(self.editor.resolve(of.up))
        if of.gate or not of.gated:
            gate = self.turned(Ref(self.editor.resolve(of.gate))) if of.gate else None
            return gate, self.turned(up)
        if of.up in halves:
            gate, other = halves[of.up]
            return self.turned(gate), self.turned(other)
        experts, width, both = self.editor[up.name].type.shape
        inner = both // 2
        cuts = [
            self.new("aten.slice.Tensor", (up, 2, at, at + inner), up, (experts, width, inner))
            for at in (0, inner)
        ]
        return self.turned(cuts[0]), self.turned(cuts[1])

    def turned(self, weight: Ref) -> Ref:
        experts, width, out = self.editor[weight.name].type.shape
        return self.new("aten.transpose.int", (weight, 1, 2), weight, (experts, out, width))

"""A pass that writes sums of experts, one product after another, as one mixture.

    for i, expert in enumerate(self.experts):
        token, slot = torch.where(ids == i)
        out[token] += weights[token, slot, None] * expert(x[token])

A trace has every expert on all tokens, and masks or weights that are zero for tokens that did not
choose it. If all experts compute the same function of the same tokens, and the masks select the
tokens that chose each expert, the loop becomes one `autopar.mixture` of their stacked weights.

Behind these, there may be experts of another kind, such as LongCat-Flash's, which give tokens back
("zero-computation experts"). Their parts of the sum remain operators on all tokens. The mixture
gets the choice of such an expert as that of none, so tokens are not sent for it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.ir.graph import Arg, Graph, Name, Node, Ref
from autopar.ir.rewrite import Editor, rewrite
from autopar.ir.tensor import TensorType
from autopar.operators.dispatch import ABSENT
from autopar.operators.expert_load import AMONG
from autopar.operators.mixture import MIXTURE
from autopar.passes.experts.chosen_elements import (
    EXPERT,
    SLOT,
    ChosenElements,
    Ids,
    Support,
    is_zero,
)
from autopar.passes.experts.expert_sums import LINEAR, Addend, Sum, bare, masked, read_sum

_ENDS = ("aten.add.Tensor", "aten.where.self")
_NOTHING = ("aten.empty_like", "aten.empty.memory_format")


@dataclass(frozen=True)
class _Mixture:
    """Experts that are one mixture.

    Attributes:
        ids: the choices.
        addends: the parts of the first experts, in the order of their numbers.
    """

    ids: Ids
    addends: tuple[Addend, ...]


def find_looped(graph: Graph) -> Graph:
    """Returns `graph` with each sum over all experts of some tokens as a mixture."""
    if sum(node.op == LINEAR for node in graph.nodes) < 2:
        return graph
    chosen = ChosenElements(graph)
    mixtures: dict[str, tuple[Sum, list[_Mixture]]] = {}
    within: set[str] = set()
    for node in reversed(graph.nodes):
        if node.op not in _ENDS or node.name in within or not node.type.floating:
            continue
        total = read_sum(node.name, graph)
        if len(total.addends) < 2 or _is_sum_and_more(node, total, graph):
            continue
        complete = _complete(total, chosen)
        if complete:
            mixtures[node.name] = total, complete
            within |= _ancestors(node, total, graph)

    def write(node: Node, editor: Editor) -> Node | Ref | None:
        if node.name not in mixtures:
            return None
        total, parts = mixtures[node.name]
        return _Writer(graph, chosen, editor, node).total(total, parts)

    return rewrite(graph, write) if mixtures else graph


def _is_sum_and_more(node: Node, total: Sum, graph: Graph) -> bool:
    """Returns whether one operand is the whole sum of experts, and the others are none."""
    operands = node.inputs if node.op == "aten.add.Tensor" and total.others else ()
    ends = (bare(name, graph) for name in operands)
    parts = (read_sum(name, graph) for name in ends if graph[name].op in _ENDS)
    return any(len(part.addends) == len(total.addends) for part in parts)


def _ancestors(node: Node, total: Sum, graph: Graph) -> set[str]:
    """Returns the nodes between a sum and its addends, which are sums of fewer experts."""
    ends = {addend.expert.down for addend in total.addends} | set(total.others)
    waiting, met = [node.name], set()
    while waiting:
        name = waiting.pop()
        if name in met or name in ends:
            continue
        met.add(name)
        if graph[name].op in (*_ENDS, "aten.reshape", "aten.mul.Tensor", "aten.to.dtype"):
            waiting += graph[name].inputs
    return met


def _complete(total: Sum, chosen: ChosenElements) -> list[_Mixture]:
    """Returns the mixtures of a sum; [] if some of its experts belong to none."""
    graph = chosen.graph
    groups: dict[tuple[Ids, str, object, str], dict[int, Addend]] = defaultdict(dict)
    for addend in total.addends:
        found = _support(addend, chosen)
        if found is None or found.expert is None or _shapes(addend, graph) is None:
            return []
        ids = replace(found.ids, dims=())
        group = groups[ids, bare(addend.x, graph), _shapes(addend, graph), addend.expert.act]
        if found.expert in group:
            return []
        group[found.expert] = addend
    mixtures = []
    for (ids, *_), group in groups.items():
        if len(group) < 2 or sorted(group) != list(range(len(group))):
            return []
        mixtures.append(_Mixture(ids, tuple(group[n] for n in range(len(group)))))
    sets = [addend.sets for addend in total.addends]
    empty = all(graph[bare(name, graph)].op in _NOTHING or _is_zero(name, graph)
                for name in total.others)  # fmt: skip
    if any(sets) and not (all(sets) and empty and len(mixtures) == 1 and _once(mixtures[0], graph)):
        return []
    unset = any(graph[bare(name, graph)].op in _NOTHING for name in total.others)
    return [] if unset and not all(sets) else mixtures


def _is_zero(name: str, graph: Graph) -> bool:
    return is_zero(graph[bare(name, graph)])


def _once(mixture: _Mixture, graph: Graph) -> bool:
    """Returns whether every token chooses one expert."""
    return mixture.ids.pairs or _slots(mixture.ids, graph) == 1


def _slots(ids: Ids, graph: Graph) -> int:
    kind = graph[ids.source].type
    made = ChosenElements(graph).ids(Ref(ids.source))
    return kind.shape[-1] if made is not None and made.dims[-1:] == (SLOT,) else 1


def _support(addend: Addend, chosen: ChosenElements) -> Support | None:
    """Returns for which tokens a part of a sum is not zero."""
    tokens = math.prod(chosen.graph[addend.x].type.shape[:-1])
    # A part that replaces others does so for all tokens of its mask.
    for name in addend.masks[:1] if addend.sets else (*addend.masks, *addend.scales):
        found = chosen.of(name)
        here = found is not None and not {SLOT, EXPERT} & set(found.dims)
        if here and math.prod(chosen.graph[name].type.shape) == tokens:
            return found
    return None


def _shapes(addend: Addend, graph: Graph) -> tuple[object, ...] | None:
    """Returns the properties in which the weights of all experts of a mixture must agree."""
    expert = addend.expert
    names = [name for name in (expert.gate, expert.up, expert.down) if name]
    kinds: list[object] = []
    for name in names:
        operands = [graph[operand].type for operand in graph[name].inputs[1:]]
        kinds.append(tuple(operands))
    down, up = graph[expert.down], graph[expert.up]
    fits = (
        down.type.shape[-1] == graph[addend.x].type.shape[-1] == graph[up.inputs[1]].type.shape[1]
    )
    return tuple(kinds) if fits and down.type.dtype == graph[addend.x].type.dtype else None


class _Writer:
    """Writes the mixtures of one sum in the place of its last node."""

    def __init__(self, graph: Graph, chosen: ChosenElements, editor: Editor, node: Node) -> None:
        self.graph, self.chosen, self.editor, self.node = graph, chosen, editor, node

    def total(self, total: Sum, mixtures: Sequence[_Mixture]) -> Ref:
        """Returns the value that replaces the sum."""
        parts = [self.mixture(mixture) for mixture in mixtures]
        others = [
            name
            for name in total.others
            if not _is_zero(name, self.graph)
            and self.graph[bare(name, self.graph)].op not in _NOTHING
        ]
        kind = self.node.type
        values = [self.like(Ref(self.editor.resolve(name)), kind) for name in others]
        values += [self.like(part, kind) for part in parts]
        while len(values) > 1:
            values[:2] = [self.new("total", "aten.add.Tensor", (values[0], values[1]), kind)]
        return values[0]

    def new(self, hint: str, op: str, args: tuple[Arg, ...], kind: TensorType) -> Ref:
        return self.editor.new(hint, op, args, kind, self.node)

    def like(self, value: Ref, kind: TensorType) -> Ref:
        """Returns a value in another shape and dtype."""
        if self.editor[value.name].type.dtype != kind.dtype:
            cast = TensorType(kind.dtype, self.editor[value.name].type.shape)
            value = self.new("cast", "aten.to.dtype", (value, Name(kind.dtype)), cast)
        if self.editor[value.name].type.shape == kind.shape:
            return value
        return self.new("experts", "aten.reshape", (value, kind.shape), kind)

    def viewed(self, name: str, shape: tuple[int, ...]) -> Ref:
        """Returns a value of the graph in another shape."""
        value = Ref(self.editor.resolve(name))
        kind = self.editor[value.name].type
        if kind.shape == shape:
            return value
        return self.new(f"{name}_rows", "aten.reshape", (value, shape), replace_shape(kind, shape))

    def mixture(self, of: _Mixture) -> Ref:
        """Writes the operator; returns its value, [tokens, width]."""
        first = of.addends[0]
        x = self.graph[first.x].type
        tokens, width = math.prod(x.shape[:-1]), x.shape[-1]
        slots = 1 if of.ids.pairs else _slots(of.ids, self.graph)
        ids = self.viewed(of.ids.source, (tokens, slots))
        if len(of.addends) < of.ids.experts:
            ids, weights = self.own_choices(of, ids, (tokens, slots))
        else:
            weights = self.weights(of, ids, (tokens, slots))
        products = [(a.expert.gate, a.expert.up, a.expert.down) for a in of.addends]
        stacks = [
            [self.stacked(names, at) for at in (1, 2)] for names in zip(*products, strict=True)
        ]
        (gate, gate_bias), (up, up_bias), (down, down_bias) = stacks
        args: tuple[Arg, ...] = (
            gate,
            up,
            down,
            self.viewed(first.x, (tokens, width)),
            ids,
            weights,
        )
        args = (*args, first.expert.act)
        if gate_bias or up_bias or down_bias:
            args = (*args, gate_bias, up_bias, down_bias)
        value = self.new("mixture", MIXTURE, args, TensorType(x.dtype, (tokens, width)))
        if len(of.addends) < of.ids.experts:
            node = self.editor[value.name]
            self.editor.put(replace(node, kwargs=((AMONG, of.ids.experts),)))
        return value

    def own_choices(self, of: _Mixture, ids: Ref, shape: tuple[int, ...]) -> tuple[Ref, Ref]:
        """Returns ids and weights; a choice of another expert is -1 with a weight of zero."""
        count, kind = len(of.addends), self.editor[ids.name].type
        others = self.new("others", "aten.ge.Scalar", (ids, count), TensorType("bool", shape))
        own = self.new("ids", "aten.masked_fill.Scalar", (ids, others, ABSENT), kind)
        ids = self.new("ids", "aten.masked_fill.Scalar", (ids, others, 0), kind)
        weights = self.weights(of, ids, shape)
        kind = self.editor[weights.name].type
        zero = self.zero(kind)
        return own, self.new("weights", "aten.where.self", (others, zero, weights), kind)

    def zero(self, kind: TensorType) -> Ref:
        """Returns a scalar 0 of a dtype."""
        zero = Node(self.editor.fresh("zero"), "aten.zeros", ((),),
                    (("dtype", Name(kind.dtype)),), (TensorType(kind.dtype, ()),))  # fmt: skip
        self.editor.put(zero)
        return Ref(zero.name)

    def stacked(self, names: Sequence[str], at: int) -> Ref | None:
        """Returns operands of the experts' products in one tensor, None if they have none."""
        if not names[0] or len(self.graph[names[0]].inputs) <= at:
            return None
        operands = [self.graph[self.graph[name].inputs[at]] for name in names]
        parts = [node.op == "aten.select.int" and node.args[1:] == (0, number)
                 for number, node in enumerate(operands)]  # fmt: skip
        sources = {node.inputs[0] for node in operands} if all(parts) else set()
        if len(sources) == 1:
            source = Ref(self.editor.resolve(sources.pop()))
            if self.editor[source.name].type.shape[0] == len(names):
                return source
        kind = replace_shape(operands[0].type, (len(names), *operands[0].type.shape))
        values = tuple(Ref(self.editor.resolve(node.name)) for node in operands)
        return self.new("experts_weight", "aten.stack", (values, 0), kind)

    def weights(self, of: _Mixture, ids: Ref, shape: tuple[int, ...]) -> Ref:
        """Returns the weights of every token's experts, [tokens, slots]."""
        exact = all(self.exactly(m, n, of.ids) for n, a in enumerate(of.addends) for m in a.masks)
        if exact and shape[1] == 1 and not any(addend.scales for addend in of.addends):
            return self.ones(shape)
        sources = {self.source(addend, n, of.ids) for n, addend in enumerate(of.addends)}
        source = sources.pop()
        if not sources and source:
            return self.viewed(source, shape)
        each = [self.weight(addend, shape[0]) for addend in of.addends]
        dtype = self.editor[each[0].name].type.dtype
        kind = TensorType(dtype, (shape[0], len(each)))
        table = self.new("weights", "aten.stack", (tuple(each), 1), kind)
        return self.new("weights", "aten.gather", (table, 1, ids), TensorType(dtype, shape))

    def ones(self, shape: tuple[int, ...]) -> Ref:
        dtype = self.node.type.dtype
        node = Node(
            self.editor.fresh("ones"),
            "aten.ones",
            (shape,),
            (("dtype", Name(dtype)),),
            (TensorType(dtype, shape),),
            self.node.source,
        )
        self.editor.put(node)
        return Ref(node.name)

    def weight(self, addend: Addend, tokens: int) -> Ref:
        """Returns the number by which an expert's rows are multiplied, 0 for other tokens."""
        dtype = self.graph[addend.x].type.dtype
        value: Ref | None = None
        for name in addend.scales:
            scale = self.viewed(name, (tokens,))
            kind = self.editor[scale.name].type
            value = (
                scale if value is None else self.new("w", "aten.mul.Tensor", (value, scale), kind)
            )
        for name in addend.masks:
            mask = self.viewed(name, (tokens,))
            if value is None:
                kind = TensorType(dtype, (tokens,))
                value = self.new("w", "aten.to.dtype", (mask, Name(dtype)), kind)
                continue
            kind = self.editor[value.name].type
            value = self.new("w", "aten.where.self", (mask, value, self.zero(kind)), kind)
        assert value is not None  # an addend without scale and mask has no support
        return value

    def source(self, addend: Addend, number: int, ids: Ids) -> str:
        """Returns the value [..., slots] whose element each scale is, "" if there is none."""
        if len(addend.scales) != 1 or not all(
            self.exactly(mask, number, ids) for mask in addend.masks
        ):
            return ""
        name = bare(addend.scales[0], self.graph)
        while (held := masked(name, self.graph)) is not None:
            if held[0] not in addend.masks:
                return ""
            name = bare(held[1], self.graph)
        node = self.graph[name]
        if node.op == "aten.sum.dim_IntList":
            return self.summed(self.graph[node.inputs[0]], number, ids)
        if node.op in ("aten.select.int", "aten.slice.Tensor"):
            table = self.graph[node.inputs[0]]
            inner = masked(table.name, self.graph)
            table = self.graph[bare(inner[1], self.graph)] if inner else table
            found = self.chosen.of(table.name)
            here = self.chosen.of(node.name) if not inner else None
            same = found is not None and replace(found.ids, dims=()) == ids
            if table.op == "aten.scatter.src" and same and here and here.expert == number:
                value = table.args[3]
                return value.name if isinstance(value, Ref) else ""
        return ""

    def summed(self, node: Node, number: int, ids: Ids) -> str:
        """Returns the values of which a sum over slots has the chosen one."""
        if node.op == "aten.where.self" and is_zero(self.graph[node.inputs[2]]):
            mask, value = node.inputs[:2]
        elif node.op == "aten.mul.Tensor" and len(node.inputs) == 2:
            mask, value = node.inputs
            if self.chosen.of(mask) is None or not self.chosen.of(mask).exact:  # type: ignore[union-attr]
                mask, value = value, mask
        else:
            return ""
        found = self.chosen.of(mask)
        fits = found is not None and found.exact and found.expert == number
        fits = fits and found is not None and replace(found.ids, dims=()) == ids
        fits = fits and found is not None and found.dims[-1:] == (SLOT,) and not found.ids.pairs
        same = self.graph[value].type.shape == self.graph[mask].type.shape
        return value if fits and same else ""

    def exactly(self, mask: str, number: int, ids: Ids) -> bool:
        found = self.chosen.of(mask)
        if found is None or not found.exact or found.expert != number:
            return False
        return replace(found.ids, dims=()) == ids


def replace_shape(kind: TensorType, shape: tuple[int, ...]) -> TensorType:
    """Returns a type with another shape."""
    return TensorType(kind.dtype, shape)

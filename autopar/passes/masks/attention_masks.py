"""Passes on attention: masks written out at length, and repeated heads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from autopar.ir.graph import Arg, Graph, Node, Ref
from autopar.ir.rewrite import Editor, argument, rewrite
from autopar.operators.attention.sequence_forms import KINDS, SEEN, SINKS
from autopar.passes.masks.constant_masks import (
    ANDS,
    constant_numbers,
    constant_value,
    shown_by,
    unexpanded,
)
from autopar.passes.masks.mask_intervals import kind_by_intervals, seen_at_most


def simplify_masks(graph: Graph) -> Graph:
    """Returns `graph` without parts of padding masks that select everything.

    A look-up `x[i, j]` whose indices cover each dimension in order is a reshape of x, and an `and`
    with a constant that is true everywhere is its other operand.
    """
    numbers = constant_numbers(graph)

    def simplify(node: Node, editor: Editor) -> Node | Ref | None:
        constants = [name for name in graph[node.name].inputs if name in numbers]
        if node.name in numbers or not constants or len(node.inputs) < 2:
            return None
        if node.op == "aten.index.Tensor" and len(constants) == len(node.inputs) - 1:
            indices = [constant_value(graph, name) for name in graph[node.name].inputs[1:]]
            if _everything(editor[node.inputs[0]].type.shape, indices):
                shape = node.type.shape
                return replace(node, op="aten.reshape", args=(node.args[0], shape), kwargs=())
        if node.op in ANDS and _kind_of(graph, constants[0]) == "full":
            place = graph[node.name].inputs.index(constants[0])
            other = Ref(node.inputs[1 - place])
            if editor[other.name].types == node.types:
                return other
            if editor[other.name].type.dtype == node.type.dtype:
                return replace(node, op="aten.expand", args=(other, node.type.shape), kwargs=())
        return None

    return rewrite(graph, simplify)


def _everything(shape: tuple[int, ...], indices: list[Tensor | None]) -> bool:
    """Returns whether `x[indices]` is a reshape: each index counts up along a later dimension."""
    known = [index for index in indices if index is not None]
    if len(known) != len(shape) or len(known) != len(indices):
        return False
    rank = max(index.dim() for index in known)
    before = -1
    for size, index in zip(shape, known, strict=True):
        if index.numel() != size or not torch.equal(index.flatten(), torch.arange(size)):
            return False
        wide = [rank - index.dim() + at for at, n in enumerate(index.shape) if n > 1]
        if len(wide) > 1 or (wide and wide[0] <= before):
            return False
        before = wide[0] if wide else before
    return True


def causal_masks(graph: Graph) -> Graph:
    """Returns `graph` with causal attention masks as `is_causal=True`, and without full masks.

    A mask is evaluated if it depends on no input, parameter, buffer or random number, once for all
    equal subgraphs. It may be bool, or float with 0 where attention is allowed and the dtype's
    lowest value or less elsewhere. Any other mask stays.
    """
    numbers = constant_numbers(graph)
    kinds: dict[int, str] = {}

    def replace_mask(node: Node, editor: Editor) -> Node | None:
        mask = argument(node, 3, "attn_mask")
        if node.op not in KINDS or not isinstance(mask, Ref):
            return None
        name = graph[node.name].inputs[3]
        if name not in numbers:
            return None
        if argument(node, 5, "is_causal") is True:
            return None
        key = numbers[name]
        if key not in kinds:
            kinds[key] = _kind_of(graph, name)
        if not kinds[key]:
            return None
        if node.op == SINKS:
            causal = (("is_causal", True),) if kinds[key] == "causal" else ()
            return replace(node, args=node.args[:3], kwargs=(*causal, *node.kwargs))
        dropout = argument(node, 4, "dropout_p", 0.0)
        args: tuple[Arg, ...] = (*node.args[:3], None, dropout, kinds[key] == "causal")
        while args[-1] in (None, False, 0.0):
            args = args[:-1]
        kept = ("scale", "enable_gqa")
        return replace(node, args=args, kwargs=tuple(k for k in node.kwargs if k[0] in kept))

    return rewrite(graph, replace_mask)


def _kind_of(graph: Graph, name: str) -> str:
    """Returns "full", "causal" or "" for a mask that depends on no input."""
    known = kind_by_intervals(graph, name, partial(constant_value, graph))
    return known or _kind(constant_value(graph, name))


def _kind(mask: Tensor | None) -> str:
    """Returns "full", "causal" (square, lower triangle with diagonal) or "" for any other mask."""
    mask = shown_by(None if mask is None else unexpanded(mask))
    if mask is None:
        return ""
    if bool(mask.all()):
        return "full"
    if mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return ""
    size = mask.shape[-1]
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    return "causal" if bool((mask == causal).all()) else ""


def note_seen(graph: Graph) -> Graph:
    """Returns `graph` with the share of keys that masks leave, as price assumption of attention.

    A window is known before training. Of a mask of documents, only causality is known.
    """
    numbers = constant_numbers(graph)
    shares: dict[str, float] = {}

    def evaluate(name: str) -> Tensor | None:
        return constant_value(graph, name) if name in numbers else None

    def note(node: Node, editor: Editor) -> Node | None:
        mask, dropout = argument(node, 3, "attn_mask"), argument(node, 4, "dropout_p", 0.0)
        if node.op not in KINDS or not isinstance(mask, Ref) or dropout or node.keyword(SEEN):
            return None
        kind = graph[mask.name].type
        if kind.dtype != "bool" or len(kind.shape) < 2 or min(kind.shape[-2:]) < 2:
            return None
        if mask.name not in shares:
            shares[mask.name] = seen_at_most(graph, mask.name, evaluate)
        share = shares[mask.name]
        return replace(node, kwargs=(*node.kwargs, (SEEN, share))) if share < 1 else None

    return rewrite(graph, note)


def group_heads(graph: Graph) -> Graph:
    """Returns `graph` with keys and values that are repeated for grouped queries read unrepeated.

    Both must repeat each head n times in a row; attention then has enable_gqa=True.
    """

    def group(node: Node, editor: Editor) -> Node | None:
        if node.op not in KINDS or node.keyword("enable_gqa") or len(node.args) < 3:
            return None
        query, key, value = node.args[:3]
        sources = [_unrepeated(arg, editor) for arg in (key, value)]
        if None in sources or not isinstance(query, Ref):
            return None
        heads = {editor[source.name].type.shape[-3] for source in sources if source is not None}
        wide = {editor[name].type.shape[-3] for name in node.inputs[:3]}
        if len(heads) != 1 or len(wide) != 1:
            return None
        args = (query, *sources, *node.args[3:])
        return replace(node, args=args, kwargs=(*node.kwargs, ("enable_gqa", True)))

    return rewrite(graph, group)


def _unrepeated(arg: Arg, editor: Editor) -> Ref | None:
    """Returns [batch, heads, length, width] whose heads `arg` repeats in a row."""
    if not isinstance(arg, Ref):
        return None
    node = editor[arg.name]
    if node.op == "aten.repeat_interleave.self_int" and len(node.type.shape) == 4:
        dim = argument(node, 2, "dim")
        source = node.args[0]
        return source if dim in (1, -3) and isinstance(source, Ref) else None
    chain = ("aten.reshape", "aten.expand", "aten.unsqueeze")
    nodes = []
    for op in chain:
        if node.op != op:
            return None
        nodes.append(node)
        node = editor[node.inputs[0]]
    batch, heads, *rest = node.type.shape
    wide = nodes[1].type.shape
    fits = (
        len(rest) == 2
        and nodes[2].type.shape == (batch, heads, 1, *rest)
        and wide == (batch, heads, wide[2], *rest)
        and nodes[0].type.shape == (batch, heads * wide[2], *rest)
    )
    return Ref(node.name) if fits else None

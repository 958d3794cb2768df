"""A backward in two halves: gradients of what was received first, those of the parameters later.

Zero-bubble schedules (arXiv:2401.10241) send the gradient of a stage's input at once and fill gaps
with the gradients of its weights. In autograd's graph the first half runs the nodes on the ways
from the results to the received values. The nodes there from which a way leads aside, to a
parameter, are its *borders*: the gradients that arrive at them are kept, and the second half begins
with them, so that it repeats nothing but their own kernels. (torch's own split, in
torch.distributed.pipelining, walks over sets; its order differs from process to process, which
collectives in the backward do not bear.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Arrived = tuple[Tensor | None, ...]


@dataclass
class _Border:
    """A node with ways aside, the weights at their ends, and the gradients that arrived at it.

    A result that depends on weights only is one too; no leaf stands behind it.
    """

    node: Node
    weights: list[Node]
    on_way: bool
    arrived: Arrived = ()


@dataclass
class Later:
    """The second half, which can be run once.

    Attributes:
        groups: borders that share weights, directly or not; every weight is in one group.
        variables: the weights by their nodes.
    """

    groups: list[list[_Border]] = field(default_factory=list)
    variables: dict[Node, Tensor] = field(default_factory=dict)

    def run(self) -> None:
        """Add the gradients of the weights to what they have."""
        while self.groups:
            self._run(self.groups.pop(0))

    def _run(self, group: Sequence[_Border]) -> None:
        edges, gradients = [], []
        for border in group:
            for place, gradient in enumerate(border.arrived):
                if gradient is not None:
                    edges.append(GradientEdge(border.node, place))
                    gradients.append(gradient)
        if not edges:
            return
        weights = list(dict.fromkeys(node for border in group for node in border.weights))
        # A way between two borders brings a gradient that is known already.
        clamps = [
            border.node.register_prehook(_giver(border.arrived))
            for border in group
            if border.on_way and len(group) > 1
        ]
        try:
            found = torch.autograd.grad(
                edges,
                [GradientEdge(node, 0) for node in weights],
                gradients,
                retain_graph=len(group) > 1,  # such a way may pass another group's border
                allow_unused=True,
            )
        finally:
            for clamp in clamps:
                clamp.remove()
        # A gradient that passed through as it is belongs to others, too: it is not added to.
        held = Counter(_storage(g) for g in (*gradients, *found) if g is not None)
        for node, gradient in zip(weights, found, strict=True):
            weight = self.variables[node]
            if gradient is None:
                continue
            if weight.grad is not None:
                weight.grad.add_(gradient)
            else:
                alone = held[_storage(gradient)] == 1
                whole = gradient.untyped_storage().nbytes() == gradient.nbytes
                weight.grad = gradient if alone and whole else gradient.clone()


def _storage(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    return tensor.untyped_storage().data_ptr()


def backward_input(
    results: Sequence[Tensor],
    gradients: Sequence[Tensor],
    leaves: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> tuple[tuple[Tensor | None, ...], Later]:
    """The first half of a backward.

    Args:
        results: with a graph behind them.
        gradients: of the results.
        leaves: whose gradients are wanted now.
        weights: whose gradients are wanted later.

    Returns:
        The gradients of the leaves, None where there is none, and the second half.
    """
    targets = {get_gradient_edge(leaf).node for leaf in leaves}
    variables = {get_gradient_edge(weight).node: weight for weight in weights}
    roots = [get_gradient_edge(result) for result in results]
    borders = _borders([edge.node for edge in roots], targets, variables)
    hooks = [border.node.register_prehook(_keeper(border)) for border in borders if border.on_way]
    found: tuple[Tensor | None, ...] = (None,) * len(leaves)
    try:
        if leaves:
            found = torch.autograd.grad(
                list(results), list(leaves), list(gradients), retain_graph=True, allow_unused=True
            )
    finally:
        for hook in hooks:
            hook.remove()
    for border in borders:
        if not border.on_way:
            border.arrived = _of_results(border.node, roots, gradients)
    return found, Later(_grouped(borders), variables)


def _of_results(node: Node, roots: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> Arrived:
    """The gradients of the results that a node made, by place."""
    own = {
        edge.output_nr: gradient
        for edge, gradient in zip(roots, gradients, strict=True)
        if edge.node is node
    }
    return tuple(own.get(place) for place in range(max(own) + 1))


def _giver(known: Arrived) -> Callable[[Arrived], Arrived]:
    return lambda arrived: known


def _keeper(border: _Border) -> Callable[[Arrived], None]:
    def keep(arrived: Arrived) -> None:
        border.arrived = arrived

    return keep


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _order(roots: Sequence[Node]) -> list[Node]:
    """All nodes behind the roots, every one after those that it leads to."""
    done: dict[Node, None] = {}
    seen: set[Node] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, left = stack.pop()
        if left:
            done[node] = None
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child in reversed(_children(node))]
    return list(done)


def _borders(
    roots: Sequence[Node], targets: set[Node], variables: Mapping[Node, Tensor]
) -> list[_Border]:
    """The borders, in one order for equal graphs."""
    on_way: set[Node] = set()
    aside: dict[Node, dict[Node, None]] = {}  # weights behind nodes off the ways
    borders = []
    for node in _order(roots):
        children = _children(node)
        reached: dict[Node, None] = {node: None} if node in variables else {}
        for child in children:
            reached.update(aside.get(child, {}))
        if node in targets or any(child in on_way for child in children):
            on_way.add(node)
            if reached:
                borders.append(_Border(node, list(reached), on_way=True))
        else:
            aside[node] = reached
    for root in dict.fromkeys(roots):
        if root not in on_way and aside[root]:
            borders.append(_Border(root, list(aside[root]), on_way=False))
    return borders


def _grouped(borders: Sequence[_Border]) -> list[list[_Border]]:
    groups: list[list[_Border]] = []
    for border in borders:
        meeting = [g for g in groups if any(set(border.weights) & set(b.weights) for b in g)]
        groups = [group for group in groups if group not in meeting]
        groups.append([other for group in meeting for other in group] + [border])
    # Those of one border free what they come by, so they come last.
    return sorted(groups, key=lambda group: len(group) == 1)

"""Splits a backward in two: gradients of received values first, gradients of parameters later.

Zero-bubble schedules (arXiv:2401.10241) send the gradient of a stage's input immediately and fill
idle time with the gradients of its weights. In autograd's graph, the first half runs the nodes on
the paths from the results to the received values. A node on such a path that also leads to a
parameter is a *border*: the gradients that arrive at it are stored, and the second half starts from
them, so that it repeats only the kernels of the borders. (torch's own split, in
torch.distributed.pipelining, iterates over sets, so its order differs between processes, which
breaks collectives in the backward.)
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
    """A node on a path to a received value that also leads to weights.

    Stores these weights and the gradients that arrived at the node. A result that depends only on
    weights is a border, too, although no received value is behind it.
    """

    node: Node
    weights: list[Node]
    on_way: bool
    arrived: Arrived = ()


@dataclass
class WeightBackward:
    """The second half of a backward, which can run once.

    Attributes:
        groups: borders that share weights, directly or indirectly; every weight is in one group.
        variables: the weights by their nodes.
    """

    groups: list[list[_Border]] = field(default_factory=list)
    variables: dict[Node, Tensor] = field(default_factory=dict)

    def run(self) -> None:
        """Accumulates the gradients of the weights."""
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
        # A path between two borders carries a gradient that is known already.
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
                retain_graph=len(group) > 1,  # such a path may cross another group's border
                allow_unused=True,
            )
        finally:
            for clamp in clamps:
                clamp.remove()
        # A gradient that was passed on unchanged is shared, so it must not be modified in place.
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
    """Returns an identifier of the memory of a tensor."""
    return tensor.untyped_storage().data_ptr()


def backward_input(
    results: Sequence[Tensor],
    gradients: Sequence[Tensor],
    leaves: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> tuple[tuple[Tensor | None, ...], WeightBackward]:
    """Runs the first half of a backward.

    Args:
        results: tensors with an autograd graph.
        gradients: gradients of the results.
        leaves: tensors whose gradients are computed now.
        weights: tensors whose gradients are computed later.

    Returns:
        The gradients of the leaves (None for leaves without a gradient), and the second half.
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
    return found, WeightBackward(_grouped(borders), variables)


def _of_results(node: Node, roots: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> Arrived:
    """Returns the gradients of the results of a node, by output index."""
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
    """Returns all nodes behind the roots in topological order, children first."""
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
    """Returns the borders, in the same order for equal graphs."""
    on_way: set[Node] = set()
    aside: dict[Node, dict[Node, None]] = {}  # weights behind nodes off the paths
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
    # Groups of one border free the buffers on their paths, so they come last.
    return sorted(groups, key=lambda group: len(group) == 1)

"""When the tensors of a training step are alive, at the points at which memory can be at its most.

Forwards, a function's variables live until it returns, and what autograd keeps until the backward
of the first operator that keeps it; so memory is at its most where a function ends. Backwards, an
operator's point is when it runs: what it keeps is still there, the gradient of its result has
arrived, those of its operands are new. A gradient waits from the first reader that gives one until
the operator that made the value, or, for a parameter, until the optimizer has run.

All blocks of a run but the first and the last one are left out of the points: along a run the bytes
at one place of a block change by the same amount from block to block. What is counted at a point
are the tensors of all blocks, so that a node of the folded graph holds n times its own bytes of
activations, or gradients, less those that are not there yet or any more.

Layouts are not known here. A choice's bytes follow from them; that a layout changes between two
operators, and which buffer then waits, is not counted (`autopar.simulate` counts it).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autopar.cost.memory import hands_on, kept
from autopar.intra_op.problem import Held
from autopar.ir.graph import Graph, Node

# What a node of the folded graph pays for, in bytes that follow from its choice.
#   leaf: an input or a buffer, or a parameter with its optimizer state (on its share)
#   value: a result that is not kept for the backward, as its only reader takes it or as it is made
#   owed: a result of which a sum is owed, until it has been added up;  kept: an operand or the
#   result, kept for the backward;  extra: what else it keeps;  scratch: of its kernels
#   waiting: the gradient of its result;  new: the gradient of an operand while its backward runs
#   gathered: a parameter as it is used, where it is stored otherwise;  copy: a parameter as the
#   operator wants it, where it is never used so;  accumulated: the sum of the gradients of earlier
#   microbatches;  gradient: of a parameter, as it is updated;  update: temporaries of the optimizer
Role = Literal[
    "leaf", "value", "owed", "kept", "extra", "scratch", "backward", "waiting", "new",
    "gathered", "copy", "accumulated", "gradient", "update",
]  # fmt: skip
Copies = NDArray[np.float64]
IDENTITIES = ("autopar.share", "autopar.shard")


@dataclass(frozen=True)
class Lifetimes:
    """Points of a step in their order, and what is alive at each of them.

    Attributes:
        points: what each is to a person, "forward of %x", "backward of %x" or "update".
        copies: node of the folded graph -> (role, operand or -1) -> how many of that tensor are
            alive at each point, shape (points,).
        payers: (node, operand or -1) -> how much of what all its blocks keep there it pays for.
            What several operators keep is one tensor if all want one layout. So each pays for an
            equal part of it, and for none is it free to keep another one.
    """

    points: tuple[str, ...]
    copies: dict[str, dict[tuple[Role, int], Copies]]
    payers: dict[tuple[str, int], float]


def pieces_of(memory: Copies) -> list[Held]:
    """Bytes at each point, shape (points, choices), as intervals in which they stay the same."""
    found: list[Held] = []
    begin = 0
    for end in range(1, len(memory) + 1):
        if end == len(memory) or (memory[end] != memory[begin]).any():
            if memory[begin].any():
                found.append(((begin, end), tuple(memory[begin].tolist())))
            begin = end
    return found


def lifetimes(graph: Graph, accelerator: bool) -> Lifetimes:
    """The life of every tensor of a step.

    Args:
        graph: prepared, with its repeats.
        accelerator: whether operators keep what kernels of accelerators do, and one update takes
            all parameters.
    """
    return _Step(graph, accelerator).result()


class _Step:
    """Moments: operator i runs forwards at i and backwards at 2 n - i, the forward ends at n."""

    def __init__(self, graph: Graph, accelerator: bool) -> None:
        self.graph, self.accelerator = graph, accelerator
        self.nodes = [node for node in graph.nodes if not node.is_leaf]
        self.place = {node.name: i for i, node in enumerate(self.nodes)}
        self.end = len(self.nodes)
        self.last = 2 * self.end + 1  # the optimizer
        self.returns = self._returns()
        self.moments, self.names = self._points()
        self.changes: dict[str, dict[tuple[Role, int], Copies]] = {}
        self.payers: dict[tuple[str, int], float] = {}

    def result(self) -> Lifetimes:
        self._leaves()
        self._forward()
        self._backward()
        copies = {
            name: {key: np.cumsum(change)[:-1].round(12) for key, change in changes.items()}
            for name, changes in self.changes.items()
        }
        return Lifetimes(self.names, copies, self.payers)

    def _returns(self) -> dict[str, int]:
        """When the function of each operator returns, where that is a block's."""
        return {
            name: max(self.place[other] for other in block if other in self.place)
            for repeat in self.graph.repeats
            for block in repeat.iterations
            for name in block
        }

    def _points(self) -> tuple[list[int], tuple[str, ...]]:
        inner: set[str] = set()
        points = {self.end: "end of forward", self.last: "update"}
        for repeat in self.graph.repeats:
            for block in repeat.iterations[1:-1]:
                inner.update(block)
            stop = self.returns[repeat.iterations[-1][-1]]
            points[stop] = f"forward of %{self.nodes[stop].name}"
        for i, node in enumerate(self.nodes):
            if node.name not in self.returns and node.op not in IDENTITIES:
                points[i] = f"forward of %{node.name}"
            if node.name not in inner and node.requires_grad:
                points[2 * self.end - i] = f"backward of %{node.name}"
        moments = sorted(points)
        return moments, tuple(points[moment] for moment in moments)

    def _alive(
        self, name: str, role: Role, begin: int, end: int, place: int = -1, count: float = 1.0
    ) -> None:
        """A tensor of an operator, from one moment to another, both included."""
        low, high = bisect_left(self.moments, begin), bisect_right(self.moments, end)
        if low < high:
            changes = self.changes.setdefault(self.graph.template[name], {})
            if (role, place) not in changes:
                changes[role, place] = np.zeros(len(self.moments) + 1)
            changes[role, place][low] += count
            changes[role, place][high] -= count

    def _storage(self, value: str) -> str:
        alias = self.graph[value].alias
        while alias is not None:
            value, alias = alias, self.graph[alias].alias
        return value

    def _is_parameter(self, node: Node) -> bool:
        return node.op == "autopar.share" and self.graph[node.inputs[0]].op == "param"

    def _leaves(self) -> None:
        """What is there all the time, and the update, which reads it."""
        trained = []
        for leaf in self.graph.nodes:
            if leaf.op != "param":
                if leaf.is_leaf:
                    self._alive(leaf.name, "leaf", 0, self.last)
                continue
            share = next(iter(self.graph.users[leaf.name]), leaf.name)
            self._alive(share, "leaf", 0, self.last)
            if leaf.requires_grad and share != leaf.name:
                trained.append((leaf.type.nbytes, share))
        if self.accelerator:
            for _, share in trained:
                self._alive(share, "update", self.last, self.last)
        elif trained:
            # One parameter at a time: its update beside what is left of the one before it.
            at = max(range(len(trained)), key=lambda i: trained[i][0])
            self._alive(trained[at][1], "update", self.last, self.last, count=2.0)
            if at:
                self._alive(trained[at - 1][1], "update", self.last, self.last)

    def _forward(self) -> None:
        keepers: dict[str, list[tuple[int, int]]] = {}
        for i, node in enumerate(self.nodes):
            for place in kept(node, self.accelerator) if node.requires_grad else ():
                value = node.name if place < 0 else node.inputs[place]
                keepers.setdefault(self._storage(value), []).append((i, place))
        for root, found in keepers.items():
            if self.graph[root].op == "param":
                continue
            made, freed = self.place.get(root, found[0][0]), 2 * self.end - found[0][0]
            for i, place in found:
                name = self.nodes[i].name
                self._alive(name, "kept", made, freed, place, 1 / len(found))
                key = self.graph.template[name], place
                self.payers[key] = self.payers.get(key, 0.0) + 1 / len(found)
        for i, node in enumerate(self.nodes):
            end = self.returns.get(node.name, self.end)
            if node.requires_grad:
                self._alive(node.name, "extra", i, 2 * self.end - i)
            self._alive(node.name, "scratch", i, i)
            if self._is_parameter(node):
                first = keepers.get(self._storage(node.name))
                kept_until = end if first is None else 2 * self.end - first[0][0]
                self._alive(node.name, "gathered", i, kept_until)
                for reader in self.graph.users[node.name]:
                    place = self.graph[reader].inputs.index(node.name)
                    self._alive(reader, "copy", self.place[reader], kept_until, place)
            elif node.alias is None and node.name not in keepers:
                self._value(node, i, end)

    def _value(self, node: Node, made: int, end: int) -> None:
        """A result that no operator keeps: a variable, in the end as its reader wants it."""
        readers = [self.graph[name] for name in self.graph.users[node.name]]
        alone = len(readers) == 1 and len(node.types) == 1
        if not alone or readers[0].op in IDENTITIES:
            self._alive(node.name, "value", made, end)
            return
        reader = readers[0]
        read = self.place[reader.name]
        self._alive(node.name, "value", made, read - 1)
        self._alive(node.name, "owed", read, read)
        self._alive(reader.name, "value", read, max(end, read), reader.inputs.index(node.name))

    def _backward(self) -> None:
        # A stage of a pipeline has no loss, but receives the gradients of what it sends.
        loss = self.graph.loss
        ends = [name for _, name in self.graph.outputs] if loss is None else [loss]
        arrived = dict.fromkeys(ends, self.end)
        paid = dict.fromkeys(ends, True)  # whether a value's gradient is a buffer of its own
        for i in reversed(range(len(self.nodes))):
            node, now = self.nodes[i], 2 * self.end - i
            if node.name not in arrived or not node.requires_grad:
                continue
            self._alive(node.name, "backward", now, now)
            if self._is_parameter(node):
                self._alive(node.name, "waiting", arrived[node.name] + 1, now - 1)
                self._alive(node.name, "accumulated", 0, now)
                self._alive(node.name, "gradient", now, self.last)
                continue
            pays = paid[node.name]
            if pays:
                self._alive(node.name, "waiting", arrived[node.name] + 1, now)
            same: list[str] = []
            for place, name in enumerate(node.inputs):
                operand = self.graph[name]
                how = hands_on(node, place, operand)
                if how == "none":
                    continue
                arrived.setdefault(name, now)
                if how == "new":
                    self._alive(node.name, "new", now, now, place)
                    paid[name] = True
                elif operand.type.numel == node.type.numel:
                    same.append(name)
                else:  # a part of the gradient, or one number for many
                    paid.setdefault(name, pays and operand.type.numel < node.type.numel)
            # One buffer for several values: the one that waits longest pays.
            same.sort(key=lambda name: self.place.get(name, -1))
            for number, name in enumerate(same):
                paid.setdefault(name, pays and number == 0)

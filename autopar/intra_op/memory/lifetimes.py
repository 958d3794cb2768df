"""When the tensors of a training step are alive, at the points at which memory can be at its most.

Forwards, a function's variables live until it returns, and what autograd keeps until the backward
of the first operator that keeps it; so memory is at its most where a function ends, or just before
its last operator, where sums are made that are owed to that. Backwards, an operator's point is when
it runs: what it keeps is still there, the gradient of its result has arrived, those of its operands
are new. A gradient waits from the first reader that gives one until the operator that made the
value, or, for a parameter, until the optimizer has run; on a CPU those that need no more than a sum
wait for the end of the backward and are summed at once.

All blocks of a run but the first and the last one are left out of the points: along a run the bytes
at one place of a block change by the same amount from block to block. What is counted at a point
are the tensors of all blocks, so that a node of the folded graph holds n times its own bytes of
activations, or gradients, less those that are not there yet or any more.

A block whose activations are offloaded keeps them until it returns, and has them again from its
backward on; on accelerators one block longer and one block earlier, while they go and come.

A block that recomputes keeps what enters it, and is computed again just before its backward: then
all that it would have kept is there, and its variables too.

Layouts are not known here. A choice's bytes follow from them; that a layout changes between two
operators, and which buffer then waits, is not counted (`autopar.simulate` counts it).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autopar.cost.operator_memory import hands_on, kept
from autopar.intra_op.memory.moments import Away, Block, offloaded, recomputed, spans
from autopar.intra_op.problem import Held
from autopar.ir.graph import Graph, Node
from autopar.ir.offload import NOTHING, Offload, offloaded_runs
from autopar.ir.recompute import Recompute, of_runs

# What a node of the folded graph pays for, in bytes that follow from its choice.
#   leaf: an input or a buffer, or a parameter with its optimizer state (on its share)
#   value: a result that is not kept for the backward, as its only reader takes it or as it is made
#   owed: a result of which a sum is owed, until it has been added up;  kept: an operand or the
#   result, kept for the backward;  extra: what else it keeps;  scratch: of its kernels
#   waiting: the gradient of its result;  new: the gradient of an operand while its backward runs
#   gathered: a parameter as it is kept for the backward, where it is stored otherwise;  fetched: as
#   it is used, where it is not kept so;  copy: a parameter as the
#   operator wants it, where it is never used so;  accumulated: the sum of the gradients of earlier
#   microbatches;  gradient: of a parameter, as it is updated;  summed: what that is made of once
#   the backward has ended;  update: temporaries of the optimizer
Role = Literal[
    "leaf", "value", "owed", "kept", "extra", "scratch", "backward", "waiting", "new",
    "gathered", "fetched", "copy", "accumulated", "gradient", "summed", "update",
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
        stowed: the same of what lies in host memory between the two.
        products: node -> how many of its results are kept so that they need not be computed again.
        arguments: node that reads what enters a block which is computed again -> how many of these
            are kept for that alone.
    """

    points: tuple[str, ...]
    copies: dict[str, dict[tuple[Role, int], Copies]]
    payers: dict[tuple[str, int], float]
    stowed: dict[tuple[str, int], float] = field(default_factory=dict)
    products: dict[str, int] = field(default_factory=dict)
    arguments: dict[str, int] = field(default_factory=dict)


def pieces_of(memory: Copies) -> list[Held]:
    """Bytes at each point, shape (points, choices), as intervals in which they stay the same."""
    ends = np.flatnonzero((memory[1:] != memory[:-1]).any(axis=1)) + 1
    bounds = [0, *ends.tolist(), len(memory)]
    return [
        ((begin, end), tuple(memory[begin].tolist()))
        for begin, end in pairwise(bounds)
        if memory[begin].any()
    ]


def lifetimes(
    graph: Graph,
    accelerator: bool,
    recompute: Mapping[str, Recompute] | None = None,
    offload: Offload = NOTHING,
) -> Lifetimes:
    """The life of every tensor of a step.

    Args:
        graph: prepared, with its repeats.
        accelerator: whether operators keep what kernels of accelerators do, and one update takes
            all parameters.
        recompute: runs whose first blocks are computed again; see `autopar.ir.recompute`.
        offload: what lies in host memory.
    """
    return _Step(graph, accelerator, recompute or {}, offload).result()


class _Step:
    """Moments: operator i runs forwards at i and backwards at 2 n - i, the forward ends at n.

    A block is computed again half a moment before its backward begins.
    """

    def __init__(
        self,
        graph: Graph,
        accelerator: bool,
        recompute: Mapping[str, Recompute],
        offload: Offload,
    ) -> None:
        self.graph, self.accelerator = graph, accelerator
        self.nodes = [node for node in graph.nodes if not node.is_leaf]
        self.place = {node.name: i for i, node in enumerate(self.nodes)}
        self.end = len(self.nodes)
        self.last = 2 * self.end + 1  # the optimizer
        self.summed = self.last - 0.5  # gradients that wait for the end of the backward
        self.returns = self._returns()
        self.recompute = of_runs(graph, recompute)
        self.again = recomputed(graph, self.recompute, self.place)
        self.runs = offloaded_runs(graph, offload, recompute)
        self.offload = offload
        self.away = offloaded(graph, self.runs, self.place, accelerator)
        self.moments, self.names = self._points()
        self.changes: dict[str, dict[tuple[Role, int], Copies]] = {}
        self.payers: dict[tuple[str, int], float] = {}
        self.stowed: dict[tuple[str, int], float] = {}
        self.products: dict[str, int] = {}
        self.arguments: dict[str, int] = {}

    def result(self) -> Lifetimes:
        self._leaves()
        self._forward()
        self._backward()
        copies = {
            name: {key: np.cumsum(change)[:-1].round(12) for key, change in changes.items()}
            for name, changes in self.changes.items()
        }
        return Lifetimes(
            self.names, copies, self.payers, self.stowed, self.products, self.arguments
        )

    def _returns(self) -> dict[str, int]:
        """When the function of each operator returns, where that is a block's."""
        return {
            name: max(self.place[other] for other in block if other in self.place)
            for repeat in self.graph.repeats
            for block in repeat.iterations
            for name in block
        }

    def _points(self) -> tuple[list[float], tuple[str, ...]]:
        inner: set[str] = set()
        points: dict[float, str] = {self.end: "end of forward", self.last: "update"}
        if not self.accelerator:
            points[self.summed] = "sums of gradients"
        rows = zip(self.graph.repeats, self.recompute, self.runs, strict=True)
        for repeat, how, (_, stowed) in rows:
            count, split = repeat.count, 0 if how is None else how.blocks
            # Of runs of blocks that do the same.
            ends = {0, split - 1, split, stowed - 1, stowed, count - 1}
            for number, block in enumerate(repeat.iterations):
                if number not in ends:
                    inner.update(block)
                elif number < split:
                    first = next(name for name in block if name in self.place)
                    points[self.again[first].when] = f"%{first} and its block computed again"
            stop = self.returns[repeat.iterations[-1][-1]]
            points[stop] = f"forward of %{self.nodes[stop].name}"
        for i, node in enumerate(self.nodes):
            if node.name not in self.returns and node.op not in IDENTITIES:
                points[i] = f"forward of %{node.name}"
            if i in points and any(map(self._read_once, node.inputs)):
                points[i - 0.5] = f"operands of %{node.name}"
            if node.name not in inner and node.requires_grad:
                points[2 * self.end - i] = f"backward of %{node.name}"
        moments = sorted(points)
        return moments, tuple(points[moment] for moment in moments)

    def _alive(
        self, name: str, role: Role, begin: float, end: float, place: int = -1, count: float = 1.0
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
        return self.graph.root(value).name

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
        if self.accelerator or self.offload.optimizer:
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
        arguments = self._arguments(keepers)
        for root, found in keepers.items():
            if self.graph[root].op == "param":
                continue
            made = self.place.get(root, found[0][0])
            freed = max(2 * self.end - found[0][0], arguments.get(root, 0.0))
            block, away = self._only_block(root, found), self._only_away(root, found)
            for i, place in found:
                name = self.nodes[i].name
                share = 1 / len(found)
                begin = block.when if block else made
                for span in spans(away, begin, freed):
                    self._alive(name, "kept", *span, place, share)
                if block is None:
                    paid = self.payers if away is None else self.stowed
                    key = self.graph.template[name], place
                    paid[key] = paid.get(key, 0.0) + share
        for i, node in enumerate(self.nodes):
            end, block = self.returns.get(node.name, self.end), self.again.get(node.name)
            self._alive(node.name, "scratch", i, i)
            if node.requires_grad:
                runs_again = block is not None and self._is_one_of(node, block.what.operators)
                begin = block.when if block is not None and runs_again else i
                for span in spans(self.away.get(node.name), begin, 2 * self.end - i):
                    self._alive(node.name, "extra", *span)
            if self._is_parameter(node):
                first = keepers.get(self._storage(node.name))
                self._gathered(node, i, end, end if first is None else 2 * self.end - first[0][0])
            elif node.alias is None:
                product = block is not None and self._is_one_of(node, block.what.kept)
                if node.name not in keepers:
                    self._value(node, i, end)
                    if block is not None and self._is_one_of(node, block.what.operators):
                        self._value(node, block.when, block.when)
                if block is not None and product:
                    # As it was computed; how its readers want it is made again from that.
                    until = block.when - 0.25 if node.name in keepers else block.when
                    self._alive(node.name, "value", end + 0.5, until)
                    template = self.graph.template[node.name]
                    self.products[template] = self.products.get(template, 0) + 1

    def _is_one_of(self, node: Node, templates: Collection[str]) -> bool:
        return self.graph.template[node.name] in templates

    def _only_block(self, root: str, keepers: list[tuple[int, int]]) -> Block | None:
        """The block that is computed again which makes a value, if nobody else keeps that."""
        block = self.again.get(root)
        if block is None:
            return None
        alone = all(self.again.get(self.nodes[i].name) is block for i, _ in keepers)
        return block if alone else None

    def _only_away(self, root: str, keepers: list[tuple[int, int]]) -> Away | None:
        """When a value is gone and back, if nobody keeps it who is not offloaded."""
        found = [self.away.get(self.nodes[i].name) for i, _ in keepers]
        aways = [away for away in found if away is not None]
        if self.graph[root].is_leaf or len(aways) < len(found):
            return None
        return Away(max(away.gone for away in aways), min(away.back for away in aways))

    def _arguments(self, keepers: Collection[str]) -> dict[str, float]:
        """What enters blocks that are computed again, and until when they keep it.

        What no operator keeps is paid for by the share that reads it, as that wants it.
        """
        until: dict[str, float] = {}
        for repeat, how in zip(self.graph.repeats, self.recompute, strict=True):
            for names in repeat.iterations[: 0 if how is None else how.blocks]:
                inside = set(names)
                for name in names:
                    for value in self.graph[name].inputs:
                        root = self._storage(value)
                        if value in inside or self.graph[root].is_leaf:
                            continue
                        begin = max(until.get(root, 0.0), self.returns.get(root, self.end)) + 0.5
                        done = self.again[name].done
                        if root not in keepers and root not in until and name in self.place:
                            self._alive(name, "value", begin, done, 0)
                            template = self.graph.template[name]
                            self.arguments[template] = self.arguments.get(template, 0) + 1
                        until[root] = max(until.get(root, 0.0), done)
        return until

    def _gathered(self, node: Node, made: int, end: int, kept_until: float) -> None:
        """A parameter as it is used; a block that is computed again gathers it again."""
        block = self.again.get(node.name)
        spans: list[tuple[float, float]] = [(made, kept_until)]
        if block is not None:
            spans = [(made, end), (block.when, max(kept_until, block.when))]
        for begin, until in spans:
            self._alive(node.name, "gathered", begin, until)
            self._alive(node.name, "fetched", begin, min(end, until) if begin == made else until)
            if block is None and until > end:
                self._alive(node.name, "fetched", until, until)
            for reader in self.graph.users[node.name]:
                place = self.graph[reader].inputs.index(node.name)
                self._alive(reader, "copy", max(self.place[reader], begin), until, place)

    def _read_once(self, value: str) -> bool:
        """Whether one operator reads a value, whose variable it then is as that wants it."""
        node, readers = self.graph[value], self.graph.users[value]
        alone = len(readers) == 1 and len(node.types) == 1 and not node.is_leaf
        return alone and self.graph[readers[0]].op not in IDENTITIES

    def _value(self, node: Node, made: float, end: float) -> None:
        """A result that no operator keeps: a variable, in the end as its reader wants it.

        What is owed is added up before the reader makes anything.
        """
        if not self._read_once(node.name):
            self._alive(node.name, "value", made, end)
            return
        reader = self.graph[self.graph.users[node.name][0]]
        read = max(self.place[reader.name] - 0.5, made)
        self._alive(node.name, "value", made, read - 0.5)
        if read > made:
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
                self._alive(node.name, "waiting", arrived[node.name] + 0.5, now - 1)
                self._alive(node.name, "accumulated", 0, now)
                self._alive(node.name, "gradient", now, self.last)
                self._alive(node.name, "summed", self.summed, self.summed)
                continue
            pays = paid[node.name]
            if pays:
                self._alive(node.name, "waiting", arrived[node.name] + 0.5, now)
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

"""Lifetimes of the tensors of a training step, at the points where memory can peak.

Forwards, the variables of a function live until it returns; a saved tensor lives until the backward
of the first operator that saved it. Memory therefore peaks at the end of a function, or just before
its last operator, which first needs its partial operands summed. Backwards, each operator is a
point: its saved tensors are still alive, the gradient of its result has arrived, and those of its
operands are new. A gradient waits from the first reader that contributes to it until the operator
that produced the value or, for a parameter, until the optimizer has run. On a CPU, gradients that
only need a sum wait for the end of the backward and are summed at once.

Only the first and the last block of a run have points: from block to block, the bytes at the same
place of a block change by the same amount. Points count the tensors of all blocks, so that a node
of the folded graph holds n times its bytes of activations or gradients, minus the bytes that are
not yet allocated or already freed.

A block with offloaded activations holds them until it returns, and again from the start of its
backward; on accelerators for one block longer and one block earlier, while the copies run.

A block that recomputes keeps its inputs and runs again just before its backward: then all its saved
tensors, and its variables, are alive. The parameters that a block gathers again for its backward
are there from its start; on accelerators from that of the block behind, to overlap with it.

Layouts are not known here; the bytes of a choice follow from them. Resharding between two
operators, and the buffers it needs, are not counted (`autopar.simulate` counts them).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autopar.cost.operator_memory import hands_on, kept
from autopar.intra_op.memory.moments import (
    Block,
    OffloadSpan,
    offloaded,
    recomputed,
    regathered,
    spans,
)
from autopar.ir.graph import Graph, Node
from autopar.ir.offload import NOTHING, Offload, offloaded_runs
from autopar.ir.recompute import Recompute, of_runs

# Roles of the tensors of a node of the folded graph; their bytes follow from its choice.
#   leaf: an input or a buffer, or a parameter with its optimizer state (on its share)
#   value: a result that is not saved, in its only reader's layout or its own
#   owed: a partial result, until it is summed;  kept: an operand or the result, saved for the
#   backward;  extra: other saved tensors;  scratch: temporaries of its kernels
#   waiting: the gradient of its result;  new: the gradient of an operand while its backward runs
#   gathered: a parameter as saved for the backward, where it is stored otherwise;  fetched: as
#   used, where it is not saved so;  copy: a parameter in the layout that an operator needs, where
#   no use has it;  accumulated: the sum of the gradients of earlier microbatches;  gradient: of a
#   parameter, as it is updated;  summed: its parts, which are summed at the end of the backward
#   update: temporaries of the optimizer
Role = Literal[
    "leaf", "value", "owed", "kept", "extra", "scratch", "backward", "waiting", "new",
    "gathered", "fetched", "copy", "accumulated", "gradient", "summed", "update",
]  # fmt: skip
Copies = NDArray[np.float64]
IDENTITIES = ("autopar.share", "autopar.shard")


@dataclass(frozen=True)
class Lifetimes:
    """Points of a step in order, and the tensors alive at each of them.

    Attributes:
        points: a description of each, "forward of %x", "backward of %x" or "update".
        copies: node of the folded graph -> (role, operand or -1) -> number of such tensors alive at
            each point, shape (points,).
        payers: (node, operand or -1) -> its share of the tensors that all its blocks save there. A
            tensor that several operators save is one tensor if all need the same layout. Each pays
            an equal part of it, so that saving another layout is free for none.
        stowed: the same for tensors in host memory between forward and backward.
        products: node -> number of its results that are kept to avoid recomputing them.
        arguments: reader of the inputs of recomputed blocks -> number of inputs kept for that
            alone.
    """

    points: tuple[str, ...]
    copies: dict[str, dict[tuple[Role, int], Copies]]
    payers: dict[tuple[str, int], float]
    stowed: dict[tuple[str, int], float] = field(default_factory=dict)
    products: dict[str, int] = field(default_factory=dict)
    arguments: dict[str, int] = field(default_factory=dict)


def lifetimes(
    graph: Graph,
    accelerator: bool,
    recompute: Mapping[str, Recompute] | None = None,
    offload: Offload = NOTHING,
) -> Lifetimes:
    """Returns the lifetimes of all tensors of a step.

    Args:
        graph: prepared, with its repeats.
        accelerator: whether kernels of accelerators run, which save other tensors than a CPU's, and
            one update takes all parameters.
        recompute: runs whose first blocks are recomputed; see `autopar.ir.recompute`.
        offload: what is kept in host memory.
    """
    return _Step(graph, accelerator, recompute or {}, offload).result()


class _Step:
    """Computes lifetimes; operator i of n runs forwards at i and backwards at 2 n - i.

    The forward ends at n. A block is recomputed half a moment before its backward begins.
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
        self.summed = self.last - 0.5  # gradients summed at the end of the backward
        self.returns = self._returns()
        self.recompute = of_runs(graph, recompute)
        self.again = recomputed(graph, self.recompute, self.place)
        self.coming = regathered(graph, self.again, self.place, accelerator)
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
        """Returns for each operator the moment at which its function returns."""
        blocks = [block for repeat in self.graph.repeats for block in repeat.iterations]
        ends = [max(self.place[name] for name in block if name in self.place) for block in blocks]
        return {name: end for block, end in zip(blocks, ends, strict=True) for name in block}

    def _points(self) -> tuple[list[float], tuple[str, ...]]:
        inner: set[str] = set()
        points: dict[float, str] = {self.end: "end of forward", self.last: "update"}
        if not self.accelerator:
            points[self.summed] = "sums of gradients"
        rows = zip(self.graph.repeats, self.recompute, self.runs, strict=True)
        for repeat, how, (_, stowed) in rows:
            count, split = repeat.count, 0 if how is None else how.blocks
            # Boundaries between blocks that behave differently.
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
        """Records a tensor of an operator as alive between two moments, both included."""
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
        """Records the tensors that are always alive, and the update, which reads them."""
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
            # Parameters are updated one at a time, while temporaries of the previous one remain.
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
        for root, savers in keepers.items():
            if self.graph[root].op == "param":
                continue
            birth = self.place.get(root, savers[0][0])
            freed = max(2 * self.end - savers[0][0], arguments.get(root, 0.0))
            block, away = self._only_block(root, savers), self._only_away(root, savers)
            for i, place in savers:
                name = self.nodes[i].name
                share = 1 / len(savers)
                begin = block.when if block else birth
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
                    # In its own layout; its readers' layouts are made from it again.
                    until = block.when - 0.25 if node.name in keepers else block.when
                    self._alive(node.name, "value", end + 0.5, until)
                    template = self.graph.template[node.name]
                    self.products[template] = self.products.get(template, 0) + 1

    def _is_one_of(self, node: Node, templates: Collection[str]) -> bool:
        return self.graph.template[node.name] in templates

    def _only_block(self, root: str, keepers: list[tuple[int, int]]) -> Block | None:
        """Returns the recomputed block that produces a value, if no operator outside saves it."""
        block = self.again.get(root)
        if block is None:
            return None
        alone = all(self.again.get(self.nodes[i].name) is block for i, _ in keepers)
        return block if alone else None

    def _only_away(self, root: str, keepers: list[tuple[int, int]]) -> OffloadSpan | None:
        """Returns when a value is in host memory, if only offloaded blocks save it."""
        blocks = [self.away.get(self.nodes[i].name) for i, _ in keepers]
        aways = [away for away in blocks if away is not None]
        if self.graph[root].is_leaf or len(aways) < len(blocks):
            return None
        return OffloadSpan(max(away.gone for away in aways), min(away.back for away in aways))

    def _arguments(self, keepers: Collection[str]) -> dict[str, float]:
        """Returns the inputs of recomputed blocks and the moments until which the blocks keep them.

        If no operator saves an input, the share that reads it pays for it, in its own layout.
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
        """Records a parameter as used; a recomputed block gathers it again."""
        block, back = self.again.get(node.name), self.coming.get(node.name, kept_until)
        spans: list[tuple[float, float]] = [(made, kept_until)]
        if block is not None:
            spans = [(made, end), (block.when, max(kept_until, block.when))]
        for begin, until in spans:
            comes, goes = (made, min(end, until)) if begin == made else (back, until)
            self._alive(node.name, "gathered", comes, until)
            self._alive(node.name, "fetched", comes, goes)
            if block is None and until > end:
                self._alive(node.name, "fetched", back, until)
            for reader in self.graph.users[node.name]:
                place = self.graph[reader].inputs.index(node.name)
                self._alive(reader, "copy", max(self.place[reader], begin), until, place)

    def _read_once(self, value: str) -> bool:
        """Returns whether a value has one reader, whose layout its variable then has."""
        node, readers = self.graph[value], self.graph.users[value]
        alone = len(readers) == 1 and len(node.types) == 1 and not node.is_leaf
        return alone and self.graph[readers[0]].op not in IDENTITIES

    def _value(self, node: Node, made: float, end: float) -> None:
        """Records a result that no operator saves: a variable, at the end in its reader's layout.

        A partial result is summed before the reader allocates anything.
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
        # A stage of a pipeline has no loss; it receives the gradients of the values that it sends.
        loss = self.graph.loss
        ends = [name for _, name in self.graph.outputs] if loss is None else [loss]
        arrived = dict.fromkeys(ends, self.end)
        paid = dict.fromkeys(ends, True)  # whether a value's gradient has its own buffer
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
                else:  # a slice of the gradient, or one number for many
                    paid.setdefault(name, pays and operand.type.numel < node.type.numel)
            # The value that lives longest pays for a buffer that several share.
            same.sort(key=lambda name: self.place.get(name, -1))
            for number, name in enumerate(same):
                paid.setdefault(name, pays and number == 0)

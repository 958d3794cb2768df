"""Graph x strategies x prices -> Problem; Solution -> the layouts of a plan.

One problem node stands for one node of the folded graph, priced forwards and backwards and times
the number of blocks it stands for; a parameter and its share are one node, "stored => used", whose
cost is the resharding between the two (data parallelism's all_reduce, ZeRO-3's all_gather and
reduce_scatter) and whose memory is exact. Edges are reshardings. Times are points of a step at
which its memory can be at its most, and a node holds at each of them what `lifetimes` says.
"""

from __future__ import annotations

import numpy as np

from autopar.cost.device import device
from autopar.cost.host_copies import host_seconds
from autopar.cost.model import Work
from autopar.cost.network import near
from autopar.cost.operator_memory import kept
from autopar.cost.overlap import TAKE_TURNS
from autopar.errors import UnknownOperatorError
from autopar.intra_op.assumptions import Assumptions
from autopar.intra_op.async_linears import Hidden
from autopar.intra_op.memory.allocations import Rows
from autopar.intra_op.memory.lifetimes import lifetimes, pieces_of
from autopar.intra_op.node_choices import Option, accumulating, storages
from autopar.intra_op.pins.layout_pins import Pins
from autopar.intra_op.price_cache import Prices
from autopar.intra_op.problem import FORBIDDEN, Choices, Edge, Matrix
from autopar.intra_op.rule import OpRule
from autopar.intra_op.storage_choices import (
    StoredCost,
    StoredTraffic,
    away_of,
    stored_traffic,
    undominated,
)
from autopar.ir.fusion.async_tensor_parallel import Beside
from autopar.ir.graph import Graph, Node
from autopar.ir.offload import offloaded_runs
from autopar.ir.recompute import repetitions, selective_runs
from autopar.ir.tensor import Layout, TensorType
from autopar.stage_plan import StagePlan

TRANSPOSES = ("aten.transpose.int", "aten.permute", "aten.t")
Stored = tuple[tuple[Option, ...], tuple[StoredCost, ...]]  # choices and their prices


class Builder:
    """Collects the nodes and edges of one Problem.

    Args:
        graph: normalised, annotated, with its repeats.
        prices: on its mesh.
        table: rules by operator.
        pins: layouts that are fixed.
        given: how the model is trained.
        limited: whether memory is.
    """

    def __init__(
        self,
        graph: Graph,
        prices: Prices,
        table: dict[str, OpRule],
        pins: Pins,
        given: Assumptions,
        limited: bool = False,
    ) -> None:
        self.given, self.limited, self.chip = given, limited, device(prices.mesh)
        self.graph, self.table, self.pins = graph, table, pins
        self.prices, self.mesh, self.model = prices, prices.mesh, prices.model
        self.resharder = prices.resharder(given.precision)
        self.alike: dict[tuple[TensorType, bool, float], Stored] = {}
        self.choices: list[Choices] = []
        self.options: list[tuple[Option, ...]] = []
        self.names: list[str] = []
        self.position: dict[str, int] = {}
        self.replicated: list[str] = []
        self.exchanged: dict[str, tuple[float, ...]] = {}
        self.forward: dict[str, tuple[float, ...]] = {}
        self.backward: dict[str, tuple[float, ...]] = {}
        self.beside: dict[str, tuple[float, ...]] = {}
        self.fetched: dict[str, tuple[float, ...]] = {}
        self.refetched: dict[str, tuple[float, ...]] = {}
        self.once: dict[str, tuple[tuple[float, float], ...]] = {}
        self.accelerator = self.mesh.device.lower() != "cpu"
        self.alive = lifetimes(graph, self.accelerator, given.recompute, given.offload)
        self.waits = given.slowdown >= TAKE_TURNS
        away = given.offload.optimizer
        self.fused_update = given.fused_update and self.accelerator and not away
        self.away = away_of(graph, self.chip, given.bucket, self.waits) if away else None
        runs = offloaded_runs(graph, given.offload, given.recompute)
        self.stows = {  # node -> how many of its blocks are offloaded
            name: end - first
            for repeat, (first, end) in zip(graph.repeats, runs, strict=True)
            for name in repeat.iterations[0]
        }
        self.stowed: dict[str, tuple[float, ...]] = {}
        self.host: dict[str, tuple[float, ...]] = {}
        self.again, self.reached = repetitions(graph, given.recompute)
        self.sums: dict[str, tuple[float, ...]] = {}
        self.last_blocks = {name for r in graph.repeats for name in r.iterations[-1]}
        self.hidden = Hidden(
            Beside(graph, selective_runs(graph, given.recompute)),
            near(self.mesh, self.chip) if given.overlapped else (),
            prices,
            self.resharder,
            table,
            given.slowdown,
            lambda name: self.options[self.position[name]],
        )
        self.left_by: dict[str, list[str]] = {}  # share -> values that leave a run held as in it
        self.held_as = self._held_after_blocks()
        for value, share in self.held_as.items():
            self.left_by.setdefault(share, []).append(value)

    def add(self, node: Node) -> None:
        """One operator, input or buffer."""
        every, signature, *prices = self.prices.operator(self.graph, node, self.table)
        if signature is None and not node.is_leaf:
            if self.given.unknown_ops == "error":
                raise UnknownOperatorError(
                    f"{node.op} has no sharding rule",
                    where=str(node.source),
                    todo='add a rule, or pass unknown_ops="replicate" to run it whole',
                )
            self.replicated.append(node.name)
        options = self.pins.keep(node, every)
        left = set(options)
        kernels, sent = (
            [seconds for option, seconds in zip(every, each, strict=True) if option in left]
            for each in prices
        )
        count = self.graph.multiplicity[node.name]
        again = self.again.get(node.name, 0)
        asked = tuple((count + again) * forward + count * backward for forward, backward in sent)
        if any(asked):
            self.exchanged[node.name] = asked
        backward = tuple(
            count * seconds + self._sum_seconds(node, option)
            for option, (_, seconds) in zip(options, kernels, strict=True)
        )
        if any(backward):
            self.backward[node.name] = backward
        if any(forward for forward, _ in kernels):
            self.forward[node.name] = tuple(count * forward for forward, _ in kernels)
        rows = self._memory(node, options)
        copied = self.stowed.get(node.name, (0.0,) * len(options))
        cost = tuple(
            (count + again) * forward + after + self._loss_seconds(node, option) + inside + 2 * copy
            for option, (forward, _), after, inside, copy in zip(
                options, kernels, backward, asked, copied, strict=True
            )
        )
        self._append(node.name, options, cost, rows)

    def add_parameter(self, node: Node, share: Node) -> None:
        """A parameter and its share as one problem node."""
        options, costs = self._stored(node, share)
        count = self.graph.multiplicity[node.name]
        rows: Rows = {(role, -1): [c.nbytes[role] for c in costs] for role in costs[0].nbytes}
        for found, seconds in (
            (self.beside, [cost.beside for cost in costs]),
            (self.fetched, [cost.fetched for cost in costs]),
            (self.refetched, [cost.refetched for cost in costs]),
        ):
            if any(seconds):
                found[share.name] = tuple(count * each for each in seconds)
        self.once[share.name] = tuple((count * c.reduced, count * c.gathered) for c in costs)
        if any(cost.host for cost in costs):
            self.host[share.name] = tuple(count * cost.host for cost in costs)
        again = self.again.get(share.name, 0)
        self.sums[share.name] = tuple(
            # A block that is computed again does not keep the gathered copy.
            count * cost.held(node.requires_grad) - again * cost.nbytes["gathered"]
            for cost in costs
        )
        self._append(share.name, options, tuple(count * cost.seconds for cost in costs), rows)
        self.position[node.name] = self.position[share.name]

    def _stored(self, node: Node, share: Node) -> Stored:
        """The choices of a parameter that are left; the same for parameters alike without pins."""
        lies = self.given.lies or (accumulating if self.given.microbatches > 1 else storages)
        every, traffic = self.prices.stored(
            node.type, node.requires_grad, lies, self.given.bucket, self.given.precision
        )
        left = self.pins.keep(share, every)
        pinned = len(left) < len(every)
        alike = (node.type, node.requires_grad, self._again(share))
        if alike in self.alike and not pinned:
            return self.alike[alike]
        among = set(left)
        costs = [
            self._stored_cost(share, each)
            for option, each in zip(every, traffic, strict=True)
            if option in among
        ]
        found = undominated(left, costs)
        if not pinned:
            self.alike[alike] = found
        return found

    def _stored_cost(self, share: Node, traffic: StoredTraffic) -> StoredCost:
        return traffic.cost(
            self.given.state_bytes,
            self.given.microbatches,
            self.waits,
            self._again(share),
            self.away,
            self.fused_update,
        )

    def _again(self, share: Node) -> float:
        """Which part of a parameter's blocks is computed again."""
        return self.again.get(share.name, 0) / self.graph.multiplicity[share.name]

    def _append(
        self, name: str, options: tuple[Option, ...], cost: tuple[float, ...], rows: Rows
    ) -> None:
        self.position[name] = len(self.choices)
        labels = tuple(option.label for option in options)
        memory = np.zeros((len(self.alive.points), len(options)))
        for key, copies in self.alive.copies.get(name, {}).items():
            if key in rows:
                memory += np.outer(copies, rows[key])
        pieces = pieces_of(memory) or [((0, 0), (0.0,) * len(options))]
        (live, nbytes), more = pieces[0], tuple(pieces[1:])
        self.choices.append(Choices(name, labels, cost, nbytes, live, more))
        self.options.append(options)
        self.names.append(name)

    def beside_seconds(self, share: Node, plan: StagePlan) -> tuple[float, float]:
        """What a plan sends of a parameter beside forward and backward, in all blocks."""
        if share.op != "autopar.share" or self.graph[share.inputs[0]].op != "param":
            return 0.0, 0.0
        leaf = self.graph[share.inputs[0]]
        storage = plan.storage(self.graph.template[leaf.name], share.name)
        traffic = stored_traffic(
            leaf.type, leaf.requires_grad, storage, self.mesh, self.model, self.given.bucket,
            self.given.precision,
        )  # fmt: skip
        cost = self._stored_cost(share, traffic)
        count = self.graph.multiplicity[share.name]
        return count * cost.fetched, count * (cost.beside + cost.refetched)

    def _sum_seconds(self, share: Node, option: Option) -> float:
        """Adding up the gradients of a value that leaves a run of blocks, held as in `share`."""
        given = option.results[0].local_bytes(share.type, self.mesh)
        seconds = 0.0
        for value in self.left_by.get(share.name, ()):
            users = set(self.graph.users[value]) - self.last_blocks
            readers = sum(self.graph[user].requires_grad for user in users)
            if self.graph[value].requires_grad and readers > 1:
                work = Work(f"{share.op} backward", share.type.numel, 3 * given, share.type.dtype)
                seconds += (readers - 1) * self.model.compute(work)
        return seconds

    def _loss_seconds(self, node: Node, option: Option) -> float:
        """The loss ends whole on every device, so that all report the same."""
        if node.name != self.graph.loss:
            return 0.0
        whole = Layout.replicated(len(node.type.shape))
        return self.resharder.cost(node.type, option.results[0], whole, node.requires_grad)

    def _memory(self, node: Node, options: tuple[Option, ...]) -> Rows:
        """Bytes of one copy of everything that an operator allocates, under each choice."""
        found = self.prices.allocated(self.graph, node, options, self._options_of, self.accelerator)
        if not node.is_leaf:
            self._sums(node, found)
        return found

    def _options_of(self, value: str) -> tuple[Option, ...]:
        """The choices of what makes a value; none of what comes later."""
        at = self.position.get(self.graph.template[value])
        return () if at is None else self.options[at]

    def _sums(self, node: Node, found: Rows) -> None:
        """What all blocks of an operator keep for the backward, and what of it is stowed."""
        stows = self.stows.get(node.name, 0)
        count = self.graph.multiplicity[node.name] - self.again.get(node.name, 0) - stows
        extra = np.array(found["extra", -1], dtype=np.float64)
        saved, stowed = count * extra, stows * extra
        for place in kept(node, self.accelerator):
            held = np.array(found["kept", place])
            saved += self.alive.payers.get((node.name, place), 0) * held
            stowed += self.alive.stowed.get((node.name, place), 0) * held
        if stowed.any():
            self.host[node.name] = tuple(stowed.tolist())
            self.stowed[node.name] = tuple(host_seconds(self.chip, n, stows) for n in stowed)
        if node.name in self.alive.arguments:
            saved += self.alive.arguments[node.name] * np.array(found["value", 0])
        saved += self.alive.products.get(node.name, 0) * np.array(found["value", -1])
        self.sums[node.name] = tuple(saved.tolist())

    def edges(self) -> tuple[Edge, ...]:
        """One resharding matrix per use of a value.

        A block's function takes a carried value in the layout in which its share reads it, and
        returns it in that layout from every block. So the value enters once, is resharded at the
        end of each block, and whoever reads it after the last one finds it in that layout.
        """
        leaving = {
            (entry, name): (leaves, repeat.count)
            for repeat in self.graph.repeats
            for entry, leaves in repeat.carried
            for name in repeat.iterations[0]
        }
        found: list[Edge] = []
        for node in self.graph.folded:
            if node.op == "param":
                continue
            for index, value in enumerate(node.inputs):
                source = self._source(value)
                if self.position[source] == self.position[node.name]:
                    continue
                enters = (value, node.name) in leaving
                if not enters:
                    count = self.graph.multiplicity[node.name]
                    again = self.reached.get(node.name, 0)
                    edge = self._edge(source, count, node, index, again)
                    times = (count + again, count)
                    found.append(
                        self.hidden.less(len(found), edge, self.graph[source], node, index, times)
                    )
                    continue
                found.append(self._edge(source, 1, node, index))
                found.append(self._edge(*leaving[value, node.name], node, index))
        return tuple(found)

    def _source(self, value: str) -> str:
        """The node of the folded graph in whose layout a value is held."""
        return self.held_as.get(value, self.graph.template[value])

    def _held_after_blocks(self) -> dict[str, str]:
        """Value that leaves the last block of a run -> the share in whose layout it is held.

        A share's layouts on both sides are one.
        """
        found: dict[str, str] = {}
        for repeat in self.graph.repeats:
            last = dict(zip(repeat.iterations[0], repeat.iterations[-1], strict=True))
            for entry, leaves in repeat.carried:
                readers = (n for n in self.graph.users[entry] if n in repeat.iterations[0])
                found[last[leaves]] = next(readers)
        return found

    def _edge(self, source: str, count: int, node: Node, index: int, again: int = 0) -> Edge:
        """`count` reshardings of an operand of `node`, from what `source` gives.

        `again` is how often only the forward is repeated.
        """
        a, b = self.position[source], self.position[node.name]
        tensor, grad = self.graph[source].type, self.graph[source].requires_grad
        rows = [option.results[0] for option in self.options[a]]
        columns = [option.operands[index] for option in self.options[b]]
        sources, targets = (
            {layout: n for n, layout in enumerate(dict.fromkeys(side))} for side in (rows, columns)
        )
        sides = tuple(sources), tuple(targets)
        price = count * self.resharder.costs(tensor, *sides, grad)
        if again:
            price += again * self.resharder.costs(tensor, *sides, False)
        matrix = price[np.ix_([sources[row] for row in rows], [targets[c] for c in columns])]
        # An operator that reads a value twice in one layout has it sent once.
        twice = [i for i in range(index) if node.inputs[i] == node.inputs[index]]
        sent = [any(o.operands[i] == o.operands[index] for i in twice) for o in self.options[b]]
        matrix = np.where(sent, 0.0, matrix)
        return Edge(a, b, self._gathered_once(source, node, index, matrix))

    def _gathered_once(self, source: str, node: Node, index: int, cost: Matrix) -> Matrix:
        """Forbids to gather a parameter behind its share, or behind a transpose of that, where its
        share can do so at no higher price: there the copy's memory is counted.
        """
        a, b = self.position[source], self.position[node.name]
        root = self.graph[source]
        while root.op in TRANSPOSES:
            root = self.graph[self._source(root.inputs[0])]
        has_gradient = self.given.lies is not None and root.requires_grad
        if has_gradient and self.options[self.position[root.name]][0].storage is not None:
            # Where a gradient is reduced is said; so it is not reduced behind the share.
            given = [set(option.results[0].varying) for option in self.options[a]]
            asked = [set(option.operands[index].varying) for option in self.options[b]]
            aside = np.array([[not more <= less for more in asked] for less in given])
            cost = np.where(aside, FORBIDDEN, cost)
        stored = [option.stored for option in self.options[self.position[root.name]]]
        if not self.limited or stored[0] is None or len(self.graph.users[source]) > 1:
            return cost
        rows = [option.results[0].dims for option in self.options[a]]
        columns = [option.operands[index].dims for option in self.options[b]]
        alike = np.array([[row == column for column in columns] for row in rows])
        total, group = cost, np.zeros(len(rows), dtype=np.int64)
        if root.name == source:
            total = cost + np.array(self.choices[a].cost)[:, None]
            # Of several that hold as much one stands for all.
            held = [layout.local_bytes(root.type, self.mesh) for layout in stored if layout]
            group = np.unique(held, return_inverse=True)[1]
        least = np.full((group.max() + 1, len(columns)), np.inf)
        np.minimum.at(least, group, np.where(alike, total, np.inf))
        return np.where(~alike & (least[group] <= total * (1 + 1e-9)), FORBIDDEN, cost)

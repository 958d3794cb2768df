"""Builds a Problem from a graph, its strategies and prices.

One problem node stands for one node of the folded graph, priced forwards and backwards and times
the number of blocks it represents. A parameter and its share are one problem node, "stored =>
used": its cost is the resharding between the two (data parallelism's all_reduce, ZeRO-3's
all_gather and reduce_scatter), and its memory is exact. Edges are reshardings. Time points are the
moments of a step at which memory can peak; `lifetimes` says which tensors are alive at each.
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
from autopar.intra_op.memory.allocations import Rows, pieces_of
from autopar.intra_op.node_choices import Option, accumulating, fixed_cache, storages
from autopar.intra_op.pins.layout_pins import Pins
from autopar.intra_op.price_cache import Prices, Side, Undominated, split_alike
from autopar.intra_op.problem import FORBIDDEN, Choices, Edge, Matrix
from autopar.intra_op.rule import OpRule
from autopar.intra_op.storage_choices import (
    StoredCost,
    StoredTraffic,
    away_of,
    stored_traffic,
    undominated,
)
from autopar.ir.fusion.async_tensor_parallel import OverlappableLinears
from autopar.ir.graph import EXTEND, WRITE, Graph, Node
from autopar.ir.offload import offloaded_runs
from autopar.ir.recompute import repetitions, selective_runs
from autopar.ir.tensor import Layout
from autopar.lower.parameter_keys import leaf_key
from autopar.stage_plan import StagePlan

TRANSPOSES = ("aten.transpose.int", "aten.permute", "aten.t")


class Builder:
    """Collects the nodes and edges of one Problem, on behalf of `build`.

    Args:
        graph: normalised, annotated, with its repeats.
        prices: on its mesh.
        table: rules by operator.
        pins: layouts that are fixed.
        given: how the model is trained.
        limited: whether memory is limited.
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
        self.choices: list[Choices] = []
        self.options: list[tuple[Option, ...]] = []
        self.names, self.replicated = list[str](), list[str]()
        self.position: dict[str, int] = {}
        self.exchanged: dict[str, tuple[float, ...]] = {}
        self.forward: dict[str, tuple[float, ...]] = {}
        self.backward: dict[str, tuple[float, ...]] = {}
        self.synchronised: dict[str, tuple[float, ...]] = {}
        self.fetched: dict[str, tuple[float, ...]] = {}
        self.refetched: dict[str, tuple[float, ...]] = {}
        self.once: dict[str, tuple[tuple[float, float], ...]] = {}
        self.ahead = 0.0, 0.0  # least seconds of the operators added so far, in each direction
        self.accelerator = self.mesh.device.lower() != "cpu"
        self.alive = prices.lifetimes(graph, self.accelerator, given.recompute, given.offload)
        self.slowdown, self.waits = given.slowdown, given.slowdown >= TAKE_TURNS
        away = given.offload.optimizer
        self.fused_update = given.fused_update and self.accelerator and not away
        self.away = away_of(graph, self.chip, given.bucket, self.waits) if away else None
        runs = offloaded_runs(graph, given.offload, given.recompute)
        self.stows = {  # node -> number of its offloaded blocks
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
            OverlappableLinears(graph, selective_runs(graph, given.recompute)),
            near(self.mesh, self.chip) if given.overlapped else (),
            prices,
            self.resharder,
            table,
            given.slowdown,
            lambda name: self.options[self.position[name]],
        )
        self.left_by: dict[str, list[str]] = {}  # share -> values that leave a run in its layout
        for value, share in graph.held_as.items():
            self.left_by.setdefault(share, []).append(value)

    def add(self, node: Node) -> None:
        """Adds one operator, input or buffer."""
        named = self.pins.names_any(node)
        every, signature, *paid = self.prices.operator(
            self.graph, node, self.table, self.slowdown, named
        )
        if signature is None and not node.is_leaf:
            if self.given.unknown_ops == "error":
                raise UnknownOperatorError(
                    f"{node.op} has no sharding rule",
                    where=str(node.source),
                    todo='add a rule, or pass unknown_ops="replicate" to run it whole',
                )
            self.replicated.append(node.name)
        count = self.graph.multiplicity[node.name]
        forward, backward = map(min, zip(*paid[0], strict=True))
        self.ahead = self.ahead[0] + count * forward, self.ahead[1] + count * backward
        options = self.pins.keep(node, fixed_cache(node, every, self.given.stored))
        if len(options) < len(every):
            left = set(options)
            places = [place for place, option in enumerate(every) if option in left]
            paid = [tuple(each[place] for place in places) for each in paid]
        kernels, sent = paid
        again = self.again.get(node.name, 0)
        asked = tuple((count + again) * forward + count * backward for forward, backward in sent)
        if any(asked):
            self.exchanged[node.name] = asked
        behind = tuple(
            count * seconds + self._sum_seconds(node, option)
            for option, (_, seconds) in zip(options, kernels, strict=True)
        )
        if any(behind):
            self.backward[node.name] = behind
        if any(forward for forward, _ in kernels):
            self.forward[node.name] = tuple(count * forward for forward, _ in kernels)
        rows = self._memory(node, options)
        copied = self.stowed.get(node.name, (0.0,) * len(options))
        cost = tuple(
            (count + again) * forward + after + self._loss_seconds(node, option) + inside + 2 * copy
            for option, (forward, _), after, inside, copy in zip(
                options, kernels, behind, asked, copied, strict=True
            )
        )
        self._append(node.name, options, cost, rows)

    def add_parameter(self, node: Node, share: Node) -> None:
        """Adds a parameter and its share as one problem node."""
        options, whole = self._stored(node, share)
        cost = self._within_kernels(share, whole)
        count, again = self.graph.multiplicity[node.name], self.again.get(share.name, 0)
        rows: Rows = {(role, -1): nbytes.tolist() for role, nbytes in cost.nbytes.items()}
        for found, each in (
            (self.synchronised, cost.synchronised),
            (self.fetched, cost.fetched),
            (self.refetched, cost.refetched),
            (self.backward, cost.added),
            (self.host, cost.host),
        ):
            if each.any():
                found[share.name] = tuple((count * each).tolist())
        once = ((count * each).tolist() for each in (cost.reduced, cost.gathered))
        self.once[share.name] = tuple(zip(*once, strict=True))
        # A recomputed block does not keep the gathered copy.
        sums = count * cost.held(node.requires_grad) - again * cost.nbytes["gathered"]
        self.sums[share.name] = tuple(sums.tolist())
        self._append(share.name, options, tuple((count * cost.seconds).tolist()), rows)
        self.position[node.name] = self.position[share.name]

    def _stored(self, node: Node, share: Node) -> Undominated:
        """Returns a parameter's remaining choices, cached for equal parameters without pins.

        Problems that differ in other ways have the same: of other layers, or blocks recomputed.
        """
        rule = self.given.update.rule(node.target, node.type.shape)
        named = self.pins.names_any(share)
        readers = map(self.graph.__getitem__, self.graph.users[share.name])
        complete = named or any(map(self.pins.names_any, readers))
        usual = accumulating if self.given.microbatches > 1 else storages
        every_allowed = self.given.allowed_storages or usual
        allowed, given = self.given.stored.get(leaf_key(node), every_allowed), self.given
        every, traffic = self.prices.stored(
            node.type, node.requires_grad, allowed, given.bucket, given.precision, rule, complete
        )
        left = self.pins.keep(share, every)
        pinned = named or allowed is not every_allowed
        paid = given.microbatches, self.waits, self._again(share), self.away, self.fused_update
        alike = (
            node.type, node.requires_grad, rule, complete, allowed, given.bucket, given.precision,
            given.execution, *paid,
        )  # fmt: skip
        if alike in self.prices.undominated and not pinned:
            return self.prices.undominated[alike]
        cost = self._stored_cost(share, traffic)
        if len(left) < len(every):
            among = set(left)
            cost = cost.of([at for at, option in enumerate(every) if option in among])
        remaining = undominated(left, cost)
        if not pinned:
            self.prices.undominated[alike] = remaining
        return remaining

    def _stored_cost(self, share: Node, traffic: StoredTraffic) -> StoredCost:
        given, again = self.given, self._again(share)
        return traffic.cost(
            given.microbatches, self.waits, again, self.away, self.fused_update, given.execution
        )

    def _within_kernels(self, share: Node, cost: StoredCost) -> StoredCost:
        """Returns the costs of a parameter whose readers have not been added yet.

        Gathering it, and reducing its gradient, overlap with kernels of operators ahead of it. An
        embedding has none; in a run of blocks, all blocks but the first have enough.
        """
        in_run, count = share.name in self.stows, self.given.microbatches
        return cost if in_run else cost.within(*self.ahead, count)

    def _again(self, share: Node) -> float:
        """Returns the fraction of a parameter's blocks that are recomputed."""
        return self.again.get(share.name, 0) / self.graph.multiplicity[share.name]

    def _append(
        self, name: str, options: tuple[Option, ...], cost: tuple[float, ...], rows: Rows
    ) -> None:
        self.position[name] = len(self.choices)
        labels = tuple(option.label for option in options)
        pieces = pieces_of(self.alive.copies.get(name, {}), rows)
        pieces = pieces or [((0, 0), (0.0,) * len(options))]
        (live, nbytes), more = pieces[0], tuple(pieces[1:])
        self.choices.append(Choices(name, labels, cost, nbytes, live, more))
        self.options.append(options)
        self.names.append(name)

    def overlapped_seconds(self, share: Node, plan: StagePlan) -> tuple[float, float, float]:
        """Returns the seconds of a parameter's collectives that overlap with each direction.

        The third number is the time of adding its gradient to those of earlier microbatches. Only
        operators ahead of the parameter have been added.
        """
        leaf = self.graph[share.inputs[0]]
        storage = plan.storage(self.graph.template[leaf.name], share.name)
        traffic = stored_traffic(
            leaf.type, leaf.requires_grad, storage, self.mesh, self.model,
            self.given.update.rule(leaf.target, leaf.type.shape), self.given.bucket,
            self.given.precision,
        )  # fmt: skip
        cost = self._within_kernels(share, self._stored_cost(share, traffic))
        count, (_, behind, ahead) = self.graph.multiplicity[share.name], cost.parts
        return count * ahead, count * behind, count * cost.added

    def _sum_seconds(self, share: Node, option: Option) -> float:
        """Returns the seconds of adding the gradients of a value that leaves a run of blocks."""
        seconds = 0.0
        for value in self.left_by.get(share.name, ()):
            given = option.results[0].local_bytes(share.type, self.mesh)
            users = set(self.graph.users[value]) - self.last_blocks
            readers = sum(self.graph[user].requires_grad for user in users)
            if self.graph[value].requires_grad and readers > 1:
                work = Work(f"{share.op} backward", share.type.numel, 3 * given, share.type.dtype)
                seconds += (readers - 1) * self.model.compute(work)
        return seconds

    def _loss_seconds(self, node: Node, option: Option) -> float:
        """Returns the seconds of making the loss whole on every device, as all ranks report it."""
        if node.name != self.graph.loss or self.given.late_loss:
            return 0.0
        whole = Layout.replicated(len(node.type.shape))
        return self.resharder.cost(node.type, option.results[0], whole, node.requires_grad)

    def _memory(self, node: Node, options: tuple[Option, ...]) -> Rows:
        """Returns the bytes of each tensor that an operator allocates, for each choice."""
        rows = self.prices.allocated(self.graph, node, options, self._options_of, self.accelerator)
        if not node.is_leaf:
            self._sums(node, rows)
        return rows

    def _options_of(self, value: str) -> tuple[Option, ...]:
        """Returns the choices of the node that produces a value; empty if it is not yet added."""
        at = self.position.get(self.graph.template[value])
        return () if at is None else self.options[at]

    def _sums(self, node: Node, found: Rows) -> None:
        """Records the bytes that all blocks of an operator save, on the device and offloaded."""
        stows = self.stows.get(node.name, 0)
        count = self.graph.multiplicity[node.name] - self.again.get(node.name, 0) - stows
        extra = np.array(found["extra", -1], dtype=np.float64)
        saved, stowed = count * extra, stows * extra
        for place in kept(node, self.accelerator):
            copies = np.array(found["kept", place])
            saved += self.alive.payers.get((node.name, place), 0) * copies
            stowed += self.alive.stowed.get((node.name, place), 0) * copies
        if stowed.any():
            self.host[node.name] = tuple(stowed.tolist())
            self.stowed[node.name] = tuple(host_seconds(self.chip, n, stows) for n in stowed)
        if node.name in self.alive.arguments:
            saved += self.alive.arguments[node.name] * np.array(found["value", 0])
        saved += self.alive.products.get(node.name, 0) * np.array(found["value", -1])
        self.sums[node.name] = tuple(saved.tolist())

    def edges(self) -> tuple[Edge, ...]:
        """Returns one resharding matrix per use of a value.

        The function of a block takes a carried value in the layout that its share reads, and every
        block returns it in that layout. The value is thus resharded once on entry and once at the
        end of each block; readers after the last block receive it in that layout.
        """
        leaving = {
            (entry, name): (leaves, repeat.count)
            for repeat in self.graph.repeats
            for entry, leaves in repeat.carried
            for name in repeat.iterations[0]
        }
        edges: list[Edge] = []
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
                    edges.append(
                        self.hidden.less(len(edges), edge, self.graph[source], node, index, times)
                    )
                    continue
                edges.append(self._edge(source, 1, node, index))
                edges.append(self._edge(*leaving[value, node.name], node, index))
        return tuple(edges)

    def _source(self, value: str) -> str:
        """Returns the node of the folded graph whose layout a value has."""
        return self.graph.held_as.get(value, self.graph.template[value])

    def _edge(self, source: str, count: int, node: Node, index: int, again: int = 0) -> Edge:
        """Returns the edge for `count` reshardings from `source` to an operand of `node`.

        `again` is the number of further runs of the forward alone.
        """
        a, b = self.position[source], self.position[node.name]
        tensor, grad = self.graph[source].type, self.graph[source].requires_grad
        sides = Side(self.options[a]), Side(self.options[b], index)
        # A copy in another layout would be written instead.
        if node.op in (EXTEND, WRITE) and index == 0:
            return Edge(a, b, np.where(split_alike(*sides), 0.0, FORBIDDEN))
        matrix = count * self.prices.reshardings(self.resharder, tensor, *sides, grad)
        if again:
            matrix += again * self.prices.reshardings(self.resharder, tensor, *sides, False)
        # If an operator reads a value twice in one layout, it is sent once.
        twice = [i for i in range(index) if node.inputs[i] == node.inputs[index]]
        if twice:
            sent = [any(o.operands[i] == o.operands[index] for i in twice) for o in self.options[b]]
            matrix[:, sent] = 0.0
        return Edge(a, b, self._gathered_once(source, node, sides, matrix))

    def _gathered_once(
        self, source: str, node: Node, sides: tuple[Side, Side], cost: Matrix
    ) -> Matrix:
        """Forbids gathering a parameter after its share, or after a transpose of the share.

        The share can do so at no higher price, and there the memory of the copy is counted.
        """
        root = self.graph[source]
        while root.op in TRANSPOSES:
            root = self.graph[self._source(root.inputs[0])]
        has_gradient = self.given.allowed_storages is not None and root.requires_grad
        if has_gradient and self.options[self.position[root.name]][0].storage is not None:
            # The plan states where a gradient is reduced, so it is not reduced after the share.
            given, asked = ([set(one.varying) for one in side.layouts] for side in sides)
            aside = np.array([[not more <= less for more in asked] for less in given])
            cost = np.where(aside, FORBIDDEN, cost)
        stored = [option.stored for option in self.options[self.position[root.name]]]
        if not self.limited or stored[0] is None or len(self.graph.users[source]) > 1:
            return cost
        alike = split_alike(*sides)
        total, group = cost, np.zeros(len(alike), dtype=np.int64)
        if root.name == source:
            total = cost + np.array(self.choices[self.position[source]].cost)[:, None]
            # Among layouts with equal bytes, only one is considered.
            nbytes = [layout.local_bytes(root.type, self.mesh) for layout in stored if layout]
            group = np.unique(nbytes, return_inverse=True)[1]
        least = np.full((group.max() + 1, alike.shape[1]), np.inf)
        np.minimum.at(least, group, np.where(alike, total, np.inf))
        return np.where(~alike & (least[group] <= total * (1 + 1e-9)), FORBIDDEN, cost)

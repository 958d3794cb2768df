"""Prices on a mesh, cached from one problem to the next.

Problems of stages, and of one model with different numbers of recomputed blocks, need the same
prices: the cheapest reshardings between layouts, the collectives of parameters, and the choices of
each operator with their kernels and memory. Operators that differ only in names are priced once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.cost.model import Checked, CostModel
from autopar.cost.overlap import TAKE_TURNS, hidden_in_turns
from autopar.intra_op.axis_runs import most_runs
from autopar.intra_op.memory.allocations import OperandFacts, Rows, amounts, operand_facts
from autopar.intra_op.memory.lifetimes import Lifetimes, lifetimes
from autopar.intra_op.node_choices import (
    AllowedStorages,
    Option,
    node_options,
    operand_types,
    parameter_options,
    stored_option,
)
from autopar.intra_op.rule import OpRule, Signature
from autopar.intra_op.storage_choices import StoredCost, StoredTraffic, stored_traffic
from autopar.intra_op.work.kernel_work import node_work
from autopar.ir.crossing import by_bytes, gathered
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.offload import Offload
from autopar.ir.precision import Precision
from autopar.ir.recompute import Recompute
from autopar.ir.resharding import LayoutGraphs, Resharder, Reshardings
from autopar.ir.stage_graphs import is_sent
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout, TensorType
from autopar.ir.update import Rule
from autopar.operators.exchange import exchanged
from autopar.operators.form import Part
from autopar.operators.forms import form_named

T = TypeVar("T")
Seconds = tuple[float, float]  # forward and backward
Operator = tuple[tuple[Option, ...], Signature | None, tuple[Seconds, ...], tuple[Seconds, ...]]
Stored = tuple[tuple[Option, ...], StoredTraffic]
Undominated = tuple[tuple[Option, ...], StoredCost]


class Side(NamedTuple):
    """One end of an edge: the choices of its node and, at the reading end, the operand's place."""

    options: tuple[Option, ...]
    operand: int | None = None

    @property
    def layouts(self) -> list[Layout]:
        """Layout of the value under each choice."""
        at = self.operand
        return [one.results[0] if at is None else one.operands[at] for one in self.options]

    @property
    def key(self) -> tuple[int, int | None]:
        """A key of these choices while they exist, which costs less than all their layouts."""
        return id(self.options), self.operand


def split_alike(rows: Side, columns: Side) -> NDArray[np.bool_]:
    """Returns for each pair of choices whether their layouts split the same dimensions."""
    number: dict[object, int] = {}
    given, asked = (
        np.array([number.setdefault(layout.dims, len(number)) for layout in side.layouts])
        for side in (rows, columns)
    )
    alike: NDArray[np.bool_] = given[:, None] == asked
    return alike


class Prices:
    """Cached prices on one mesh.

    It is a cost model itself, whose `collective` remembers the cheapest reshardings.

    Args:
        mesh: the devices.
        model: prices, in seconds.
        complete: whether to return all choices also on many axes, see `axis_runs.py`.
        graphs: layouts and steps to share with prices on other meshes.

    Attributes:
        undominated: choices of parameters that are worth their memory, with their prices; the
            builder of problems keeps them here by all that they depend on.
    """

    def __init__(
        self,
        mesh: Mesh,
        model: CostModel,
        complete: bool = False,
        graphs: LayoutGraphs | None = None,
    ) -> None:
        graphs = graphs or LayoutGraphs()
        self.mesh, self.model = mesh, Checked(model)
        self.compute = self.model.compute
        self.collective = Reshardings(mesh, self.model.collective, graphs)
        self._by_bytes = by_bytes(mesh, graphs)
        self._runs = None if complete else most_runs(mesh)
        self._operators: dict[Hashable, Operator] = {}
        self._kinds: dict[Hashable, int] = {}
        self._numbered: tuple[Graph, dict[str, int]] | None = None  # by name, of the last graph
        self._choices: dict[int, int] = {}
        self._allocated: dict[tuple[int, OperandFacts, bool, int], Rows] = {}
        self._stored: dict[Hashable, Stored] = {}
        self.undominated: dict[Hashable, Undominated] = {}
        # By the keys of sides: the choices, their distinct layouts, and which of these each has.
        self._sides: dict[Hashable, tuple[Side, tuple[Layout, ...], list[int]]] = {}
        self._resharded: dict[Hashable, NDArray[np.float64]] = {}
        self._alive: tuple[Graph, object, Lifetimes] | None = None

    def resharder(self, precision: Precision) -> Resharder:
        """Returns the cached resharder for a precision."""
        return self.collective.resharder(precision)

    def lifetimes(
        self, graph: Graph, accelerator: bool, recompute: Mapping[str, Recompute], offload: Offload
    ) -> Lifetimes:
        """Returns `lifetimes`, kept until another graph is asked for: pins do not change them."""
        asked = accelerator, dict(recompute), offload
        if self._alive is None or self._alive[0] is not graph or self._alive[1] != asked:
            self._alive = graph, asked, lifetimes(graph, *asked)
        return self._alive[2]

    def reshardings(
        self, resharder: Resharder, tensor: TensorType, rows: Side, columns: Side, grad: bool
    ) -> NDArray[np.float64]:
        """Returns the seconds from each layout of one side to each of the other, as a new array.

        Problems have most of their edges in common: `operator` and `undominated` return the same
        choices again, so that their prices are known by them.
        """
        (one, sources, here), (other, targets, there) = map(self._side, (rows, columns))
        key = resharder, tensor, one.key, other.key, grad
        if key not in self._resharded:
            self._resharded[key] = resharder.costs(tensor, sources, targets, grad)
        return self._resharded[key][np.ix_(here, there)]

    def _side(self, side: Side) -> tuple[Side, tuple[Layout, ...], list[int]]:
        if side.key not in self._sides:
            place: dict[Layout, int] = {}
            where = [place.setdefault(layout, len(place)) for layout in side.layouts]
            # The side is kept, so that the identity in its key belongs to no other choices.
            self._sides[side.key] = side, tuple(place), where
        return self._sides[side.key]

    def stored(
        self,
        tensor: TensorType,
        trained: bool,
        allowed_storages: AllowedStorages | Storage | None,
        bucket: int,
        precision: Precision,
        rule: Rule,
        complete: bool = False,
    ) -> Stored:
        """Returns every choice of a parameter, with its traffic and memory.

        Args:
            tensor: its type.
            trained: whether it has a gradient.
            allowed_storages: its possible storages, or the only one.
            bucket: bytes of gradients or parameters that are sent together.
            precision: dtypes in which it is updated and its gradient sent.
            rule: how it is updated.
            complete: whether to return all choices also on many axes, see `axis_runs.py`.

        Raises:
            CostError: a price that is negative or not finite.
        """
        runs = None if complete else self._runs
        key = (tensor, trained, allowed_storages, bucket, precision, rule, runs)
        if key not in self._stored:
            options = (
                (stored_option(allowed_storages, tensor),)
                if isinstance(allowed_storages, Storage)
                else parameter_options(tensor, self.mesh, trained, allowed_storages, runs)
            )
            traffic = [
                stored_traffic(
                    tensor, trained, option.storage, self.mesh, self.model, rule, bucket, precision
                )
                for option in options
                if option.storage is not None
            ]
            self._stored[key] = options, StoredTraffic.of(traffic)
        return self._stored[key]

    def operator(
        self,
        graph: Graph,
        node: Node,
        table: dict[str, OpRule],
        slowdown: float = TAKE_TURNS,
        complete: bool = False,
    ) -> Operator:
        """Returns the choices of a node and their prices.

        Args:
            graph, node, table: the node, its graph and the rules.
            slowdown: slowdown of kernels and collectives that run side by side.
            complete: whether to return all choices also on many axes, see `axis_runs.py`.

        Returns:
            Its choices; its signature if it has a rule; and for each choice the forward and
            backward seconds of its kernels and of its own communication, less what a form hides
            behind its kernels.

        Raises:
            CostError: a price that is negative or not finite.
        """
        runs = None if complete else self._runs
        key = self._kind(graph, node), slowdown, runs
        if key not in self._operators:
            options, signature = node_options(graph, node, self.mesh, table, runs)
            kernels, sent = self._seconds(graph, node, options, signature, slowdown)
            self._operators[key] = options, signature, kernels, sent
            self._choices[key[0]] = max(len(options), self._choices.get(key[0], 0))
        return self._operators[key]

    def allocated(
        self,
        graph: Graph,
        node: Node,
        options: tuple[Option, ...],
        options_of: Callable[[str], tuple[Option, ...]],
        accelerator: bool,
    ) -> Rows:
        """Returns the bytes of each tensor that a node allocates, by choice (see `amounts`).

        Callers must not modify the result.
        """
        facts, number = operand_facts(graph, node, options_of), self._kind(graph, node)
        known = self._choices.get(number)
        if known is None or len(options) < known:
            return amounts(graph, node, options, facts, self.mesh, accelerator)
        key = number, facts, accelerator, len(options)
        if key not in self._allocated:
            self._allocated[key] = amounts(graph, node, options, facts, self.mesh, accelerator)
        return self._allocated[key]

    def _kind(self, graph: Graph, node: Node) -> int:
        """Returns a number that nodes share if they and their operands differ only in names."""
        if self._numbered is None or self._numbered[0] is not graph:
            self._numbered = graph, {}
        numbers = self._numbered[1]
        if node.name not in numbers:
            numbers[node.name] = self._kinds.setdefault(kind(graph, node), len(self._kinds))
        return numbers[node.name]

    def _seconds(
        self,
        graph: Graph,
        node: Node,
        options: tuple[Option, ...],
        signature: Signature | None,
        slowdown: float,
    ) -> tuple[tuple[Seconds, ...], tuple[Seconds, ...]]:
        """Returns the seconds of kernels and of communication for each choice.

        Choices that split the same dimensions differ only in sums that are still to be computed,
        for which the operator does no work; unless its value is sent between stages.
        """
        crosses = node.op == "received" or is_sent(graph, node)
        known: dict[Hashable, tuple[Seconds, Seconds]] = {}
        rows = []
        for option in options:
            alike: Hashable = option if crosses else option.split
            if alike not in known:
                kernels = self._kernels(graph, node, option, signature)
                known[alike] = kernels, self._exchange(graph, node, option, kernels, slowdown)
            rows.append(known[alike])
        return tuple(kernels for kernels, _ in rows), tuple(sent for _, sent in rows)

    def _kernels(
        self, graph: Graph, node: Node, option: Option, signature: Signature | None
    ) -> Seconds:
        layouts = option.operands, option.results
        work = node_work(graph, node, *layouts, signature, self.mesh, option.form)
        forward, backward = (_total(self.model.compute, w) for w in (work.forward, work.backward))
        return forward, backward

    def _exchange(
        self, graph: Graph, node: Node, option: Option, kernels: Seconds, slowdown: float
    ) -> Seconds:
        types = operand_types(graph, node)
        asked = exchanged(node, types, option.operands, self.mesh, option.form)
        arriving = gathered(graph, node, option.results[0], self.mesh, self._by_bytes)
        asked = asked[0] + arriving[0], asked[1] + arriving[1]
        forward, backward = (_total(self.model.collective, calls) for calls in asked)
        if not option.form:
            return forward, backward
        part, form = Part(node, types, option.operands, self.mesh), form_named(node.op, option.form)
        turns, calls = form.turns(part), [
            _total(self.model.collective, calls[alone:])
            for calls, alone in zip(asked, form.alone(part), strict=True)
        ]  # fmt: skip
        return (
            forward - hidden_in_turns(kernels[0], calls[0], turns, slowdown),
            backward - hidden_in_turns(kernels[1], calls[1], turns, slowdown),
        )


def _total(price: Callable[[T], float], items: Sequence[T]) -> float:
    """Returns the sum of prices; a ring repeats one call for every device, which is priced once."""
    known = {id(item): item for item in items}
    prices = {place: price(item) for place, item in known.items()}
    return sum(prices[id(item)] for item in items)


def kind(graph: Graph, node: Node) -> Hashable:
    """Returns a key that nodes share if they and their operands differ only in names."""
    place = {name: at for at, name in enumerate(dict.fromkeys(node.inputs))}
    return (
        node.op,
        node.form,
        node.types,
        node.requires_grad,
        tuple(map(place.get, node.inputs)),
        None if node.alias is None else place.get(node.alias),
        tuple(place.get(name) for name in node.saved),
        node.saved_types,
        tuple((graph[name].types, graph[name].requires_grad) for name in node.inputs),
        sum(graph[user].requires_grad for user in graph.users[node.name]),
        node.name in graph.aside,
        is_sent(graph, node),
        node.part,
    )

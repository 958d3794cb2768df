"""Parts of a loss: how the losses of microbatches relate to the loss of the whole batch.

The analysis goes from the loss back to the samples, through operators in which the loss is linear.
A value adds up over microbatches if it is a sum over samples, or such a sum divided by a count. A
mean over samples does not add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from autopar.errors import OptionError
from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.rewrite import argument
from autopar.ir.stage_graphs import free_values
from autopar.passes.loss.batch_factors import BatchFactors
from autopar.passes.loss.means import LABELLED, MEAN, SUM, reduction_of

_SUMS = ("sum", "count_nonzero")
_SAME = (
    "clamp", "clamp_min", "maximum", "max", "add", "sub", "_to_copy", "to", "reshape", "view",
    "squeeze", "unsqueeze", "expand", "clone", "share", "shard", "detach", "abs",
)  # fmt: skip
_LINEAR = (
    "add", "sub", "neg", "mul", "div", "sum", "reshape", "view", "squeeze", "unsqueeze", "expand",
    "_to_copy", "to", "clone", "share", "shard", "where", "masked_fill", "stack", "cat", "select",
    "slice", "transpose", "permute", "getitem",
)  # fmt: skip


class _Kind(Enum):
    """Relation of the values of microbatches to that of the whole batch.

    It is their mean, or their sum; a sum that counts of the whole batch have divided is no longer
    divided by another number of samples.
    """

    MEAN = "mean"
    SUM = "sum"
    COUNTED = "counted"


@dataclass(frozen=True)
class Parts:
    """Tells values that add up over microbatches from means, which stay the same.

    Attributes:
        graph: graph of one microbatch.
        search: returns the operands to follow, and errors.
        divided: divisions by counts; their results add up.
        factors: recognises numbers that depend on the size of the batch.
    """

    graph: Graph
    search: Divisions
    divided: Mapping[str, str]
    factors: BatchFactors
    _known: dict[str, _Kind] = field(default_factory=dict)
    _times: dict[str, list[str]] = field(default_factory=dict)

    @cached_property
    def operands(self) -> Mapping[str, Sequence[str]]:
        """The operands that add up over microbatches, of operators that have other operands too."""
        self.adds_up(self.graph.loss or "")
        return self._times

    def divided_in(self, graph: Graph) -> Mapping[str, str]:
        """Returns `divided` for the same model's graph of one sample, as `operands_in` does."""
        for name, count in self.divided.items():
            if name not in graph or count not in graph[name].inputs:
                raise self._other_operators(self.graph[name])
        return self.divided

    def _other_operators(self, node: Node) -> OptionError:
        return self.search.refused(node, "one sample is computed by other operators")

    def operands_in(self, graph: Graph) -> Mapping[str, Sequence[str]]:
        """Returns `operands` by the names of the same model's graph of one sample.

        It lacks factors that are one there.

        Raises:
            OptionError: it has other operators.
        """
        if graph is self.graph:
            return self.operands
        found: dict[str, list[str]] = {}
        for reader, names in self.operands.items():
            own = graph[reader].inputs if reader in graph else ()
            found[reader] = [self._kept(name, own, self.graph[reader]) for name in names]
        return found

    def _kept(self, name: str, known: Sequence[str], reader: Node) -> str:
        """Returns the first known value among a value and those that it multiplies by a factor."""
        while name not in known:
            node = self.graph[name]
            if _base(node) not in ("mul", "div") or len(node.inputs) != 1:
                raise self._other_operators(reader)
            (name,) = node.inputs
        return name

    def adds_up(self, name: str) -> bool:
        """Returns whether the sum of a value over microbatches is that of the whole batch."""
        return self._kind(name) is not _Kind.MEAN

    def _kind(self, name: str) -> _Kind:
        if name not in self._known:
            self._known[name] = self._kind_of(self.graph[name])
        return self._known[name]

    def _kind_of(self, node: Node) -> _Kind:
        if node.name in self.divided:
            return _Kind.COUNTED
        moving = self.search.moving(node)
        product = _base(node) in ("mul", "div")
        if not moving or not is_linear(node) or (product and len(moving) != 1):
            return self._reduced(node)
        kinds = {name: self._kind(name) for name in moving}
        if len(kinds) == 1 and product:
            return self._multiplied(node, *kinds.values())
        adding = [name for name, kind in kinds.items() if kind is not _Kind.MEAN]
        offset = _base(node) in ("add", "sub", "stack", "cat") and node.type.shape == ()
        if len(adding) == len(kinds) and (not offset or len(moving) == len(node.inputs)):
            return _Kind.SUM if set(kinds.values()) == {_Kind.SUM} else _Kind.COUNTED
        if adding:
            self._times[node.name] = adding
        return _Kind.MEAN

    def _reduced(self, node: Node) -> _Kind:
        """Returns the kind of the result of a non-linear operator of samples."""
        if node.type.shape != ():
            return _Kind.SUM  # of each sample
        reduction = reduction_of(node)
        if _base(node) == "mean" or reduction == MEAN:
            return _Kind.MEAN
        if _base(node) in ("dot", "vdot") or reduction == SUM:
            return _Kind.SUM
        raise self.search.refused(node, f"it is the {_base(node)} of all samples")

    def _multiplied(self, node: Node, kind: _Kind) -> _Kind:
        """Returns the kind of a value's product with a factor that may depend on the batch size."""
        if kind is not _Kind.SUM and not self.factors.may_depend(node):
            return kind
        power = self.factors.power(node)
        changed = {(_Kind.SUM, -1): _Kind.MEAN, (_Kind.MEAN, 1): _Kind.SUM}
        if power is None or (power and (kind, power) not in changed):
            raise self.search.refused(node, "its factor depends on the batch in an unknown way")
        return changed[kind, power] if power else kind


@dataclass(frozen=True)
class Divisions:
    """Looks for the divisions by counts between the losses of samples and the loss.

    Attributes:
        graph: graph of one microbatch.
        microbatches: for errors.
    """

    graph: Graph
    microbatches: int

    def divided(self) -> dict[str, str]:
        """Returns the operators to change, and for each the value that is a count or its inverse.

        Only operators are followed in which the loss is linear.
        """
        graph, found = self.graph, dict[str, str]()
        stack, seen = [(graph.loss or "", False)], set[tuple[str, bool]]()
        while stack:
            place = name, counted = stack.pop()
            if place in seen:
                continue
            seen.add(place)
            node = graph[name]
            if node.op in LABELLED and argument(node, 3, "reduction", MEAN) == MEAN:
                raise self.refused(node, "its mean is weighted by the classes of its labels")
            moving = self.moving(node)
            linear = is_linear(node)
            product = linear and _base(node) in ("mul", "div")
            if not linear or (product and len(moving) != 1):
                if any(graph[name].type.shape == () for name in moving):
                    raise self.refused(node, f"it is no mean, but {_base(node)} of one")
                continue
            factors = [name for name in node.inputs if name not in moving] if product else []
            power = self._power(node, factors[0]) if factors else 0
            if power:
                if counted or power != -1:
                    raise self.refused(node, "it is divided by counts more than once")
                found[name], counted = factors[0], True
            stack += [(name, counted) for name in moving]
        return found

    def moving(self, node: Node) -> list[str]:
        """Returns the operands with a gradient that depend on the batch."""
        graph, names = self.graph, dict.fromkeys(node.inputs)
        return [name for name in names if graph[name].requires_grad and is_batched(graph, name)]

    def _power(self, node: Node, factor: str) -> int:
        """Returns the power of a count by which an operator multiplies its operand."""
        graph = self.graph
        if not is_batched(graph, factor):
            return 0
        kind = graph[factor].type
        if kind.numel != 1 or len(kind.shape) > len(node.type.shape):
            if sums_before(graph, factor):
                raise self.refused(node, "it is weighted by a value that is no count alone")
            return 0  # of each sample
        degree = self._degree(node, factor)
        return -degree if _base(node) == "div" else degree

    def _degree(self, node: Node, name: str) -> int:
        """Returns the power of the number of microbatches with which a scalar grows.

        Args:
            node: the operator that reads it, for errors.
            name: the scalar.
        """
        own, graph = self.graph[name], self.graph
        if not is_batched(graph, name):
            return 0
        if is_sum(graph, own):
            leaves = [graph[leaf] for leaf in before_of(graph, name) if graph[leaf].is_leaf]
            other = next((leaf for leaf in leaves if leaf.op != "input"), None)
            if other is not None or name not in free_values(graph):
                reads = "random numbers" if other is None else f"{other.op} {other.target!r}"
                raise self.refused(
                    node, f"it is divided by a sum over the batch that reads {reads}"
                )
            return 1
        base = _base(own)
        whole = (name for name in own.inputs if is_batched(graph, name))
        if own.is_leaf or any(graph[name].type.numel != 1 for name in whole):
            raise self.refused(node, f"it is divided by the batch's {base}, which does not add up")
        degrees = [self._degree(node, name) for name in own.inputs]
        if base in _SAME:
            return max(degrees)
        if base == "reciprocal":
            return -degrees[0]
        if base == "mul":
            return sum(degrees)
        if base == "div":
            first = isinstance(own.args[0], Ref)
            before = degrees[0] if first else 0
            return before - sum(degrees[first:])
        raise self.refused(node, f"it is divided by the batch's {base}, which does not add up")

    def refused(self, node: Node, why: str) -> OptionError:
        """Returns the error of a loss that does not add up, and why."""
        return OptionError(
            f"{self.microbatches} microbatches cannot have the loss of the whole batch",
            where=str(node.source),
            why=f"{why}, so the losses of microbatches do not add up to it",
            todo="divide by a sum of labels or of a mask; or pass whole_loss=False, to train on the"
            " mean of the microbatches' losses",
        )


def is_linear(node: Node) -> bool:
    """Returns whether an operator is linear in any one of its operands."""
    return _base(node) in _LINEAR


def _base(node: Node) -> str:
    """Returns the name of an operator without its space and overload."""
    return node.op.partition(".")[2].partition(".")[0] or node.op


def is_sum(graph: Graph, node: Node) -> bool:
    """Returns whether an operator without a gradient adds up a tensor of the batch."""
    if _base(node) not in _SUMS or node.requires_grad or node.type.numel != 1:
        return False
    return graph[node.inputs[0]].type.shape != () and is_batched(graph, node.name)


def before_of(graph: Graph, name: str) -> set[str]:
    """Returns a value and all that it depends on."""
    found, stack = set[str](), [name]
    while stack:
        one = stack.pop()
        if one not in found:
            found.add(one)
            stack += graph[one].inputs
    return found


def is_batched(graph: Graph, name: str) -> bool:
    """Returns whether a value depends on a tensor of the batch that microbatches cut."""
    before = (graph[one] for one in before_of(graph, name))
    return any(node.op == "input" and node.type.shape != () for node in before)


def sums_before(graph: Graph, name: str) -> bool:
    """Returns whether a value depends on a sum over the batch."""
    return any(is_sum(graph, graph[one]) for one in before_of(graph, name))

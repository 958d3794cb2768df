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
from autopar.passes.loss.batch_factors import BatchFactors, numbers
from autopar.passes.loss.means import LABELLED, MEAN, SUM, is_whole_mean, reduction_of
from autopar.passes.loss.mixed_samples import MixedSamples

_SUMS = ("sum", "count_nonzero")
_SAME = (
    "clamp", "clamp_min", "maximum", "max", "add", "sub", "_to_copy", "to", "reshape", "view",
    "squeeze", "unsqueeze", "expand", "clone", "share", "shard", "detach", "abs", "neg", "rsub",
)  # fmt: skip
_LINEAR = (
    "add", "sub", "rsub", "neg", "mul", "div", "sum", "reshape", "view", "squeeze", "unsqueeze",
    "expand", "_to_copy", "to", "clone", "share", "shard", "where", "masked_fill", "stack", "cat",
    "select", "slice", "transpose", "permute", "getitem",
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
        mixed: recognises values that are no longer of each sample.
    """

    graph: Graph
    search: Divisions
    divided: Mapping[str, str]
    factors: BatchFactors
    mixed: MixedSamples
    _known: dict[str, _Kind] = field(default_factory=dict)
    _times: dict[str, list[str]] = field(default_factory=dict)
    _sums: list[str] = field(default_factory=list)

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

    @cached_property
    def any_sums(self) -> bool:
        """Returns whether the loss has a term that adds up and that no number seen here divides."""
        kind = self._kind(self.graph.loss or "")
        return kind is _Kind.SUM or bool(self._sums)

    def _kind_of(self, node: Node) -> _Kind:
        moving = self.search.moving(node)
        if not moving or not self.search.follows(node, moving):
            return self._reduced(node, moving)
        kinds = {name: self._kind(name) for name in moving}
        if node.name in self.divided:
            return self._counted(node, *kinds.values())
        if _base(node) in ("mul", "div"):
            return self._multiplied(node, *kinds.values())
        adding = [name for name, kind in kinds.items() if kind is not _Kind.MEAN]
        offset = _base(node) in ("add", "sub", "rsub", "stack", "cat") and node.type.shape == ()
        offset = offset and (len(moving) < len(node.inputs) or bool(numbers(node)))
        if len(adding) == len(kinds) and not offset and len(set(kinds.values())) == 1:
            return kinds[moving[0]]
        self._sums.extend(name for name in adding if kinds[name] is _Kind.SUM)
        if len(adding) == len(kinds) and not offset:
            return _Kind.COUNTED
        if adding:
            self._times[node.name] = adding
        return _Kind.MEAN

    def _reduced(self, node: Node, moving: Sequence[str]) -> _Kind:
        """Returns the kind of the result of a non-linear operator of samples."""
        if moving and any(name in self.mixed for name in node.inputs):
            raise self.search.refused(node, f"{_base(node)} reads a value of all samples together")
        if node.type.shape != ():
            return _Kind.SUM  # of each sample
        reduction = reduction_of(node)
        if _base(node) == "mean" or reduction == MEAN:
            return _Kind.MEAN
        if _base(node) in ("dot", "vdot") or reduction == SUM:
            return _Kind.SUM
        raise self.search.refused(node, f"it is the {_base(node)} of all samples")

    def _counted(self, node: Node, kind: _Kind) -> _Kind:
        """Returns the kind of a value that a count divides, which may itself be a mean."""
        size = self._size(node, self.divided[node.name])
        power = -(kind is _Kind.MEAN) + (size if _base(node) == "mul" else -size)
        if power not in (0, -1):
            raise self.search.refused(node, "its factor depends on the batch in an unknown way")
        return _Kind.MEAN if power else _Kind.COUNTED

    def _size(self, node: Node, name: str) -> int:
        """Returns the power of the number of samples in the numbers of a count.

        Args:
            node: the operator that reads the count, for errors.
            name: a count, or a part of it.
        """
        own = self.graph[name]
        if is_sum(self.graph, own) or not is_batched(self.graph, name):
            return 0
        sizes = [self._size(node, one) for one in own.inputs]
        base = _base(own)
        if base == "reciprocal":
            return -sizes[0]
        if base == "mul" and len(sizes) == 2:
            return sum(sizes)
        if base == "div" and not isinstance(own.args[0], Ref):
            return -sizes[0]
        if base == "div" and len(sizes) == 2:
            return sizes[0] - sizes[1]
        power: int | None = 0
        if base in ("mul", "div"):
            power = self.factors.power(own) if self.factors.may_depend(own) else 0
        elif not self.factors.constant(own):
            power = None  # a count and a number of samples
        if power is None:
            raise self.search.refused(node, "its count depends on the batch in an unknown way")
        return power + max(sizes)

    def _multiplied(self, node: Node, kind: _Kind) -> _Kind:
        """Returns the kind of a value's product with a factor that may depend on the batch size."""
        other = next((name for name in node.inputs if name not in self.search.moving(node)), "")
        if other in self.mixed and self.graph[other].type.numel != 1:
            return self._weighted(node, kind, other)
        if kind is not _Kind.SUM and not self.factors.may_depend(node):
            return kind
        summed = self.graph[node.inputs[0]].inputs[:1]
        of_mixed = is_whole_mean(self.graph, node) and summed[0] in self.mixed
        power = 0 if of_mixed else self.factors.power(node)
        changed = {(_Kind.SUM, -1): _Kind.MEAN, (_Kind.MEAN, 1): _Kind.SUM}
        if power is None or (power and (kind, power) not in changed):
            raise self.search.refused(node, "its factor depends on the batch in an unknown way")
        return changed[kind, power] if power else kind

    def _weighted(self, node: Node, kind: _Kind, weights: str) -> _Kind:
        """Returns the kind of a value that numbers of all samples weigh, such as counts of classes.

        A sum over such counts is a mean, of one microbatch.
        """
        degree = self._grows(node, weights)
        power = (kind is not _Kind.MEAN) + (degree if _base(node) == "mul" else -degree)
        if power not in (0, 1) or (degree and kind is _Kind.COUNTED):
            raise self.search.refused(node, "it is weighted by a value that is no count alone")
        return kind if not degree else _Kind.SUM if power else _Kind.MEAN

    def _grows(self, node: Node, name: str) -> int:
        """Returns the power of the number of samples with which a value of all of them grows."""
        own = self.graph[name]
        base, inputs = _base(own), [one for one in own.inputs if is_batched(self.graph, one)]
        if base in _SUMS and inputs[0] not in self.mixed:
            return 1
        if all(one in self.mixed for one in inputs):
            grows = [self._grows(node, one) for one in inputs]
            power = self.factors.power(own) if self.factors.may_depend(own) else 0
            if base == "reciprocal" or (base == "div" and own.args[0] != Ref(inputs[0])):
                return -grows[0]
            if base in ("mul", "div") and power is not None:
                sign = 1 if base == "mul" else -1
                return grows[0] + power + sign * sum(grows[1:])
            if base in (*_SAME, *_LINEAR) and self.factors.constant(own):
                return max(grows)
        raise self.search.refused(node, "it is weighted by a value that is no count alone")


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
            product = _base(node) in ("mul", "div")
            if not self.follows(node, moving):
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

    def follows(self, node: Node, moving: Sequence[str]) -> bool:
        """Returns whether an operator is linear in its moving operands together."""
        if _base(node) == "div" and node.args[0] != Ref(next(iter(moving), "")):
            return False
        return is_linear(node) and (_base(node) not in ("mul", "div") or len(moving) == 1)

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

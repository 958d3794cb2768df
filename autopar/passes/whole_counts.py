"""A pass for accumulated microbatches: a loss divides by the counts of the whole batch.

A mean loss is a sum over a count, sum(losses) / sum(labels != -100). If every microbatch divided by
its own count, the mean of their losses would give tokens of short microbatches more weight than a
whole batch does. So the count becomes an input, which the runtime adds up over all microbatches
before the step, and the quotient is multiplied by the number n of microbatches:

    1/n Σ n S_i / Σ c_i  =  Σ S_i / Σ c_i

The keyword `counts` of the input holds the graph that computes one microbatch's count. Means over a
fixed number of elements stay, because they are equal in all microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.errors import OptionError
from autopar.ir.graph import COUNTS, Arg, Graph, Node, Ref, Source
from autopar.ir.graph_text import format_graph
from autopar.ir.rewrite import Editor, Names, argument, rewrite
from autopar.ir.stage_graphs import free_values
from autopar.passes.losses import LABELLED, MEAN

ITEMS = "items_in_batch"  # name of the input, with a number if it is taken
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


def count_whole_batch(graph: Graph, microbatches: int) -> Graph:
    """Returns the graph of a microbatch whose loss is its part of the whole batch's.

    Args:
        graph: normalised, of one microbatch.
        microbatches: number of microbatches in a step.

    Raises:
        OptionError: the loss is divided by a value of the batch that is no sum over it, or reads
            the model's parameters or buffers; or it has class weights.
    """
    if graph.loss is None or microbatches == 1:
        return graph
    divided = _Search(graph, microbatches).divided()
    if not divided:
        return graph
    inputs: dict[str, Ref] = {}
    unused = Names(leaf.target for leaf in graph.leaves("input"))

    def count(name: str, editor: Editor) -> Ref:
        if name not in inputs:
            node = graph[name]
            target, of = unused(ITEMS), ((COUNTS, _text(graph, name)),)
            leaf = Node(editor.fresh(target), "input", (target,), of, node.types)
            editor.put(leaf)
            inputs[name] = Ref(leaf.name)
        return inputs[name]

    def divide(node: Node, editor: Editor) -> Node | None:
        if node.name not in divided:
            return None
        copies: dict[str, Ref] = {}

        def copied(name: str) -> Arg:
            if name in copies:
                return copies[name]
            own = graph[name]
            if own.op != "input" and _is_sum(graph, own):
                return count(name, editor)
            if own.is_leaf or not _sums_before(graph, name):
                return Ref(editor.resolve(name))
            twin = own.map_refs(copied)
            twin = replace(twin, name=editor.fresh(f"whole_{name}"), alias=None, saved=())
            editor.put(twin)
            copies[name] = Ref(twin.name)
            return copies[name]

        factor = divided[node.name]
        part = node.map_refs(lambda name: copied(name) if name == factor else Ref(name))
        part = replace(part, name=editor.fresh(f"{node.name}_part"))
        editor.put(part)
        args: tuple[Arg, ...] = (Ref(part.name), microbatches)
        return replace(node, op="aten.mul.Tensor", args=args, kwargs=())

    return rewrite(graph, divide)


@dataclass(frozen=True)
class _Search:
    """Looks for the divisions by counts between the losses of samples and the loss.

    Attributes:
        graph: of one microbatch.
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
                raise self._refused(node, "its mean is weighted by the classes of its labels")
            moving = self._moving(node)
            linear = is_linear(node)
            product = linear and _base(node) in ("mul", "div")
            if not linear or (product and len(moving) != 1):
                if any(graph[name].type.shape == () for name in moving):
                    raise self._refused(node, f"it is no mean, but {_base(node)} of one")
                continue
            factors = [name for name in node.inputs if name not in moving] if product else []
            power = self._power(node, factors[0]) if factors else 0
            if power:
                if counted or power != -1:
                    raise self._refused(node, "it is divided by counts more than once")
                found[name], counted = factors[0], True
            stack += [(name, counted) for name in moving]
        return found

    def _moving(self, node: Node) -> list[str]:
        """Returns the operands with a gradient that depend on the batch."""
        graph, names = self.graph, dict.fromkeys(node.inputs)
        return [name for name in names if graph[name].requires_grad and _batched(graph, name)]

    def _power(self, node: Node, factor: str) -> int:
        """Returns the power of a count by which an operator multiplies its operand."""
        graph = self.graph
        if not _batched(graph, factor):
            return 0
        kind = graph[factor].type
        if kind.numel != 1 or len(kind.shape) > len(node.type.shape):
            if _sums_before(graph, factor):
                raise self._refused(node, "it is weighted by a value that is no count alone")
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
        if not _batched(graph, name):
            return 0
        if _is_sum(graph, own):
            leaves = [graph[leaf] for leaf in _before(graph, name) if graph[leaf].is_leaf]
            other = next((leaf for leaf in leaves if leaf.op != "input"), None)
            if other is not None or name not in free_values(graph):
                reads = "random numbers" if other is None else f"{other.op} {other.target!r}"
                raise self._refused(
                    node, f"it is divided by a sum over the batch that reads {reads}"
                )
            return 1
        base = _base(own)
        whole = (name for name in own.inputs if _batched(graph, name))
        if own.is_leaf or any(graph[name].type.numel != 1 for name in whole):
            raise self._refused(node, f"it is divided by the batch's {base}, which does not add up")
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
        raise self._refused(node, f"it is divided by the batch's {base}, which does not add up")

    def _refused(self, node: Node, why: str) -> OptionError:
        count = self.microbatches
        return OptionError(
            f"accumulate={count} cannot give the loss of the whole batch",
            where=str(node.source),
            why=f"{why}, so the losses of microbatches do not add up to it",
            todo=f"pass microbatches={count}, which trains on the mean of the microbatches' losses;"
            " or divide by a sum of labels or of a mask",
        )


def is_linear(node: Node) -> bool:
    """Returns whether an operator is linear in any one of its operands."""
    return _base(node) in _LINEAR


def _base(node: Node) -> str:
    """Returns the name of an operator without its space and overload."""
    return node.op.partition(".")[2].partition(".")[0] or node.op


def _is_sum(graph: Graph, node: Node) -> bool:
    """Returns whether an operator without a gradient adds up a tensor of the batch."""
    if _base(node) not in _SUMS or node.requires_grad or node.type.numel != 1:
        return False
    return graph[node.inputs[0]].type.shape != () and _batched(graph, node.name)


def _before(graph: Graph, name: str, stop: Callable[[Node], bool] = lambda node: False) -> set[str]:
    """Returns a value and all that it depends on; what `stop` accepts is not followed."""
    found, stack = set[str](), [name]
    while stack:
        one = stack.pop()
        if one not in found:
            found.add(one)
            stack += () if stop(graph[one]) else graph[one].inputs
    return found


def _batched(graph: Graph, name: str) -> bool:
    """Returns whether a value depends on a tensor of the batch that microbatches cut."""
    before = (graph[one] for one in _before(graph, name))
    return any(node.op == "input" and node.type.shape != () for node in before)


def _sums_before(graph: Graph, name: str) -> bool:
    """Returns whether a value depends on a sum over the batch."""
    return any(_is_sum(graph, graph[one]) for one in _before(graph, name))


def _text(graph: Graph, name: str) -> str:
    """Returns the graph that computes a value from the batch, as text."""
    wanted = _before(graph, name)
    nodes = tuple(
        replace(node, source=Source(), alias=None, saved=(), saved_types=())
        for node in graph.nodes
        if node.name in wanted
    )
    return format_graph(Graph("a microbatch's count", nodes, ((ITEMS, name),)))

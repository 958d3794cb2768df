"""A pass for microbatches: their losses add up to the loss of the whole batch.

A step trains on the mean of the losses of its n microbatches. A mean loss is a sum over a count,
sum(losses) / sum(labels != -100). If every microbatch divided by its own count, tokens of short
microbatches would weigh more than in the whole batch. So the count becomes an input, which the
runtime adds up over all microbatches before the step, and what adds up is multiplied by n:

    1/n Σ n S_i / Σ c_i  =  Σ S_i / Σ c_i

A sum without a count is also multiplied by n. Means over a fixed number of elements stay, because
they are equal in all microbatches. The keyword `counts` of the input holds the graph that computes
one microbatch's count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.errors import CaptureError
from autopar.ir.graph import COUNTS, Arg, Graph, Node, Ref, Source
from autopar.ir.graph_text import format_graph
from autopar.ir.rewrite import Editor, Names, rewrite
from autopar.passes.loss.batch_factors import BatchFactors
from autopar.passes.loss.loss_parts import (
    Divisions,
    Parts,
    before_of,
    is_batched,
    is_sum,
    sums_before,
)
from autopar.passes.loss.mixed_samples import MixedSamples

ITEMS = "items_in_batch"  # name of the input, with a number if it is taken


def count_whole_batch(
    graph: Graph,
    microbatches: int,
    scaled: Callable[[int], Graph],
    without: Callable[[Graph], frozenset[str]],
) -> Graph:
    """Returns the graph of a microbatch with n times its part of the whole batch's loss.

    Args:
        graph: normalised, of one microbatch.
        microbatches: number n of microbatches in a step.
        scaled: returns the same graph of a number of times as many samples, to tell a sum with a
            factor from a mean.
        without: returns the values of a graph whose dimensions are none of the samples.

    Raises:
        OptionError: the loss is divided by a value of the batch that is no sum over it, or reads
            the model's parameters or buffers; or it has class weights; or it is neither a sum nor a
            mean over samples, or of values that mix them; or a factor depends on the size of the
            batch in another way.
    """
    if graph.loss is None or microbatches == 1 or not is_batched(graph, graph.loss):
        return graph
    parts = _parts(graph, microbatches, scaled, without)
    loss = parts.graph.loss or ""
    change = _Change(
        graph, microbatches, parts.divided_in(graph), parts.operands_in(graph), parts.adds_up(loss)
    )
    return rewrite(graph, change)


def _parts(
    graph: Graph,
    microbatches: int,
    scaled: Callable[[int], Graph],
    without: Callable[[Graph], frozenset[str]],
) -> Parts:
    """Returns the parts of the loss, perhaps of twice as many samples.

    A division by the number of samples is invisible where that is one, and one by the number of
    pairs where that is one. So no sum is believed that a larger batch does not confirm.
    """

    def parts(seen: Graph, larger: int) -> Parts:
        search = Divisions(seen, microbatches)
        factors = BatchFactors(seen, partial(scaled, larger))
        mixed = MixedSamples(seen, factors, without)
        return Parts(seen, search, search.divided(), factors, mixed)

    if any(leaf.type.shape[:1] == (1,) for leaf in graph.leaves("input")):
        return parts(scaled(2), 4)
    found = parts(graph, 2)
    if not found.any_sums:
        return found
    try:
        return parts(scaled(2), 4)
    except CaptureError:  # the model takes no other batch
        return found


@dataclass(frozen=True)
class _Change:
    """Rewrites one operator after the other.

    Attributes:
        graph: graph of one microbatch.
        microbatches: number of them.
        divided: operators that divide by a count -> that count, or its inverse.
        operands: operators -> their operands that add up over microbatches, while others do not.
        adds_up: whether the loss does.
    """

    graph: Graph
    microbatches: int
    divided: Mapping[str, str]
    operands: Mapping[str, Sequence[str]]
    adds_up: bool
    _inputs: dict[str, Ref] = field(default_factory=dict)

    def __call__(self, node: Node, editor: Editor) -> Node | None:
        changed = self._counted(node, editor) if node.name in self.divided else node
        products = {}
        for name in self.operands.get(node.name, ()):
            product = self._times(editor[name], editor.fresh(f"{name}_whole"))
            editor.put(product)
            products[name] = product.name
        if products:
            changed = changed.map_refs(lambda name: Ref(products.get(name, name)))
        if node.name == self.graph.loss and self.adds_up:
            part = replace(changed, name=editor.fresh(f"{node.name}_part"))
            editor.put(part)
            return self._times(part, node.name)
        return None if changed is node else changed

    def _times(self, node: Node, name: str) -> Node:
        """Returns the value times the number of microbatches, under a name."""
        args: tuple[Arg, ...] = (Ref(node.name), self.microbatches)
        return replace(node, name=name, op="aten.mul.Tensor", args=args, kwargs=())

    def _counted(self, node: Node, editor: Editor) -> Node:
        """Returns a division by a count with that of the whole batch in its place."""
        copies: dict[str, Ref] = {}

        def copied(name: str) -> Arg:
            if name in copies:
                return copies[name]
            own = self.graph[name]
            if own.op != "input" and is_sum(self.graph, own):
                return self._count(name, editor)
            if own.is_leaf or not sums_before(self.graph, name):
                return Ref(editor.resolve(name))
            twin = own.map_refs(copied)
            twin = replace(twin, name=editor.fresh(f"whole_{name}"), alias=None, saved=())
            editor.put(twin)
            copies[name] = Ref(twin.name)
            return copies[name]

        factor = self.divided[node.name]
        return node.map_refs(lambda name: copied(name) if name == factor else Ref(name))

    def _count(self, name: str, editor: Editor) -> Ref:
        """Returns the input that takes the place of a microbatch's count."""
        if name not in self._inputs:
            node = self.graph[name]
            unused = Names(leaf.target for leaf in self.graph.leaves("input"))
            for _ in self._inputs:
                unused(ITEMS)
            target, of = unused(ITEMS), ((COUNTS, _text(self.graph, name)),)
            leaf = Node(editor.fresh(target), "input", (target,), of, node.types)
            editor.put(leaf)
            self._inputs[name] = Ref(leaf.name)
        return self._inputs[name]


def _text(graph: Graph, name: str) -> str:
    """Returns the graph that computes a value from the batch, as text."""
    wanted = before_of(graph, name)
    nodes = tuple(
        replace(node, source=Source(), alias=None, saved=(), saved_types=())
        for node in graph.nodes
        if node.name in wanted
    )
    return format_graph(Graph("a microbatch's count", nodes, ((ITEMS, name),)))

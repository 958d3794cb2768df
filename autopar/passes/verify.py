"""Invariants of a graph, one small named check each, run after every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from autopar.errors import GraphError
from autopar.ir.graph import WRITE, Graph, Node, Repeat

Fault = tuple[Node | None, str]
Pass = Callable[[Graph], Graph]
Trace = Callable[[str, Graph], None]


def apply(graph: Graph, passes: Iterable[Pass], trace: Trace = lambda name, graph: None) -> Graph:
    """Returns the result of passes, one after the other.

    Each is followed by `verify` and by `trace(name of the pass, its result)`.

    Raises:
        GraphError: a pass produced a graph that breaks an invariant.
    """
    for step in passes:
        graph = verify(step(graph))
        trace(step.__name__, graph)
    return graph


def verify(graph: Graph) -> Graph:
    """Returns `graph` itself if every check in `CHECKS` holds.

    Raises:
        GraphError: a check fails; names the first such check, the node and the user's source.
    """
    for check in CHECKS:
        for node, why in check(graph):
            place = "" if node is None else f" at %{node.name} ({node.op})"
            raise GraphError(
                f"graph {graph.name} breaks {check.__name__}{place}",
                where="" if node is None else str(node.source),
                why=why,
                todo="correct the pass or the text that made this graph",
            )
    return graph


def names_are_unique(graph: Graph) -> Iterator[Fault]:
    """Checks that every node has a unique name, a Python identifier."""
    seen: set[str] = set()
    for node in graph.nodes:
        if not (node.name.isidentifier() and node.name.isascii()):
            yield node, f"{node.name!r} is not an identifier"
        if node.name in seen:
            yield node, f"the name {node.name!r} is taken"
        seen.add(node.name)


def leaves_come_first(graph: Graph) -> Iterator[Fault]:
    """Inputs, parameters and buffers precede all operators and carry the user's name."""
    operator = ""
    for node in graph.nodes:
        if not node.is_leaf:
            operator = operator or node.name
        elif operator:
            yield node, f"this leaf follows the operator %{operator}"
        elif not node.args or not isinstance(node.args[0], str) or len(node.types) != 1:
            yield node, "a leaf has its user-facing name as first argument, and one type"


def references_are_defined(graph: Graph) -> Iterator[Fault]:
    """A node reads only values that precede it."""
    seen: set[str] = set()
    for node in graph.nodes:
        for name in node.inputs:
            if name not in seen:
                yield node, f"%{name} is read before it is defined"
        seen.add(node.name)


def writes_name_buffers(graph: Graph) -> Iterator[Fault]:
    """A buffer is written at most once, by a value of its type."""
    seen: set[str] = set()
    for node in graph.nodes:
        if node.op != WRITE:
            continue
        buffer, value = node.inputs
        if graph[buffer].op != "buffer" or graph[buffer].types != graph[value].types:
            yield node, f"it writes {graph[value].types} into %{buffer} ({graph[buffer].op})"
        if buffer in seen:
            yield node, f"%{buffer} is written twice"
        seen.add(buffer)


def results_exist(graph: Graph) -> Iterator[Fault]:
    """Outputs and the loss are values of the graph."""
    for user, name in graph.outputs:
        if name not in graph:
            yield None, f"the output {user!r} is %{name}, which does not exist"
    if graph.loss is not None and graph.loss not in graph:
        yield None, f"the loss is %{graph.loss}, which does not exist"


def loss_is_a_scalar(graph: Graph) -> Iterator[Fault]:
    """The loss has one floating element, so that it can be differentiated."""
    if graph.loss is not None:
        node = graph[graph.loss]
        if not node.types or node.type.shape != () or not node.type.floating:
            yield node, f"the loss has type {', '.join(map(str, node.types)) or '()'}"


def storage_is_known(graph: Graph) -> Iterator[Fault]:
    """`alias` and `saved` name values of the graph that exist by the time they are needed."""
    seen: set[str] = set()
    for node in graph.nodes:
        if node.alias is not None and node.alias not in seen:
            yield node, f"its alias %{node.alias} is not defined before it"
        seen.add(node.name)
        for name in node.saved:
            if name not in seen:
                yield node, f"it saves %{name}, which is not defined by then"


def gradients_have_a_cause(graph: Graph) -> Iterator[Fault]:
    """Checks that only parameters, received values and their results require a gradient."""
    for node in graph.nodes:
        if node.requires_grad and node.op not in ("param", "received"):
            if not any(graph[name].requires_grad for name in node.inputs):
                yield node, "it requires a gradient, but it is not a parameter and no input does"
            if not any(kind.floating for kind in node.types):
                yield node, "it requires a gradient, but no result is floating"


def repeats_are_disjoint(graph: Graph) -> Iterator[Fault]:
    """Runs have at least two blocks, of existing nodes that belong to no other block."""
    seen: set[str] = set()
    for repeat in graph.repeats:
        if repeat.count < 2:
            yield None, "a repeat has at least two blocks"
        for name in (name for block in repeat.iterations for name in block):
            if name not in graph:
                yield None, f"a repeat holds %{name}, which does not exist"
            elif name in seen:
                yield graph[name], "it belongs to two blocks"
            seen.add(name)


def blocks_are_aligned(graph: Graph) -> Iterator[Fault]:
    """Position j of every block has the same operator, types and non-reference arguments."""
    for repeat in graph.repeats:
        first = repeat.iterations[0]
        for block in repeat.iterations:
            if len(block) != len(first):
                yield None, f"a block has {len(block)} nodes where the first has {len(first)}"
                continue
            for name, model in zip(block, first, strict=True):
                node, other = graph[name], graph[model]
                if _shape_of(node) != _shape_of(other):
                    yield node, f"it differs from %{model}, its counterpart in the first block"


def _shape_of(node: Node) -> tuple[object, ...]:
    return (node.op, node.types, node.form, node.requires_grad, node.saved_types)


def blocks_read_alike(graph: Graph) -> Iterator[Fault]:
    """References correspond: inside the block, to carried values, or to one value for all."""
    for repeat in graph.repeats:
        first = repeat.iterations[0]
        previous: dict[str, str] = {}
        for block in repeat.iterations:
            here = dict(zip(first, block, strict=True))
            expected = {
                start: previous[end] if previous and end in previous else start
                for start, end in repeat.carried
            } | here
            for model, name in here.items():
                wanted = [expected.get(read, read) for read in graph[model].inputs]
                if list(graph[name].inputs) != wanted:
                    yield graph[name], f"it reads {graph[name].inputs}, not {tuple(wanted)}"
            previous = here


def blocks_are_closed(graph: Graph) -> Iterator[Fault]:
    """Checks that only carried values leave a block before the last, each read by one share."""
    results = {name for _, name in graph.outputs} | {graph.loss}
    for repeat in graph.repeats:
        ends = {repeat.iterations[0].index(end) for _, end in repeat.carried if end in graph}
        for index, block in enumerate(repeat.iterations):
            inside = set(block)
            if index < repeat.count - 1:
                after = set(repeat.iterations[index + 1])
                for place, name in enumerate(block):
                    allowed = inside | after if place in ends else inside
                    if name in results or not allowed.issuperset(graph.users[name]):
                        yield graph[name], "it is read outside its block"
            for value in _entering(repeat, index):
                readers = [user for user in graph.users[value] if user in inside]
                if len(readers) != 1 or graph[readers[0]].op != "autopar.share":
                    yield graph[value], f"block {index} reads it by {readers}, not by one share"


def _entering(repeat: Repeat, index: int) -> list[str]:
    if index == 0:
        return [start for start, _ in repeat.carried]
    places = [repeat.iterations[0].index(end) for _, end in repeat.carried]
    return [repeat.iterations[index - 1][place] for place in places]


def carried_values_exist(graph: Graph) -> Iterator[Fault]:
    """A carried pair is a value outside the run's blocks and a node of the first block."""
    for repeat in graph.repeats:
        inside = {name for block in repeat.iterations for name in block}
        for start, end in repeat.carried:
            if start not in graph or start in inside:
                yield None, f"the carried value %{start} does not enter the first block"
            elif end not in repeat.iterations[0]:
                yield None, f"%{end} is carried but is not a node of the first block"
            elif graph[start].types != graph[end].types:
                yield graph[end], f"it replaces %{start}, which has another type"


CHECKS: tuple[Callable[[Graph], Iterator[Fault]], ...] = (
    names_are_unique,
    leaves_come_first,
    references_are_defined,
    writes_name_buffers,
    results_exist,
    loss_is_a_scalar,
    storage_is_known,
    gradients_have_a_cause,
    repeats_are_disjoint,
    blocks_are_aligned,
    carried_values_exist,
    blocks_read_alike,
    blocks_are_closed,
)

"""Names for the classes of a graph's dimensions, by their use in the graph.

    batch         the first dimension of the inputs
    sequence      the other dimension of a residual stream beside batch and features; tokens' second
    hidden        the features of a residual stream
    vocab         rows of an embedding that is looked up by an input, and as many classes
    heads         heads of attention, groups of them where keys are shared
    head_dim      features of a head
    ffn           made by a linear from a stream, and contracted by another back into it
    expert        matrices of a linear that has one for each expert
    features      inputs and outputs of other linears
    classes       of a classifier
    channels, height, width, kernel     of convolutions
    positions     rows of an embedding that is indexed by something other than an input
    dim7          none of these: class number 7

Several classes with one use are called heads.1, heads.2, and so on, and "heads" means all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autopar.intra_op.pins.dims import Dims
from autopar.intra_op.pins.roles import Roles
from autopar.ir.graph import Graph, Node
from autopar.operators.attention.sequence_forms import KINDS

_LOSSES = ("aten.cross_entropy_loss", "aten.nll_loss", "aten.nll_loss_nd")
Claim = tuple[str, int | None]


def name_dims(roles: Roles) -> tuple[str, ...]:
    """Returns a distinct name for each class, by number."""
    uses: dict[int, str] = {}
    for name, cls in _claims(roles):
        if cls is not None:
            uses.setdefault(cls, name)
    members: dict[str, list[int]] = {}
    for cls, name in uses.items():
        members.setdefault(name, []).append(cls)
    names = [f"dim{cls}" for cls in range(len(roles.dims.sizes))]
    for name, classes in members.items():
        for place, cls in enumerate(classes, 1):
            names[cls] = name if len(classes) == 1 else f"{name}.{place}"
    return tuple(names)


def _claims(roles: Roles) -> Iterator[Claim]:
    """Yields names and the classes that claim them; the first claim on a class counts."""
    graph, dims = roles.graph, roles.dims
    embeddings = [node for node in graph.folded if node.op == "aten.embedding"]
    by_input = [node for node in embeddings if _comes_from_input(graph, node.inputs[1])]
    yield from _all("batch", roles.batch)
    yield from _all("hidden", roles.streams)
    yield from _all("vocab", (dims.outer(node.inputs[0])[0] for node in by_input))
    yield from _all("positions", (dims.outer(n.inputs[0])[0] for n in embeddings))
    for node in graph.folded:
        yield from _of_attention(dims, node)
    for item in roles.linears:
        yield from _all("expert", sorted(item.along))
    for node in graph.folded:
        # Each token with the matrices of its own expert.
        looked_up = node.op == "aten.index.Tensor" and node.inputs[0] in roles.parametric
        if looked_up and len(graph[node.inputs[0]].type.shape) == 3:
            yield "expert", dims.outer(node.inputs[0])[0]
    yield from _all("ffn", roles.inner)
    yield from _all("sequence", roles.positions)
    for node in graph.folded:
        if node.op in _LOSSES:
            scores = dims.outer(node.inputs[0])
            cls = scores[min(1, len(scores) - 1)]
            words = {graph[n.inputs[0]].type.shape[0] for n in by_input}
            yield "vocab" if cls is not None and dims.sizes[cls] in words else "classes", cls
    for item in roles.convolutions:
        yield from _of_convolution(dims, graph[item.node], item.weight)
    for item in roles.linears:
        yield from _all("features", (*sorted(item.reads), *sorted(item.gives)))


def _all(name: str, classes: Iterable[int | None]) -> Iterator[Claim]:
    return ((name, cls) for cls in classes)


def _of_attention(dims: Dims, node: Node) -> Iterator[Claim]:
    """Returns the dimensions of heads, which queries and keys have if one dimension leads each."""
    if node.op in KINDS:
        query, key, value = (dims.outer(name) for name in node.inputs[:3])
        for outer in (query, key):
            yield "heads", outer[-3] if len(outer) > 2 else None
        yield "head_dim", query[-1]
        yield "head_dim", value[-1]
    elif node.op == "aten.softmax.int" and len(node.type.shape) == 4:
        yield "heads", dims.outer(node.name)[1]


def _of_convolution(dims: Dims, node: Node, weight: str) -> Iterator[Claim]:
    image, made, kernel = (dims.outer(name) for name in (node.inputs[0], node.name, weight))
    yield "channels", image[1]
    yield "channels", made[1]
    if len(made) == 4:
        for outer in (image, made):
            yield "height", outer[2]
            yield "width", outer[3]
    yield from _all("kernel", kernel[2:])


def _comes_from_input(graph: Graph, name: str) -> bool:
    """Returns whether a value is an input or computed from one by single-operand operators."""
    node = graph[graph.template[name]]
    while not node.is_leaf and len(node.inputs) == 1:
        node = graph[graph.template[node.inputs[0]]]
    return node.op == "input"

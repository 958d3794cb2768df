"""Published parallel plans as functions that return pins, for any model that they fit.

Each constrains only the mesh axes that it is given, so that they combine: data parallelism along
one axis and Megatron's tensor parallelism along another is

    pins=[autopar.pins.data_parallel("node"), autopar.pins.megatron("gpu")]

Whatever a published plan does not determine is left to the solver.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from autopar.errors import PinError
from autopar.intra_op.pins.pin_functions import Axes, PinContext, write
from autopar.intra_op.pins.roles import Linear, is_conv
from autopar.ir.graph import Node
from autopar.ir.tensor import Layout


@dataclass(frozen=True)
class DataParallel:
    """The batch split along axes, by default along all; parameters stored and used whole.

    A state sharding, where requested, decides how they are stored instead. Each parameter's
    gradient is summed along the axes (arXiv:2006.15704). Raises PinError if no operator that reads
    a parameter can split the batch that many ways.
    """

    axes: Axes = ()

    def __call__(self, context: PinContext) -> dict[str, str]:
        """Returns the pins for one model on one mesh."""
        axes = context.axes(self.axes or context.mesh.names)
        if not axes:
            return {}
        pins = {
            context.key(node): write(node.type.shape, {}, axes, stored=context.stored)
            for node in context.parameters()
        }
        return {**pins, **_batch(context, axes, str(self))}

    def __str__(self) -> str:
        return f"data_parallel({_quoted(self.axes)})"


@dataclass(frozen=True)
class FullyShardedDataParallel:
    """The batch split along axes; parameters stored in shards, used whole.

    Each parameter is split along its first dimension that divides evenly, else the first that is
    long enough; one without such a dimension stays whole. It is gathered where it is used, and its
    gradient is reduced to shards (ZeRO-3, arXiv:1910.02054, section 5.3; FSDP, arXiv:2304.11277,
    section 3). Raises PinError as data parallelism does.
    """

    axes: Axes = ()

    def __call__(self, context: PinContext) -> dict[str, str]:
        """Returns the pins for one model on one mesh."""
        axes = context.axes(self.axes or context.mesh.names)
        if not axes:
            return {}
        pins = {}
        for node in context.parameters():
            used = write(node.type.shape, {}, axes)
            dim = _first_dim(node.type.shape, context.ways(axes))
            stored = write(node.type.shape, {} if dim is None else {dim: axes}, axes)
            pins[context.key(node)] = f"{stored.partition(' along')[0]} => {used}"
        return {**pins, **_batch(context, axes, str(self))}

    def __str__(self) -> str:
        return f"fsdp({_quoted(self.axes)})"


@dataclass(frozen=True)
class Megatron:
    """Tensor parallelism of pairs of linears along one axis.

    A linear that reads the residual stream is split by outputs, one whose result is added to the
    stream by inputs, and everything between them (heads of attention, features of the perceptron)
    with them. The stream is whole, which takes one all_reduce per pair and direction
    (arXiv:1909.08053, section 3); embeddings and the head are split by the vocabulary where their
    operators can. With `sequence` the stream is split by positions instead, and the all_reduce
    becomes a reduce_scatter and an all_gather (arXiv:2205.05198, section 4.2.2). Everything else
    outside the blocks is left to the solver.

    Raises PinError if there is no such pair, or if the values between do not split that many ways.
    """

    axis: str
    sequence: bool = False

    def __call__(self, context: PinContext) -> dict[str, str]:
        """Returns the pins for one model on one mesh."""
        axes, roles = context.axes((self.axis,)), context.roles
        if not axes:
            return {}
        if not roles.inner:
            raise _unfit(
                context,
                str(self),
                "pairs of linears, of which the first reads a residual stream and the second's "
                f"result is added to it; found {len(roles.linears)} linears and "
                f"{len(roles.residuals)} residual additions, but no such pair",
            )
        self._check_sizes(context, roles.inner)
        between, streams = {*roles.inner, *self._vocabulary(context)}, set(roles.streams)
        scope, pins = _blocks(context), {}
        for node in context.parameters():
            outer = context.dims.outer(node.name)
            inner = [dim for dim, cls in enumerate(outer) if cls in between]
            if inner or (node.name in scope and streams.intersection(outer)):
                split = dict.fromkeys(inner[:1], axes)
                pins[context.key(node)] = write(node.type.shape, split, axes, stored=context.stored)
        return {**pins, **self._pairs(context, axes), **self._stream(context, axes)}

    def _pairs(self, context: PinContext, axes: Axes) -> dict[str, str]:
        """Returns pins of the results of pairs and of the head, so that no weights are gathered."""
        inner, streams, pins = set(context.roles.inner), set(context.roles.streams), {}
        columns = {*inner, *self._vocabulary(context)}
        for item in context.roles.linears:
            node = context.graph[item.node]
            if item.gives & columns:
                places = (context.dims.place(node.name, cls) for cls in item.gives & columns)
                split = {place: axes for place in places if place is not None}
                text = write(node.type.shape, split, axes)
            elif item.gives & streams and item.reads & inner:
                text = _owed(node, axes)
            else:
                continue
            if context.allows(node, text):
                pins[context.key(node)] = text
        return pins

    def _vocabulary(self, context: PinContext) -> list[int]:
        """Returns the vocabularies to split: those that no operator needs whole."""
        ways, kept = context.mesh.axis_size(self.axis), {a.cls for a in context.dims.unsplit}
        named = (c for c, name in enumerate(context.names) if name.split(".")[0] == "vocab")
        return [c for c in named if c not in kept and context.dims.divides(c, ways)]

    def _check_sizes(self, context: PinContext, inner: Iterable[int]) -> None:
        ways = context.mesh.axis_size(self.axis)
        for cls in inner:
            if not context.dims.divides(cls, ways):
                raise _unfit(
                    context,
                    str(self),
                    f"inner dimensions that split {ways} ways; {context.names[cls]!r} has "
                    f"{context.dims.sizes[cls]}",
                )

    def _stream(self, context: PinContext, axes: Axes) -> dict[str, str]:
        """Returns the pins of the stream and of values computed from it position by position.

        Results of linears are partial sums, as are other contractions over dimensions outside the
        stream.
        """
        roles, dims = context.roles, context.dims
        positions = roles.positions[:1] if self.sequence else ()
        if self.sequence and not positions:
            raise _unfit(context, str(self), "a dimension of positions in the residual stream")
        shapes = {dims.outer(name) for name in roles.residuals}
        shapes |= {tuple(None if c in roles.streams else c for c in outer) for outer in shapes}
        pins, owed = self._branches(context, axes)
        free = {*owed, *(item.node for item in roles.linears)}
        scope = _blocks(context) - free
        for node in context.operators():
            streamed = node.name in scope and dims.outer(node.name) in shapes
            whole = node.op != "autopar.share" and _summed(context, node) <= set(roles.streams)
            if not streamed or not whole:
                continue
            places = (dims.place(node.name, cls) for cls in positions)
            split = {dim: axes for dim in places if dim is not None}
            text = write(node.type.shape, split, axes)
            if context.allows(node, text):
                pins[context.key(node)] = text
        return pins

    def _branches(self, context: PinContext, axes: Axes) -> tuple[dict[str, str], set[str]]:
        """Returns the pins of values between a linear's partial sums and the stream.

        Whatever can stay a partial sum does, so that parallel branches are summed once.
        """
        graph, roles, streams = context.graph, context.roles, set(context.roles.streams)
        owed, pins = {item.node for item in roles.linears if item.gives & streams}, {}
        for node in context.operators():
            inputs = {graph.template[name] for name in node.inputs} - roles.parametric
            text = _owed(node, axes)
            inside = inputs and inputs <= owed and node.name not in {*roles.residuals, *owed}
            if inside and context.allows(node, text):
                owed.add(node.name)
                if node.op != "autopar.share":
                    pins[context.key(node)] = text
        return pins, owed

    def __str__(self) -> str:
        return f"megatron{'_sp' * self.sequence}({self.axis!r})"


@dataclass(frozen=True)
class GShard:
    """Experts split along an axis; everything else is data-parallel along it.

    Tokens reach their experts by one all_to_all and return by another (arXiv:2006.16668, section
    3.2). Raises PinError if no linear has a separate matrix for each expert, or if those cannot be
    split.
    """

    axis: str

    def __call__(self, context: PinContext) -> dict[str, str]:
        """Returns the pins for one model on one mesh."""
        axes, dims = context.axes((self.axis,)), context.dims
        if not axes:
            return {}
        experts = {cls for item in context.roles.linears for cls in item.along}
        if not experts:
            raise _unfit(
                context,
                str(self),
                "linears with a matrix for each expert: batched products of a parameter whose "
                "dimension of experts is also one of the activations",
            )
        for cls in experts:
            if not dims.divides(cls, context.ways(axes)):
                obstacle = f"{context.names[cls]!r} has {dims.sizes[cls]}"
                wanted = f"experts that split {context.ways(axes)} ways; {obstacle}"
                raise _unfit(context, str(self), wanted)
        pins = DataParallel(axes)(context)
        own = [item for item in context.roles.linears if item.along]
        # An expert's values stay on its device until they are combined.
        linears = [item.node for item in own]
        for node in _made_of(context, linears, lambda n: bool(experts & {*dims.outer(n.name)})):
            pins.pop(context.key(node), None)
        for item in own:
            _split_own(context, item, item.along, axes, pins)
        return pins

    def __str__(self) -> str:
        return f"gshard({self.axis!r})"


@dataclass(frozen=True)
class AlexNetSplit:
    """Convolutions data-parallel along an axis, fully connected layers split by outputs along it.

    "One weird trick" (arXiv:1404.5997, section 4). A layer with fewer outputs than devices is left
    to the solver. Raises PinError if there are no convolutions or no fully connected layers.
    """

    axis: str

    def __call__(self, context: PinContext) -> dict[str, str]:
        """Returns the pins for one model on one mesh."""
        axes, roles, dims = context.axes((self.axis,)), context.roles, context.dims
        if not axes:
            return {}
        if not roles.convolutions or not roles.linears:
            counts = f"{len(roles.convolutions)} convolutions, {len(roles.linears)} linears"
            wanted = f"convolutions and fully connected layers; found {counts}"
            raise _unfit(context, str(self), wanted)
        pins = DataParallel(axes)(context)
        layers = [item.node for item in roles.linears]
        for node in _made_of(context, layers, lambda node: not is_conv(node)):
            pins.pop(context.key(node), None)
        for item in roles.linears:
            fitting = frozenset(c for c in item.gives if dims.divides(c, context.ways(axes)))
            _split_own(context, item, fitting, axes, pins)
        return pins

    def __str__(self) -> str:
        return f"alexnet_split({self.axis!r})"


def _batch(context: PinContext, axes: Axes, plan: str) -> dict[str, str]:
    """Returns pins that split the batch in every value that has it, and keep its sums partial.

    Values that no strategy can split, and labels and counts, which every device has whole, are left
    to the solver.
    """
    dims, batch, ways = context.dims, context.roles.batch[:1], context.ways(axes)
    cut, owed = dict[str, str](), dict[str, str]()
    for node in context.operators():
        if node.op == "autopar.share" or not batch or not node.type.floating:
            continue
        place = _cut(context, node.name, batch[0], ways)
        if place is not None:
            text = write(node.type.shape, {place: axes}, axes)
            if context.allows(node, text):
                cut[context.key(node)] = text
        elif node.type.floating and batch[0] in _summed(context, node):
            places = [_cut(context, name, batch[0], ways) for name in node.inputs]
            if any(p is not None for p in places) and context.allows(node, _owed(node, axes)):
                owed[context.key(node)] = _owed(node, axes)
    if not cut:
        instead = (
            f"the batch of {dims.sizes[batch[0]]} splits nowhere" if batch else "no such input"
        )
        wanted = f"inputs with a batch, and operators that split it {ways} ways"
        raise _unfit(context, plan, f"{wanted}; {instead}")
    return {**cut, **owed}


def _cut(context: PinContext, value: str, cls: int, ways: int) -> int | None:
    """Returns the dimension of a value that splits a class `ways` ways, None if there is none."""
    place = context.dims.place(value, cls)
    return place if place is not None and context.dims.cuts(value, place, ways) else None


def _owed(node: Node, axes: Axes) -> str:
    """Returns the pin of a partial sum along axes."""
    layout = Layout.replicated(len(node.type.shape))
    owed = replace(layout, partial=axes).format(node.type.shape)
    return f"{owed} along {', '.join(axes)}"


def _blocks(context: PinContext) -> set[str]:
    """Returns the nodes of repeated blocks, or all nodes if no residual addition is in one."""
    graph = context.graph
    inside = {name for repeat in graph.repeats for name in repeat.iterations[0]}
    return inside if inside.issuperset(context.roles.residuals) else set(graph.template.values())


def _summed(context: PinContext, node: Node) -> set[int | None]:
    """Returns the classes that an operator sums over; None among them where unknown."""
    signature = context.dims.signatures.get(node.name)
    if signature is None:
        return {None}
    operands, results = (
        {f for dims in side for dim in dims for f in dim if signature.sizes[f] > 1}
        for side in (signature.operands, signature.results)
    )
    return {context.dims.leading(node.name, factor) for factor in operands - results}


def _made_of(
    context: PinContext, starts: Iterable[str], through: Callable[[Node], bool]
) -> list[Node]:
    """Returns the operators `through` that read `starts`, directly or through one another."""
    reached, readers = set(starts), []
    for node in context.operators():
        inputs = {context.graph.template[name] for name in node.inputs}
        if inputs & reached and through(node):
            reached.add(node.name)
            readers.append(node)
    return readers


def _split_own(
    context: PinContext, item: Linear, classes: frozenset[int], axes: Axes, pins: dict[str, str]
) -> None:
    """Pins a linear and its parameters to be split along the given classes."""
    graph, own, ahead = context.graph, [item.node], list(context.graph[item.node].inputs)
    while ahead:
        name = graph.template[ahead.pop()]
        if name in context.roles.parametric:
            own += [name] if graph[name].op == "param" else []
            ahead += graph[name].inputs
    for name, cls in itertools.product(own, sorted(classes)):
        node, place = graph[name], context.dims.place(name, cls)
        if place is not None:
            stored = node.op == "param"
            pins[context.key(node)] = write(node.type.shape, {place: axes}, axes, stored=stored)


def _first_dim(shape: tuple[int, ...], ways: int) -> int | None:
    """Returns the first dimension that splits evenly, else the first that is long enough."""
    even = [dim for dim, size in enumerate(shape) if size % ways == 0 and size]
    long = [dim for dim, size in enumerate(shape) if size >= ways]
    return next(iter(even or long), None)


def _unfit(context: PinContext, plan: str, looked_for: str) -> PinError:
    return PinError(
        f"{plan} does not apply to {context.graph.name}",
        where=f"mesh {context.mesh}",
        why=f"it looks for {looked_for}",
        todo="try another plan of autopar.pins, another axis, or leave it to the solver",
    )


def _quoted(axes: Axes) -> str:
    return ", ".join(map(repr, axes))

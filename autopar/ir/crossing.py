"""Transfers of values between the devices of two pipeline stages.

Along mesh axes that a layout does not name, every device holds the same elements. Sending a copy to
each would send the same elements several times over what is often the slowest link. Instead, the
value arrives in a layout that also splits it over these axes, where sizes allow, and the receiving
devices gather it among themselves (the "local all-gather" of Alpa, arXiv:2201.12023, section 6).
Holders of the same part take turns as senders, so that they share the work.

A gradient has the layout of its value, so it returns by `crossing` with the sides swapped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.errors import LayoutError, MeshError
from autopar.ir.collective import Collective, Step
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.resharding import LayoutGraphs, Resharder
from autopar.ir.stage_graphs import is_sent
from autopar.ir.tensor import Layout, TensorType

Span = tuple[int, int]  # start, length
Spans = tuple[Span, ...]  # one for each dimension


@dataclass(frozen=True)
class Side:
    """One end of a transfer.

    Attributes:
        mesh: its devices.
        ranks: their global ranks, row-major.
        layout: layout of the value on this mesh, without partial sums.
    """

    mesh: Mesh
    ranks: tuple[int, ...]
    layout: Layout

    def part(self, shape: tuple[int, ...], place: int, layout: Layout | None = None) -> Spans:
        """Returns the part that the device at a place in `ranks` holds."""
        chosen = self.layout if layout is None else layout
        return chosen.bounds(shape, self.mesh, self.mesh.coordinate(place))


@dataclass(frozen=True)
class Box:
    """Elements that one rank sends to another in one message.

    Attributes:
        sender, receiver: global ranks, possibly equal.
        taken: (start, length) for each dimension in the sender's part.
        put: (start, length) for each dimension in the part that arrives at the receiver.
    """

    sender: int
    receiver: int
    taken: Spans
    put: Spans

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(length for _, length in self.put)


@dataclass(frozen=True)
class Crossing:
    """The transfer of a value between two meshes.

    Attributes:
        boxes: the messages, by receiver.
        arrival: the layout, on the receiving mesh, in which the value arrives.
        gathers: the steps from there to the wanted layout.
    """

    boxes: tuple[Box, ...]
    arrival: Layout
    gathers: tuple[Step, ...]

    @property
    def moved(self) -> int:
        """Number of elements that change devices, without the gathers."""
        return sum(box.numel for box in self.boxes if box.sender != box.receiver)

    @property
    def busiest(self) -> int:
        """Number of elements of the rank that sends or receives the most."""
        loads: dict[tuple[str, int], int] = {}
        for box in self.boxes:
            if box.sender != box.receiver:
                for end in (("sender", box.sender), ("receiver", box.receiver)):
                    loads[end] = loads.get(end, 0) + box.numel
        return max(loads.values(), default=0)


def crossing(tensor: TensorType, source: Side, target: Side) -> Crossing:
    """Returns the transfer of a value from one mesh to another.

    Every element is sent once to the target mesh if the value can be split over all of its devices.
    Otherwise, as for a scalar, every device that needs it is sent a copy.

    Args:
        tensor: the value's global type.
        source, target: both ends. They may share ranks.

    Raises:
        LayoutError: a layout does not fit the value or its mesh, or has a partial sum.
        MeshError: a mesh has another number of devices than ranks.
    """
    for side in (source, target):
        _check(tensor, side)
    shape = tensor.shape
    stays = source == target  # every device keeps its part
    arrival = target.layout if stays else spread(shape, target.layout, target.mesh)
    holders = _holders(shape, source)
    boxes = []
    for place, receiver in enumerate(target.ranks):
        whole = target.part(shape, place, arrival)
        for part, ranks in holders:
            common = _common(part, whole)
            if common is not None:
                # A receiver that holds the part keeps it; otherwise holders take turns.
                sender = receiver if receiver in ranks else ranks[place % len(ranks)]
                boxes.append(Box(sender, receiver, _within(common, part), _within(common, whole)))
    gathers = () if stays else gathers_of(tensor, target.layout, target.mesh)
    return Crossing(tuple(boxes), arrival, gathers)


def by_bytes(mesh: Mesh, graphs: LayoutGraphs | None = None) -> Resharder:
    """Returns the resharder that sends the fewest bytes.

    Args:
        mesh: the devices.
        graphs: layouts and steps to share with resharders on other meshes.
    """
    return Resharder(mesh, lambda call: float(call.nbytes), graphs=graphs)


def gathers_of(
    tensor: TensorType, layout: Layout, mesh: Mesh, resharder: Resharder | None = None
) -> tuple[Step, ...]:
    """Returns the steps by which devices gather a value that other devices sent them.

    They depend on the receiving side only.

    Args:
        tensor: the value's global type.
        layout: its layout on the receiving mesh, without partial sums.
        mesh: the receiving mesh.
        resharder: `by_bytes` of this mesh, if it was used before.
    """
    resharder = resharder or by_bytes(mesh)
    return resharder.steps(tensor, spread(tensor.shape, layout, mesh), layout, grad=False)


def gathered(
    graph: Graph, node: Node, layout: Layout, mesh: Mesh, resharder: Resharder | None = None
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """Returns the collectives by which a stage's devices gather the values of other stages.

    Those of a received value run before the forward, those of the gradient of a sent value before
    the backward.

    Args:
        graph: graph of the stage.
        node: one of its nodes.
        layout: layout of the node's value.
        mesh: the stage's devices.
        resharder: `by_bytes` of this mesh, if it was used before.
    """
    received = node.op == "received"
    sent = node.requires_grad and is_sent(graph, node)
    if not received and not sent:
        return (), ()
    steps = gathers_of(node.type, layout, mesh, resharder)
    calls = tuple(step.forward for step in steps if step.forward is not None)
    return (calls, ()) if received else ((), calls)


def spread(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> Layout:
    """Returns `layout` split further over the axes along which it is replicated, where sizes allow.

    Each axis splits the first dimension that it divides evenly, else the first with enough
    elements.
    """
    dims = list(layout.dims)
    least = [  # number of elements of the smallest part
        size // math.prod(mesh.axis_size(axis) for axis in axes)
        for size, axes in zip(shape, dims, strict=True)
    ]
    for axis in mesh.axes:
        if axis.size == 1 or axis.name in layout.axes:
            continue
        fits = [dim for dim, size in enumerate(least) if size >= axis.size]
        even = [
            dim
            for dim in fits
            if shape[dim] % (axis.size * math.prod(map(mesh.axis_size, dims[dim]))) == 0
        ]
        if fits:
            dim = (even or fits)[0]
            dims[dim] = (*dims[dim], axis.name)
            least[dim] //= axis.size
    return layout.with_dims(tuple(dims))


def _check(tensor: TensorType, side: Side) -> None:
    if side.mesh.size != len(side.ranks):
        raise MeshError(
            f"mesh {str(side.mesh)!r} has {side.mesh.size} devices",
            why=f"{len(side.ranks)} ranks are given for it",
        )
    side.layout.check(tensor.shape, side.mesh)
    if side.layout.partial or side.layout.varying:
        raise LayoutError(
            f"{side.layout.format(tensor.shape)} cannot cross between meshes",
            why="it is a partial sum along one of them",
            todo="transfer it in a layout without partial sums",
        )


def _holders(shape: tuple[int, ...], side: Side) -> list[tuple[Spans, tuple[int, ...]]]:
    """Returns each part of a value, with the ranks that hold it."""
    holders: dict[Spans, list[int]] = {}
    for place, rank in enumerate(side.ranks):
        holders.setdefault(side.part(shape, place), []).append(rank)
    return [(part, tuple(ranks)) for part, ranks in holders.items()]


def _common(one: Spans, other: Spans) -> Spans | None:
    """Returns the elements that both have, None if there are none."""
    spans = []
    for (a, n), (b, m) in zip(one, other, strict=True):
        start, stop = max(a, b), min(a + n, b + m)
        if start >= stop:
            return None
        spans.append((start, stop - start))
    return tuple(spans)


def _within(spans: Spans, part: Spans) -> Spans:
    return tuple((a - b, n) for (a, n), (b, _) in zip(spans, part, strict=True))

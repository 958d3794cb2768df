"""Prices transfers between stages, which may run on different kinds of devices."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

from autopar.cost.algorithms import INTER
from autopar.cost.device import device
from autopar.cost.model import CostModel
from autopar.cost.network import Network
from autopar.inter_op.search_task import Transfer
from autopar.inter_op.submeshes import Cluster, SubMesh
from autopar.ir.collective import Collective
from autopar.ir.crossing import Side, crossing
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.tensor import DTYPE_BYTES, TensorType
from autopar.planning.options import Options
from autopar.planning.pipelines.layered import Layered
from autopar.planning.prices import cost_model

_HOSTS, _INSIDE = "hosts", "devices"


class Messages:
    """Prices messages between two devices of a cluster.

    Args:
        mesh: the cluster.
        price: prices of a mesh.
    """

    def __init__(self, mesh: Mesh, price: Callable[[Mesh], CostModel]) -> None:
        self.mesh, self.price = mesh, price
        self._busiest: dict[tuple[object, ...], int] = {}

    def busiest(self, tensor: TensorType, source: Side, target: Side) -> int:
        """Returns the bytes of the rank that sends or receives most of a value between two stages.

        They do not depend on where in the cluster a pair of stages is.
        """
        first = source.ranks[0]
        ranks = tuple(tuple(rank - first for rank in side.ranks) for side in (source, target))
        key = (tensor, source.mesh, source.layout, target.mesh, target.layout, *ranks)
        if key not in self._busiest:
            elements = crossing(tensor, source, target).busiest
            self._busiest[key] = elements * DTYPE_BYTES[tensor.dtype]
        return self._busiest[key]

    def along(self, part: int, axis: str, nbytes: int) -> float:
        """Returns the seconds of a message along an axis of one part."""
        return self.price(self.mesh.parts[part]).collective(Collective("send", (axis,), nbytes))

    def between(self, one: int, other: int, nbytes: int) -> float:
        """Returns the seconds of a message between two ranks.

        Inside a part it takes the outermost axis along which they differ. Between parts it leaves
        one host and enters another, at the pace of the slower of the two.
        """
        (part, start), (further, begin) = self.mesh.part_of(one), self.mesh.part_of(other)
        if part != further:
            return self.across(part, further, nbytes)
        own = self.mesh.parts[part]
        here, there = own.coordinate(one - start), own.coordinate(other - begin)
        axis = next(name for name in own.names if here[name] != there[name])
        return self.along(part, axis, nbytes)

    def across(self, part: int, other: int, nbytes: int) -> float:
        """Returns the seconds of a message from one part to another."""
        call = Collective("send", (_HOSTS,), nbytes)
        sides = (two_hosts(self.mesh.parts[number]) for number in (part, other))
        return max(self.price(side).collective(call) for side in sides)


def two_hosts(part: Mesh) -> Mesh:
    """Returns two hosts of a part, whose links are those of its outermost axis between hosts."""
    chip = device(part)
    outer, network = part.axes[0], Network(part, chip)
    far = [level for level in network.levels((outer.name,)) if level.resource == INTER]
    links = replace(outer, name=_HOSTS, size=2) if far else Axis(_HOSTS, 2)
    return replace(part, axes=(links, Axis(_INSIDE, chip.devices_per_node)))


class Borders:
    """Seconds that one microbatch's values, and their gradients, take across a border of stages.

    Args:
        layered: the model on one microbatch.
        mesh: the cluster.
        options: give the prices.
    """

    def __init__(self, layered: Layered, mesh: Mesh, options: Options) -> None:
        self.layered, self.mesh = layered, mesh
        self.messages = Messages(mesh, cache(lambda one: cost_model(one, options)))
        self.hosts = [Cluster.of(part).devices for part in mesh.parts]
        self.nbytes = cache(self._nbytes)

    def between(self, microbatches: int) -> Transfer:
        """Returns transfers for any number of microbatches, given the number of `layered`."""
        kinds = self.layered.kinds

        def transfer(border: int, before: SubMesh, behind: SubMesh, count: int) -> float:
            pair = (kinds[border - 1], kinds[border])
            return self.seconds(pair, before, behind, microbatches / count)

        return transfer

    def _nbytes(self, pair: tuple[Hashable, Hashable]) -> tuple[float, float]:
        """Returns the bytes of values and of gradients that cross between two kinds of layers."""
        layers = self.layered.layers
        at = [*pairwise(layers.kinds)].index(pair)  # type: ignore[arg-type]
        return layers.forward[at], layers.backward[at]

    def seconds(
        self, pair: tuple[Hashable, Hashable], before: SubMesh, behind: SubMesh, share: float
    ) -> float:
        """Prices a border: every element crosses once, over all devices of the smaller side.

        Gathers among the receiving devices belong to the price of their stage.

        Args:
            pair: kinds of the layers on both sides.
            before, behind: sub-meshes on both sides.
            share: elements that cross, relative to a microbatch of `layered`.
        """
        part, lanes = before.part, min(before.size, behind.size)
        if part != behind.part:
            send = partial(self.messages.across, part, behind.part)
        else:
            inside = before.size + behind.size <= self.hosts[part]
            axis = self.mesh.parts[part].names[-1 if inside else 0]
            send = partial(self.messages.along, part, axis)
        return sum(send(int(share * nbytes / lanes)) for nbytes in self.nbytes(pair) if nbytes)

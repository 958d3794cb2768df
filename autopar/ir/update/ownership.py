"""Owners of whole parameters: which device updates which, and the messages that this needs.

A parameter whose elements an optimizer mixes is updated by one device, its owner. One all_to_all
over all devices of the mesh sends a parameter to each owner, and another returns the results.
Replicas each send an equal share of the elements that they have in common.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh
from autopar.ir.storage import Hop, Storage
from autopar.ir.tensor import TensorType
from autopar.ir.update.update_rules import DEALT, PARTS, Rule

OWNERS = "owners"  # when these hops run: after "reduce" and before "update"


def is_dealt(rule: Rule, storage: Storage, mesh: Mesh) -> bool:
    """Returns whether one owner updates a parameter, and sends the others their parts."""
    split = math.prod(mesh.axis_size(axis) for axis in storage.updated.sharded_axes) > 1
    return mesh.size > 1 and (rule.needs == DEALT or (rule.needs != PARTS and split))


def owner_hops(rule: Rule, storage: Storage, own: TensorType, mesh: Mesh) -> tuple[Hop, ...]:
    """Returns the collectives by which a parameter reaches its owner and comes back.

    Args:
        rule: rule of the parameter.
        storage: its storage.
        own: its type in the dtype of the update.
        mesh: the devices.
    """
    return tuple(_hops(rule, storage, own, mesh)) if is_dealt(rule, storage, mesh) else ()


def _hops(rule: Rule, storage: Storage, own: TensorType, mesh: Mesh) -> Iterator[Hop]:
    axes = tuple(axis for axis in mesh.names if mesh.axis_size(axis) > 1)
    part = storage.updated
    share = math.ceil(own.nbytes / mesh.size)
    sent = [share] * (1 if rule.needs == DEALT else 2) + [part.local_bytes(own, mesh)]
    for nbytes in sent:
        yield Hop(OWNERS, Collective("all_to_all", axes, nbytes), part, part, None, 1, nbytes)


def deal(loads: Sequence[float], owners: int) -> tuple[int, ...]:
    """Returns the owner of each item: the largest first, to the owner with the least so far.

    At most 4/3 of the best largest sum (Graham, "Bounds on multiprocessing timing anomalies",
    SIAM J. Appl. Math. 17, 1969).
    """
    heap = [(0.0, owner) for owner in range(owners)]
    dealt = [0] * len(loads)
    for item in sorted(range(len(loads)), key=lambda item: -loads[item]):
        load, owner = heapq.heappop(heap)
        dealt[item] = owner
        heapq.heappush(heap, (load + loads[item], owner))
    return tuple(dealt)

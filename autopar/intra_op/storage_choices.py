"""What a parameter's storage costs: seconds of its collectives, bytes of its states.

A parameter meets the rest of the problem through the layout in which it is used, and nothing else.
So of its choices with one such layout those remain that no other is at least as good as in
everything that counts, and no optimum is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.cost.device import Device
from autopar.cost.model import CostModel
from autopar.cost.operator_memory import reduction_staging
from autopar.intra_op.memory.lifetimes import Role
from autopar.intra_op.node_choices import Option
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.offload import IN_FLIGHT
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.storage import BUCKET, EACH, REDUCED, Storage
from autopar.ir.tensor import TensorType


@dataclass(frozen=True)
class Away:
    """That optimizer state lies in host memory.

    Attributes:
        seconds: that one of its bytes takes to come and to go; on accelerators at once.
        share: the part of it that is on the device at a time in the update.
    """

    seconds: float
    share: float


@dataclass(frozen=True)
class StoredCost:
    """One choice of a parameter, in seconds and bytes.

    Attributes:
        seconds: of its collectives for one microbatch, with its part of what a step does once.
        beside: of those for which only the optimizer waits: its gradient's; in `seconds`.
        fetched, refetched: of gathering it for the forward and in the backward, which the block
            before hides; in `seconds`.
        reduced: of what is done with its gradient once a step, and
        gathered: of gathering it once the optimizer has run; of a whole step.
        nbytes: what it holds; see `lifetimes.Role`.
        host: bytes of it in host memory.
    """

    seconds: float
    beside: float
    fetched: float
    refetched: float
    reduced: float
    gathered: float
    nbytes: dict[Role, float]
    host: float = 0.0

    def held(self, trained: bool) -> float:
        """Bytes that it holds for most of a step, with its gradient if it is trained."""
        gradient = max(self.nbytes["gradient"], self.nbytes["accumulated"]) if trained else 0.0
        return self.nbytes["leaf"] + self.nbytes["gathered"] + gradient

    def dominates(self, other: StoredCost) -> bool:
        """Whether it is at least as good in everything."""
        pairs = zip(self._parts, other._parts, strict=True)
        return all(mine <= its * (1 + 1e-12) for mine, its in pairs) and all(
            self.nbytes[role] <= other.nbytes[role] for role in self.nbytes
        )

    @cached_property
    def _parts(self) -> tuple[float, ...]:
        """Seconds by what they are hidden behind: nothing, the backward, the forward."""
        behind = self.beside + self.refetched
        return self.seconds - behind - self.fetched, behind, self.fetched


@dataclass(frozen=True)
class StoredTraffic:
    """What one choice of a parameter sends and holds, however many microbatches a step has.

    Attributes:
        tensor: type of the parameter.
        own: type of what the optimizer updates.
        trained: whether it has a gradient.
        seconds: of its collectives, each once, by when they run; see `storage.Hop`.
        nbytes: of its layouts, by their names in `Storage`; `grads` and `updated` in `own`'s type.
        apart: whether it is gathered for the forward and for the backward.
        reducing: the most bytes of its gradient while that is reduced.
        at_end: whether that is done when the backward has ended, for all gradients at once.
    """

    tensor: TensorType
    own: TensorType
    trained: bool
    seconds: dict[str, float]
    nbytes: dict[str, float]
    apart: tuple[bool, bool]
    reducing: float
    at_end: bool

    def cost(
        self,
        state_bytes: float,
        microbatches: int,
        waits: bool,
        again: float = 0.0,
        away: Away | None = None,
        fused: bool = False,
    ) -> StoredCost:
        """The price of the choice.

        Args:
            state_bytes: optimizer state in units of the bytes of what it updates.
            microbatches: in a step.
            waits: whether the program waits for each collective.
            again: which part of its blocks is computed again in the backward, and fetches it again.
            away: said where its optimizer state lies in host memory.
            fused: whether the update is a kernel, which needs no temporaries.
        """
        totals = {
            when: seconds * (microbatches if when in EACH else 1)
            for when, seconds in self.seconds.items()
        }
        # A block that is computed again gathers it for that, and has it for the backward then.
        totals["backward"] = totals["forward"] * again + totals["backward"] * (1 - again)
        shown = 0.0 if waits else 1 / microbatches
        beside = shown * (totals["accumulate"] + totals["reduce"])
        fetched, refetched = shown * totals["forward"], shown * totals["backward"]
        used, updated = self.nbytes["used"], self.nbytes["updated"]
        forward_apart, backward_apart = self.apart
        beside_result = max(self.reducing - updated, 0.0)
        own_dtype = self.own != self.tensor
        # The kernel takes parts that lie in a buffer of their own; others are updated in place.
        master = updated if own_dtype or (fused and updated < self.nbytes["held"]) else 0.0
        state = state_bytes * updated + master if self.trained else 0.0
        host, coming = (0.0, 0.0) if away is None else (state, state * away.seconds)
        nbytes: dict[Role, float] = {
            "leaf": self.nbytes["held"] + state - host,
            "gathered": self.nbytes["kept"] if forward_apart else 0.0,
            "fetched": used if backward_apart else 0.0,
            "waiting": used,
            "backward": 0.0 if self.at_end else beside_result,
            "summed": beside_result if self.at_end else 0.0,
            "gradient": updated,
            "accumulated": self.nbytes["grads"] if microbatches > 1 else 0.0,
            "update": 0.0 if fused else updated if away is None else away.share * (updated + state),
        }
        return StoredCost(
            (sum(totals.values()) + coming) / microbatches,
            beside,
            fetched,
            refetched,
            totals["reduce"],
            totals["update"] + coming,
            nbytes,
            host,
        )


def stored_traffic(
    tensor: TensorType,
    trained: bool,
    storage: Storage,
    mesh: Mesh,
    model: CostModel,
    bucket: int = 1,
    precision: Precision = AS_IS,
) -> StoredTraffic:
    """What one choice of a parameter sends and holds.

    Args:
        tensor: type of the parameter.
        trained: whether it has a gradient.
        storage: where its states lie.
        mesh, model: the devices and their prices.
        bucket: bytes of gradients, or of parameters, that go together.
        precision: in which dtypes it is updated and its gradient sent.
    """
    seconds = dict.fromkeys((*EACH, "reduce", "update"), 0.0)
    hops = storage.hops(tensor, mesh, 1, trained, precision)
    for hop in hops:
        seconds[hop.when] += hop.seconds(model.collective, bucket)
    own, sent = precision.updated(tensor, trained), precision.sent(tensor, trained)
    types = {"held": tensor, "used": tensor, "kept": tensor, "grads": own, "updated": own}
    nbytes = {
        name: float(getattr(storage, name).local_bytes(type, mesh)) for name, type in types.items()
    }
    apart = storage.held.dims != storage.kept.dims, storage.kept.dims != storage.used.dims
    accelerator = mesh.device.lower() != "cpu"
    path = [hop for hop in hops if hop.when in REDUCED]
    # A CPU sums all gradients that need no more than that at once.
    at_end = not accelerator and {hop.call.kind for hop in path} == {"all_reduce"}
    before, levels = nbytes["used"], [nbytes["updated"]]
    for hop in path:
        whole, after = (float(part.local_bytes(sent, mesh)) for part in (hop.src, hop.dst))
        levels += [before + whole] if before != whole else []  # cast
        levels.append(whole + after + reduction_staging(hop, whole, after, mesh, accelerator))
        before = after
    levels += [before + nbytes["updated"]] if before != nbytes["updated"] else []
    return StoredTraffic(tensor, own, trained, seconds, nbytes, apart, max(levels), at_end)


def bucket_of(graph: Graph) -> int:
    """Bytes of gradients, or of parameters, that go together: a tenth of a small model, or a block.

    In a block's bucket there is what FSDP gathers and reduces as one (arXiv:2304.11277, section 4).
    """
    leaves = {leaf.name: leaf.type.nbytes for leaf in graph.leaves("param") if leaf.requires_grad}
    blocks = [sum(leaves.get(n, 0) for n in repeat.iterations[0]) for repeat in graph.repeats]
    return max(min(BUCKET, max(sum(leaves.values()) // 10, *blocks, 1)), 1)


def away_of(graph: Graph, chip: Device, bucket: int, waits: bool) -> Away:
    """What it means for a parameter that optimizer state lies in host memory.

    Args:
        graph: whose parameters they are.
        chip: what the state comes to.
        bucket: bytes of parameters whose state comes together.
        waits: whether one bucket goes before the next one comes.
    """
    trained = sum(leaf.type.nbytes for leaf in graph.leaves("param") if leaf.requires_grad)
    return Away(
        (2 if waits else 1) / (chip.host_bandwidth * chip.host_efficiency),
        min((1 if waits else IN_FLIGHT) * bucket / max(trained, 1), 1.0),
    )


def undominated(
    options: Sequence[Option], costs: Sequence[StoredCost]
) -> tuple[tuple[Option, ...], tuple[StoredCost, ...]]:
    """The choices that no other with the same layout in use beats; of equals the first.

    Those that split no state stay: at one price they are the plainest (see `polish`).
    """
    kept: dict[object, list[int]] = {}
    plain: list[int] = []
    for at, (option, cost) in enumerate(zip(options, costs, strict=True)):
        if option.storage is not None and not option.storage.axes("updated"):
            plain.append(at)
            continue
        rivals = kept.setdefault(option.results, [])
        if not any(costs[rival].dominates(cost) for rival in rivals):
            rivals[:] = [rival for rival in rivals if not cost.dominates(costs[rival])]
            rivals.append(at)
    left = sorted([*plain, *(at for rivals in kept.values() for at in rivals)])
    return tuple(options[at] for at in left), tuple(costs[at] for at in left)

"""Cost of a parameter's storage: seconds of its collectives, bytes of its states.

A parameter interacts with the rest of the problem only through the layout in which it is used. Of
the choices with one such layout, those that are worse than another in every respect are dropped; no
optimum is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost.device import Device
from autopar.cost.model import CostModel
from autopar.cost.operator_memory import reduction_staging
from autopar.cost.work import Work, accumulation_work, copy_work
from autopar.intra_op.memory.lifetimes import Role
from autopar.intra_op.node_choices import Option
from autopar.ir.collective import Collective
from autopar.ir.executed.execution import AS_WRITTEN, Execution
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.offload import IN_FLIGHT
from autopar.ir.precision import AS_IS, Precision
from autopar.ir.storage import BUCKET, EACH, REDUCED, Storage
from autopar.ir.tensor import TensorType
from autopar.ir.update import LocalState, Rule, nbytes_in, owner_hops, states_of
from autopar.ir.update.ownership import OWNERS

Figure = Any  # of one choice, or an array with that of each choice
States = Callable[[bool, bool], tuple[LocalState, ...]]


@dataclass(frozen=True)
class HostStateCost:
    """Optimizer state in host memory.

    Attributes:
        seconds: per byte, for the copies from and to the host; on accelerators they overlap.
        share: share of the state that is on the device at a time during the update.
    """

    seconds: float
    share: float


@dataclass(frozen=True)
class StoredCost:
    """Choices of a parameter, in seconds and bytes: figures of one, or arrays of several.

    Attributes:
        seconds: its collectives for one microbatch, with its part of the costs once per step.
        synchronised: collectives of its gradient for which only the optimizer waits; included in
            `seconds`.
        fetched, refetched: gathering it for the forward and in the backward, overlapped with the
            previous block, or with the forward once it is updated; included in `seconds`.
        reduced: its gradient's collectives once per step; seconds of a whole step.
        gathered: gathering it after the optimizer has run; seconds of a whole step.
        added: kernels of its own, which add its gradient to those of earlier microbatches, and copy
            out of and into messages; included in `seconds`.
        nbytes: bytes by role; see `lifetimes.Role`.
        host: bytes in host memory.
    """

    seconds: Figure
    synchronised: Figure
    fetched: Figure
    refetched: Figure
    reduced: Figure
    gathered: Figure
    added: Figure
    nbytes: dict[Role, Figure]
    host: Figure = 0.0

    def held(self, trained: bool) -> Figure:
        """Returns the bytes held for most of a step, with the gradient if it is trained."""
        gradient = np.maximum(self.nbytes["gradient"], self.nbytes["accumulated"]) * trained
        return self.nbytes["leaf"] + self.nbytes["gathered"] + gradient

    @property
    def parts(self) -> tuple[Figure, ...]:
        """Returns the seconds that are exposed, hidden by the backward, hidden by the forward."""
        behind = self.synchronised + self.refetched
        return self.seconds - behind - self.fetched, behind, self.fetched

    def within(self, ahead: float, behind: float, microbatches: int) -> StoredCost:
        """Returns the costs where only so many seconds of kernels are left to overlap with.

        Args:
            ahead: seconds of the kernels that run before it is read.
            behind: seconds of the kernels that run once its gradient is complete.
            microbatches: number in a step; a reduction once per step overlaps with the last.
        """
        last = np.minimum(self.synchronised, self.reduced / microbatches)
        synchronised = np.minimum(last, behind / microbatches)
        synchronised += np.minimum(self.synchronised - last, behind)
        return replace(self, fetched=np.minimum(self.fetched, ahead), synchronised=synchronised)

    def of(self, places: Sequence[int]) -> StoredCost:
        """Returns some of several choices."""
        at = list(places)
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        nbytes = {role: each[at] for role, each in given.pop("nbytes").items()}
        return StoredCost(**{name: each[at] for name, each in given.items()}, nbytes=nbytes)


@dataclass(frozen=True)
class StoredTraffic:
    """Traffic and memory of one choice of a parameter, or of several, for any microbatches.

    Attributes:
        seconds: its collectives, each once, by when they run; see `storage.Hop`.
        nbytes: bytes of its layouts, by their names in `Storage`; `grads` and `updated` in `own`'s
            type.
        state_bytes: returns the bytes of its states on the device and in host memory, given whether
            they are kept in host memory, and whether a kernel updates parts in flat buffers.
        separate_gathers: whether it is gathered separately for the forward and for the backward.
        reducing: peak bytes of its gradient during the reduction.
        at_end: whether gradients are reduced after the backward, all at once.
        residual: bytes of the residuals of compressed messages that a skipped step must restore.
        added: seconds of adding a gradient to those of earlier microbatches.
        copied: seconds of copying it out of its messages and its gradient into them, where a system
            does so, by when they are sent.
    """

    seconds: dict[str, Figure]
    nbytes: dict[str, Figure]
    state_bytes: Callable[[bool, bool], tuple[Figure, Figure]]
    separate_gathers: tuple[Figure, Figure]
    reducing: Figure
    at_end: Figure
    residual: Figure
    added: Figure
    copied: dict[str, Figure]

    @classmethod
    def of(cls, every: Sequence[StoredTraffic]) -> StoredTraffic:
        """Returns the traffic of several choices, in arrays."""

        def rows(figures: Callable[[StoredTraffic], Mapping[str, Figure]]) -> dict[str, Figure]:
            table = list(map(figures, every))
            return {name: np.array([row[name] for row in table]) for name in table[0]}

        def state_bytes(away: bool, in_parts: bool) -> tuple[Figure, Figure]:
            device, host = np.array([one.state_bytes(away, in_parts) for one in every]).T
            return device, host

        forward, backward = np.array([one.separate_gathers for one in every]).T
        return cls(
            rows(lambda one: one.seconds),
            rows(lambda one: one.nbytes),
            cache(state_bytes),
            (forward, backward),
            np.array([one.reducing for one in every]),
            np.array([one.at_end for one in every]),
            np.array([one.residual for one in every]),
            np.array([one.added for one in every]),
            rows(lambda one: one.copied),
        )

    def cost(
        self,
        microbatches: int,
        waits: bool,
        again: float = 0.0,
        away: HostStateCost | None = None,
        fused: bool = False,
        how: Execution = AS_WRITTEN,
    ) -> StoredCost:
        """Returns the price of the choice, or of each choice.

        Args:
            microbatches: number in a step.
            waits: whether the program waits for each collective.
            again: share of its blocks that are recomputed in the backward, and gather it again.
            away: costs of optimizer state in host memory, None if it is on the device.
            fused: whether the update is one kernel, which needs no temporaries.
            how: whether products add gradients, whether it is gathered beside the next forward,
                and whether it is copied out of messages, and its gradient into them.
        """
        totals, copied = (
            {name: each * (microbatches if name in EACH else 1) for name, each in kind.items()}
            for kind in (self.seconds, self.copied)
        )
        for kind in (totals, copied):
            # A recomputed block gathers it for that, and then has it for the backward.
            kind["backward"] = kind["forward"] * again + kind["backward"] * (1 - again)
        shown = 0.0 if waits else 1 / microbatches
        synchronised = shown * (totals["accumulate"] + totals["reduce"])
        fetched = shown * (totals["forward"] + totals["update"] * how.ahead)
        refetched = shown * totals["backward"]
        used, updated = self.nbytes["used"], self.nbytes["updated"]
        forward_separate, backward_separate = self.separate_gathers
        reduction_scratch = np.maximum(self.reducing - updated, 0.0)
        state, host = self.state_bytes(away is not None, fused)
        coming = 0.0 if away is None else host * away.seconds
        updating = updated if away is None else away.share * (updated + host)
        nbytes: dict[Role, Figure] = {
            "leaf": self.nbytes["held"] + state + self.residual,
            "gathered": self.nbytes["kept"] * forward_separate,
            "fetched": used * backward_separate,
            "waiting": used,
            "backward": reduction_scratch * (1.0 - self.at_end),
            "summed": reduction_scratch * self.at_end,
            "gradient": updated,
            "accumulated": self.nbytes["grads"] * (microbatches > 1),
            "update": updating * (not fused),
        }
        added = self.added * (microbatches > 1 and not how.adds)
        added += how.copies * sum(copied.values()) / microbatches
        return StoredCost(
            (sum(totals.values()) + coming) / microbatches + added,
            synchronised,
            fetched,
            refetched,
            totals["reduce"],
            totals[OWNERS] + totals["update"] + coming,
            added,
            nbytes,
            host,
        )


def stored_traffic(
    tensor: TensorType,
    trained: bool,
    storage: Storage,
    mesh: Mesh,
    model: CostModel,
    rule: Rule,
    bucket: int = 1,
    precision: Precision = AS_IS,
) -> StoredTraffic:
    """Returns the traffic and memory of one choice of a parameter.

    Args:
        tensor: type of the parameter.
        trained: whether it has a gradient.
        storage: its storage.
        mesh, model: the devices and their prices.
        rule: how it is updated.
        bucket: bytes of gradients or parameters that are sent together.
        precision: dtypes in which it is updated and its gradient sent.
    """
    own, sent = precision.updated(tensor, trained), precision.sent(tensor, trained)
    seconds = dict.fromkeys((*EACH, "reduce", OWNERS, "update"), 0.0)
    copied = dict.fromkeys((*EACH, "reduce", "update"), 0.0)
    hops = storage.hops(tensor, mesh, 1, trained, precision)
    for hop in hops:
        if hop.when in copied:
            message, kind = (hop.src, sent) if hop.when in REDUCED else (hop.dst, tensor)
            read, written = (float(message.local_bytes(each, mesh)) for each in (tensor, kind))
            copied[hop.when] = model.compute(copy_work(read, written, tensor.dtype))
    for hop in (*hops, *(owner_hops(rule, storage, own, mesh) if trained else ())):
        seconds[hop.when] += hop.seconds(model.collective, bucket)
    types = {"held": tensor, "used": tensor, "kept": tensor, "grads": own, "updated": own}
    nbytes = {
        name: float(getattr(storage, name).local_bytes(type, mesh)) for name, type in types.items()
    }
    separate = storage.held.dims != storage.kept.dims, storage.kept.dims != storage.used.dims
    accelerator = mesh.device.lower() != "cpu"
    path = [hop for hop in hops if hop.when in REDUCED]
    # A CPU sums all gradients that need only an all_reduce at once.
    at_end = not accelerator and {hop.call.kind for hop in path} == {"all_reduce"}
    before, levels = nbytes["used"], [nbytes["updated"]]
    for hop in path:
        whole, after = (float(part.local_bytes(sent, mesh)) for part in (hop.src, hop.dst))
        levels += [before + whole] if before != whole else []  # cast
        levels.append(whole + after + reduction_staging(hop, whole, after, mesh, accelerator))
        before = after
    levels += [before + nbytes["updated"]] if before != nbytes["updated"] else []
    states = partial(states_of, rule, storage, tensor, mesh, precision) if trained else _no_states
    state_bytes = cache(partial(_state_bytes, states))
    residual = float(sum(hop.residual for hop in hops))
    arriving = sent if any(hop.when == "accumulate" for hop in hops) else tensor
    gradient = float(storage.grads.local_bytes(arriving, mesh))
    added = model.compute(accumulation_work(gradient, nbytes["grads"], own.dtype)) * trained
    return StoredTraffic(
        seconds, nbytes, state_bytes, separate, max(levels), at_end, residual, added, copied
    )


def _state_bytes(states: States, away: bool, in_parts: bool) -> tuple[float, float]:
    kept = states(away, in_parts)
    return nbytes_in(kept, "device"), nbytes_in(kept, "host")


def _no_states(away: bool, in_parts: bool) -> tuple[LocalState, ...]:
    return ()


def bucket_of(graph: Graph) -> int:
    """Returns the bytes of gradients or parameters sent together: a block, or a tenth of the model.

    A block's bucket holds the parameters of one FSDP unit (arXiv:2304.11277, section 4).
    """
    leaves = {leaf.name: leaf.type.nbytes for leaf in graph.leaves("param") if leaf.requires_grad}
    blocks = [sum(leaves.get(n, 0) for n in repeat.iterations[0]) for repeat in graph.repeats]
    return max(min(BUCKET, max(sum(leaves.values()) // 10, *blocks, 1)), 1)


def bucket_by_price(graph: Graph, mesh: Mesh, prices: CostModel) -> int:
    """Returns the bytes of gradients or parameters sent together, by measured prices.

    Tensors of many owners that share a call pay its latency once, and are copied into and out of a
    common buffer. If copies take longer than the calls that they save, buckets are smaller than
    `bucket_of` returns, down to one for each tensor. A typical call is a reduce_scatter over all
    axes.

    Args:
        graph: graph with the parameters.
        mesh: the devices.
        prices: prices of calls and copies, as measured; closed forms ignore what a host pays for a
            call.
    """
    most, axes = bucket_of(graph), tuple(axis.name for axis in mesh.axes if axis.size > 1)
    leaves = [leaf.type for leaf in graph.leaves("param") if leaf.requires_grad]

    def seconds(bucket: int) -> float:
        total, waiting = 0.0, list[TensorType]()
        for number, leaf in enumerate(leaves, 1):
            waiting.append(leaf)
            nbytes = sum(each.nbytes for each in waiting)
            if nbytes < bucket and number < len(leaves):
                continue
            total += prices.collective(Collective("reduce_scatter", axes, nbytes))
            if len(waiting) > 1:  # in: all is read and written; out: a part of it
                moved = 2.0 * nbytes * (1 + 1 / mesh.size)
                total += prices.compute(Work("aten.cat", 0.0, moved, leaf.dtype))
            waiting.clear()
        return total

    smaller = [1 << power for power in range(0, most.bit_length(), 2) if 1 << power < most]
    return min([most, *reversed(smaller)], key=seconds) if axes else most


def away_of(graph: Graph, chip: Device, bucket: int, waits: bool) -> HostStateCost:
    """Returns the costs of optimizer state in host memory.

    Args:
        graph: graph with the parameters.
        chip: the device.
        bucket: bytes of parameters whose state is copied together.
        waits: whether one bucket is written back before the next is read.
    """
    trained = sum(leaf.type.nbytes for leaf in graph.leaves("param") if leaf.requires_grad)
    return HostStateCost(
        (2 if waits else 1) / (chip.host_bandwidth * chip.host_efficiency),
        min((1 if waits else IN_FLIGHT) * bucket / max(trained, 1), 1.0),
    )


def undominated(
    options: Sequence[Option], cost: StoredCost
) -> tuple[tuple[Option, ...], StoredCost]:
    """Returns the choices that no other with the same layout in use beats; of equals the first.

    Choices that split no state stay: at equal price they are the plainest (see `polish`).
    """
    left: list[int] = []
    used_alike: dict[object, list[int]] = {}
    for at, option in enumerate(options):
        plain = option.storage is not None and not option.storage.axes("updated")
        (left if plain else used_alike.setdefault(option.results, [])).append(at)
    seconds, nbytes = np.array(cost.parts).T, np.array([*cost.nbytes.values()]).T
    for places in used_alike.values():
        better = _dominates(seconds[places], nbytes[places])
        kept: list[int] = []
        for at in range(len(places)):
            if not better[kept, at].any():
                kept = [rival for rival in kept if not better[at, rival]] + [at]
        left += [places[at] for at in kept]
    left.sort()
    return tuple(options[at] for at in left), cost.of(left)


def _dominates(seconds: NDArray[np.float64], nbytes: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns for each pair of choices whether the first is at least as good in every respect."""
    faster = seconds[:, None] <= seconds[None] * (1 + 1e-12)
    smaller = nbytes[:, None] <= nbytes[None]
    return np.logical_and(faster.all(axis=2), smaller.all(axis=2))

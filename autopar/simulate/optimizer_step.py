"""The optimizer of a simulated step; its state may come from host memory, bucket by bucket.

Masters come with it. Afterwards they are rounded to the stored parameters, unless AdamW's kernel
writes these too. That kernel has one launch for every buffer of gradients: the results of
reduce_scatters, a bucket that was all_reduced, gradients that were cast together, small gradients
that are copied together, and every other gradient by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.work import (
    Work,
    adamw_work,
    optimizer_work,
    products_works,
    rounding_work,
)
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.offload import rows
from autopar.ir.precision import Precision
from autopar.ir.storage import BUCKET, COPIED, REDUCED, Storage, scattered
from autopar.ir.tensor import DTYPE_BYTES
from autopar.ir.update import LocalState, Rule, nbytes_in, owner_hops, states_of
from autopar.simulate.buffers import Buffer, Recorder
from autopar.simulate.owned_update import Owned, owned_update
from autopar.simulate.settings import Settings
from autopar.stage_plan import StagePlan


@dataclass(frozen=True)
class Updated:
    """Part of a parameter that this device updates.

    Attributes:
        name: name of the node.
        nbytes, dtype: bytes and dtype of the updated tensor.
        rounded: bytes of the tensor in a lower precision that is cast from it; 0 if it is no
            master.
        stays: whether this device holds that cast tensor, which is then not sent to others.
        sent: bytes of its gradient in a bucket, 0 if it is not reduced or comes as a message.
        scattered: whether its gradient is placed in a buffer with those of other parameters.
        cast: whether a gradient that is in no bucket comes in another dtype.
        states: bytes of the states that its rule names.
        coming: bytes of states that come from host memory for the update, if they are kept there.
        owned: set if one device updates all of it, for the others.
        products: products of matrices by which this device updates it alone.
    """

    name: str
    nbytes: float
    dtype: str
    rounded: float = 0.0
    stays: bool = False
    sent: float = 0.0
    scattered: bool = False
    cast: bool = False
    states: float = 0.0
    coming: float = 0.0
    owned: Owned | None = None
    products: tuple[Work, ...] = ()


def updated_of(graph: Graph, plan: StagePlan, node: Node) -> Updated:
    """Returns the part of a parameter that a device updates, under the plan's storage.

    Args:
        graph: prepared.
        plan: for it.
        node: a parameter that something reads.
    """
    share = graph.template[graph.users[node.name][0]]
    storage = plan.storage(graph.template[node.name], share)
    rule = plan.update.rule(node.target, node.type.shape)
    return updated_in(storage, node, plan.mesh, plan.precision, rule)


def updated_in(
    storage: Storage, node: Node, mesh: Mesh, precision: Precision, rule: Rule
) -> Updated:
    """Returns the part of a parameter that a device updates, given its storage and rule."""
    own = precision.updated(node.type, node.requires_grad)
    nbytes = float(storage.updated.local_bytes(own, mesh))
    hops = storage.hops(node.type, mesh, 1, node.requires_grad, precision)
    whens = {hop.when for hop in hops}
    sent = precision.sent(node.type, node.requires_grad)
    # Compressed messages are decoded tensor by tensor.
    last = [hop.call for hop in hops if hop.when in REDUCED][-1:]
    reduced = any(not call.compression for call in last)
    bucketed = float(storage.used.local_bytes(sent, mesh)) if reduced else 0.0
    together = scattered(hops) and sent == own
    master = precision.has_master(node.type, node.requires_grad)
    rounded = float(storage.updated.local_bytes(node.type, mesh)) if master else 0.0
    stays = "update" not in whens
    away: tuple[LocalState, ...] = ()
    if node.requires_grad:
        away = states_of(rule, storage, node.type, mesh, precision, away=True)
    coming = nbytes_in(away, "host")
    read = nbytes_in((kept for kept in away if kept.state.in_steps), "host")
    path = owner_hops(rule, storage, own, mesh) if node.requires_grad else ()
    owned = Owned(node.name, own, rule, path) if path else None
    alone = node.requires_grad and not path
    cast = sent != own if last else master
    return Updated(
        node.name,
        nbytes,
        own.dtype,
        rounded,
        stays,
        bucketed,
        together,
        cast,
        read - nbytes * master,
        coming,
        owned,
        products_works(rule.products, own) if alone else (),
    )


def update_works(
    trained: Sequence[Updated], fused: bool, bucket: int = BUCKET, each: float = 0.0
) -> list[Work]:
    """The kernels of an update of all of these at once, and of the rounding of masters.

    Args:
        trained: not empty.
        fused: whether it is AdamW's kernel, which also casts the parameters that stay.
        bucket: bytes of gradients that are reduced together.
        each: bytes moved for each parameter, if a system's are known; 0 for these kernels' own.
    """
    if each:
        values = sum(one.nbytes / DTYPE_BYTES[one.dtype] for one in trained)
        return [Work("optimizer", 12 * values, each * values, trained[0].dtype)]
    dtype, nbytes = trained[0].dtype, sum(each.nbytes for each in trained)
    works = [optimizer_work(nbytes, sum(each.states for each in trained), dtype)]
    works += [work for each in trained for work in each.products]
    left = [each for each in trained if each.rounded]
    if fused:
        works = _adamw_works(trained, bucket)
        left = [each for each in left if not each.stays]
    if left:
        masters, rounded = (sum(getattr(e, n) for e in left) for n in ("nbytes", "rounded"))
        works.append(rounding_work(masters, rounded, dtype))
    return works


def _adamw_works(trained: Sequence[Updated], bucket: int) -> list[Work]:
    """The launches of AdamW's kernel, and the copies of small gradients that are made for it."""
    buffers: list[list[Updated]] = []
    size = float(bucket)  # of the last buffer; the first gradient begins one
    for each in (each for each in trained if each.sent and not each.scattered):
        if size >= bucket:
            buffers.append([])
            size = 0.0
        buffers[-1].append(each)
        size += each.sent
    parts = [each for each in trained if each.scattered]
    apart = [each for each in trained if not each.sent]
    cast = [each for each in apart if each.cast]
    small = _copied(trained)
    buffers += [together for together in (parts, cast, small) if together]
    buffers += [[each] for each in apart if not each.cast and each not in small]
    works = []
    if small:
        moved = 2 * sum(each.nbytes for each in small)
        works.append(Work("copy", 0.0, moved, small[0].dtype))
    for row in buffers:
        rounded = sum(each.rounded for each in row if each.stays)
        works.append(adamw_work(sum(each.nbytes for each in row), rounded, row[0].dtype))
    return works


def _copied(trained: Sequence[Updated]) -> list[Updated]:
    """Returns the parameters whose small gradients are copied together."""
    apart = [each for each in trained if not each.sent and not each.cast]
    small = [each for each in apart if each.nbytes < COPIED]
    return small if len(small) > 1 else []


@dataclass
class _MovedState:
    """The state of some parameters, on its way: its buffer, and the task that moves it, or -1."""

    buffer: Buffer
    task: int


def update(
    recorder: Recorder,
    settings: Settings,
    trained: Sequence[Updated],
    plan: StagePlan,
    away: bool,
) -> None:
    """Simulates the updates of the optimizer's phase.

    Args:
        recorder: takes the tasks.
        settings: settings of the step.
        trained: parameters that have a gradient.
        plan: decides whether it is AdamW's kernel, which needs no temporaries.
        away: whether optimizer state comes from host memory.
    """
    if not away:
        _step(recorder, settings, trained, plan)
        _owned_step(recorder, trained, plan)
        return
    buckets = list(rows(trained, plan.bucket))
    coming = _come(recorder, settings, buckets, 0)
    going: _MovedState | None = None
    for number, row in enumerate(buckets):
        here = coming
        if here is not None and here.task >= 0:
            recorder.compute("wait for optimizer state", "", (), [here.task])
        if settings.accelerator:
            coming = _come(recorder, settings, buckets, number + 1)
        _step(recorder, settings, row)
        _owned_step(recorder, row, plan)
        if going is not None:
            _gone(recorder, going)
        going = None if here is None else _go(recorder, settings, here)
        if not settings.accelerator:
            coming = _come(recorder, settings, buckets, number + 1)
    if going is not None:
        _gone(recorder, going)


def _owned_step(recorder: Recorder, trained: Sequence[Updated], plan: StagePlan) -> None:
    """Simulates the part of the update that owners compute."""
    if owned := [each.owned for each in trained if each.owned is not None]:
        owned_update(recorder, owned, plan.mesh.size)


def _step(
    recorder: Recorder,
    settings: Settings,
    trained: Sequence[Updated],
    plan: StagePlan | None = None,
) -> None:
    """Simulates one step of the optimizer, by a kernel if the plan fuses the update."""
    fused, bucket = plan is not None and plan.fuses_update, BUCKET if plan is None else plan.bucket
    at_once = settings.at_once or fused
    groups = [list(trained)] if at_once and trained else [[each] for each in trained]
    last: Buffer | None = None
    for group in groups:
        nbytes = sum(each.nbytes for each in group)
        name = "update" if at_once else f"update of {group[0].name}"
        works = update_works(group, fused, bucket, settings.optimizer)
        recorder.compute(name, "", tuple(works))
        if fused:
            copied = sum(each.nbytes for each in _copied(group))
            recorder.scratch("temporary", "gradients copied together", copied)
            continue
        recorder.scratch("temporary", f"of {name}", nbytes * max(settings.update_bytes - 1, 0.0))
        # The loop's variable keeps it until the next parameter has its own.
        inside = nbytes * min(settings.update_bytes, 1.0)
        kept = recorder.hold(recorder.allocate("temporary", f"in {name}", inside))
        if last is not None:
            recorder.drop(last)
        last = kept
    if last is not None:
        recorder.drop(last)


def _come(
    recorder: Recorder, settings: Settings, buckets: Sequence[Sequence[Updated]], number: int
) -> _MovedState | None:
    """The state of a bucket comes."""
    if number >= len(buckets):
        return None
    nbytes = sum(each.coming for each in buckets[number])
    if not nbytes:
        return None
    title = f"state of {buckets[number][0].name}"
    with recorder.aside(settings.accelerator):
        task = recorder.copy(title, nbytes, True, not settings.accelerator)
        return _MovedState(recorder.hold(recorder.allocate("optimizer", title, nbytes)), task)


def _go(recorder: Recorder, settings: Settings, here: _MovedState) -> _MovedState:
    """Moves the state back to host memory."""
    with recorder.aside(settings.accelerator):
        nbytes = here.buffer.nbytes
        task = recorder.copy(here.buffer.name, nbytes, False, not settings.accelerator)
    if task < 0:
        recorder.drop(here.buffer)
    return _MovedState(here.buffer, task)


def _gone(recorder: Recorder, away: _MovedState) -> None:
    """Frees the memory of a tensor that has gone to the host."""
    if away.task >= 0:
        recorder.compute("wait for the host", "", (), [away.task])
        recorder.drop(away.buffer)

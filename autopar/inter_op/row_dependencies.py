"""Dependencies of the actions of rows, and the link of each send."""

from __future__ import annotations

import numpy as np

from autopar.inter_op.whole_rows import CODE, B, Columns, F, I, Ints, W
from autopar.ir.action import ALL, SYNC_AWAIT, SYNC_BEGIN, UPDATE
from autopar.ir.pipeline_step import Step

_SEND_F, _SEND_B, _BEGIN, _AWAIT, _UPDATE = (
    CODE[kind] for kind in ("SEND_F", "SEND_B", SYNC_BEGIN, SYNC_AWAIT, UPDATE)
)


def links(columns: Columns, step: Step) -> tuple[Ints, Ints]:
    """Returns the hop and the link of each send; -1 for other actions."""
    hop, link = (np.full(len(columns.flat), -1) for _ in range(2))
    placed = np.array(step.placement)
    for kind, way in ((_SEND_F, 1), (_SEND_B, -1)):
        at = np.flatnonzero(columns.kind == kind)
        others = np.array([columns.flat[n].partner for n in at.tolist()], np.int64)
        peer = placed[columns.copy[at], others]
        link[at] = columns.rank[at] * len(step.rows) + peer
        near = others == columns.stage[at] + way
        hop[at[near]] = np.minimum(columns.stage[at], others)[near]
    begun = columns.kind == _BEGIN
    link[begun] = columns.rank[begun] * (len(step.rows) + 1)  # from a rank to itself
    return hop, link


def dependencies(columns: Columns, step: Step) -> tuple[Ints, Ints]:
    """Returns the dependencies of all actions, and the start of each action's dependencies."""
    done = [columns.where(kind) for kind in (F, B, I, W)]
    backward = np.maximum(done[B], done[I])
    pairs = [(backward, done[F]), (done[W], done[I])]
    partner = np.array([action.partner if action.kind[0] == "S" else -1 for action in columns.flat])
    for maker, reader, gradient in step.wiring.edges:
        for kind, made, one, other in (
            (_SEND_F, done[F], maker, reader),
            (_SEND_B, backward, reader, maker),
        )[: 1 + gradient]:
            sent = columns.where(kind, partner == other)[:, one]
            own = [ranks[one] == ranks[other] for ranks in step.placement]
            brought = np.where(np.array(own)[:, None], made[:, one], sent)
            pairs.append(((done[F] if kind == _SEND_F else backward)[:, other], brought))
    pairs += [*_ends(columns), _sums(columns)]
    at, need = (np.concatenate([pair[side].ravel() for pair in pairs]) for side in (0, 1))
    there = (at >= 0) & (need >= 0)
    at, need = at[there], need[there]
    count = np.bincount(at, minlength=len(columns.flat))
    return need[np.argsort(at, kind="stable")], np.concatenate(([0], np.cumsum(count)))


def _sums(columns: Columns) -> tuple[Ints, Ints]:
    """Returns where sums are awaited, and where each begins."""
    flat = columns.flat
    begun = {flat[at]: at for at in np.flatnonzero(columns.kind == _BEGIN).tolist()}
    awaited = np.flatnonzero(columns.kind == _AWAIT)
    begins = (begun.get(flat[at]._replace(kind=SYNC_BEGIN), -1) for at in awaited.tolist())
    return awaited, np.array([*begins], np.int64)


def _ends(columns: Columns) -> list[tuple[Ints, Ints]]:
    """Returns the dependencies of final updates on the actions before them on all ranks."""
    ends = (columns.kind == _UPDATE) & (columns.batch == ALL)
    if not ends.any():
        return []
    first = np.array([np.flatnonzero(ends & (columns.rank == r))[0] for r in set(columns.rank)])
    before = first[first > columns.begins[columns.rank[first]]] - 1
    return [(np.repeat(first, len(before)), np.tile(before, len(first)))]

"""All states of a parameter on a device: those of its optimizer, and those that a plan adds.

    master[*]        what the optimizer updates, if operators use the parameter in another dtype
    part[*]          the part that the optimizer's kernel updates, in a flat buffer of its own
    exp_avg[*], ...  of the rule, an average and those of an outer method among them
    left_out[4 *]    the residual of compressed messages; it never leaves the device

Planner, simulator, explanations and the runtime iterate over this list, and do not depend on names
in it. Sizes are relative to the elements that the device updates: "[4 *]" has four elements for
each of those. Numbers that the optimizer counts on the host are not part of the list.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.ir.storage import Storage
from autopar.ir.tensor import DTYPE_BYTES, TensorType
from autopar.ir.update.ownership import is_dealt
from autopar.ir.update.update_rules import ANY, Rule, State

MASTER, PART, LEFT_OUT = "master", "part", "left_out"
DEVICE, HOST = "device", "host"
_NUMBER = TensorType("f32", ())


@dataclass(frozen=True)
class LocalState:
    """A state of one parameter on a device, between steps.

    Attributes:
        state: its name, dtype, extents and place.
        nbytes: its bytes; if owners keep it, their mean.
        whole: whether the owner of the parameter keeps it whole.
    """

    state: State
    nbytes: float
    whole: bool = False


@lru_cache(maxsize=1 << 14)
def states_of(
    rule: Rule,
    storage: Storage,
    tensor: TensorType,
    mesh: Mesh,
    precision: Precision,
    away: bool = False,
    in_parts: bool = False,
) -> tuple[LocalState, ...]:
    """Returns all states of a trained parameter on a device.

    Args:
        rule: rule of its update.
        storage: its layouts.
        tensor: its type.
        mesh: the devices.
        precision: dtypes of updates and messages.
        away: whether states that only the update needs are kept in host memory.
        in_parts: whether a kernel updates parts in flat buffers.
    """
    return tuple(_states(rule, storage, tensor, mesh, precision, away, in_parts))


def _states(
    rule: Rule,
    storage: Storage,
    tensor: TensorType,
    mesh: Mesh,
    precision: Precision,
    away: bool,
    in_parts: bool,
) -> Iterator[LocalState]:
    own = precision.updated(tensor)
    part = TensorType(own.dtype, storage.updated.local_shape(own.shape, mesh))
    cut = part.shape != storage.held.local_shape(own.shape, mesh)
    whole = rule.keeps_whole and is_dealt(rule, storage, mesh)
    states = [s for s in rule.states if (s.place, s.lifetime) == (DEVICE, "kept")]
    if precision.has_master(tensor):
        yield _of_part(State(MASTER, own.dtype), part, away)
    elif in_parts and cut and not away:
        yield _of_part(State(PART), part, away)
    for state in states:
        if whole:
            placed = replace(state, place=HOST if away else DEVICE)
            yield LocalState(placed, state.nbytes(own) / mesh.size, whole)
        else:
            yield _of_part(state, part, away)
    left = sum(hop.residual for hop in storage.hops(tensor, mesh, 1, True, precision))
    if left:
        dtype = "f64" if precision.sent(tensor).dtype == "f64" else "f32"
        share = left / (DTYPE_BYTES[dtype] * part.numel)
        extents = ANY if share == 1 else f"{share:.12g} {ANY}"
        yield LocalState(State(LEFT_OUT, dtype, extents), float(left))


def _of_part(state: State, part: TensorType, away: bool) -> LocalState:
    return LocalState(replace(state, place=HOST if away else DEVICE), state.nbytes(part))


def shared_states(precision: Precision) -> tuple[LocalState, ...]:
    """Returns the states that belong to no parameter: the loss scale, and the steps it has held."""
    if not precision.scaled:
        return ()
    states = State("loss_scale", "f32", ""), State("good_steps", "i64", "")
    return tuple(LocalState(state, state.nbytes(_NUMBER)) for state in states)


def nbytes_in(states: Iterable[LocalState], place: str) -> float:
    """Returns the bytes of states in DEVICE or HOST memory."""
    return math.fsum(kept.nbytes for kept in states if kept.state.place == place)

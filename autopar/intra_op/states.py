"""The table of named state shardings; a new one is one line."""

from __future__ import annotations

import difflib

from autopar.errors import StateError
from autopar.ir.state import StateSharding

STATES: dict[str, StateSharding] = {
    name: StateSharding.parse(levels)
    for name, levels in {
        "ddp": "NNN",  # arXiv:2006.15704
        "zero1": "NNG",  # arXiv:1910.02054, as are the next two
        "zero2": "NGG",
        "zero3": "GGG",
        "zero++": "GGG+I",  # arXiv:2306.10209, without quantisation
        "hsdp": "III",  # arXiv:2304.11277, hybrid sharding
        "mics": "III",  # arXiv:2205.00119
        "paro-nig": "NIG",  # arXiv:2310.06003, as are the next two
        "paro-igg": "IGG",
        "paro-iig": "IIG",
    }.items()
}


def state(name: str) -> StateSharding:
    """The state sharding of that name, or the one that its letters tell ("NIG").

    Raises:
        StateError: neither; names the nearest known.
    """
    if name in STATES:
        return STATES[name]
    try:
        return StateSharding.parse(name)
    except StateError as error:
        near = difflib.get_close_matches(name, STATES) or list(STATES)
        raise StateError(
            f"{name!r} is not a state sharding",
            why=f"the nearest known are {', '.join(near)}",
            todo='use one of those, or three letters of N, I and G as in "NIG"',
        ) from error

"""Fused kernels that can replace operators that a model writes out.

Patterns are in `patterns/`, one kernel or family per file; `pattern.py` defines them, and
`autopar/passes/fusion.py` applies them. A mixture of experts is already one operator, with an
argument that selects kernels (`autopar/operators/mixture.py`). Three fusions have no pattern, since
they are not part of the graph: the optimizer's step, rotary embedding together with a plan's
exchange of rows for heads (`packed.py`), and a plan's collectives beside linears
(`async_tensor_parallel.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.errors import ProgramError
from autopar.ir.fusion.async_tensor_parallel import ASYNC
from autopar.ir.fusion.packed import PACK
from autopar.ir.fusion.pattern import Match, Pattern
from autopar.ir.fusion.patterns import names, patterns

__all__ = [
    "ASKED_FOR",
    "ASYNC",
    "EXPERTS",
    "PACK",
    "UPDATE",
    "Fuse",
    "Match",
    "Pattern",
    "choose",
    "names",
    "patterns",
    "switches",
]

EXPERTS = "experts"  # the name in `fuse` for the kernels of a mixture
UPDATE = "adamw"  # the name in `fuse` for the optimizer's kernel

# On only if named: torch's operators for it have not been run on a GPU here, and their gain is only
# predicted. torchtitan leaves it off, too.
ASKED_FOR = (ASYNC,)

Fuse = bool | Mapping[str, bool] | Sequence[str]


def switches() -> tuple[str, ...]:
    """Returns all names that `fuse` accepts."""
    return (*names(), EXPERTS, PACK, ASYNC, UPDATE)


def choose(fuse: Fuse) -> tuple[str, ...]:
    """Returns the names of the patterns that a user selects.

    Args:
        fuse: True for all, False for none, a list of names, or a mapping that switches names off.
            Patterns in `ASKED_FOR` must be named.

    Raises:
        ProgramError: there is no pattern with such a name.
    """
    if isinstance(fuse, bool):
        fuse = {} if fuse else ()
    listed = (fuse,) if isinstance(fuse, str) else tuple(fuse)
    if isinstance(fuse, Mapping) and not all(isinstance(on, bool) for on in fuse.values()):
        raise ProgramError(
            "fuse maps a pattern to something other than True or False", why=f"{fuse!r}"
        )
    unknown = [name for name in listed if name not in switches()]
    if isinstance(fuse, str) or unknown:
        raise ProgramError(
            f"there is no pattern {(unknown or listed)[0]!r} to fuse",
            why=f"the patterns are {', '.join(switches())}",
            todo="pass True, False, a list of these, or a mapping of them to True or False",
        )
    if isinstance(fuse, Mapping):
        return tuple(name for name in switches() if fuse.get(name, name not in ASKED_FOR))
    return tuple(name for name in switches() if name in listed)

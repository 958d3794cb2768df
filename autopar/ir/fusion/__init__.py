"""The kernels that may take the place of operators that a model writes out.

Patterns stand in `patterns/`, one kernel or family a file; `pattern.py` says what one is, and
`autopar/passes/fusion.py` puts kernels in their place. A mixture of experts is one operator
already, which is told to use kernels (`autopar/operators/mixture.py`). Three more have no pattern,
since they are no part of the graph: the optimizer's step, what rotary embedding and a plan's
exchange of rows for heads are together (`packed.py`), and a plan's collectives beside linears
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

EXPERTS = "experts"  # by what `fuse` switches the kernels of a mixture on and off
UPDATE = "adamw"  # by what `fuse` switches the optimizer's kernel on and off

# What is on only where it is named: torch's operators for it have run on no GPU from here, and what
# they gain is a prediction. torchtitan leaves it off, too.
ASKED_FOR = (ASYNC,)

Fuse = bool | Mapping[str, bool] | Sequence[str]


def switches() -> tuple[str, ...]:
    """All that `fuse` may name."""
    return (*names(), EXPERTS, PACK, ASYNC, UPDATE)


def choose(fuse: Fuse) -> tuple[str, ...]:
    """The names of the patterns that a user asks for.

    Args:
        fuse: all or none, those of a list, or all but those that a mapping switches off. Of
            `ASKED_FOR` only those that are named.

    Raises:
        ProgramError: there is no pattern of such a name.
    """
    if isinstance(fuse, bool):
        fuse = {} if fuse else ()
    listed = (fuse,) if isinstance(fuse, str) else tuple(fuse)
    if isinstance(fuse, Mapping) and not all(isinstance(on, bool) for on in fuse.values()):
        raise ProgramError(
            "fuse switches a pattern by something else than True or False", why=f"{fuse!r}"
        )
    unknown = [name for name in listed if name not in switches()]
    if isinstance(fuse, str) or unknown:
        raise ProgramError(
            f"there is no pattern {(unknown or listed)[0]!r} to fuse",
            why=f"there are {', '.join(switches())}",
            todo="pass True, False, a list of these, or a mapping of them to True or False",
        )
    if isinstance(fuse, Mapping):
        return tuple(name for name in switches() if fuse.get(name, name not in ASKED_FOR))
    return tuple(name for name in switches() if name in listed)

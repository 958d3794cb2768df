"""Algorithms of collectives, one in every module of this folder whose name begins with a letter.

A module defines a function for each collective that it implements, named like the collective:

    def all_gather(shape: Shape) -> Written: ...

The function takes the sizes of the levels, outermost first, and returns the number of chunks and
the rounds. An algorithm for all_gather implies others: reversed, with additions, it is a
reduce_scatter, and both in sequence are an all_reduce. These are derived unless the module defines
them itself. `NAME` is the name of the algorithm; by default it is the name of the file.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module

from autopar.cost.collectives._rounds import Shape, Written, backwards, pipelined
from autopar.cost.programs.collective_program import MOST_RANKS, CollectiveProgram
from autopar.errors import CollectiveError
from autopar.ir.chosen_algorithms import KINDS

Write = Callable[[Shape], Written]
MOST_MESSAGES = 2**20  # in a program; more take minutes to generate


@cache
def algorithms(kind: str) -> dict[str, Write]:
    """Returns the functions that generate `kind`, by name of algorithm, in alphabetical order.

    Raises:
        CollectiveError: the collective is unknown, or two modules have the same name.
    """
    if kind not in KINDS:
        raise CollectiveError(
            f"there is no collective {kind!r}", why=f"there are {', '.join(KINDS)}"
        )
    return {
        name: found[kind]
        for name, found in sorted(_modules(tuple(__path__)).items())
        if kind in found
    }


def _modules(folders: tuple[str, ...]) -> dict[str, dict[str, Write]]:
    found: dict[str, dict[str, Write]] = {}
    for info in pkgutil.iter_modules(folders):
        if info.name.startswith("_"):
            continue
        module = import_module(f"{__name__}.{info.name}")
        name = getattr(module, "NAME", info.name)
        if name in found:
            raise CollectiveError(
                f"there are two algorithms {name!r}",
                where=f"{__name__}.{info.name}",
                todo="give one of them another NAME",
            )
        found[name] = {kind: getattr(module, kind) for kind in KINDS if hasattr(module, kind)}
        if "all_gather" in found[name]:
            found[name] = _derived(found[name]["all_gather"]) | found[name]
    return found


def _derived(gather: Write) -> dict[str, Write]:
    """Returns the collectives that an all_gather implies, reversed or followed by itself."""

    def reduce_scatter(shape: Shape) -> Written:
        chunks, rounds = gather(shape)
        return chunks, backwards(rounds)

    def all_reduce(shape: Shape) -> Written:
        chunks, rounds = gather(shape)
        return chunks, [*backwards(rounds), *rounds]

    return {"reduce_scatter": reduce_scatter, "all_reduce": all_reduce}


def check_name(kind: str, name: str) -> None:
    """Raises CollectiveError if no algorithm of that name runs `kind`."""
    found = algorithms(kind)
    if name not in found:
        raise CollectiveError(
            f"there is no algorithm {name!r} for {kind}",
            why=f"there are {', '.join(found)}",
            todo="name one of these",
        )


@lru_cache(maxsize=64)
def written(kind: str, name: str, shape: Shape, pieces: int = 1) -> CollectiveProgram:
    """Returns the program of the algorithm `name` for `kind`.

    Args:
        kind: a collective.
        name: an algorithm for it.
        shape: the sizes of the levels, outermost first.
        pieces: number of pieces of each chunk, which are pipelined one round apart.

    Raises:
        CollectiveError: the collective or the algorithm is unknown, or the sizes are invalid.
    """
    found = algorithms(kind)
    check_name(kind, name)
    if pieces < 1 or not shape or min(shape) < 1:
        raise CollectiveError(
            f"{name} over {shape} in {pieces} pieces", why="sizes and pieces are at least 1"
        )
    ranks = math.prod(shape)
    if ranks > MOST_RANKS:
        raise CollectiveError(
            f"{kind} by {name} over {ranks} ranks", why=f"there may be {MOST_RANKS}"
        )
    whole = found[name](shape)
    messages = pieces * sum(map(len, whole[1]))
    if messages > MOST_MESSAGES:
        raise CollectiveError(
            f"{kind} by {name} over {ranks} ranks in {pieces} pieces sends {messages} messages",
            why=f"there may be {MOST_MESSAGES}",
            todo="cut chunks into fewer pieces, or leave the call to the library",
        )
    chunks, rounds = pipelined(whole, pieces)
    return CollectiveProgram(kind, name, shape, chunks, rounds)

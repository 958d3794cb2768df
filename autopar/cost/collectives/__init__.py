"""Algorithms of collectives: every module of this folder whose name begins with a letter is one.

A module has a function for each collective that it does, called as the collective is:

    def all_gather(shape: Shape) -> Written: ...

It takes the sizes of the levels, outermost first, and returns the number of chunks and the rounds.
One that can gather can do more: run backwards and adding, that is a reduce_scatter, and one behind
the other an all_reduce. A module says so by having no such functions of its own. `NAME` is what the
algorithm is called, by default as its file is.
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
MOST_MESSAGES = 2**20  # of a program; more take minutes to write


@cache
def algorithms(kind: str) -> dict[str, Write]:
    """Returns what writes `kind`, by the name of the algorithm, in alphabetical order.

    Raises:
        CollectiveError: there is no such collective, or two modules have one name.
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
    """What a way to gather is when it runs backwards, and then forwards again."""

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
        pieces: into how many each chunk is cut; they follow one another, a round later each.

    Raises:
        CollectiveError: there is no such collective or algorithm, or the sizes make no sense.
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

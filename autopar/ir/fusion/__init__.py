"""A pass that puts kernels in the place of what models write out.

Patterns stand in `patterns/`, one kernel or family a file; `pattern.py` says what one is. A pattern
does not reach over the border of a repeated block, so that all blocks stay alike. A mixture of
experts is one operator already, which is told to use kernels (`ir/mixture.py`). Three more have no
pattern, since they are no part of the graph: the optimizer's step, what rotary embedding and a
plan's exchange of rows for heads are together (`packed.py`), and a plan's collectives beside
linears (`overlapped.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.errors import GraphError, ProgramError
from autopar.ir.fusion.match import find
from autopar.ir.fusion.overlapped import ASYNC
from autopar.ir.fusion.packed import PACK
from autopar.ir.fusion.pattern import Match, Pattern, Writer
from autopar.ir.fusion.patterns import names, patterns
from autopar.ir.graph import Arg, Graph, Node, Ref
from autopar.ir.repeats import find_repeats
from autopar.ir.rewrite import Names, eliminate_dead

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
    "fuse",
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

Home = tuple[int, int] | None  # run and block
Known = dict[tuple[str, tuple[Arg, ...]], Ref]


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


def _matches(
    graph: Graph, chosen: tuple[str, ...], home: Mapping[str, tuple[int, int]]
) -> tuple[tuple[Pattern, Match], ...]:
    """Where the patterns called `chosen` are found, in execution order, none in two."""
    wanted = [pattern for pattern in patterns() if pattern.name in chosen]
    found: list[tuple[Pattern, Match]] = []
    taken: set[str] = set()
    # From the end: what a longer pattern holds inside is no match of its own.
    for node in reversed(graph.nodes):
        for pattern in wanted:
            match = find(pattern, graph, node)
            if match is None or taken & match.inside:
                continue
            if len({home.get(name) for name in match.inside}) == 1:
                found.append((pattern, match))
                taken |= match.inside
                break
    return tuple(reversed(found))


def fuse(graph: Graph, chosen: tuple[str, ...]) -> Graph:
    """`graph` with kernels in the place of the patterns called `chosen`."""
    home = _blocks(graph)
    found = _matches(graph, chosen, home)
    if not found:
        return graph
    fresh = Names(node.name for node in graph.nodes)
    nodes = {node.name: node for node in graph.nodes}
    known = defaultdict[Home, Known](dict)
    for pattern, match in found:
        writer = Writer(match.found, fresh, known[home.get(match.found.name)])
        pattern.replace(match, writer)
        for node in writer.nodes:
            nodes[node.name] = node
    return eliminate_dead(replace(graph, nodes=_in_order(graph, nodes), repeats=()))


def _in_order(graph: Graph, nodes: Mapping[str, Node]) -> tuple[Node, ...]:
    """The nodes in execution order: as they were, but each after what it reads."""
    placed: dict[str, Node] = {}

    def place(name: str) -> None:
        stack = [name]
        while stack:
            if len(stack) > len(nodes):
                raise GraphError(
                    "kernels would read one another's results",
                    where=str(nodes[name].source),
                    todo="compile with fuse=False",
                )
            node = nodes[stack[-1]]
            missing = [read for read in dict.fromkeys(node.inputs) if read not in placed]
            if missing:
                stack += reversed(missing)
            else:
                placed.setdefault(stack.pop(), node)

    for node in graph.nodes:
        place(node.name)
    return tuple(placed.values())


def _blocks(graph: Graph) -> dict[str, tuple[int, int]]:
    """The run and the block to which each node belongs that is in one."""
    return {
        name: (run, number)
        for run, repeat in enumerate(find_repeats(graph).repeats)
        for number, iteration in enumerate(repeat.iterations)
        for name in iteration
    }

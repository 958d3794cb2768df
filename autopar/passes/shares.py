"""Shares: identities between a value and its readers, where it is resharded once for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.ir.graph import Graph, Node, Ref, Repeat
from autopar.ir.rewrite import Names, writes

_OUTSIDE = (-1, -1)
Home = tuple[int, int]  # (run, block)


@dataclass(frozen=True)
class Run:
    """A run of equal blocks in a graph without shares. Places count operators, not leaves.

    Attributes:
        start: place of the first operator.
        period: operators per block.
        count: number of blocks.
        entering: (place in the block, index of the operand) -> number of the carried value there.
        ends: for each carried value, the place in the block that produces it for the next block.
        starts: for each carried value, the value that enters the first block.
        own: for each block the leaves that only it reads, aligned.
    """

    start: int
    period: int
    count: int
    entering: dict[tuple[int, int], int]
    ends: tuple[int, ...]
    starts: tuple[str, ...]
    own: tuple[tuple[str, ...], ...]

    @property
    def stop(self) -> int:
        """Place after the last operator."""
        return self.start + self.covered

    @property
    def covered(self) -> int:
        """Number of operators in all blocks."""
        return self.period * self.count


def insert_shares(graph: Graph, runs: Sequence[Run] = ()) -> Graph:
    """Returns `graph` with `autopar.share`s between values and readers, and with `runs` as repeats.

    Every parameter that is read has one share, any other value only if at least two operators read
    it. Each block of a run begins with shares that read its carried values. Values read inside
    their own block are shared there, values read by all blocks before the run. Outputs are the
    values themselves. A written buffer has no share: an `autopar.write` names the buffer itself.
    """
    return _Sharing(graph, runs).result()


def remove_shares(graph: Graph) -> Graph:
    """Returns the normalised graph behind a prepared one, without shares and repeats."""
    source: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        if node.op == "autopar.share":
            value = node.inputs[0]
            source[node.name] = source.get(value, value)
            continue
        plain = node.map_refs(lambda name: Ref(source.get(name, name)))
        nodes.append(replace(plain, alias=None, saved=(), saved_types=()))
    return replace(graph, nodes=tuple(nodes), repeats=())


class _Sharing:
    """The shares of a graph, by the reads that they serve."""

    def __init__(self, graph: Graph, runs: Sequence[Run]) -> None:
        self.graph, self.runs = graph, runs
        self.operators = [node for node in graph.nodes if not node.is_leaf]
        self.fresh = Names(node.name for node in graph.nodes)
        self.written = {name for node in self.operators for name in writes(node)}
        self.home: dict[str, Home] = {}
        for number, run in enumerate(runs):
            for place in range(run.start, run.stop):
                block = (place - run.start) // run.period
                self.home[self.operators[place].name] = (number, block)
            for block, leaves in enumerate(run.own):
                self.home.update((leaf, (number, block)) for leaf in leaves)
        self.entries: dict[tuple[int, int, int], Node] = {}
        self.before: dict[str, list[Node]] = {}
        self.after: dict[str, list[Node]] = {}
        self.ahead: dict[int, list[Node]] = {}
        self.behind: dict[int, list[Node]] = {}

    def result(self) -> Graph:
        """Returns the graph with all shares."""
        for number, run in enumerate(self.runs):
            for block in range(run.count):
                for carried, end in enumerate(run.ends):
                    place = run.start + (block - 1) * run.period + end
                    value = self.operators[place].name if block else run.starts[carried]
                    self.entries[number, block, carried] = self._share(value)
        shares = {group: self._place(group, readers) for group, readers in self._groups().items()}
        nodes = [node for node in self.graph.nodes if node.is_leaf]
        blocks: dict[Home, list[str]] = {}
        for number, run in enumerate(self.runs):
            for block, leaves in enumerate(run.own):
                blocks[number, block] = list(leaves)
        for place, node in enumerate(self.operators):
            home = self.home.get(node.name, _OUTSIDE)
            if home != _OUTSIDE:
                run = self.runs[home[0]]
                if place == run.start:
                    nodes += self.ahead.get(home[0], [])
                if (place - run.start) % run.period == 0:
                    inserted = [self.entries[(*home, carried)] for carried in range(len(run.ends))]
                    blocks[home] += [share.name for share in inserted]
                    nodes += inserted
            read = self._reading(place, node, shares)
            inserted = [*self.before.get(node.name, []), read, *self.after.get(node.name, [])]
            nodes += inserted
            if home != _OUTSIDE:
                blocks[home] += [item.name for item in inserted]
                if place == self.runs[home[0]].stop - 1:
                    nodes += self.behind.get(home[0], [])
        return replace(self.graph, nodes=tuple(nodes), repeats=tuple(self._repeats(blocks)))

    def _repeats(self, blocks: dict[Home, list[str]]) -> Iterator[Repeat]:
        for number, run in enumerate(self.runs):
            iterations = tuple(tuple(blocks[number, block]) for block in range(run.count))
            ends = [self.operators[run.start + end].name for end in run.ends]
            yield Repeat(iterations, tuple(zip(run.starts, ends, strict=True)))

    def _share(self, value: str) -> Node:
        node = self.graph[value]
        return replace(
            node, name=self.fresh(f"{value}_share"), op="autopar.share", args=(Ref(value),),
            kwargs=(), alias=value, saved=(), saved_types=(),
        )  # fmt: skip

    def _entry(self, place: int, node: Node, slot: int) -> tuple[int, int, int] | None:
        """Returns the carried value that an operand is, as (run, block, number), else None."""
        number, block = self.home.get(node.name, _OUTSIDE)
        if number < 0:
            return None
        run = self.runs[number]
        carried = run.entering.get(((place - run.start) % run.period, slot))
        return None if carried is None else (number, block, carried)

    def _group(self, value: str, reader: str) -> tuple[str, Home]:
        """Returns the group of a read: inside the value's own block, or outside."""
        home = self.home.get(value, _OUTSIDE)
        return value, home if self.home.get(reader, _OUTSIDE) == home else _OUTSIDE

    def _groups(self) -> dict[tuple[str, Home], list[str]]:
        """Returns the groups of reads that need a share, with their readers."""
        groups: dict[tuple[str, Home], dict[str, None]] = {}
        for place, node in enumerate(self.operators):
            for slot, value in enumerate(node.inputs):
                if self._entry(place, node, slot) is None:
                    groups.setdefault(self._group(value, node.name), {})[node.name] = None
        return {
            (value, home): list(readers)
            for (value, home), readers in groups.items()
            if (len(readers) > 1 or self.graph[value].op == "param")
            and len(self.graph[value].types) == 1
            and value not in self.written
        }

    def _place(self, group: tuple[str, Home], readers: list[str]) -> str:
        """Creates a share directly after its value, or before the first reader for a leaf."""
        (value, home), first = group, readers[0]
        share = self._share(value)
        made_in = self.home.get(value, _OUTSIDE)
        if not self.graph[value].is_leaf:
            if home == made_in:
                self.after.setdefault(value, []).append(share)
            else:
                self.behind.setdefault(made_in[0], []).append(share)
        elif home == self.home.get(first, _OUTSIDE):
            self.before.setdefault(first, []).append(share)
        else:
            self.ahead.setdefault(self.home[first][0], []).append(share)
        return share.name

    def _reading(self, place: int, node: Node, shares: dict[tuple[str, Home], str]) -> Node:
        """Returns `node` reading through shares."""
        reads = []
        for slot, value in enumerate(node.inputs):
            entry = self._entry(place, node, slot)
            if entry is not None:
                reads.append(self.entries[entry].name)
            else:
                reads.append(shares.get(self._group(value, node.name), value))
        following = iter(reads)
        return (
            node.map_refs(lambda _: Ref(next(following))) if tuple(reads) != node.inputs else node
        )

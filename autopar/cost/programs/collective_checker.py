"""Verifies collective programs: runs the scripts of all ranks symbolically and checks the result.

The value of a chunk is the set of ranks whose part it contains, as bits of an integer. The
execution follows the strictest rules of any library: a rank posts all messages of a round at once,
a message is transferred when both ends have posted it, messages between two ranks arrive in order,
and a rank begins a round only after its previous round has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.programs.collective_program import CollectiveProgram, Post, Script, unit
from autopar.errors import CollectiveError


def check_program(program: CollectiveProgram) -> None:
    """Proves that a program computes its collective and terminates; see `check_scripts`."""
    where = f"{program.kind} by {program.name} over {'x'.join(map(str, program.shape))}"
    check_scripts(program.kind, program.chunks, program.scripts, where)


def check_scripts(kind: str, chunks: int, scripts: Sequence[Script], where: str = "") -> None:
    """Proves that ranks which run these scripts compute a collective.

    Args:
        kind: the collective.
        chunks: number of chunks.
        scripts: one for each rank.
        where: a description of the scripts for error messages.

    Raises:
        CollectiveError: a rank sends, or adds to, a chunk that it does not have; a rank adds a part
            twice, or expects other chunks than are sent; the result depends on the order in which
            messages of a round arrive; ranks wait for one another; or the result is wrong.
    """
    _Trial(kind, chunks, scripts, where).run()


def promised(
    kind: str, ranks: int, chunks: int, rank: int
) -> tuple[dict[int, int], dict[int, int]]:
    """Returns what a rank has before and what it must have after: chunk -> bits of contributors."""
    everyone, own = (1 << ranks) - 1, 1 << rank
    each = range(chunks)
    block = chunks // unit(kind, ranks)
    mine = range(rank * block, (rank + 1) * block)
    if kind == "all_reduce":
        return dict.fromkeys(each, own), dict.fromkeys(each, everyone)
    if kind == "broadcast":
        return dict.fromkeys(each if rank == 0 else (), 1), dict.fromkeys(each, 1)
    if kind == "all_gather":
        return dict.fromkeys(mine, own), {chunk: 1 << chunk // block for chunk in each}
    if kind == "reduce_scatter":
        return dict.fromkeys(each, own), dict.fromkeys(mine, everyone)
    sent = range(rank * ranks * block, (rank + 1) * ranks * block)
    taken = {
        (source * ranks + rank) * block + piece: 1 << source
        for source in range(ranks)
        for piece in range(block)
    }
    return dict.fromkeys(sent, own), taken


class _Trial:
    def __init__(self, kind: str, chunks: int, scripts: Sequence[Script], where: str) -> None:
        self.kind, self.chunks, self.scripts, self.where = kind, chunks, scripts, where
        ranks = len(scripts)
        pairs = [promised(kind, ranks, chunks, rank) for rank in range(ranks)]
        self.held = [before for before, _ in pairs]
        self.wanted = [after for _, after in pairs]
        self.place = [-1] * ranks
        # Unmatched posts by sender and receiver, and the number of posts that a rank waits for.
        self.sends: dict[tuple[int, int], list[tuple[tuple[int, ...], list[int]]]] = {}
        self.takes: dict[tuple[int, int], list[Post]] = {}
        self.open = [0] * ranks

    def run(self) -> None:
        for rank, script in enumerate(self.scripts):
            for number, posts in enumerate(script):
                self._check(rank, number, posts)
        ready = list(range(len(self.scripts)))
        while ready:
            ready += self._advance(ready.pop())
        stuck = [r for r, count in enumerate(self.open) if count]
        if stuck:
            names = ", ".join(
                f"rank {r} in its round {self.place[r]} for {self._awaited(r)}" for r in stuck[:4]
            )
            raise self._wrong("the ranks wait for one another", names)
        for rank, wanted in enumerate(self.wanted):
            for chunk, bits in wanted.items():
                got = self.held[rank].get(chunk, 0)
                if got != bits:
                    raise self._wrong(
                        f"rank {rank} ends with the wrong chunk {chunk}",
                        f"it has the parts of {_names(got)} and not those of {_names(bits)}",
                    )

    def _check(self, rank: int, number: int, posts: Sequence[Post]) -> None:
        """Raises CollectiveError if messages of a round cannot be in transit at the same time."""
        where = f"that is in its round {number}"
        uses: dict[int, set[str]] = {}
        for post in posts:
            if post.does not in ("send", "add", "keep"):
                raise self._wrong(f"rank {rank} is to {post.does} chunks", where)
            if post.peer == rank or not 0 <= post.peer < len(self.scripts):
                raise self._wrong(f"rank {rank} has a message with rank {post.peer}", where)
            for chunk in post.chunks:
                before = uses.setdefault(chunk, set())
                # Several sends of a chunk are independent, and so are several sums into it.
                if before - {post.does} or (post.does == "keep" and before):
                    both = " and ".join(sorted({*before, post.does}))
                    raise self._wrong(f"rank {rank} has to {both} chunk {chunk} at once", where)
                before.add(post.does)

    def _advance(self, rank: int) -> list[int]:
        """Begins the next round of a rank; returns the ranks whose rounds this completes."""
        self.place[rank] += 1
        if self.place[rank] >= len(self.scripts[rank]):
            return []
        posts = self.scripts[rank][self.place[rank]]
        self.open[rank] = len(posts)
        touched = []
        for post in posts:
            if post.does == "send":
                values = [self._read(rank, chunk) for chunk in post.chunks]
                self.sends.setdefault((rank, post.peer), []).append((post.chunks, values))
                touched.append((rank, post.peer))
            else:
                self.takes.setdefault((post.peer, rank), []).append(post)
                touched.append((post.peer, rank))
        done = []
        for pair in touched:
            sends, takes = self.sends.get(pair, []), self.takes.get(pair, [])
            while sends and takes:
                self._deliver(pair, *sends.pop(0), takes.pop(0))
                for end in pair:
                    self.open[end] -= 1
                    if not self.open[end]:
                        done.append(end)
        return done if posts else [rank]

    def _read(self, rank: int, chunk: int) -> int:
        if chunk not in self.held[rank]:
            raise self._wrong(
                f"rank {rank} sends chunk {chunk} before it has it",
                f"that is in its round {self.place[rank]}",
            )
        return self.held[rank][chunk]

    def _deliver(
        self, pair: tuple[int, int], chunks: tuple[int, ...], values: list[int], take: Post
    ) -> None:
        source, target = pair
        if chunks != take.chunks:
            raise self._wrong(
                f"rank {source} sends other chunks than rank {target} expects",
                f"{chunks[:8]} and {take.chunks[:8]}",
            )
        held = self.held[target]
        for chunk, bits in zip(chunks, values, strict=True):
            if not 0 <= chunk < self.chunks:
                raise self._wrong(f"there is no chunk {chunk}", f"there are {self.chunks}")
            if take.does == "keep":
                held[chunk] = bits
                continue
            if chunk not in held:
                raise self._wrong(f"rank {target} adds to chunk {chunk}", "it does not have it")
            if held[chunk] & bits:
                raise self._wrong(
                    f"rank {target} adds the parts of {_names(held[chunk] & bits)} twice",
                    f"chunk {chunk} comes from rank {source}",
                )
            held[chunk] |= bits

    def _awaited(self, rank: int) -> str:
        peers = [s for (s, t), left in self.takes.items() if t == rank and left]
        peers += [t for (s, t), left in self.sends.items() if s == rank and left]
        return "rank " + ", ".join(map(str, sorted(set(peers))))

    def _wrong(self, what: str, why: str) -> CollectiveError:
        return CollectiveError(what, where=self.where, why=why)


def _names(bits: int) -> str:
    ranks = [str(rank) for rank in range(bits.bit_length()) if bits >> rank & 1]
    return f"rank {', '.join(ranks)}" if ranks else "no rank"

"""Checks execution plans: runs all threadblocks symbolically, and detects races.

The value of a chunk is the set of (rank, chunk) of the inputs that it contains. Each threadblock
runs until it must wait for a signal, a semaphore, or a packet, which carries its own flag. Each
threadblock has a vector clock (Fidge, Mattern 1988). If two threadblocks access the same chunk
without a signal in between and at least one of them writes it, this is a race, even if the result
is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.cost.programs.execution_plan import ExecutionPlan, Operation, Part
from autopar.cost.programs.promised_chunks import Value, promised_chunks
from autopar.errors import CollectiveError

Place = tuple[int, str, int]  # rank, buffer, chunk
Clock = dict[int, int]

_SIGNALS = ("signal", "rlxsignal", "pws", "pwsf")
_WAITS = ("wait", "rlxwait")
_NOTHING = ("nop", "flush")
_MOVES = ("copy", "put", "pws", "pwsf", "get", "ppkt", "cpkt", "rppkt", "upkt")
_SUMS = ("re", "res", "rre", "rres", "respkt", "repkt", "recpkt", "recspkt")
_READS_PACKETS = ("upkt", "rppkt", "respkt", "repkt", "recpkt", "recspkt")
_WRITES_PACKETS = ("ppkt", "cpkt", "rppkt", "respkt", "recpkt", "recspkt")


@dataclass
class Transfer:
    """A transfer of chunks from one GPU to another.

    Attributes:
        source, target: the ranks.
        chunks: number of chunks.
        after: numbers of the transfers that end before it begins.
    """

    source: int
    target: int
    chunks: int
    after: set[int]


@dataclass
class _Cell:
    value: Value
    written: tuple[int, int] = (-1, 0)  # the writing threadblock and its time
    reads: Clock = field(default_factory=dict)
    packet: Clock | None = None  # the clock of its writer, if the packet carries a flag
    brought: set[int] = field(default_factory=set)


@dataclass
class _Thread:
    """A running threadblock; `after` are the transfers that its next transfer waits for."""

    number: int
    rank: int
    operations: tuple[Operation, ...]
    channels: dict[str, tuple[tuple[int, int, str], ...]]  # peer, index, type
    buffers: dict[str, tuple[tuple[int, str], ...]]
    clock: Clock
    after: set[int] = field(default_factory=set)
    place: int = 0


def check_plan(plan: ExecutionPlan) -> tuple[Transfer, ...]:
    """Proves that an execution plan computes its collective, terminates and has no race.

    Returns:
        The transfers between GPUs.

    Raises:
        CollectiveError: the plan fails one of these checks, reads a chunk that has no value, or has
            an operation that is not checked (through switches, in pipelines, by groups of
            threadblocks).
    """
    return _Trial(plan).run()


class _Trial:
    def __init__(self, plan: ExecutionPlan) -> None:
        self.plan = plan
        self.cells = dict(self._inputs())
        self.transfers: list[Transfer] = []
        self.signals: dict[tuple[int, int, int, str], list[tuple[Clock, set[int]]]] = {}
        self.semaphores = {
            (rank, number): [({}, set()) for _ in range(first)]
            for rank, gpu in enumerate(plan.gpus)
            for number, first in enumerate(gpu.semaphores)
        }  # type: dict[tuple[int, int], list[tuple[Clock, set[int]]]]
        self.threads = list(self._threads())

    def _inputs(self) -> Iterator[tuple[Place, _Cell]]:
        for rank, gpu in enumerate(self.plan.gpus):
            for chunk in range(gpu.inputs):
                yield self._place(rank, "i", chunk), _Cell(frozenset({(rank, chunk)}))

    def _place(self, rank: int, buffer: str, chunk: int) -> Place:
        """Returns the place of a chunk; an in-place plan has one buffer for input and output."""
        if rank >= len(self.plan.gpus):
            raise self._wrong(f"there is no rank {rank}", f"there are {len(self.plan.gpus)}")
        gpu = self.plan.gpus[rank]
        limit = {"i": gpu.inputs, "o": gpu.outputs, "s": gpu.scratch}[buffer]
        if not 0 <= chunk < limit:
            raise self._wrong(f"rank {rank} has no chunk {chunk} in {buffer}", f"it has {limit}")
        if self.plan.inplace and buffer != "s":
            kind = self.plan.collective
            if kind == "allgather" and buffer == "i":
                chunk += rank * gpu.inputs
            elif kind == "reducescatter" and buffer == "o":
                chunk += rank * gpu.outputs
            buffer = "io"
        return rank, buffer, chunk

    def _threads(self) -> Iterator[_Thread]:
        number = 0
        for rank, gpu in enumerate(self.plan.gpus):
            ends = {}
            for kind, peers in gpu.peers.items():
                seen: dict[int, int] = {}
                for place, peer in enumerate(peers):
                    ends[kind, place] = (peer, seen.setdefault(peer, 0), kind)
                    seen[peer] += 1
            for block in gpu.threadblocks:
                try:
                    channels = {
                        kind: tuple(ends[kind, n] for n in ids)
                        for kind, ids in block.channels.items()
                    }
                    buffers = {
                        kind: tuple(gpu.remote[n][:2] for n in ids)
                        for kind, ids in block.buffers.items()
                    }
                except (KeyError, IndexError):
                    raise self._wrong(
                        f"rank {rank} has a threadblock with a channel or buffer of none",
                        "those through switches are not supported",
                    ) from None
                yield _Thread(number, rank, block.operations, channels, buffers, {number: 1})
                number += 1

    def run(self) -> tuple[Transfer, ...]:
        moving = True
        while moving:
            moving = False
            for thread in self.threads:
                while thread.place < len(thread.operations) and self._step(thread):
                    thread.place += 1
                    thread.clock[thread.number] += 1
                    moving = True
        stuck = [t for t in self.threads if t.place < len(t.operations)]
        if stuck:
            names = "; ".join(
                f"rank {t.rank} at operation {t.place}, {t.operations[t.place].name}"
                for t in stuck[:4]
            )
            raise self._wrong("the threadblocks wait for one another", names)
        for (source, target, *_), left in self.signals.items():
            if left:
                raise self._wrong(
                    f"rank {source} signals and rank {target} does not wait for it",
                    "the next run would take it for one of its own",
                )
        self._compare()
        return tuple(self.transfers)

    def _step(self, thread: _Thread) -> bool:
        """Runs the next operation of a threadblock, unless it must wait."""
        operation = thread.operations[thread.place]
        name = operation.name
        if "tbg_info" in operation.more or operation.inner:
            raise self._wrong(f"{name} is not supported", "it belongs to a group or a pipeline")
        if name in _NOTHING:
            return True
        if name in _WAITS:
            return self._wait(thread, operation)
        if name in ("sem_acquire", "sem_release"):
            return self._semaphore(thread, operation)
        if name in _MOVES:
            done = self._move(thread, operation)
        elif name in _SUMS:
            done = self._sum(thread, operation)
        elif name in _SIGNALS:
            done = True
        else:
            raise self._wrong(f"{name} is not supported", f"rank {thread.rank} has it")
        if done and name in _SIGNALS:
            for channel in operation.channels:
                peer, which, kind = self._channel(thread, operation, channel)
                sent = (dict(thread.clock), set(thread.after))
                self.signals.setdefault((thread.rank, peer, which, kind), []).append(sent)
        return done

    def _channel(self, thread: _Thread, operation: Operation, number: int) -> tuple[int, int, str]:
        """Returns a channel of the operation's type, or of the only type if it names none."""
        lists = thread.channels
        kinds = [operation.channel_type] if operation.channel_type else [*lists]
        known = lists.get(kinds[0], ()) if len(kinds) == 1 else ()
        if number >= len(known):
            raise self._wrong(
                f"rank {thread.rank} has no channel {number}",
                f"its threadblock names {len(known)} for {operation.name}",
            )
        return known[number]

    def _wait(self, thread: _Thread, operation: Operation) -> bool:
        keys = []
        for channel in operation.channels:
            peer, which, kind = self._channel(thread, operation, channel)
            keys.append((peer, thread.rank, which, kind))
        if any(len(self.signals.get(key, ())) < n for key, n in Counter(keys).items()):
            return False
        for key in keys:
            self._learn(thread, *self.signals[key].pop(0))
        return True

    def _semaphore(self, thread: _Thread, operation: Operation) -> bool:
        numbers = operation.more.get("semaphore_ids")
        numbers = numbers if isinstance(numbers, list) else [numbers]
        keys = [(thread.rank, n) for n in numbers if isinstance(n, int)]
        if len(keys) != len(numbers) or not all(key in self.semaphores for key in keys):
            raise self._wrong(f"rank {thread.rank} has no such semaphore", f"{numbers}"[:80])
        if operation.name == "sem_release":
            for key in keys:
                self.semaphores[key].append((dict(thread.clock), set(thread.after)))
            return True
        if any(len(self.semaphores[key]) < n for key, n in Counter(keys).items()):
            return False
        for key in keys:
            self._learn(thread, *self.semaphores[key].pop(0))
        return True

    @staticmethod
    def _learn(thread: _Thread, clock: Clock, after: set[int]) -> None:
        for other, time in clock.items():
            thread.clock[other] = max(thread.clock.get(other, 0), time)
        thread.after |= after

    def _places(self, thread: _Thread, operation: Operation, part: Part) -> list[Place]:
        chunks = range(part.index, part.index + part.size)
        if part.kind == "type":
            return [self._place(thread.rank, str(part.buffer), chunk) for chunk in chunks]
        known = thread.buffers.get(operation.channel_type, ())
        if part.kind != "buffer_id" or int(part.buffer) >= len(known):
            raise self._wrong(
                f"rank {thread.rank} reaches a buffer that it does not name", operation.name
            )
        peer, buffer = known[int(part.buffer)]
        return [self._place(peer, buffer, chunk) for chunk in chunks]

    def _move(self, thread: _Thread, operation: Operation) -> bool:
        if len(operation.source) != len(operation.target):
            raise self._wrong(f"{operation.name} moves unequal chunks", f"rank {thread.rank}")
        pairs = zip(operation.source, operation.target, strict=True)
        rows = [[self._places(thread, operation, part) for part in pair] for pair in pairs]
        reads = [place for source, _ in rows for place in source]
        if not self._there(operation, reads):
            return False
        for source, target in rows:
            if len(source) != len(target):
                raise self._wrong(f"{operation.name} moves unequal chunks", f"rank {thread.rank}")
            values = [self._read(thread, place, operation) for place in source]
            self._carry(thread, source, target)
            for place, value in zip(target, values, strict=True):
                self._write(thread, place, value, operation.name in _WRITES_PACKETS)
        return True

    def _sum(self, thread: _Thread, operation: Operation) -> bool:
        if (how := operation.more.get("reduce_op", "sum")) != "sum":
            raise self._wrong(f"{operation.name} by {how!r:.80} is not supported", "sums are")
        sources = [self._places(thread, operation, part) for part in operation.source]
        targets = [self._places(thread, operation, part) for part in operation.target]
        if not sources or len({len(row) for row in (*sources, *targets)}) != 1:
            raise self._wrong(f"{operation.name} adds unequal chunks", f"rank {thread.rank}")
        if not self._there(operation, [place for row in sources[1:] for place in row]):
            return False
        totals: list[Value] = [frozenset()] * len(sources[0])
        for row in sources:
            self._carry(thread, row, [(thread.rank, "", 0)])
            for number, place in enumerate(row):
                value = self._read(thread, place, operation)
                if totals[number] & value:
                    raise self._wrong(f"rank {thread.rank} adds something twice", operation.name)
                totals[number] |= value
        for row in targets:
            self._carry(thread, sources[0], row)
            packets = operation.name in _WRITES_PACKETS and row[0][1] == "s"
            for place, value in zip(row, totals, strict=True):
                self._write(thread, place, value, packets)
        return True

    def _there(self, operation: Operation, places: Sequence[Place]) -> bool:
        """Returns whether the packets that an operation reads have arrived."""
        if operation.name not in _READS_PACKETS:
            return True
        scratch = [place for place in places if place[1] == "s"]
        return all(
            place in self.cells and self.cells[place].packet is not None for place in scratch
        )

    def _carry(self, thread: _Thread, source: list[Place], target: list[Place]) -> None:
        """Records the transfer from one GPU to another."""
        if source[0][0] == target[0][0]:
            return
        needs = set(thread.after)
        for place in source:
            needs |= self.cells[place].brought if place in self.cells else set()
        number = len(self.transfers)
        self.transfers.append(Transfer(source[0][0], target[0][0], len(source), needs))
        thread.after = {number}

    def _read(self, thread: _Thread, place: Place, operation: Operation) -> Value:
        cell = self.cells.get(place)
        if cell is None:
            raise self._wrong(f"rank {thread.rank} reads before anything is there", _name(place))
        writer, time = cell.written
        if cell.packet is not None and operation.name in _READS_PACKETS:
            self._learn(thread, cell.packet, cell.brought)
        elif writer >= 0 and thread.clock.get(writer, 0) < time:
            raise self._wrong(
                f"rank {thread.rank} reads what may not be there yet",
                f"{_name(place)} is written by rank {self.threads[writer].rank}",
            )
        cell.reads[thread.number] = thread.clock[thread.number]
        return cell.value

    def _write(self, thread: _Thread, place: Place, value: Value, packet: bool) -> None:
        cell = self.cells.get(place)
        if cell is not None:
            others = {**cell.reads}
            if cell.written[0] >= 0:
                others[cell.written[0]] = max(others.get(cell.written[0], 0), cell.written[1])
            late = [n for n, time in others.items() if thread.clock.get(n, 0) < time]
            if late:
                raise self._wrong(
                    f"rank {thread.rank} writes over what others may still use",
                    f"{_name(place)} is used by rank {self.threads[late[0]].rank}",
                )
        written = (thread.number, thread.clock[thread.number])
        told = dict(thread.clock) if packet else None
        self.cells[place] = _Cell(value, written, {}, told, set(thread.after) if packet else set())

    def _compare(self) -> None:
        known: list[Clock] = [{} for _ in self.plan.gpus]
        for thread in self.threads:
            for other, time in thread.clock.items():
                own = known[thread.rank]
                own[other] = max(own.get(other, 0), time)
        for rank, buffer, chunk, wanted in promised_chunks(self.plan):
            place = self._place(rank, buffer, chunk)
            cell = self.cells.get(place)
            if cell is None or cell.value != wanted:
                got = sorted(cell.value)[:6] if cell else "nothing"
                raise self._wrong(
                    f"rank {rank} ends with the wrong chunk {chunk}",
                    f"{buffer} holds {got} and not {sorted(wanted)[:6]}",
                )
            writer, time = cell.written
            if writer >= 0 and known[rank].get(writer, 0) < time:
                raise self._wrong(
                    f"rank {rank} ends before chunk {chunk} is there",
                    f"it does not wait for rank {self.threads[writer].rank}, which writes it",
                )

    def _wrong(self, what: str, why: str) -> CollectiveError:
        return CollectiveError(what, where=f"{self.plan.collective} by {self.plan.name}", why=why)


def _name(place: Place) -> str:
    rank, buffer, chunk = place
    return f"chunk {chunk} of {buffer} on rank {rank}"

"""Checks execution plans: runs all threadblocks symbolically, and detects races.

The value of a chunk is the set of (rank, chunk) of the inputs that it contains. Each threadblock
runs until it must wait for a signal, a semaphore, or a packet, which carries its own flag. Each
threadblock has a vector clock (Fidge, Mattern 1988). If two threadblocks access the same chunk
without a signal in between and at least one of them writes it, this is a race, even if the result
is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.cost.programs.execution_plan import ExecutionPlan
from autopar.cost.programs.execution_steps import BROADCASTS, Place, Resolver, Step
from autopar.cost.programs.promised_chunks import Value, promised_chunks
from autopar.errors import CollectiveError

Clock = dict[int, int]

_SIGNALS = ("signal", "rlxsignal", "pws", "pwsf")
_WAITS = ("wait", "rlxwait")
_NOTHING = ("nop", "flush")
_MOVES = ("copy", "put", "pws", "pwsf", "get", "ppkt", "cpkt", "upkt", *BROADCASTS)
_SUMS = ("re", "res", "rre", "rres", "respkt", "repkt", "recpkt", "recspkt", "glres")
_SWITCHED = ("glres", "gstore", "gstorepkt")
_READS_PACKETS = ("upkt", "rppkt", "respkt", "repkt", "recpkt", "recspkt", "gstorepkt")
_WRITES_PACKETS = ("ppkt", "cpkt", "rppkt", "respkt", "recpkt", "recspkt", "gstorepkt")


@dataclass
class Transfer:
    """A transfer of chunks from one GPU to another.

    Attributes:
        source, target: the ranks.
        chunks: number of chunks; a threadblock or an iteration may transfer a part of one.
        after: numbers of the transfers that end before it begins.
        unported: whether it needs no port of its source, and none of its target: a switch sends
            copies of one transfer to several targets, and sums several transfers into one.
    """

    source: int
    target: int
    chunks: float
    after: set[int]
    unported: tuple[bool, bool] = (False, False)


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
    steps: tuple[Step, ...]
    clock: Clock
    after: set[int] = field(default_factory=set)
    place: int = 0


@dataclass
class _Semaphore:
    """The initial value of a semaphore, and what its releases bring, in order."""

    free: int
    released: list[tuple[Clock, set[int]]] = field(default_factory=list)


@dataclass
class _Barrier:
    """The threadblocks that have arrived, and those that have not left since all arrived."""

    arrived: list[int] = field(default_factory=list)
    leaving: set[int] = field(default_factory=set)


def check_plan(plan: ExecutionPlan) -> tuple[Transfer, ...]:
    """Proves that an execution plan computes its collective, terminates and has no race.

    Pipelines are checked for one size of message; see `execution_steps.py`.

    Returns:
        The transfers between GPUs.

    Raises:
        CollectiveError: the plan fails one of these checks, reads a chunk that has no value, or has
            an operation that is not supported.
    """
    return _Trial(plan).run()


class _Trial:
    def __init__(self, plan: ExecutionPlan) -> None:
        self.plan, self.memory = plan, Resolver(plan)
        self.cells = {
            self.memory.place(rank, "i", unit): _Cell(frozenset({(rank, unit)}))
            for rank, gpu in enumerate(plan.gpus)
            for unit in range(gpu.inputs * self.memory.units)
        }
        self.transfers: list[Transfer] = []
        self.signals: dict[tuple[int, int, int, str], list[tuple[Clock, set[int]]]] = {}
        self.semaphores = {
            (rank, number): _Semaphore(first)
            for rank, gpu in enumerate(plan.gpus)
            for number, first in enumerate(gpu.semaphores)
        }
        self.barriers: dict[tuple[int, int], _Barrier] = {}
        blocks = enumerate(self.memory.threadblocks())
        self.threads = [_Thread(n, rank, steps, {n: 1}) for n, (rank, steps) in blocks]

    def run(self) -> tuple[Transfer, ...]:
        moving = True
        while moving:
            moving = False
            for thread in self.threads:
                while thread.place < len(thread.steps) and self._step(thread):
                    thread.place += 1
                    thread.clock[thread.number] += 1
                    moving = True
        stuck = [t for t in self.threads if t.place < len(t.steps)]
        if stuck:
            names = "; ".join(
                f"rank {t.rank} at operation {t.place}, {t.steps[t.place].name}" for t in stuck[:4]
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
        """Runs the next step of a threadblock, unless it must wait."""
        step = thread.steps[thread.place]
        name = step.name
        if name in _NOTHING:
            return True
        if name in _WAITS:
            return self._wait(thread, step)
        if name in ("sem_acquire", "sem_release"):
            return self._semaphore(thread, step)
        if name == "barrier":
            return self._barrier(thread, step)
        if name in _MOVES:
            done = self._move(thread, step)
        elif name in _SUMS:
            done = self._sum(thread, step)
        elif name in _SIGNALS:
            done = True
        else:
            raise self._wrong(f"{name} is not supported", f"rank {thread.rank} has it")
        if done and name in _SIGNALS:
            for channel in step.channels:
                sent = (dict(thread.clock), set(thread.after))
                self.signals.setdefault((thread.rank, *channel), []).append(sent)
        return done

    def _wait(self, thread: _Thread, step: Step) -> bool:
        keys = [(peer, thread.rank, which, kind) for peer, which, kind in step.channels]
        if any(len(self.signals.get(key, ())) < n for key, n in Counter(keys).items()):
            return False
        for key in keys:
            self._learn(thread, *self.signals[key].pop(0))
        return True

    def _semaphore(self, thread: _Thread, step: Step) -> bool:
        keys = [(thread.rank, number) for number in step.semaphores]
        if not all(key in self.semaphores for key in keys):
            raise self._wrong(f"rank {thread.rank} has no such semaphore", f"{step.semaphores}")
        if step.name == "sem_release":
            for key in keys:
                self.semaphores[key].released.append((dict(thread.clock), set(thread.after)))
            return True
        every = [(self.semaphores[key], n) for key, n in Counter(keys).items()]
        if any(each.free + len(each.released) < n for each, n in every):
            return False
        for each, n in every:
            for _ in range(n):
                if each.free:
                    each.free -= 1
                else:
                    self._learn(thread, *each.released.pop(0))
        return True

    def _barrier(self, thread: _Thread, step: Step) -> bool:
        barrier = self.barriers.setdefault((thread.rank, step.semaphores[0]), _Barrier())
        if thread.number not in barrier.leaving and thread.number not in barrier.arrived:
            barrier.arrived.append(thread.number)
        if thread.number in barrier.arrived and len(barrier.arrived) == step.joins:
            every = [self.threads[number] for number in barrier.arrived]
            for each in every:
                for other in every:
                    self._learn(each, dict(other.clock), set(other.after))
            barrier.leaving.update(barrier.arrived)
            barrier.arrived.clear()
        if thread.number not in barrier.leaving:
            return False
        barrier.leaving.remove(thread.number)
        return True

    @staticmethod
    def _learn(thread: _Thread, clock: Clock, after: set[int]) -> None:
        for other, time in clock.items():
            thread.clock[other] = max(thread.clock.get(other, 0), time)
        thread.after |= after

    def _move(self, thread: _Thread, step: Step) -> bool:
        sources, targets = step.sources, step.targets
        if step.name in BROADCASTS and len(sources) == 1:
            sources *= len(targets)
        if [*map(len, sources)] != [*map(len, targets)]:
            raise self._wrong(f"{step.name} moves unequal chunks", f"rank {thread.rank}")
        if not self._there(step, [place for source in sources for place in source]):
            return False
        values = [[self._read(thread, place, step) for place in source] for source in sources]
        ends = [(row[0][0], to[0][0]) for row, to in zip(sources, targets, strict=True)]
        self._carry(thread, sources, ends, step.name)
        for row, target in zip(values, targets, strict=True):
            for place, value in zip(target, row, strict=True):
                self._write(thread, place, value, step.name in _WRITES_PACKETS)
        return True

    def _sum(self, thread: _Thread, step: Step) -> bool:
        if step.reduces != "sum":
            raise self._wrong(f"{step.name} by {step.reduces!r:.80} is not supported", "sums are")
        sources, targets = step.sources, step.targets
        if not sources or len({len(row) for row in (*sources, *targets)}) != 1:
            raise self._wrong(f"{step.name} adds unequal chunks", f"rank {thread.rank}")
        if not self._there(step, [place for row in sources[1:] for place in row]):
            return False
        totals: list[Value] = [frozenset()] * len(sources[0])
        self._carry(thread, sources, [(row[0][0], thread.rank) for row in sources], step.name)
        for row in sources:
            for number, place in enumerate(row):
                value = self._read(thread, place, step)
                if totals[number] & value:
                    raise self._wrong(f"rank {thread.rank} adds something twice", step.name)
                totals[number] |= value
        ends = [(thread.rank, row[0][0]) for row in targets]
        self._carry(thread, sources[:1] * len(ends), ends, step.name)
        for row in targets:
            packets = step.name in _WRITES_PACKETS and row[0][1] == "s"
            for place, value in zip(row, totals, strict=True):
                self._write(thread, place, value, packets)
        return True

    def _there(self, step: Step, places: Sequence[Place]) -> bool:
        """Returns whether the packets that a step reads have arrived."""
        if step.name not in _READS_PACKETS:
            return True
        scratch = [place for place in places if place[1] == "s"]
        return all(
            place in self.cells and self.cells[place].packet is not None for place in scratch
        )

    def _carry(
        self,
        thread: _Thread,
        rows: Sequence[Sequence[Place]],
        ends: Sequence[tuple[int, int]],
        name: str,
    ) -> None:
        """Records the transfers of what rows of places hold; a switch makes them all at once."""
        switched, begun, before = name in _SWITCHED, set[int](), set(thread.after)
        for places, (source, target) in zip(rows, ends, strict=True):
            if source == target:
                continue
            needs = set(before if switched else thread.after)
            for place in places:
                needs |= self.cells[place].brought if place in self.cells else set()
            number, size = len(self.transfers), len(places) / self.memory.units
            # Of transfers that a switch sums, or copies from one, the first one occupies the port.
            free = [bool(begun) and switched and end == thread.rank for end in (source, target)]
            self.transfers.append(Transfer(source, target, size, needs, (free[0], free[1])))
            begun.add(number)
            thread.after = {number}
        thread.after = begun if switched and begun else thread.after

    def _read(self, thread: _Thread, place: Place, step: Step) -> Value:
        cell = self.cells.get(place)
        if cell is None:
            raise self._wrong(
                f"rank {thread.rank} reads before anything is there", self._name(place)
            )
        writer, time = cell.written
        if cell.packet is not None and step.name in _READS_PACKETS:
            self._learn(thread, cell.packet, cell.brought)
        elif writer >= 0 and thread.clock.get(writer, 0) < time:
            raise self._wrong(
                f"rank {thread.rank} reads what may not be there yet",
                f"{self._name(place)} is written by rank {self.threads[writer].rank}",
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
                    f"{self._name(place)} is used by rank {self.threads[late[0]].rank}",
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
        units = self.memory.units

        def first_of(rank: int) -> Value:
            cell = self.cells.get(self.memory.place(rank, "o", 0))
            return frozenset((r, unit // units) for r, unit in cell.value) if cell else frozenset()

        for rank, buffer, chunk, promised in promised_chunks(self.plan, first_of):
            for place in range(units):
                unit, wanted = chunk * units + place, promised
                if units > 1:
                    wanted = frozenset((r, c * units + place) for r, c in promised)
                self._compare_unit(
                    known[rank], self.memory.place(rank, buffer, unit), wanted, chunk
                )

    def _compare_unit(self, known: Clock, place: Place, wanted: Value, chunk: int) -> None:
        cell, units, rank = self.cells.get(place), self.memory.units, place[0]
        if cell is None or cell.value != wanted:
            got = sorted({(r, unit // units) for r, unit in cell.value})[:6] if cell else "nothing"
            right = sorted({(r, unit // units) for r, unit in wanted})[:6]
            raise self._wrong(
                f"rank {rank} ends with the wrong chunk {chunk}",
                f"a part of it holds {got}, where {right} is right",
            )
        writer, time = cell.written
        if writer >= 0 and known.get(writer, 0) < time:
            raise self._wrong(
                f"rank {rank} ends before chunk {chunk} is there",
                f"it does not wait for rank {self.threads[writer].rank}, which writes it",
            )

    def _wrong(self, what: str, why: str) -> CollectiveError:
        return self.memory.wrong(what, why)

    def _name(self, place: Place) -> str:
        rank, buffer, unit = place
        return f"chunk {unit // self.memory.units} of {buffer} on rank {rank}"

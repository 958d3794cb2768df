"""Resolves an execution plan into steps: the memory that every operation of a threadblock uses.

A chunk is divided into units, so that threadblocks can share it: threadblock i of a group of g
processes the i-th of g slices. A pipeline repeats its operations; each iteration processes the next
`unit_size` bytes. MSCCL++ derives the number of iterations from the size of the message. Here, a
chunk takes two iterations; or, if scratch memory is reused, one more than fit there, so that the
last iteration overwrites the first. An operation through a switch reads or writes the buffers of
all ranks of the switch's group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.cost.programs.execution_plan import ExecutionPlan, Gpu, Operation, Part, Threadblock
from autopar.errors import CollectiveError

Place = tuple[int, str, int]  # rank, buffer, unit
Channel = tuple[int, int, str]  # peer, index among the channels to this peer, type

BROADCASTS = ("rppkt", "gstore", "gstorepkt")  # have one source for all their targets
_SCRATCH = 1 << 26  # bytes of scratch memory that MSCCL++ reuses (src/core/include)
_MOST, _ALL = 1 << 12, 1 << 20  # units of a chunk, and units that all operations process


@dataclass(frozen=True)
class Step:
    """An operation, or one iteration of it.

    Attributes:
        name: "put", "signal", "wait", "rres", ...
        sources, targets: for each part, the places that it reads and writes.
        channels: channels on which it signals or waits.
        semaphores: its semaphores; of a barrier, its number.
        joins: number of threadblocks that meet at a barrier.
        reduces: "sum", or another reduction.
    """

    name: str
    sources: tuple[tuple[Place, ...], ...] = ()
    targets: tuple[tuple[Place, ...], ...] = ()
    channels: tuple[Channel, ...] = ()
    semaphores: tuple[int, ...] = ()
    joins: int = 0
    reduces: str = "sum"


_NOP = Step("nop")


class Resolver:
    """Resolves the operations of a plan.

    Attributes:
        units: number of units of a chunk.

    Raises:
        CollectiveError: an operation names a channel, buffer, chunk or slice that does not exist,
            or threadblocks and pipelines divide chunks too finely.
    """

    def __init__(self, plan: ExecutionPlan) -> None:
        self.plan = plan
        operations = [op for gpu in plan.gpus for b in gpu.threadblocks for op in b.operations]
        every = [*operations, *(inner for op in operations for inner in op.inner)]
        groups = {self._slice(op)[1] for op in every}
        self._sizes = {self._iterations(op)[0] for op in operations if op.inner}
        largest = max(self._sizes, default=1)
        self._room = 0  # iterations that fit into reused scratch memory
        scratch = max((gpu.scratch for gpu in plan.gpus), default=0)
        if self._sizes and scratch and plan.more.get("reuse_resources") is True:
            self._room = _SCRATCH // scratch // largest
            if not self._room or _SCRATCH // scratch % largest:
                raise self.wrong(
                    f"pipelines of {largest} bytes do not divide the scratch memory",
                    f"a chunk there has {_SCRATCH // scratch} bytes",
                )
        iterations = self._room + 1 if self._room else 2
        fine = largest // math.gcd(*self._sizes) if self._sizes else 1
        self._iteration = iterations * largest  # bytes of a chunk with pipelines
        self.units = math.lcm(*groups) * (iterations * fine if self._sizes else 1)
        self._left = _ALL
        if self.units > _MOST:
            raise self.wrong(
                "threadblocks or pipelines divide chunks too finely to be checked",
                f"a chunk into {self.units} parts",
            )
        self.count(self.units * sum(gpu.inputs for gpu in plan.gpus))

    def count(self, units: int) -> None:
        """Counts units that an operation processes; raises CollectiveError if they are too many."""
        self._left -= units
        if self._left < 0:
            raise self.wrong("the plan is too large to be checked", f"{_ALL} parts of chunks are")

    def place(self, rank: int, buffer: str, unit: int) -> Place:
        """Returns a place; an in-place plan has one buffer for input and output.

        Raises:
            CollectiveError: the place does not exist.
        """
        if rank >= len(self.plan.gpus):
            raise self.wrong(f"there is no rank {rank}", f"there are {len(self.plan.gpus)}")
        gpu, chunk = self.plan.gpus[rank], unit // self.units
        limit = {"i": gpu.inputs, "o": gpu.outputs, "s": gpu.scratch}[buffer]
        if not 0 <= chunk < limit:
            raise self.wrong(f"rank {rank} has no chunk {chunk} in {buffer}", f"it has {limit}")
        if self.plan.inplace and buffer != "s":
            kind = self.plan.collective
            if kind == "allgather" and buffer == "i":
                unit += rank * gpu.inputs * self.units
            elif kind == "reducescatter" and buffer == "o":
                unit += rank * gpu.outputs * self.units
            buffer = "io"
        return rank, buffer, unit

    def threadblocks(self) -> Iterator[tuple[int, tuple[Step, ...]]]:
        """Yields the rank and the steps of every threadblock."""
        for rank, gpu in enumerate(self.plan.gpus):
            for block in gpu.threadblocks:
                yield rank, tuple(_Block(self, rank, gpu, block).steps())

    def _slice(self, operation: Operation) -> tuple[int, int]:
        """Returns the index of a threadblock in its group, and the size of the group."""
        index, size = self._numbers(operation, "tbg_info", ("tb_id", "tbg_size"), (0, 1))
        if not 0 <= index < size:
            raise self.wrong(f"{operation.name} has no slice {index}", f"its group has {size}")
        return index, size

    def _iterations(self, operation: Operation) -> tuple[int, int]:
        """Returns the bytes of an iteration of a pipeline, and the chunks that it goes through."""
        size, chunks = self._numbers(operation, "iter_context", ("unit_size", "num_chunks"), (0, 0))
        if size < 1 or not 1 <= chunks <= _MOST:
            raise self.wrong(
                f"a pipeline of {chunks} chunks by {size} bytes", "both must be positive"
            )
        return size, chunks

    def _numbers(
        self, operation: Operation, key: str, names: Sequence[str], default: Sequence[int]
    ) -> Sequence[int]:
        table: Any = operation.more.get(key)
        if table is None:
            return default
        found = [table.get(name) for name in names] if isinstance(table, Mapping) else []
        numbers = [value for value in found if isinstance(value, int) and 0 <= value < 2**53]
        if len(numbers) != len(names):
            raise self.wrong(f"{key} of {operation.name} is not supported", f"{table}"[:80])
        return numbers

    def spans(self, operation: Operation, part: Part, turn: int, size: int) -> range:
        """Returns the units of a part that a threadblock processes.

        Args:
            operation, part: an operation and one of its parts.
            turn: the iteration of the pipeline.
            size: bytes of an iteration, 0 outside of pipelines.
        """
        index, slices = self._slice(operation)
        whole = part.size * self.units
        start, stop = whole * index // slices, whole * (index + 1) // slices
        if not size:
            return range(part.index * self.units + start, part.index * self.units + stop)
        each = self.units * size // self._iteration
        if start + turn * each >= stop:
            raise self.wrong(
                f"a pipeline goes beyond the chunks of {operation.name}",
                f"its iteration {turn} begins after the last of {part.size} chunks",
            )
        stop = min(start + (turn + 1) * each, stop)
        first = part.index * self.units + start + turn * each
        return range(first, first + stop - start - turn * each)

    def pipeline(self, operation: Operation) -> tuple[int, int]:
        """Returns the bytes of an iteration of a pipeline, and the number of iterations."""
        size, chunks = self._iterations(operation)
        return size, min(chunks * self._iteration // size, _MOST)

    def reused(self, place: Place, turn: int, size: int) -> Place:
        """Returns the place in scratch memory that MSCCL++ uses in an iteration of a pipeline."""
        if not (self._room and size) or place[1] != "s":
            return place
        each = self.units * size // self._iteration
        room = self._room * max(self._sizes) // size
        return place[0], "s", place[2] - (turn // room * room) * each

    def wrong(self, what: str, why: str) -> CollectiveError:
        """Returns an error that names the plan."""
        return CollectiveError(what, where=f"{self.plan.collective} by {self.plan.name}", why=why)


class _Block:
    """Resolves the operations of one threadblock."""

    def __init__(self, resolver: Resolver, rank: int, gpu: Gpu, block: Threadblock) -> None:
        self.resolver, self.rank, self.gpu, self.block = resolver, rank, gpu, block
        ends: dict[tuple[str, int], Channel] = {}
        for kind, peers in gpu.peers.items():
            seen: dict[int, int] = {}
            for number, peer in enumerate(peers):
                ends[kind, number] = (peer, seen.setdefault(peer, 0), kind)
                seen[peer] += 1
        try:
            self.channels = {
                kind: tuple(ends[kind, n] for n in ids)
                for kind, ids in block.channels.items()
                if not kind.startswith("switch")
            }
            self.buffers = {
                kind: tuple(gpu.remote[n][:2] for n in ids) for kind, ids in block.buffers.items()
            }
            self.switches = [
                gpu.switches[n]
                for kind, ids in block.channels.items()
                if kind.startswith("switch")
                for n in ids
            ]
        except (KeyError, IndexError):
            raise resolver.wrong(
                f"rank {rank} has a threadblock with a channel or buffer of none",
                "the GPU does not list it",
            ) from None

    def steps(self) -> Iterator[Step]:
        for operation in self.block.operations:
            if operation.name != "pipeline":
                yield self._step(operation, 0, 0)
                continue
            size, iterations = self.resolver.pipeline(operation)
            for turn in range(iterations):
                for inner in operation.inner:
                    if inner.name.endswith("pkt") or inner.name == "barrier":
                        raise self.resolver.wrong(
                            f"{inner.name} in a pipeline is not supported",
                            "MSCCL++ does not iterate over it",
                        )
                    yield self._step(inner, turn, size)

    def _step(self, operation: Operation, turn: int, size: int) -> Step:
        name, more = operation.name, operation.more
        if name == "nop":
            return _NOP
        sources, targets = (
            tuple(row for part in parts for row in self._rows(operation, part, turn, size))
            for parts in (operation.source, operation.target)
        )
        waits = name.endswith(("signal", "wait")) or name in ("pws", "pwsf")
        channels = operation.channels if waits else ()
        key = "barrier_id" if name == "barrier" else "semaphore_ids"
        given: Any = more.get(key, ())
        given = given if isinstance(given, (list, tuple)) else [given]
        joins: Any = more.get("num_threadblocks", 0)
        numbers = [number for number in (*given, joins) if isinstance(number, int)]
        if len(numbers) != len(given) + 1 or (name == "barrier" and len(given) != 1):
            raise self.resolver.wrong(
                f"{name} of rank {self.rank} names no number", f"{given}"[:80]
            )
        return Step(
            name, sources, targets, tuple(self._channel(operation, n) for n in channels),
            tuple(numbers[:-1]), numbers[-1], str(more.get("reduce_op", "sum")),
        )  # fmt: skip

    def _rows(
        self, operation: Operation, part: Part, turn: int, size: int
    ) -> Iterator[tuple[Place, ...]]:
        """Yields the places of a part; of a part behind a switch, those of each of its ranks."""
        span = self.resolver.spans(operation, part, turn, size)
        for rank, buffer in self._buffers(operation, part):
            self.resolver.count(len(span))
            places = (self.resolver.place(rank, buffer, unit) for unit in span)
            yield tuple(self.resolver.reused(place, turn, size) for place in places)

    def _buffers(self, operation: Operation, part: Part) -> list[tuple[int, str]]:
        """Returns the rank and the kind of the buffers of a part."""
        if part.kind == "type" and part.rank in (None, self.rank):
            return [(self.rank, str(part.buffer))]
        number = -1 if part.kind == "type" else int(part.buffer)
        known = self.buffers.get(operation.channel_type, ())
        if part.kind == "buffer_id" and number < len(known):
            return [known[number]]
        if part.kind == "switch_channel_id" and number < len(self.switches):
            switch = self.switches[number]
            for ranks in switch.groups:
                if self.rank in ranks:
                    return [(rank, switch.buffer) for rank in ranks]
        raise self.resolver.wrong(
            f"rank {self.rank} reaches a buffer that it does not name", operation.name
        )

    def _channel(self, operation: Operation, number: int) -> Channel:
        """Returns a channel of the operation's type, or of the only type if it names none."""
        kinds = [operation.channel_type] if operation.channel_type else [*self.channels]
        known = self.channels.get(kinds[0], ()) if len(kinds) == 1 else ()
        if number >= len(known):
            raise self.resolver.wrong(
                f"rank {self.rank} has no channel {number}",
                f"its threadblock names {len(known)} for {operation.name}",
            )
        return known[number]

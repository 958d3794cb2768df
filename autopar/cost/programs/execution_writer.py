"""Writes collective programs as execution plans, and prices such plans.

Each rank is one threadblock. In a round it first puts the chunks that it sends: chunks that
overwrite others directly into their place, chunks to be added into separate places of scratch
memory. Then it signals its receivers, waits for its senders, and adds the chunks that have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from autopar.cost.algorithms import Level
from autopar.cost.programs.collective_program import CollectiveProgram, Message
from autopar.cost.programs.execution_checker import check_plan
from autopar.cost.programs.execution_plan import (
    COLLECTIVES,
    ExecutionPlan,
    Gpu,
    Operation,
    Part,
    Threadblock,
)
from autopar.cost.programs.message_simulation import Flow, MessageTimes, simulate_messages

_KIND = "memory"
_NOP = Operation("nop")


def execution_plan(program: CollectiveProgram) -> ExecutionPlan:
    """Returns the execution plan of a program, in place except for an all_to_all."""
    writer = _Writer(program)
    inplace = program.kind != "all_to_all"
    gpus = tuple(map(writer.gpu, range(program.ranks)))
    return ExecutionPlan(program.name, COLLECTIVES[program.kind], "Simple", inplace, gpus)


def simulate_plan(plan: ExecutionPlan, levels: Sequence[Level], nbytes: float) -> MessageTimes:
    """Checks a plan by `check_plan`, and simulates its messages over the levels of a network."""
    transfers = check_plan(plan)
    rows = [(t.source, t.target, t.chunks, False) for t in transfers]
    share = 1 / plan.gpus[0].inputs
    flow = Flow.of_messages(
        len(plan.gpus), share, rows, [t.after for t in transfers], [t.unported for t in transfers]
    )
    return simulate_messages(flow, levels, nbytes)


class _Writer:
    def __init__(self, program: CollectiveProgram) -> None:
        self.program = program
        # For every rank: the numbers of its channels by peer, and of its remote buffers.
        self.peers: list[dict[int, int]] = [{} for _ in range(program.ranks)]
        self.remote: list[dict[tuple[int, str], int]] = [{} for _ in range(program.ranks)]
        self.scratch = [0] * program.ranks
        # By round: messages, with the index of their first chunk in the target's scratch memory.
        self.rounds: list[list[tuple[Message, int]]] = []
        # Chunks of other ranks that a rank forwards in an all_to_all.
        self.passing: list[dict[int, int]] = [{} for _ in range(program.ranks)]
        for messages in program.rounds:
            placed = []
            for message in messages:
                source, target, chunks, adds = message
                self.peers[source].setdefault(target, len(self.peers[source]))
                self.peers[target].setdefault(source, len(self.peers[target]))
                placed.append((message, self.scratch[target]))
                if adds:
                    self.scratch[target] += len(chunks)
                for chunk in chunks if program.kind == "all_to_all" else ():
                    if self._home(target, chunk)[0] == "s":
                        self.passing[target][chunk] = self.scratch[target]
                        self.scratch[target] += 1
            self.rounds.append(placed)

    def gpu(self, rank: int) -> Gpu:
        program, peers = self.program, self.peers[rank]
        per = program.chunks // program.ranks
        inputs, outputs = {
            "all_gather": (per, program.chunks),
            "reduce_scatter": (program.chunks, per),
            "all_to_all": (per, per),
        }.get(program.kind, (program.chunks, program.chunks))
        operations = tuple(self._operations(rank))
        remote = [(peer, kind, (_KIND,)) for peer, kind in self.remote[rank]]
        block = Threadblock(
            {_KIND: tuple(range(len(peers)))} if peers else {},
            {_KIND: tuple(range(len(remote)))} if remote else {},
            operations,
        )
        links = {_KIND: tuple(peers)} if peers else {}
        return Gpu(inputs, outputs, self.scratch[rank], links, (), tuple(remote), (), (block,))

    def _operations(self, rank: int) -> Iterator[Operation]:
        program = self.program
        if program.kind == "all_to_all":
            each = program.chunks // program.unit
            own = Part("type", "i", rank * each, each), Part("type", "o", rank * each, each)
            yield Operation("copy", (own[0],), (own[1],))
        for placed in self.rounds:
            sent = [(m, at) for m, at in placed if m.source == rank]
            came = [(m, at) for m, at in placed if m.target == rank]
            for message, at in sent:
                yield from self._put(rank, message, at)
            if sent:
                links = tuple(dict.fromkeys(self.peers[rank][m.target] for m, _ in sent))
                yield from (_NOP, Operation("signal", (), (), links, _KIND))
            if came:
                links = tuple(dict.fromkeys(self.peers[rank][m.source] for m, _ in came))
                yield from (Operation("wait", (), (), links, _KIND), _NOP)
            for message, at in came:
                for place, chunk in enumerate(message.chunks if message.adds else ()):
                    home = Part("type", *self._home(rank, chunk), 1)
                    there = Part("type", "s", at + place, 1)
                    yield Operation("re", (home, there), (home,), more={"reduce_op": "sum"})
            if any(message.adds for message, _ in came):
                yield _NOP

    def _put(self, rank: int, message: Message, at: int) -> Iterator[Operation]:
        """Yields the operations that transfer a message, one for each run of adjacent chunks."""
        places = []
        for place, chunk in enumerate(message.chunks):
            there = ("s", at + place) if message.adds else self._home(message.target, chunk)
            places.append((self._home(rank, chunk), there))
        starts = [
            n
            for n, (here, there) in enumerate(places)
            if not n or places[n - 1] != ((here[0], here[1] - 1), (there[0], there[1] - 1))
        ]
        for first, last in pairwise((*starts, len(places))):
            (buffer, index), (far, there_index) = places[first]
            reached = self.remote[rank]
            remote = reached.setdefault((message.target, far), len(reached))
            source = Part("type", buffer, index, last - first)
            target = Part("buffer_id", remote, there_index, last - first)
            link = (self.peers[rank][message.target],)
            yield Operation("put", (source,), (target,), link, _KIND)

    def _home(self, rank: int, chunk: int) -> tuple[str, int]:
        """The buffer and the place of a chunk on a rank."""
        program = self.program
        if program.kind == "all_gather":
            return "o", chunk
        if program.kind != "all_to_all":
            return "i", chunk
        block, piece = divmod(chunk, program.chunks // program.unit)
        source, target = divmod(block, program.ranks)
        each = program.chunks // program.unit
        if source == rank:
            return "i", target * each + piece
        if target == rank:
            return "o", source * each + piece
        return "s", self.passing[rank].get(chunk, 0)

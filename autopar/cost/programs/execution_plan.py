"""Reads and writes MSCCL++'s execution plans: a collective as JSON that its executor runs.

A plan lists GPUs. A GPU lists its chunks, its signalling channels, the remote buffers that it can
access, and its threadblocks. A threadblock lists its operations, which run in order. The fields are
those that microsoft/mscclpp reads in src/core/executor/execution_plan.cc. An operation refers to a
channel or a remote buffer by its index in the threadblock's list for the channel type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import CollectiveError
from autopar.files.checked_values import FLAG, Fields, Integer, Row, Text
from autopar.files.kinds import Kind

FILE = Kind("the execution plan", CollectiveError)
COLLECTIVES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_to_all": "alltoall",
    "broadcast": "broadcast",
}
_SMALL, _SIZE = Integer(0, 2**20), Integer(0, 2**64)
_TYPES = ("memory", "port", "switch", "none")
_NUMBERS = Row(_SMALL)
# Other fields that MSCCL++ reads; they are stored unchanged.
_OF_PLAN = (
    "reuse_resources",
    "use_double_scratch_buffer",
    "buffer_alignment",
    "min_message_size",
    "max_message_size",
    "num_threads_per_block",
)
_OF_OPERATION = (
    "reduce_op",
    "tbg_info",
    "barrier_id",
    "num_threadblocks",
    "semaphore_ids",
    "iter_context",
)


@dataclass(frozen=True)
class Part:
    """Chunks of a buffer.

    Attributes:
        kind: "type" for a buffer of the GPU itself, "buffer_id" for one of another GPU,
            "switch_channel_id" for one behind a switch.
        buffer: "i", "o" or "s"; or the number of the remote buffer or of the channel.
        index, size: the first chunk, and the number of chunks.
        rank: the GPU, which MSCCL++ states for the source of a store through a switch; else None.
    """

    kind: str
    buffer: str | int
    index: int
    size: int
    rank: int | None = None

    @property
    def table(self) -> dict[str, Any]:
        """The entry in JSON."""
        stated = {} if self.rank is None else {"rank": self.rank}
        return {**stated, self.kind: self.buffer, "index": self.index, "size": self.size}


@dataclass(frozen=True)
class Operation:
    """One operation of a threadblock.

    Attributes:
        name: "put", "signal", "wait", "rres", ...
        source, target: chunks that it reads and writes.
        channels: channels on which it signals or waits, or through which it transfers.
        channel_type: "memory", "port", "switch" or "".
        inner: the operations that a pipeline repeats.
        more: other fields of MSCCL++, unchanged.
    """

    name: str
    source: tuple[Part, ...] = ()
    target: tuple[Part, ...] = ()
    channels: tuple[int, ...] = ()
    channel_type: str = ""
    inner: tuple[Operation, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def table(self) -> dict[str, Any]:
        """The entry in JSON."""
        found: dict[str, Any] = {"name": self.name}
        if self.source:
            found["src_buff"] = [part.table for part in self.source]
        if self.target:
            found["dst_buff"] = [part.table for part in self.target]
        if self.channels:
            found["channel_ids"] = list(self.channels)
        if self.channel_type:
            found["channel_type"] = self.channel_type
        if self.inner:
            found["ops"] = [operation.table for operation in self.inner]
        return {**found, **self.more}


@dataclass(frozen=True)
class Threadblock:
    """Operations that run in order.

    Attributes:
        channels: by type, the numbers of the GPU's channels that it uses; the type of a channel
            through a switch is followed by its buffer, "switch s".
        buffers: by channel type, the numbers of the GPU's remote buffers that it uses.
        operations: in order.
    """

    channels: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]
    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class Switch:
    """A channel through a switch, which reads or writes a buffer of several GPUs at once.

    Attributes:
        buffer: "i", "o" or "s".
        groups: the ranks that each switch connects.
        key: "buffer_type", or "buff" in older files.
    """

    buffer: str
    groups: tuple[tuple[int, ...], ...]
    key: str = "buffer_type"

    @property
    def table(self) -> dict[str, Any]:
        """The entry in JSON."""
        groups = [{"size": len(ranks), "ranks": list(ranks)} for ranks in self.groups]
        return {"channel_type": "switch", self.key: self.buffer, "rank_groups": groups}


@dataclass(frozen=True)
class Gpu:
    """Operations of one GPU.

    Attributes:
        inputs, outputs, scratch: numbers of chunks of its buffers.
        peers: by channel type, the rank at the other end of each channel.
        switches: channels through switches.
        remote: rank, buffer and channel types of every remote buffer.
        semaphores: initial values of the semaphores.
        threadblocks: the threadblocks, which run concurrently.
    """

    inputs: int
    outputs: int
    scratch: int
    peers: Mapping[str, tuple[int, ...]]
    switches: tuple[Switch, ...]
    remote: tuple[tuple[int, str, tuple[str, ...]], ...]
    semaphores: tuple[int, ...]
    threadblocks: tuple[Threadblock, ...]


@dataclass(frozen=True)
class ExecutionPlan:
    """A plan for all GPUs.

    Attributes:
        name: name of the algorithm.
        collective: as MSCCL++ calls it, "allreduce".
        protocol: "Simple", or "LL" if data travels in packets with flags.
        inplace: whether input and output are one buffer.
        gpus: by rank.
        more: other fields of MSCCL++, unchanged.
    """

    name: str
    collective: str
    protocol: str
    inplace: bool
    gpus: tuple[Gpu, ...]
    more: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        head = {
            "name": self.name,
            "collective": self.collective,
            "protocol": self.protocol,
            "inplace": self.inplace,
        }
        gpus = [_gpu_table(rank, gpu) for rank, gpu in enumerate(self.gpus)]
        return json.dumps({**head, **self.more, "gpus": gpus}, indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Writes the plan, whole or not at all; CollectiveError if it cannot be written."""
        FILE.write(path, str(self))

    @classmethod
    def load(cls, path: str | Path) -> ExecutionPlan:
        """Reads a plan; CollectiveError names what is wrong with it."""
        return cls.parse(FILE.text(path), str(path))

    @classmethod
    def parse(cls, text: str, where: str = "") -> ExecutionPlan:
        """Reads the text of a plan; CollectiveError names what is wrong with it."""
        table = FILE.json(text, where)
        if not isinstance(table, dict):
            raise CollectiveError(
                "the execution plan is not an object",
                where=where,
                why=f"it is a {type(table).__name__}",
            )
        own = {k: v for k, v in table.items() if k not in _OF_PLAN}
        fields = Fields(own, CollectiveError, "the plan", where)
        plan = cls(
            fields.take("name", Text()),
            fields.take("collective", Text(1000)),
            fields.take("protocol", Text(known=("Simple", "LL"))),
            fields.take("inplace", FLAG),
            tuple(
                _gpu(entry, rank, where)
                for rank, entry in enumerate(fields.take("gpus", Row(dict)))
            ),
            {k: v for k, v in table.items() if k in _OF_PLAN},
        )
        fields.end()
        return plan


def _gpu_table(rank: int, gpu: Gpu) -> dict[str, Any]:
    channels = [
        *({"channel_type": kind, "connected_to": list(p)} for kind, p in gpu.peers.items()),
        *(switch.table for switch in gpu.switches),
    ]
    return {
        "id": rank,
        "input_chunks": gpu.inputs,
        "output_chunks": gpu.outputs,
        "scratch_chunks": gpu.scratch,
        "threadblocks": [_block_table(n, block) for n, block in enumerate(gpu.threadblocks)],
        "channels": channels,
        "remote_buffers": [
            {"rank": peer, "type": kind, "access_channel_types": list(types)}
            for peer, kind, types in gpu.remote
        ],
        "semaphores": [{"init_value": value} for value in gpu.semaphores],
    }


def _kind(text: str) -> dict[str, str]:
    kind, _, buffer = text.partition(" ")
    return {**({"buff": buffer} if buffer else {}), "channel_type": kind}


def _block_table(number: int, block: Threadblock) -> dict[str, Any]:
    return {
        "id": number,
        "ops": [operation.table for operation in block.operations],
        "channels": [
            {**_kind(kind), "channel_ids": list(ids)} for kind, ids in block.channels.items()
        ],
        "remote_buffer_refs": [
            {"access_channel_type": kind, "remote_buffer_ids": list(ids)}
            for kind, ids in block.buffers.items()
        ],
    }


def _gpu(entry: dict[str, Any], rank: int, where: str) -> Gpu:
    within = f"{where}, GPU {rank}" if where else f"GPU {rank}"
    fields = Fields(entry, CollectiveError, "the GPU", within)
    fields.take("id", Integer(rank, rank))
    peers: dict[str, tuple[int, ...]] = {}
    switches = []
    for channel in fields.take("channels", Row(dict), ()):
        if channel.get("channel_type") == "switch":
            switches.append(_switch(channel, within))
            continue
        inner = Fields(channel, CollectiveError, "the channel", within)
        kind = inner.take("channel_type", Text(known=_TYPES))
        peers[kind] = (*peers.get(kind, ()), *inner.take("connected_to", _NUMBERS))
        inner.end()
    remote = []
    for buffer in fields.take("remote_buffers", Row(dict), ()):
        inner = Fields(buffer, CollectiveError, "the remote buffer", within)
        kinds = Row(Text(known=_TYPES))
        remote.append(
            (
                inner.take("rank", _SMALL),
                inner.take("type", Text(known=("i", "o", "s"))),
                tuple(inner.take("access_channel_types", kinds)),
            )
        )
        inner.end()
    semaphores = fields.take("semaphores", Row(dict), ())
    made = Gpu(
        fields.take("input_chunks", _SMALL),
        fields.take("output_chunks", _SMALL),
        fields.take("scratch_chunks", _SMALL),
        peers,
        tuple(switches),
        tuple(remote),
        tuple(
            Fields(s, CollectiveError, "the semaphore", within).take("init_value", _SIZE)
            for s in semaphores
        ),
        tuple(
            _block(block, f"{within}, threadblock {number}")
            for number, block in enumerate(fields.take("threadblocks", Row(dict)))
        ),
    )
    fields.end()
    return made


def _switch(entry: dict[str, Any], where: str) -> Switch:
    fields = Fields(entry, CollectiveError, "the switch", where)
    fields.take("channel_type", Text())
    key = "buff" if "buff" in entry else "buffer_type"
    buffer = fields.take(key, Text(known=("i", "o", "s")))
    groups = []
    for group in fields.take("rank_groups", Row(dict)):
        inner = Fields(group, CollectiveError, "the group of ranks", where)
        ranks = tuple(inner.take("ranks", _NUMBERS))
        inner.take("size", Integer(len(ranks), len(ranks)))
        inner.end()
        groups.append(ranks)
    fields.end()
    return Switch(buffer, tuple(groups), key)


def _block(entry: dict[str, Any], where: str) -> Threadblock:
    fields = Fields(entry, CollectiveError, "the threadblock", where)
    fields.take("id", _SMALL)
    lists: list[dict[str, tuple[int, ...]]] = []
    for name, kind, ids in (
        ("channels", "channel_type", "channel_ids"),
        ("remote_buffer_refs", "access_channel_type", "remote_buffer_ids"),
    ):
        found: dict[str, tuple[int, ...]] = {}
        for each in fields.take(name, Row(dict), ()):
            inner = Fields(each, CollectiveError, name, where)
            of = inner.take(kind, Text(known=_TYPES))
            if "buff" in each:
                of += " " + inner.take("buff", Text(known=("i", "o", "s")))
            found[of] = (*found.get(of, ()), *inner.take(ids, _NUMBERS))
            inner.end()
        lists.append(found)
    operations = tuple(_operation(each, where) for each in fields.take("ops", Row(dict)))
    fields.end()
    return Threadblock(lists[0], lists[1], operations)


def _operation(entry: dict[str, Any], where: str, depth: int = 0) -> Operation:
    own = {k: v for k, v in entry.items() if k not in _OF_OPERATION}
    fields = Fields(own, CollectiveError, "the operation", where)
    inner = fields.take("ops", Row(dict), ())
    if inner and depth:
        raise CollectiveError(
            "a pipeline holds a pipeline", where=where, why="it repeats plain operations"
        )
    made = Operation(
        fields.take("name", Text(100)),
        tuple(_part(each, where) for each in fields.take("src_buff", Row(dict), ())),
        tuple(_part(each, where) for each in fields.take("dst_buff", Row(dict), ())),
        tuple(fields.take("channel_ids", _NUMBERS, ())),
        fields.take("channel_type", Text(known=_TYPES), ""),
        tuple(_operation(each, where, 1) for each in inner),
        {k: v for k, v in entry.items() if k in _OF_OPERATION},
    )
    fields.end()
    return made


def _part(entry: dict[str, Any], where: str) -> Part:
    fields = Fields(entry, CollectiveError, "the chunks", where)
    kinds = [kind for kind in ("type", "buffer_id", "switch_channel_id") if kind in entry]
    if len(kinds) != 1:
        raise CollectiveError("chunks name one buffer", where=where, why=f"keys: {list(entry)}")
    check = Text(known=("i", "o", "s")) if kinds == ["type"] else _SMALL
    buffer = fields.take(kinds[0], check)
    index, size = fields.take("index", _SMALL), fields.take("size", Integer(1, 2**20))
    made = Part(kinds[0], buffer, index, size, fields.take("rank", _SMALL, None))
    fields.end()
    return made

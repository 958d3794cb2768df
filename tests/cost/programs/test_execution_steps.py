"""Execution plans whose threadblocks share chunks, repeat operations, or go through a switch.

The plans follow those of microsoft/mscclpp, in test/executor-tests and test/execution-files:
reduce_tbg, transfer_pack_tbg, allreduce_pipeline and reduce_nvls.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from autopar.cost.algorithms import Level
from autopar.cost.programs.execution_checker import check_plan
from autopar.cost.programs.execution_plan import ExecutionPlan
from autopar.cost.programs.execution_writer import simulate_plan
from autopar.errors import CollectiveError

Ops = list[dict[str, Any]]


def plan(
    collective: str, chunks: tuple[int, int, int], blocks: list[list[Ops]], **more: Any
) -> str:
    """GPUs with channels of every threadblock to all others, their buffers, and a switch.

    Args:
        collective, chunks: of inputs, outputs and scratch memory.
        blocks: the operations of every threadblock of every GPU.
        more: other fields; `switched` is the buffer behind the switch, `semaphores` their values.
    """
    count, made = len(blocks), []
    ranks = [*range(count)]
    switched, semaphores = more.pop("switched", "i"), more.pop("semaphores", [])
    for rank, own in enumerate(blocks):
        others = [other for other in ranks if other != rank]
        buffers = [*range(3 * len(others))]
        made.append(
            {
                "id": rank,
                "input_chunks": chunks[0],
                "output_chunks": chunks[1],
                "scratch_chunks": chunks[2],
                "channels": [
                    {"channel_type": "memory", "connected_to": others * len(own)},
                    {
                        "channel_type": "switch",
                        "buffer_type": switched,
                        "rank_groups": [{"size": count, "ranks": ranks}],
                    },
                ],
                "remote_buffers": [
                    {"rank": other, "type": kind, "access_channel_types": ["memory"]}
                    for other in others
                    for kind in "ios"
                ],
                "semaphores": [{"init_value": value} for value in semaphores],
                "threadblocks": [
                    {
                        "id": number,
                        "channels": [
                            {
                                "channel_type": "memory",
                                "channel_ids": [number * len(others) + n for n in range(count - 1)],
                            },
                            {"channel_type": "switch", "channel_ids": [0]},
                        ],
                        "remote_buffer_refs": [
                            {"access_channel_type": "memory", "remote_buffer_ids": buffers}
                        ],
                        "ops": ops,
                    }
                    for number, ops in enumerate(own)
                ],
            }
        )
    head = {"name": "mine", "collective": collective, "protocol": "Simple", "inplace": True}
    return json.dumps({**head, **more, "gpus": made})


def own(buffer: str, index: int, size: int = 1) -> dict[str, Any]:
    return {"type": buffer, "index": index, "size": size}


def far(buffer: str, index: int, size: int = 1, other: int = 0) -> dict[str, Any]:
    """Chunks of the GPU at the other end of a channel."""
    return {"buffer_id": 3 * other + "ios".index(buffer), "index": index, "size": size}


def through(index: int, size: int = 1) -> dict[str, Any]:
    return {"switch_channel_id": 0, "index": index, "size": size}


def move(name: str, source: Any, *targets: Any, **more: Any) -> dict[str, Any]:
    kind = "switch" if name.startswith("g") and name != "get" else "memory"
    ends = {"src_buff": [source], "dst_buff": [*targets], "channel_type": kind}
    return {"name": name, **ends, **more}


def signals(*channels: int, kind: str = "") -> Ops:
    on = {"channel_ids": [*(channels or (0,))], "channel_type": "memory"}
    return [{"name": kind + "signal", **on}, {"name": kind + "wait", **on}]


def slice_of(number: int, size: int = 2) -> dict[str, Any]:
    return {"tbg_info": {"tb_id": number, "tbg_size": size}}


def barrier(count: int, number: int = 0) -> Ops:
    return [{"name": "barrier", "barrier_id": number, "num_threadblocks": count}]


def together(before: int = 2, after: int = 2, slices: int = 2) -> str:
    """Two threadblocks put halves of one chunk; the first tells the other GPU when both have."""
    blocks = []
    for rank in range(2):
        put = move("put", own("o", rank), far("o", rank))
        first = [*signals(kind="rlx"), *barrier(before), {**put, **slice_of(0, slices)}]
        second = [*barrier(before), {**put, **slice_of(1, slices)}]
        blocks.append([[*first, *barrier(after), *signals()], [*second, *barrier(after)]])
    return plan("allgather", (1, 2, 0), blocks)


def apart(size: int) -> str:
    """Both threadblocks copy halves of `size` chunks, and add halves of each from the other GPU."""
    blocks = []
    for rank in range(2):
        theirs = 2 * (1 - rank)
        block = []
        for number in range(2):
            copies = [
                move("copy", own("i", theirs + at, size), own("s", theirs + at, size))
                for at in range(0, 2, size)
            ]
            sums = []
            for at in (2 * rank, 2 * rank + 1):
                ends = [own("i", at), far("s", at)], [own("i", at), far("i", at)]
                row = {"src_buff": ends[0], "dst_buff": ends[1], "channel_type": "memory"}
                sums.append({"name": "rres", **row, "reduce_op": "sum"})
            ops = [{**op, **slice_of(number)} for op in (*copies, *sums)]
            block.append([*ops[: len(copies)], *signals(), *ops[len(copies) :], *signals()])
        blocks.append(block)
    return plan("allreduce", (4, 4, 4), blocks)


def pipelined(free: int, chunks: int = 1, **more: Any) -> str:
    """An all_reduce of two chunks through scratch memory, which holds two iterations of each.

    One threadblock fills the memory, one adds up through the switch, and one empties it; `free`
    iterations may be under way.
    """

    def repeat(*ops: dict[str, Any]) -> Ops:
        return [
            {
                "name": "pipeline",
                "iter_context": {"unit_size": 1 << 24, "num_chunks": chunks},
                "ops": [*ops],
            }
        ]

    def semaphore(kind: str, number: int) -> dict[str, Any]:
        return {"name": f"sem_{kind}", "semaphore_ids": [number]}

    blocks = []
    for rank in range(2):
        fill = [move("copy", own("i", at), own("s", at)) for at in range(2)]
        empty = [move("copy", own("s", at), own("i", at)) for at in range(2)]
        add = move("glres", through(rank), through(rank), reduce_op="sum")
        blocks.append(
            [
                repeat(semaphore("acquire", 2), *fill, *signals(), semaphore("release", 0)),
                repeat(semaphore("acquire", 0), add, semaphore("release", 1)),
                repeat(semaphore("acquire", 1), *signals(), *empty, semaphore("release", 2)),
            ]
        )
    values = {"semaphores": [0, 0, free], "switched": "s"}
    return plan("allreduce", (2, 2, 2), blocks, reuse_resources=True, **values, **more)


def switched(count: int) -> str:
    """Each GPU adds up its chunk through the switch, which stores the sum on all of them."""
    blocks: list[list[Ops]] = []
    channels = range(count - 1)
    for rank in range(count):
        add = move("glres", through(rank), through(rank), reduce_op="sum")
        blocks.append([[*signals(*channels, kind="rlx"), add, *signals(*channels)]])
    return plan("allreduce", (count, count, 0), blocks)


def stored(count: int) -> str:
    """Each GPU stores its chunk on all GPUs through the switch."""
    blocks: list[list[Ops]] = []
    channels = range(count - 1)
    for rank in range(count):
        store = move("gstore", {"rank": rank, **own("o", rank)}, through(rank))
        blocks.append([[*signals(*channels, kind="rlx"), store, *signals(*channels)]])
    return plan("allgather", (1, count, 0), blocks, switched="o")


def forwarded() -> str:
    """A GPU's packets of one source go to two targets at once."""
    blocks: list[list[Ops]] = []
    for rank in range(3):
        sends = move("rppkt", own("s", rank), far("s", rank), far("s", rank, other=1))
        takes = [
            move("upkt", own("s", other), own("o", other)) for other in range(3) if other != rank
        ]
        blocks.append([[move("cpkt", own("o", rank), own("s", rank)), sends], takes])
    return plan("allgather", (1, 3, 3), blocks, protocol="LL")


@pytest.mark.parametrize(
    "text",
    [together(), apart(1), pipelined(2), switched(2), switched(4), stored(3), forwarded()],
)
def test_plans_of_every_kind_are_read_judged_and_written_back(text: str) -> None:
    read = ExecutionPlan.parse(text)
    assert json.loads(str(read)) == json.loads(text)
    check_plan(read)


def broken(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        # The threadblock of another GPU copied what this one adds: they have not met.
        (apart(2), "may not be there yet"),
        # The third iteration overwrites the first one before it has been read.
        (pipelined(3), "may still use"),
        (pipelined(1 << 60), "may still use"),
        (pipelined(0), "wait for one another"),
        (pipelined(2, chunks=2), "goes beyond the chunks of copy"),
        (pipelined(2, chunks=1 << 40), "both must be positive"),
        (broken(pipelined(2), "16777216", "33554433"), "do not divide the scratch memory"),
        (broken(pipelined(2), "16777216", "1"), "too finely"),
        (switched(2).replace('_chunks": 2', '_chunks": 1048576'), "too large to be checked"),
        (broken(pipelined(2), '"name": "copy"', '"name": "upkt"'), "upkt in a pipeline"),
        (together(before=3), "wait for one another"),
        (together(after=1), "may not be there yet|ends before"),
        (together(slices=3), "wrong chunk"),
        (broken(together(), '"tb_id": 1', '"tb_id": 2'), "has no slice 2"),
        (broken(together(), '"tbg_size": 2', '"tbg_size": 8209'), "too finely"),
        (broken(together(), '"barrier_id": 0', '"barrier_id": "x"'), "names no number"),
        (broken(switched(2), '"ranks": [0, 1]', '"ranks": [1, 1]'), "does not name"),
        (broken(switched(4), '"ranks": [0, 1, 2, 3]', '"ranks": [0, 1, 2, 9]'), "no rank 9"),
        (broken(switched(2), "rlxwait", "nop"), "does not wait for it"),
        (broken(stored(3), '"rank": 0, "type": "o"', '"rank": 1, "type": "o"'), "does not name"),
        (broken(forwarded(), '"upkt"', '"nop"'), "wrong chunk"),
    ],
)  # fmt: skip
def test_wrong_plans_are_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(CollectiveError, match=says):
        check_plan(ExecutionPlan.parse(text))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"buffer_type": "i"', '"buffer_type": "z"'),
        ('"size": 2, "ranks"', '"size": 3, "ranks"'),
        ('"rank_groups"', '"gangs"'),
    ],
)
def test_damaged_switches_are_refused(old: str, new: str) -> None:
    with pytest.raises(CollectiveError):
        ExecutionPlan.parse(broken(switched(2), old, new))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_switch_adds_and_copies_on_the_way(count: int) -> None:
    """A GPU sends its parts to n - 1 others, and takes one sum; then it sends one sum to all."""
    read = ExecutionPlan.parse(switched(count))
    phase = 3.0 + (count - 1) * (1000 / count) / 100
    assert simulate_plan(read, [Level(count, 100.0, 3.0)], 1000).seconds == pytest.approx(2 * phase)


@pytest.mark.parametrize("text", [together(), apart(1), pipelined(2), switched(3), forwarded()])
def test_every_operation_of_every_kind_is_needed(text: str) -> None:
    def rows(table: dict[str, Any]) -> list[Ops]:
        blocks = [block["ops"] for gpu in table["gpus"] for block in gpu["threadblocks"]]
        return [*blocks, *(op["ops"] for ops in blocks for op in ops if "ops" in op)]

    for number, row in enumerate(rows(json.loads(text))):
        for place in range(len(row)):
            table = json.loads(text)
            rows(table)[number][place] = {"name": "nop"}
            with pytest.raises(CollectiveError):
                check_plan(ExecutionPlan.parse(json.dumps(table)))

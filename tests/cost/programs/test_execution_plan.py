"""MSCCL++'s execution plans are read, checked and priced; ours are written and read back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.algorithms import Level
from autopar.cost.collectives import written
from autopar.cost.programs.execution_checker import check_plan
from autopar.cost.programs.execution_plan import ExecutionPlan, Operation
from autopar.cost.programs.execution_writer import execution_plan, simulate_plan
from autopar.cost.programs.message_simulation import flow_of, simulate_messages
from autopar.errors import CollectiveError
from tests.cost.programs.grids import ALGORITHMS


def own(buffer: str, index: int, size: int = 1) -> dict[str, Any]:
    return {"type": buffer, "index": index, "size": size}


def far(number: int, index: int, size: int = 1) -> dict[str, Any]:
    return {"buffer_id": number, "index": index, "size": size}


def move(name: str, source: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "src_buff": [source], "dst_buff": [target]}


def plan(gpus: list[dict[str, Any]], protocol: str = "Simple") -> str:
    """Two GPUs with four chunks each, a channel to one another, and all of the other's buffers."""
    made = [
        {
            "id": rank,
            "input_chunks": 4,
            "output_chunks": 4,
            "scratch_chunks": 4,
            "channels": [{"channel_type": "memory", "connected_to": [1 - rank]}],
            "remote_buffers": [
                {"rank": 1 - rank, "type": kind, "access_channel_types": ["memory"]}
                for kind in ("i", "s")
            ],
            "semaphores": [{"init_value": 0}],
            "threadblocks": [
                {
                    "id": number,
                    "channels": [{"channel_type": "memory", "channel_ids": [0]}],
                    "remote_buffer_refs": [
                        {"access_channel_type": "memory", "remote_buffer_ids": [0, 1]}
                    ],
                    "ops": ops,
                }
                for number, ops in enumerate(gpu["blocks"])
            ],
        }
        for rank, gpu in enumerate(gpus)
    ]
    head = {"name": "mine", "collective": "allreduce", "protocol": protocol, "inplace": True}
    return json.dumps({**head, "num_threads_per_block": 1024, "gpus": made})


SIGNAL = {"name": "signal", "channel_ids": [0], "channel_type": "memory"}
WAIT = {**SIGNAL, "name": "wait"}


def halves() -> str:
    """Each GPU adds a half of the other's input to its own and writes the sum to both."""
    gpus = []
    for rank in range(2):
        ends = own("i", 2 * rank, 2), far(0, 2 * rank, 2)
        add = {"name": "rres", "src_buff": ends, "dst_buff": ends, "channel_type": "memory"}
        ops = [SIGNAL, WAIT, {**add, "reduce_op": "sum"}, {"name": "nop"}, SIGNAL, WAIT]
        gpus.append({"blocks": [ops]})
    return plan(gpus)


def packets() -> str:
    """The same in packets, which need no signals: one threadblock sends and adds, one unpacks."""
    gpus = []
    for rank in range(2):
        mine, other = 2 * rank, 2 * (1 - rank)
        send = {
            "name": "ppkt", "src_buff": [own("i", other, 2)], "dst_buff": [far(1, 0, 2)],
            "channel_type": "memory",
        }  # fmt: skip
        add = {
            "name": "respkt", "src_buff": [own("i", mine, 2), own("s", 0, 2)],
            "dst_buff": [own("i", mine, 2), far(1, 2, 2)], "channel_type": "memory",
        }  # fmt: skip
        unpack = {"name": "upkt", "src_buff": [own("s", 2, 2)], "dst_buff": [own("i", other, 2)]}
        gpus.append({"blocks": [[send, add], [unpack]]})
    return plan(gpus, "LL")


@pytest.mark.parametrize("text", [halves(), packets()])
def test_plans_are_read_judged_priced_and_written_back(text: str, tmp_path: Path) -> None:
    read = ExecutionPlan.parse(text)
    assert json.loads(str(read)) == json.loads(text)
    check_plan(read)
    # Two chunks of four there and two back, each after the other one's: 2 (a + m / 2b).
    there_and_back = simulate_plan(read, [Level(2, 100.0, 1.0)], 400).seconds
    assert there_and_back == pytest.approx(2 * (1 + 200 / 100))
    read.save(tmp_path / "plan.json")
    assert ExecutionPlan.load(tmp_path / "plan.json") == read


def changed(text: str, rank: int, block: int, place: int, new: dict[str, Any] | None) -> str:
    table = json.loads(text)
    ops = table["gpus"][rank]["threadblocks"][block]["ops"]
    ops[place : place + 1] = [] if new is None else [new]
    return json.dumps(table)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (changed(halves(), 0, 0, 0, None), "wait for one another"),
        (changed(halves(), 0, 0, 4, None), "wait for one another"),
        (changed(halves(), 0, 0, 2, {"name": "nop"}), "wrong chunk"),
        (changed(packets(), 0, 1, 0, {"name": "nop"}), "wrong chunk"),
        (changed(packets(), 1, 0, 0, {"name": "nop"}), "wait for one another"),
        (changed(halves(), 0, 0, 2, {"name": "glres"}), "adds unequal chunks"),
        (changed(halves(), 0, 0, 2, {"name": "pray"}), "pray is not supported"),
        (changed(halves(), 0, 0, 3, {"name": "nop", "tbg_info": {"tb_id": 0}}), "not supported"),
        (changed(halves(), 0, 0, 3, {**WAIT, "channel_ids": [7]}), "no channel 7"),
        (
            changed(halves(), 0, 0, 3, {"name": "sem_acquire", "semaphore_ids": [0]}),
            "wait for one another",
        ),
        (
            changed(halves(), 0, 0, 3, move("copy", own("s", 0), own("i", 0))),
            "before anything is there",
        ),
        (
            changed(halves(), 0, 0, 3, move("copy", own("i", 9), own("i", 0))),
            "no chunk 9",
        ),
        (
            changed(halves(), 0, 0, 3, move("put", own("i", 0), far(5, 0))),
            "does not name",
        ),
        (halves().replace("allreduce", "gossip"), "not supported"),
        (halves().replace('"sum"', '"max"', 1), "by 'max' is not supported"),
        (changed(halves(), 0, 0, 1, {**WAIT, "channel_ids": [0, 0]}), "wait for one another"),
        (changed(halves(), 0, 0, 1, {**WAIT, "channel_type": "port"}), "no channel 0"),
        (plan([]), "equal inputs"),
        (halves().replace('"input_chunks": 4', '"input_chunks": 8', 1), "equal inputs"),
    ],
)  # fmt: skip
def test_broken_plans_are_caught(text: str, says: str) -> None:
    with pytest.raises(CollectiveError) as caught:
        check_plan(ExecutionPlan.parse(text))
    assert says in str(caught.value)


def around(ranks: int, *changes: tuple[int, int, dict[str, Any]]) -> str:
    """Each GPU sends its input to the next, as MSCCL++'s example for several nodes does.

    Args:
        ranks: number of GPUs.
        changes: rank, place and operation that takes the place of another.
    """
    gpus = []
    for rank in range(ranks):
        before, after = (rank - 1) % ranks, (rank + 1) % ranks
        put = {**move("pws", own("i", 0, 2), far(0, 0, 2)), "channel_ids": [1]}
        ops = [
            {"name": "signal", "channel_ids": [0], "channel_type": "port"},
            {"name": "wait", "channel_ids": [1], "channel_type": "port"},
            {**put, "channel_type": "port"},
            {"name": "wait", "channel_ids": [0], "channel_type": "port"},
        ]
        for _, place, op in (change for change in changes if change[0] == rank):
            ops[place] = op
        gpus.append(
            {
                "id": rank,
                "input_chunks": 2,
                "output_chunks": 2,
                "scratch_chunks": 0,
                "channels": [{"channel_type": "port", "connected_to": [before, after]}],
                "remote_buffers": [
                    {"rank": after, "type": "o", "access_channel_types": ["port"]},
                ],
                "threadblocks": [
                    {
                        "id": 0,
                        "channels": [{"channel_type": "port", "channel_ids": [0, 1]}],
                        "remote_buffer_refs": [
                            {"access_channel_type": "port", "remote_buffer_ids": [0]}
                        ],
                        "ops": ops,
                    }
                ],
            }
        )
    head = {"name": "around", "collective": "sendrecv", "protocol": "Simple", "inplace": False}
    return json.dumps({**head, "gpus": gpus})


def test_messages_between_ranks_are_checked_and_priced() -> None:
    """All links carry one message at the same time."""
    found = ExecutionPlan.parse(around(4))
    assert ExecutionPlan.parse(str(found)) == found
    sent = [(each.source, each.target, each.chunks) for each in check_plan(found)]
    assert sorted(sent) == [(rank, (rank + 1) % 4, 2) for rank in range(4)]
    assert simulate_plan(found, [Level(4, 1e9, 1e-6)], 1e6).seconds == pytest.approx(1e-3 + 1e-6)


NOTHING = {"name": "nop"}
PUT = {"name": "pws", "channel_ids": [1], "channel_type": "port"}


@pytest.mark.parametrize(
    ("ops", "says"),
    [
        ((NOTHING, NOTHING, move("copy", own("i", 0, 2), own("o", 0, 2)), NOTHING), "of one other"),
        ((NOTHING, NOTHING, NOTHING, NOTHING), "of one other"),
        ((None, None, {**move("", own("i", 0), far(0, 0)), **PUT}, None), "the wrong chunk 1"),
        ((None, None, {**move("", own("i", 1), far(0, 0)), **PUT}, None), "the wrong chunk 0"),
        ((None, None, None, NOTHING), "does not wait for it"),
    ],
)
def test_messages_that_miss_a_rank_are_caught(ops: tuple[Any, ...], says: str) -> None:
    changes = [(rank, at, op) for rank in range(3) for at, op in enumerate(ops) if op]
    with pytest.raises(CollectiveError, match=says):
        check_plan(ExecutionPlan.parse(around(3, *changes)))


def test_a_race_is_caught_whatever_came_of_it() -> None:
    """A GPU reads what another one is about to write, or writes it, without having waited."""
    get = {
        "name": "get", "src_buff": [far(1, 0)], "dst_buff": [own("s", 1)], "channel_ids": [0],
        "channel_type": "memory",
    }  # fmt: skip
    put = {
        "name": "put", "src_buff": [own("i", 0)], "dst_buff": [far(1, 1)], "channel_ids": [0],
        "channel_type": "memory",
    }  # fmt: skip
    copy = {"name": "copy", "src_buff": [own("i", 0)], "dst_buff": [own("s", 0)]}
    for blocks in (
        [{"blocks": [[copy]]}, {"blocks": [[get]]}],
        [{"blocks": [[put]]}, {"blocks": [[{**copy, "dst_buff": [own("s", 1)]}]]}],
    ):
        with pytest.raises(CollectiveError, match=r"may not be there yet|may still use"):
            check_plan(ExecutionPlan.parse(plan(blocks)))


def test_semaphores_join_threadblocks_of_one_gpu() -> None:
    copy = {"name": "copy", "src_buff": [own("i", 0)], "dst_buff": [own("s", 0)]}
    add = {"name": "copy", "src_buff": [own("s", 0)], "dst_buff": [own("s", 1)]}
    release = {"name": "sem_release", "semaphore_ids": [0]}
    acquire = {**release, "name": "sem_acquire"}
    joined = [{"blocks": [[copy, release], [acquire, add]]}, {"blocks": []}]
    with pytest.raises(CollectiveError, match="ends with the wrong chunk"):
        check_plan(ExecutionPlan.parse(plan(joined)))  # ends, and is no all_reduce
    apart = [{"blocks": [[copy], [add]]}, {"blocks": []}]
    with pytest.raises(CollectiveError, match="may not be there yet"):
        check_plan(ExecutionPlan.parse(plan(apart)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"protocol": "Simple"', '"protocol": "Fast"'),
        ('"inplace": true', '"inplace": 3'),
        ('"id": 0', '"id": 7'),
        ('"input_chunks": 4', '"input_chunks": "four"'),
        ('"channel_type": "memory"', '"channel_type": "pigeon"'),
        ('{"type": "i", "index": 0, "size": 2}', '{"index": 0, "size": 2}'),
        ('{"type": "i", "index": 0, "size": 2}', '{"type": "z", "index": 0, "size": 2}'),
        ('"gpus"', '"cpus"'),
        ("{", "["),
        ('"inplace": true', '"inplace": true, "telepathy": 1'),
        ('"reduce_op": "sum"', '"reduce_op": "sum", "telepathy": 1'),
    ],
)
def test_damaged_files_are_refused_by_name(old: str, new: str) -> None:
    assert old in halves()
    with pytest.raises(CollectiveError, match="telepathy" if "telepathy" in new else None):
        ExecutionPlan.parse(halves().replace(old, new, 1))


@pytest.mark.parametrize(("kind", "name"), ALGORITHMS)
@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 2, 2)])
def test_ours_are_written_read_back_and_judged(
    kind: str, name: str, shape: tuple[int, ...]
) -> None:
    for pieces in (1, 2):
        made = execution_plan(written(kind, name, shape, pieces))
        assert ExecutionPlan.parse(str(made)) == made
        check_plan(made)


@settings(deadline=None, max_examples=80)
@given(algorithm=st.sampled_from(ALGORITHMS), pieces=st.integers(1, 2), data=st.data())
def test_every_operation_is_needed(
    algorithm: tuple[str, str], pieces: int, data: st.DataObject
) -> None:
    made = execution_plan(written(*algorithm, (2, 3), pieces))
    rank = data.draw(st.integers(0, 5))
    gpu = made.gpus[rank]
    (block,) = gpu.threadblocks
    real = [n for n, op in enumerate(block.operations) if op.name != "nop"]
    place = data.draw(st.sampled_from(real))
    operations = list(block.operations)
    operations[place] = Operation("nop")
    broken = replace(gpu, threadblocks=(replace(block, operations=tuple(operations)),))
    gpus = (*made.gpus[:rank], broken, *made.gpus[rank + 1 :])
    with pytest.raises(CollectiveError):
        check_plan(replace(made, gpus=gpus))


def test_a_plan_is_priced_as_its_program_is() -> None:
    levels = [Level(2, 1e9, 1e-5), Level(4, 1e10, 1e-6)]
    for kind, name in (("all_reduce", "halving_doubling"), ("broadcast", "chain")):
        plan = execution_plan(written(kind, name, (2, 4)))
        played = simulate_messages(flow_of(kind, name, (2, 4)), levels, 1e6).seconds
        assert simulate_plan(plan, levels, 1e6).seconds == pytest.approx(played)

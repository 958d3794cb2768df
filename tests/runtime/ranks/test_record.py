"""Records of ranks: their contents, the diagnosis from all of them, and damaged ones."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from autopar.cli import main
from autopar.errors import DumpError
from autopar.runtime.ranks.diagnosis import diagnose
from autopar.runtime.ranks.dumps import Dump, Dumps
from autopar.runtime.ranks.record import Record
from autopar.runtime.ranks.recorder import Recorder
from tests.support.work import calls_of

EVERYONE = (0, 1, 2)


def record(rank: int, calls: list[str], waits: bool, world: int = 3) -> Record:
    """A rank that has made calls on one channel of all ranks, and may wait in the last one."""
    recorder = Recorder()
    with recorder.step(), recorder.part("phase", "backward"):
        for number, kind in enumerate(calls):
            event = recorder.begin("all", EVERYONE[:world], kind, 8)
            if not (waits and number == len(calls) - 1):
                recorder.end(event)
        return Record.of(recorder, rank, world, "a test")


def test_a_ring_keeps_the_last_events() -> None:
    recorder = Recorder(size=4)
    for number in range(10):
        recorder.end(recorder.begin("all", (0, 1), "all_reduce", number))
    assert [event.nbytes for event in recorder.events] == [6, 7, 8, 9]
    assert [event.number for event in recorder.events] == [7, 8, 9, 10]


def test_a_record_reads_back() -> None:
    written = record(1, ["all_reduce", "all_gather"], waits=True)
    read = Record.read(written.write())
    assert read == written
    assert read.at == "in step 1, backward"
    assert "all_gather of 8 bytes among ranks 0, 1, 2" in read.describe()


def test_who_waits_for_whom() -> None:
    calls = ["all_reduce"] * 3
    records = {0: record(0, calls, True), 1: record(1, calls, True), 2: record(2, calls[:2], False)}
    found = diagnose(records)
    assert found.behind == (2,)
    assert [(wait.rank, wait.absent) for wait in found.waits] == [(0, (2,)), (1, (2,))]
    del records[2]
    assert diagnose(records).behind == diagnose(records).missing == (2,)


def test_ranks_that_call_different_things() -> None:
    records = {
        0: record(0, ["all_reduce", "all_gather"], True, 2),
        1: record(1, ["all_reduce", "broadcast", "all_reduce"], True, 2),
    }
    found = diagnose(records).disagreement
    assert found is not None
    assert (found.number, found.entries[0].kind, found.entries[1].kind) == (
        2,
        "all_gather",
        "broadcast",
    )


def dumped(folder: Path) -> None:
    for rank, count in ((0, 3), (1, 3), (2, 2)):
        made = record(rank, ["all_reduce"] * count, waits=count == 3)
        dumps_of(folder).write(made, "")


def dumps_of(folder: Path) -> Dumps:
    dumps = Dumps()
    dumps.configure(Dump(folder))
    return dumps


def test_the_doctor_names_who_is_behind(tmp_path: Path) -> None:
    dumped(tmp_path)
    (tmp_path / "rank-9.json").write_text("{")
    shown = CliRunner().invoke(main, ["doctor", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "Rank 2 is behind" in shown.output
    assert "Rank 0 waits for rank 2 in all_reduce of 8 bytes" in shown.output
    assert "rank-9.json cannot be read" in shown.output
    found = json.loads(CliRunner().invoke(main, ["doctor", str(tmp_path), "--json"]).output)
    assert found["behind"] == [2]
    assert found["damaged"][0]["file"].endswith("rank-9.json")


@pytest.mark.parametrize(
    "content", ["", "{}", "[" * 100_000, '{"autopar_record": 1}', "\x00\ud800"]
)
def test_a_folder_without_a_dump_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "rank-0.json").write_text(content, errors="surrogatepass")
    shown = CliRunner().invoke(main, ["doctor", str(tmp_path)])
    assert (shown.exit_code, "no dump can be read" in shown.output) == (2, True)
    gone = CliRunner().invoke(main, ["doctor", str(tmp_path / "gone")])
    assert (gone.exit_code, "cannot read" in gone.output) == (2, True)


VALUES = [None, -1, 1 << 80, 1.5, "\x1b[31m", [], {}, [[]], True, {"a": {}}, float("inf")]


def test_damaged_dumps_are_read_or_refused_by_name() -> None:
    good = json.loads(record(1, ["all_reduce"] * 3, waits=True).write())
    draw = random.Random(0)
    refused = 0
    for _ in range(2000):
        value = json.loads(json.dumps(good))
        target = value if draw.random() < 0.6 else draw.choice(value["events"])
        target[draw.choice(list(target))] = draw.choice(VALUES)
        text = json.dumps(value)
        if draw.random() < 0.3:
            text = text[: draw.randrange(len(text))]
        try:
            read = Record.read(text)
        except DumpError:
            refused += 1
            continue
        assert read.describe().isprintable()
        diagnose({read.rank: read, 0: dataclasses.replace(read, rank=0)})
    assert 1000 < refused < 2000


def test_a_signal_asks_even_where_python_does_not_run(tmp_path: Path) -> None:
    """And the handler that was there runs as well."""
    heard = threading.Event()
    before = signal.signal(signal.SIGUSR2, lambda *_: heard.set())
    try:
        dumps = Dumps()
        dumps.configure(Dump(tmp_path, signal="SIGUSR2"))
        assert not dumps.asked
        signal.raise_signal(signal.SIGUSR2)
        assert dumps.asked
        assert not dumps.asked
        assert heard.wait(10)
        del dumps
        assert signal.getsignal(signal.SIGUSR2) not in (signal.SIG_DFL, None)
    finally:
        signal.signal(signal.SIGUSR2, before)
    with pytest.raises(DumpError, match="is not a signal"):
        Dump.read(Dump(signal="SIGNOT"))


def test_a_dump_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DumpError, match="is a file"):
        Dump.read(tmp_path / "file")
    with pytest.raises(DumpError, match="no dump is written"):
        dumps_of(tmp_path / "file" / "under").write(record(0, [], False), "")


def test_recording_costs_a_dozen_calls_however_much_is_recorded() -> None:
    recorder = Recorder(size=64)

    def rounds(count: int) -> None:
        for _ in range(count):
            recorder.end(recorder.begin("all", EVERYONE, "all_reduce", 8))

    few, many = (calls_of(lambda count=count: rounds(count)) for count in (50, 5000))
    assert few < 50 * 16
    assert many < 5000 * 16

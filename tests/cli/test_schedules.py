"""`autopar schedules`: the list, the picture, JSON, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autopar.cli import main
from autopar.inter_op import schedules as package
from autopar.inter_op.laws import law
from autopar.inter_op.schedules import schedule, schedules
from autopar.ir.action import format_row, parse_row
from tests.support.further_modules import find_also


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["schedules", *map(str, arguments)])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def test_the_list_names_all_and_is_sorted_by_time() -> None:
    lines = run("--stages", 4, "--microbatches", 8).stdout.splitlines()
    table = {line.split()[0]: line.split() for line in lines if line.split()[0] in schedules()}
    assert set(table) == set(schedules())
    times = [float(words[1]) for words in table.values()]
    assert times == sorted(times)
    bubble = 3 / 11
    assert table["1f1b"][1:5] == ["33", f"{bubble:.1%}", f"{bubble:.1%}", "4"]
    assert table["gpipe"][4] == "8"
    assert table["zb_h2"][3] == "0.0%*"


def test_the_list_as_json_has_figures_or_the_reason() -> None:
    found = json.loads(run("--ranks", 3, "--microbatches", 3, "--json").stdout)
    listed = {item["name"]: item for item in found["schedules"]}
    assert found["simulated"]
    assert set(listed) == set(schedules())
    assert listed["1f1b"]["bubble"] == pytest.approx(2 / 5)
    assert listed["1f1b"]["published_bubble"] == pytest.approx(2 / 5)
    assert "3 ranks" in listed["chimera"]["refused"]
    assert "5 microbatches" in listed["zb_h2"]["refused"]
    assert all(item["summary"] and item["needs"] for item in listed.values())


def test_sizes_that_a_schedule_does_not_take_stand_in_the_list() -> None:
    lines = run("--stages", 3, "--microbatches", 3).stdout.splitlines()
    line = next(line for line in lines if line.startswith("chimera"))
    assert "even number" in line
    assert line.split()[1:4] == ["-", "-", "-"]


def test_a_method_in_one_more_file_is_listed_drawn_and_priced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(next(iter(package.__path__)), "two_buffered.py").read_text("utf-8")
    (tmp_path / "mine.py").write_text(source.replace('NAME = "2bw"', 'NAME = "mine"'))
    find_also(monkeypatch, package, tmp_path)
    found = json.loads(run("--stages", 4, "--microbatches", 8, "--json").stdout)
    listed = {item["name"]: item for item in found["schedules"]}
    same = {key: value for key, value in listed["2bw"].items() if key != "name"}
    assert listed["mine"] == {**same, "name": "mine"}
    assert "UPDATE0.-1" in run("mine", "--stages", 4, "--microbatches", 8, "--complete").stdout
    assert law("mine").fill(4, 8) == law("2bw").fill(4, 8) == 0


def test_a_picture_has_a_line_for_each_rank() -> None:
    text = run("1f1b", "--stages", 2, "--microbatches", 2, "--times", "1,0.5,0.5").stdout
    rows = [line.split(maxsplit=2)[2] for line in text.splitlines() if line.startswith("rank")]
    width = len(rows[0]) // 6
    assert [row[::width] for row in rows] == ["FF·B·B", "·FBFB·"]
    assert "bubble 33.3%, published 33.3%" in text
    assert "forward" in text
    assert "by rank: 2, 1" in text


def test_a_schedule_as_json_holds_rows_that_read_back() -> None:
    found = json.loads(run("zb_v", "--stages", 2, "--microbatches", 4, "--json").stdout)
    made = schedule("zb_v", 2, 4)
    assert tuple(map(parse_row, found["rows"])) == made.rows
    assert found["placement"] == [[0, 1, 1, 0]]
    assert [len(row) for row in found["ends"]] == [24, 24]
    # two stages a rank, each half of a rank's part, and rank 1 begins half a forward later
    assert found["time"] == pytest.approx(4 * 3 + 0.5)
    assert found["bubble_without_barrier"] == pytest.approx(0)


def test_options_of_schedules_and_transfers() -> None:
    words = ("interleaved_1f1b", "--stages", 4, "--microbatches", 8, "--json")
    for chunks in (2, 4):
        found = json.loads(run(*words, "--chunks", chunks).stdout)
        assert found["stages"] == 4 * chunks
        assert found["bubble"] == pytest.approx(3 / (3 + 8 * chunks))
    slow = json.loads(run(*words, "--transfer", 1).stdout)
    assert slow["bubble"] > found["bubble"]
    assert slow["published_bubble"] is None
    eager = json.loads(run("eager_1f1b", "--extra", 0, "--json").stdout)
    assert eager["in_flight"] == [4, 3, 2, 1]


def test_complete_rows_are_printed_with_all_that_a_step_is() -> None:
    text = run("1f1b", "--stages", 2, "--microbatches", 1, "--complete").stdout
    assert (
        "0: RECV_B0.0 F0.0 SEND_F0.0 B0.0 SYNC0 UPDATE0\n"
        "1: RECV_F1.0 F1.0 B1.0 SEND_B1.0 SYNC1 UPDATE1\n"
    ) in text
    found = json.loads(run("chimera", "--stages", 2, "--complete", "--json").stdout)
    assert all("SYNC1'/copies" in row or "SYNC1/copies" in row for row in found["rows"])
    assert format_row(parse_row(found["rows"][0])) == found["rows"][0]


def test_a_trace_is_written(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    run("gpipe", "--stages", 2, "--microbatches", 3, "--trace-json", path)
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == 2 * 2 * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonsense",), "there is no schedule 'nonsense'"),
        (("chimera", "--stages", 3), "use 4 ranks"),
        (("zb_h2", "--stages", 8, "--microbatches", 3), "15 microbatches or more"),
        (("interleaved_1f1b", "--chunks", 1), "use 1f1b"),
        (("1f1b", "--chunks", 2), "does not take --chunks"),
        (("--extra", 2), "need a NAME"),
        (("--times", "1,2"), "three positive numbers"),
        (("--times", "1,0,1"), "three positive numbers"),
        (("--times", "a,b,c"), "three positive numbers"),
        (("--stages", 0), "0 is not in the range"),
        (("gpipe", "--trace-json", "/nowhere/at/all.json"), "cannot write"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[object, ...], message: str) -> None:
    result = run(*arguments, code=2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr

"""Graphs that are kept between runs: found again only under the same question and versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from autopar.cli.common import kept_graphs
from autopar.cli.common.console import foldable
from autopar.cli.common.planning_profile import Sampler
from autopar.plan_entries import ModelSpec
from autopar.zoo import spec


class Asked:
    """Counts how often an answer is computed."""

    def __init__(self, text: str) -> None:
        self.text, self.times = text, 0

    def __call__(self) -> str:
        self.times += 1
        return self.text


def test_an_answer_is_kept_until_anything_it_depends_on_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    graph, other = Asked("graph 'a'\n%x = …"), Asked("b")
    for _ in range(3):
        assert kept_graphs.remembered_text(["a", 64], graph) == graph.text
        assert kept_graphs.remembered_text(["a", 65], other) == other.text
    assert (graph.times, other.times) == (1, 1)
    monkeypatch.setattr(kept_graphs, "_versions", lambda: ["a newer torch"])
    assert kept_graphs.remembered_text(["a", 64], graph) == graph.text
    assert graph.times == 2


@pytest.mark.parametrize("damage", [b"", b"0" * 64 + b"\ngraph 'a'", b"\xff\xfe\x00"])
def test_damaged_entries_are_not_believed(
    damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    answer = Asked("graph")
    kept_graphs.remembered_text("q", answer)
    (entry,) = tmp_path.rglob("*.txt")
    entry.write_bytes(damage)
    assert kept_graphs.remembered_text("q", answer) == "graph"
    assert answer.times == 2
    assert kept_graphs.remembered_text("q", answer) == "graph"
    assert answer.times == 2  # the entry was written anew


def test_without_a_folder_nothing_is_kept_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    answer = Asked("graph")
    assert [kept_graphs.remembered_text("q", answer) for _ in range(2)] == ["graph"] * 2
    assert answer.times == 2


def test_old_entries_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept_graphs, "MOST", 1000)
    for number in range(8):
        kept_graphs.remembered_text(number, Asked("x" * 200))
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.txt")) <= 1000
    kept = Asked("never")
    assert kept_graphs.remembered_text(7, kept) == "x" * 200


def test_what_is_prepared_serves_users_with_an_empty_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_graphs, "BESIDE", tmp_path / "package" / "graphs")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "installer"))
    answer = Asked("graph")
    with kept_graphs.kept_beside_package():
        kept_graphs.remembered_text("q", answer)
    kept_graphs.remembered_text("another question", Asked("b"))
    assert len(list((tmp_path / "package").rglob("*.txt"))) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert kept_graphs.remembered_text("q", answer) == "graph"
    assert answer.times == 1


def test_the_usual_batch_is_one_entry_whether_it_is_named_or_not() -> None:
    usual = spec("gpt2")
    named = ModelSpec("gpt2", usual.batch, usual.seq, 4)
    assert kept_graphs._identity(named) == kept_graphs._identity(ModelSpec("gpt2", None, None, 4))


def test_narrow_tables_lose_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model.layers.*.post_attention_layernorm.weight", "bf16[16384@node@gpu@pod, 16384]"]
    table = Table(box=None)
    for name in ("parameter", "stored"):
        table.add_column(name, no_wrap=True)
    table.add_row(*words)
    Console(width=40).print(foldable(table))
    shown = "".join(capsys.readouterr().out.split())
    assert "…" not in shown
    assert sorted(shown) == sorted("".join(("parameter", "stored", *words)).replace(" ", ""))


def test_samples_become_nested_slices() -> None:
    sampler = Sampler(0)
    for now, names in ((1.0, "ab"), (2.0, "ab"), (3.0, "ac"), (5.0, "")):
        sampler._see(list(names), now)
    slices = [(e["name"], e["ts"], e["dur"]) for e in sampler.events()]
    assert slices == [("a", 1e6, 4e6), ("b", 1e6, 2e6), ("c", 3e6, 2e6)]

"""Pins on the command line, and in edited plan files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.errors import PlanError
from autopar.plan import Plan
from tests.cli.test_commands import refused, run

MESH = "slow[10GFLOP/s 1GB 1GB/s]: node=2 @10GB/s 1us, gpu=2 @50GB/s 1us"
UP = "blocks.0.f.weight"
COLUMN = "[24, 16] => [24, 16] along node; [24@gpu, 16] => [24@gpu, 16] along gpu"
SOURCE = """
from tests.support.words import MODELS

def even():
    return MODELS["even"]()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model `even` of tests/support/words.py, as the command line names it."""
    path = tmp_path_factory.mktemp("model") / "even.py"
    path.write_text(SOURCE)
    return f"{path}:even"


@pytest.fixture(scope="module")
def text(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan made under Megatron inside a node and data parallelism between nodes."""
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    words = ("--pins", "data_parallel:node", "--pins", "megatron:gpu")
    run("plan", model, "--mesh", MESH, *words, "-o", path)
    return path.read_text()


@pytest.fixture
def plan(text: str, tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_a_plan_records_its_pins_and_reads_back(plan: Path) -> None:
    made = Plan.load(plan)
    assert Plan.from_toml(made.to_toml()) == made
    assert made.stage.pins[UP] == COLUMN


def test_a_plan_is_made_again_under_its_own_pins(model: str, plan: Path) -> None:
    again = json.loads(run("plan", model, "--mesh", MESH, "--from", plan, "--json").stdout)
    made = Plan.load(plan)
    assert again["pins"] == made.stage.pins
    assert again["layouts"] == {name: str(node) for name, node in made.stage.nodes.items()}
    assert again["predicted"] == made.predicted.figures()


def test_edited_pins_and_those_on_top_are_kept(model: str, plan: Path) -> None:
    """Stored in parts between nodes, as ZeRO-3 does, instead of whole; and the head by words."""
    stored = COLUMN.replace("[24, 16]", "[24@node, 16]", 1)
    edit(plan, f'"{UP}" = "{COLUMN}"', f'"{UP}" = "{stored}"')
    pin = "last.weight=[32, 16@gpu] along gpu"
    last = '"last.weight" = "[32, 16] => [32, 16] along node; '
    text = plan.read_text()
    assert last in text
    plan.write_text(re.sub(f"{re.escape(last)}.*", last.replace("; ", '"'), text))
    made = run("plan", model, "--mesh", MESH, "--from", plan, "--pin", pin, "--json").stdout
    found = json.loads(made)
    assert found["layouts"]["blocks_0_f_weight_share"] == (
        "[24@gpu@node, 16] -> [24@gpu, 16] -sum(node)"
    )
    assert found["pins"]["last.weight"].endswith("; [32, 16@gpu] along gpu")
    assert "-> [32, 16@gpu] -sum(node)" in found["layouts"]["last_weight_share"]


def test_edits_that_cannot_be_are_refused_by_name(model: str, plan: Path) -> None:
    for old, new, says in (
        (COLUMN, "[24@gpu, 16]; [24, 16@gpu] along gpu", "contradict each other"),
        ("[24@gpu, 16]; [24, 16@gpu] along gpu", "[23@gpu, 16]", "fits no choice"),
    ):
        edit(plan, f'"{UP}" = "{old}"', f'"{UP}" = "{new}"')
        said = refused("plan", model, "--mesh", MESH, "--from", plan, says=says)
        assert all(f"'{UP}' = '{text}'" in said for text in new.split("; "))
        assert f"the param '{UP}'" in said


def test_a_plan_that_cannot_be_changed_is_refused(model: str, plan: Path, tmp_path: Path) -> None:
    mesh = MESH.replace("gpu=", "other=")
    assert mesh != MESH
    said = refused("plan", model, "--mesh", mesh, "--from", plan, says="'gpu' is no axis of")
    assert "other" in said
    pipeline = tmp_path / "pipeline.toml"
    replace(Plan.load(plan), schedule="1f1b").save(pipeline)
    says = "this one is a pipeline"
    said = refused("plan", model, "--mesh", MESH, "--from", pipeline, says=says)
    assert str(pipeline) in said


def test_a_plan_without_pins_has_nothing_to_keep(model: str, plan: Path, tmp_path: Path) -> None:
    """As those have that were made before there was such a table; they load as ever."""
    old = Plan.of(replace(Plan.load(plan).stage, pins={}))
    old.save(tmp_path / "old.toml")
    assert "pins" not in (tmp_path / "old.toml").read_text()
    assert Plan.load(tmp_path / "old.toml") == old
    said = refused(
        "plan", model, "--mesh", MESH, "--from", tmp_path / "old.toml", says="has no pins to keep"
    )
    assert "[pins]" in said


@pytest.mark.parametrize(
    "entry", ["pins = 3", "[stages.pins]\nx = 3", "[stages.pins]\nx = ['[8]']"]
)
def test_a_damaged_table_of_pins_is_named(entry: str, plan: Path) -> None:
    head, _, tail = plan.read_text().partition("[stages.predicted]")
    rest = "[stages.layouts]" + tail.partition("[stages.layouts]")[2]
    predicted = "[stages.predicted]" + tail.partition("[stages.pins]")[0]
    damaged = f"{head}{entry}\n{predicted}{rest}"
    with pytest.raises(PlanError, match="damaged entry") as caught:
        Plan.from_toml(damaged)
    assert "pins" in caught.value.why


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--pins=megatrom:gpu", "plans are data_parallel, fsdp, megatron"),
        ("--pins=megatron", "megatron takes one axis"),
        ("--pins=gshard:node,gpu", "gshard takes one axis"),
        ("--pins=gshard:gpu", "gshard('gpu') does not apply"),
        ("--pins=fsdp:rack", "no axis 'rack'"),
        ("--layout=heads", "cannot read the pin 'heads'"),
        ("--layout=eyes=gpu", "no dimension 'eyes'"),
        ("--pin=last.weight", "cannot read the pin 'last.weight'"),
    ],
)
def test_words_that_cannot_be_read_are_refused(model: str, word: str, says: str) -> None:
    refused("plan", model, "--mesh", MESH, word, says=says)


def test_named_dimensions_are_split_and_listed(model: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    words = ("--layout", "batch=node", "--layout", "heads=gpu")
    run("plan", model, "--mesh", MESH, *words, "-o", path)
    shown = ("explain", path, "--model", model, "--dims")
    rows = {row["name"]: row for row in json.loads(run(*shown, "--json").stdout)}
    # q, k, v and the output of three blocks have heads.
    assert (rows["heads"]["size"], rows["heads"]["parameters"]) == (4, 12)
    # Parameters may be stored in smaller parts.
    assert {split.split("@")[-1] for split in rows["heads"]["split"]} == {"gpu"}
    assert all("node" in axes for axes in rows["batch"]["split"])
    assert rows["batch"]["apart"] == {}
    # Seven matrices, a norm and two biases a block; embedding and head.
    assert (rows["hidden"]["size"], rows["hidden"]["parameters"]) == (16, 3 * 11 + 2)
    attention = "scaled_dot_product_attention needs it whole"
    assert rows["head_dim.1"]["apart"][f"aten.{attention}"] == 3
    listed = run(*shown).stdout
    for name in ("batch", "sequence", "heads", "ffn", "vocab", "kept whole by", attention):
        assert name in listed

"""`autopar rules`: the list, the proofs, the audit, discovery, and the reference page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autopar.cli import main
from autopar.intra_op.rules import rules

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "rules.md"
WRONG = """
import autopar

RULES = [
    autopar.rule("aten::cumsum", "a b -> a b", examples=["f64[4, 6], 1"]),
    autopar.rule("aten::exp", "a! -> a!", examples=["f64[4]"]),
    autopar.rule("aten::sin", "a -> a", examples=["f64[4"]),
]
"""
OWN = """
import torch
import autopar

@torch.library.custom_op("rulescli::{name}", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@scaled.register_fake
def _(x):
    return torch.empty_like(x)

scaled.register_autograd(lambda ctx, gradient: gradient * 2)
RULES = (autopar.rule("rulescli::{name}", "... -> ...", linear=True, examples=["f64[4, 6]"]),)

class Model(torch.nn.Linear):
    def forward(self, x):
        return torch.ops.rulescli.{name}(super().forward(x)).square().sum()

def model():
    return Model(64, 64), {{"x": torch.zeros(64, 64)}}
"""


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["rules", *map(str, arguments)])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    path = tmp_path / "wrong.py"
    path.write_text(WRONG)
    return path


def test_the_page_of_all_rules_is_up_to_date() -> None:
    todo = "write it anew: autopar rules --markdown > docs/reference/rules.md"
    text = run("--markdown").stdout
    assert text == PAGE.read_text("utf-8"), todo
    named = re.findall(r"^\| `([\w.]+)`", text, flags=re.MULTILINE)
    assert sorted(named) == sorted(rules())


def test_rules_are_listed_by_name_and_by_pattern() -> None:
    text = run("aten.linear").stdout
    assert "... k, n k, +n -> ... n" in text
    found = {item["op"]: item for item in json.loads(run("aten.*mm", "--json").stdout)}
    assert {"aten.addmm", "aten.baddbmm", "aten.bmm", "aten.mm"} <= found.keys()
    assert found["aten.mm"] == {
        "op": "aten.mm",
        "rule": "m k, k n -> m n",
        "varies": False,
        "splittable": ["m", "k", "n"],
        "linear": [],
        "example": "f64[4, 6], f64[6, 8]",
        "examples": 2,
    }
    assert json.loads(run("aten::mm", "--json").stdout) == [found["aten.mm"]]


def test_terms_of_operands_that_are_not_given_are_not_shown() -> None:
    (item,) = json.loads(run("aten.exp", "--json").stdout)
    assert item["rule"] == "... -> ..."
    assert item["splittable"] == ["..."]


def test_rules_are_proved() -> None:
    result = run("--prove", "aten.mm", "aten.bmm")
    assert re.fullmatch(r"2 of 2 rules proved, \d+ strategies\n", result.stdout)
    (report,) = json.loads(run("--prove", "aten.mm", "--json").stdout)
    assert report["proved"]
    assert report["failures"] == []


def test_a_wrong_rule_is_an_exit_code_and_words(wrong: Path) -> None:
    result = run("--prove", "--rules", wrong, "aten.cumsum", "aten.exp", "aten.sin", code=1)
    assert "1 of 3 rules proved" in result.stdout
    assert "aten.cumsum(f64[4, 6], 1) under 'b@x'" in result.stderr
    assert "result 0 differs by" in result.stderr
    assert "cannot read an example of aten.sin" in result.stderr
    reports = json.loads(
        run("--prove", "--json", "--rules", wrong, "aten.si[ng]*", "aten.cumsum", code=1).stdout
    )
    assert {report["op"] for report in reports if not report["proved"]} == {
        "aten.cumsum",
        "aten.sin",
    }


def test_what_is_whole_without_need_is_shown(wrong: Path) -> None:
    result = run("--audit", "--rules", wrong, "aten.exp", code=1)
    assert re.search(r"aten\.exp +a -> a +a +holds", result.stdout)
    assert json.loads(run("--audit", "--json", "aten.mm").stdout) == []


def test_a_rule_is_found() -> None:
    text = run("--discover", "aten::bmm").stdout
    assert text.startswith('rule(\n    "aten.bmm",\n    "... a b, ... b c -> ... a c",\n')
    arguments = ["aten.sum.dim_IntList", "--example", "f64[4, 6], (1,)", "--json"]
    (found,) = json.loads(run("--discover", *arguments).stdout)
    assert found["spec"] == "... a -> ..."


def test_own_operators_are_found_listed_planned_and_explained(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN.format(name="planned"))
    text = run("--discover", "rulescli::planned", "--rules", path).stdout
    assert text.startswith('autopar.rule(\n    "rulescli::planned",\n    "... -> ...",')
    assert "rulescli.planned" in run("--rules", path, "rulescli::*").stdout
    plan = tmp_path / "plan.toml"
    given = ["--mesh", "cpu: x=2 @1TB/s 1ns", "-o", plan]
    runner, model = CliRunner(), f"{path}:model"
    without = runner.invoke(main, ["plan", model, *map(str, given)])
    assert "because they have no rule" in without.stderr
    assert "[stages.replicated]" in plan.read_text()
    planned = runner.invoke(main, ["plan", model, *map(str, given), "--rules", str(path)])
    assert planned.exit_code == 0, planned.output
    assert "because they have no rule" not in planned.stderr
    assert "[replicated]" not in plan.read_text()
    explained = ["explain", str(plan), "--model", model]
    refused = runner.invoke(main, explained)
    assert refused.exit_code == 2
    assert "not possible" in refused.stderr
    known = runner.invoke(main, [*explained, "--rules", str(path)])
    assert known.exit_code == 0, known.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["aten.nothing"], "no rule for aten.nothing"),
        (["--prove", "--audit"], "exclude one another"),
        (["--discover"], "needs an operator"),
        (["--discover", "aten.mm", "aten.mv", "--example", "f64[4]"], "only one"),
        (["--example", "f64[4]"], "needs --discover"),
        (["--discover", "aten.dropout", "--example", "f64[4], 0.5, True"], "random"),
        (["--rules", "nowhere.py"], "no such file"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: list[str], says: str) -> None:
    result = run(*arguments, code=2)
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("text", ["RULES = 3", "RULES = ['a -> a']", "import nothing_at_all"])
def test_a_file_without_rules_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(text)
    assert str(path) in run("--rules", path, code=2).stderr

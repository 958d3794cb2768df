"""The commands on small models, with good and with bad arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from torch import Tensor, nn

from autopar import zoo
from autopar.cli import main
from autopar.plan import Plan
from autopar.plan_entries import ModelSpec
from autopar.runtime.module_loader import load

MESH = "slow[10GFLOP/s 1GB 1GB/s]: node=2 @10GB/s 1us, gpu=2 @50GB/s 1us"
MODEL = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

def tiny(batch=8, seq=16, layers=2):
    config = GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=layers, n_head=4,
                        use_cache=False)
    tokens = torch.zeros((batch, seq), dtype=torch.int64)
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens.clone()}
"""
ODD = """
import torch

@torch.library.custom_op("cli_test::mirror", mutates_args=())
def mirror(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0).clone()

@mirror.register_fake
def _(x):
    return torch.empty_like(x)

class Odd(torch.nn.Linear):
    def forward(self, x):
        hidden = super().forward(x)
        return mirror(hidden).sum()

def odd():
    return Odd(8, 8), {"x": torch.zeros(4, 8)}
"""
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def refused(*arguments: object, says: str) -> str:
    """The message of a command that must fail by name, without a traceback or output."""
    result = run(*arguments, code=2)
    assert isinstance(result.exception, SystemExit)
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    return result.stderr


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("hf") / "config.json"
    path.write_text(json.dumps(LLAMA))
    return f"hf:{path}"


@pytest.fixture(scope="module")
def llama_plan(config: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a plan of the small Llama."""
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    run("plan", config, "--mesh", MESH, "--batch", 8, "--seq", 16, "-o", path)
    return path.read_text()


@pytest.fixture
def saved(llama_plan: str, tmp_path: Path) -> Callable[..., Path]:
    """Writes that plan with replacements."""

    def save(*changes: tuple[str, str]) -> Path:
        text = llama_plan
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "plan.toml"
        path.write_text(text)
        return path

    return save


def test_a_python_file_is_planned_explained_and_emitted(tmp_path: Path) -> None:
    source, path = tmp_path / "tiny.py", tmp_path / "plan.toml"
    source.write_text(MODEL)
    model = f"{source}:tiny"
    result = run("plan", model, "--mesh", MESH, "--layers", 3, "-o", path)
    plan = Plan.load(path)
    assert f"autopar explain {path} --model {model}" in result.stderr
    assert plan.model == ModelSpec(model, layers=3)
    assert "transformer.h.*.mlp.c_fc.weight  × 3" in result.stdout
    # A plan is data: the file that it names is run only when the user names it.
    assert "--model" in refused("explain", path, says="code that a plan names is not run")
    assert "Where the time goes" in run("explain", path, "--model", model).stdout
    program = tmp_path / "program"
    assert (
        "torchrun --nproc-per-node 4" in run("emit", path, "-o", program, "--model", model).stdout
    )
    check_program(program, plan)


def test_a_configuration_round_trips_without_more_arguments(
    saved: Callable[..., Path], config: str, tmp_path: Path
) -> None:
    path = saved()
    plan = Plan.load(path)
    assert plan.model == ModelSpec(config, 8, 16)
    assert "f32[8, 16" not in plan.to_toml()
    found = json.loads(run("explain", path, "--json").stdout)
    assert found["graph"] == plan.graph
    step = plan.predicted.step_seconds
    assert sum(found["seconds"].values()) == pytest.approx(step, rel=1e-9)
    assert [section["times"] for section in found["sections"]] == [1, 2, 1]
    run("emit", path, "-o", tmp_path / "program")
    check_program(tmp_path / "program", plan)


def check_program(folder: Path, plan: Plan) -> None:
    """It is whole, clean, loads, and holds the plan and no weights."""
    names = {"program.py", "plan.toml", "graph.txt", "program.toml"}
    assert {file.name for file in folder.iterdir()} == names
    assert Plan.load(folder / "plan.toml") == plan
    program = folder / "program.py"
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", str(program)]
    checked = subprocess.run(ruff, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    module = load(program.read_text(), str(program))
    assert str(plan.mesh) == module.MESH
    assert "loss" in module.OUTPUTS


def test_json_pins_and_traces(config: str, tmp_path: Path) -> None:
    pin = "model.layers.*.mlp.up_proj.weight=[96@gpu, 64]"
    trace = tmp_path / "trace"
    arguments = ("--mesh", MESH, "--seq", 16, "--memory", "512MiB", "--pin", pin)
    found = json.loads(run("plan", config, *arguments, "--trace", trace, "--json").stdout)
    assert found["memory_limit"] == 512 * 2**20
    assert found["model"] == {"source": config, "seq": 16}
    assert found["mesh"] == MESH
    assert found["solver"]["gap"] <= 1e-6
    assert 0 <= found["solver"]["left"] <= found["solver"]["nodes"]
    figures = found["predicted"]
    causes = ("compute", "exchange", "parameter", "reshard", "update")
    seconds = sum(figures[f"{cause}_seconds"] for cause in causes)
    assert figures["step_seconds"] == pytest.approx(seconds)
    assert found["whole"] == []
    # A pin without -sum(...) leaves it open.
    assert "-> [96@gpu, 64]" in found["layouts"]["model_layers_0_mlp_up_proj_weight_share"]
    written = sorted(file.name for file in trace.iterdir())
    assert written[0] == "01_capture.txt"
    assert written[-1].endswith("_plan.toml")


def test_a_zoo_name_is_planned_without_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, load = [], zoo.load
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # an earlier run may have kept the graph

    def spy(text: str, **flags: int | None) -> tuple[nn.Module, dict[str, Tensor]]:
        made.append(load(text, **flags))
        return made[-1]

    monkeypatch.setattr("autopar.zoo.loading.load", spy)
    arguments = ("bert-base", "--mesh", "A100-80: gpu=4", "--layers", 1, "--seq", 128)
    found = json.loads(run("plan", *arguments, "--json").stdout)
    assert found["model"] == {"source": "bert-base", "layers": 1, "seq": 128}
    assert 0 < found["predicted"]["peak_bytes"] <= 80e9
    ((model, inputs),) = made
    held = [*model.parameters(), *model.buffers(), *inputs.values()]
    assert {tensor.device.type for tensor in held} == {"meta"}


def test_an_operator_without_a_rule_is_named_or_refused(tmp_path: Path) -> None:
    source = tmp_path / "odd.py"
    source.write_text(ODD)
    arguments = ("plan", f"{source}:odd", "--mesh", "H100: gpu=4")
    assert "mirror" in run(*arguments).stderr
    says = "cli_test.mirror has no sharding rule"
    line = 1 + ODD.splitlines().index("        return mirror(hidden).sum()")
    assert f"odd.py:{line}" in refused(*arguments, "--unknown-ops", "error", says=says)


def test_stages_are_shown_to_a_person_only(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Recorder:
        def __init__(self, first: str, console: Console) -> None:
            assert console.stderr
            shown.append(first)

        def update(self, text: str) -> None:
            shown.append(text.split()[0])

        def __enter__(self) -> Recorder:
            return self

        def __exit__(self, *error: object) -> None:
            shown.append("end")

    monkeypatch.setattr("autopar.cli.common.console.Status", Recorder)
    arguments = ("plan", config, "--mesh", "H100: gpu=2", "--seq", 16, "--layers", 1)
    run(*arguments)
    assert shown == []
    monkeypatch.setattr(Console, "is_terminal", True)
    run(*arguments, "--json")
    assert shown == []
    run(*arguments)
    assert shown == ["capture", "strategies", "solve", "end"]


def test_help_shows_an_example_of_every_command() -> None:
    assert "autopar plan" in run("--help").stdout
    for name in ("plan", "explain", "emit"):
        assert f"autopar {name} " in run(name, "--help").stdout


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"--mesh": "H1000: gpu=4"}, "device 'H1000' is not known"),
        ({"--mesh": "H100 gpu 4"}, "cannot read"),
        ({"MODEL": "gpt22"}, "no model is named 'gpt22'"),
        ({"MODEL": "missing.py:run"}, "there is no such file"),
        ({"--memory": "1KiB", "--mesh": "H100: gpu=2", "--layers": "1"}, "no plan fits"),
        ({"--memory": "lots"}, "cannot read the quantity 'lots'"),
        ({"--pin": "model.norm.weight"}, "cannot read the pin"),
        ({"--pin": "model.nothing=[64]"}, "name nothing"),
        ({"MODEL": "gpt2", "--seq": "2000"}, "a sequence of 2000 tokens"),
        ({"-o": "missing/plan.toml"}, "there is no folder"),
    ],
)
def test_bad_arguments_of_plan_are_named_and_write_nothing(
    changes: dict[str, str],
    says: str,
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"MODEL": config, "--mesh": MESH, "--seq": "16", "-o": "plan.toml", **changes}
    model = given.pop("MODEL")
    refused("plan", model, *(word for pair in given.items() for word in pair), says=says)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "old", "new", "says"),
    [
        ("explain", "version = 2", "version = ", "not readable TOML"),
        ("emit", "[stages.layouts]", "[stages.elsewhere]", "no usable entry 'layouts'"),
        ("explain", "batch = 8", 'batch = "8"', "model.batch"),
        ("emit", "gpu=2 @50GB/s", "tpu=2 @50GB/s", "are not possible"),
        ("explain", "gpu=2 @50GB/s", "gpu=3 @50GB/s", "are not possible"),
        ("emit", "slow[10GFLOP/s 1GB 1GB/s]", "H1000", "device 'H1000' is not known"),
        ("explain", "seq = 16", "seq = 32", "the plan is for another model"),
        ("emit", "sha256:", "sha256:0", "the plan is for another model"),
        ("emit", "model_norm_weight =", "model_mystery_weight =", "model_mystery_weight"),
    ],
)
def test_plans_that_are_damaged_or_for_something_else_are_named(
    command: str, old: str, new: str, says: str, saved: Callable[..., Path], tmp_path: Path
) -> None:
    path, program = saved((old, new)), tmp_path / "program"
    refused(command, path, *(("-o", program) if command == "emit" else ()), says=says)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("spelled", ["{}:run", "{}", "hf:{}", "./{}:run"])
@pytest.mark.parametrize("command", ["explain", "emit"])
def test_a_hostile_plan_runs_nothing(
    command: str,
    spelled: str,
    saved: Callable[..., Path],
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    evil = tmp_path / "evil.py"
    evil.write_text("open('ran', 'w')\ndef run(**flags): open('ran', 'w')\n")
    path = saved((config, spelled.format("evil.py")))
    refused(command, path, *(("-o", "program") if command == "emit" else ()), says="evil.py")
    assert {file.name for file in tmp_path.iterdir()} == {"evil.py", path.name}
    # The same file runs once the user names it: that is what --model is for.
    refused("explain", path, "--model", "evil.py:run", says="does not return a model")
    assert (tmp_path / "ran").exists()

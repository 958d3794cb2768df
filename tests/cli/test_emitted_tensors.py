"""`autopar emit` with weights and a batch: the folder runs, and its losses are the model's."""

from __future__ import annotations

import io
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import autopar
from autopar.cli import main
from autopar.cli.common.run_tensors import weights_from
from tests.support.ranks import run_ranks

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 2.0, dtype=torch.float64))
        self.table = nn.Embedding(7, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words, labels):
        return nn.functional.cross_entropy(self.head(self.scale * self.table(words)), labels)


def net(batch=4):
    torch.manual_seed(3)
    words = torch.arange(batch) % 7
    return Net().double(), {"words": words, "labels": words}
"""
MESH = "cpu: data=1"


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def printed(folder: Path) -> str:
    """Returns the output of a program that runs as a script."""
    with redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(folder / "program.py"), run_name="__main__")
    return output.getvalue()


def loss(folder: Path) -> float:
    """The loss of the first step of a program."""
    (output,) = run_ranks(printed, folder, count=1)
    found = re.search(r"step +1 +loss ([\d.]+)", output)
    assert found, output
    return float(found[1])


def expected(weights: dict[str, Tensor], batch: dict[str, Tensor]) -> float:
    table = weights["table.weight"]
    logits = weights["scale"] * table[batch["words"]] @ table.T
    return float(nn.functional.cross_entropy(logits, batch["labels"]))


def test_programs_run_with_what_is_written_beside_them(tmp_path: Path) -> None:
    source, plan = tmp_path / "net.py", tmp_path / "plan.toml"
    source.write_text(MODEL)
    model = ("--model", f"{source}:net")
    run("plan", f"{source}:net", "--mesh", MESH, "--batch", 4, "-o", plan)
    torch.manual_seed(4)
    weights = {
        "table.weight": torch.randn(7, 8, dtype=torch.float64),
        "scale": torch.full((1,), 3.0, dtype=torch.float64),
    }
    batch = {"words": torch.tensor([1, 2, 3, 3]), "labels": torch.tensor([0, 6, 2, 1])}
    save_file(weights, tmp_path / "model.safetensors")
    save_file(batch, tmp_path / "batch.safetensors")
    given = tmp_path / "given"
    out = run(
        "emit", plan, "-o", given, *model, "--weights", tmp_path / "model.safetensors", "--batch",
        tmp_path / "batch.safetensors",
    ).stdout  # fmt: skip
    assert "put " not in out
    assert loss(given) == pytest.approx(expected(weights, batch), abs=1e-6)
    drawn = tmp_path / "drawn"
    run("emit", plan, "-o", drawn, *model, "--random", "--batch", 4)
    values = load_file(drawn / "weights.safetensors")
    assert values["scale"].item() == 2
    assert 0.01 < values["table.weight"].std() < 0.03
    assert load_file(drawn / "batch.safetensors")["words"].tolist() == [0, 1, 2, 3]
    only = run("emit", plan, "-o", tmp_path / "only", *model, "--weights", given).stdout
    assert "put batch.safetensors beside it, with the names of INPUTS" in only


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    source, plan = tmp_path / "net.py", tmp_path / "plan.toml"
    source.write_text(MODEL)
    run("plan", f"{source}:net", "--mesh", MESH, "-o", plan)
    rest = ("-o", tmp_path / "out", "--model", f"{source}:net")
    short, few = tmp_path / "short.safetensors", tmp_path / "few.safetensors"
    save_file({"words": torch.zeros(3, dtype=torch.int64)}, short)
    save_file({"scale": torch.ones(1)}, few)
    assert "'words' is i64[3]" in run("emit", plan, *rest, "--batch", short, code=2).output
    assert "missing: table.weight" in run("emit", plan, *rest, "--weights", few, code=2).output
    assert "neither a number nor a file" in run(
        "emit", plan, *rest, "--batch", tmp_path / "nothing", code=2
    ).output.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_weights_have_the_names_of_published_experts(tmp_path: Path) -> None:
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 3}
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))
    model.save_pretrained(tmp_path)
    assert "model.layers.0.block_sparse_moe.experts.2.w1.weight" in load_file(
        tmp_path / "model.safetensors"
    )
    words = torch.zeros(1, 2, dtype=torch.int64)
    compiled = autopar.emit(model, MESH, example_inputs={"input_ids": words, "labels": words})
    with torch.device("meta"):
        unknown = transformers.MixtralForCausalLM(model.config)
    values = weights_from(tmp_path, unknown, compiled.captured)
    for name, value in model.state_dict().items():
        assert values[name].equal(value), name


def test_models_of_the_zoo_draw_their_own_batches(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.toml", tmp_path / "out"
    small = ("--layers", 1, "--batch", 2, "--seq", 4)
    run("plan", "gpt2", "--mesh", "cpu: data=2", *small, "--accumulate", 2, "-o", plan)
    run("emit", plan, "-o", out, "--random")
    batch = load_file(out / "batch.safetensors")
    assert {name: list(value.shape) for name, value in batch.items()} == {
        "input_ids": [2, 4],
        "labels": [2, 4],
    }
    assert "COUNTS" in (out / "stage_0.py").read_text()

"""The zoo builds what was published, allocates nothing, and refuses bad input by name."""

from __future__ import annotations

import json
import math
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import modeling_utils

from autopar import zoo
from autopar.errors import (
    BatchError,
    MissingDependencyError,
    ModelFileError,
    UnknownModelError,
)
from tests.support.ranks import run_ranks

TINY: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
    },
    "GPT2LMHeadModel": {
        "model_type": "gpt2",
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 16,
    },
    "BertForMaskedLM": {
        "model_type": "bert",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("name", zoo.names())
def test_parameters_are_those_published(name: str) -> None:
    spec = zoo.spec(name)
    model = zoo.build(name)
    # nn.Module.parameters() gives a tied weight once.
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(spec.parameters, rel=0.01)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, spec.dtype)}
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("name", zoo.names())
def test_transformers_finds_the_loss_without_a_warning(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warned(text: str) -> None:
        raise AssertionError(text)

    monkeypatch.setattr(modeling_utils.logger, "warning_once", warned)
    loss = zoo.build(name, layers=1).loss_function
    if zoo.spec(name).architecture.endswith(("ForCausalLM", "LMHeadModel")):
        assert loss.__name__ == "ForCausalLMLoss"


def largest() -> tuple[int, int]:
    """The bytes of its parameters, and by how many KiB the process grew."""
    zoo.build("llama-3.1-405b", layers=1)  # brings in the libraries
    before = peak()
    model = zoo.build("llama-3.1-405b")
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return nbytes, peak() - before


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux


def test_the_largest_model_allocates_nothing() -> None:
    ((nbytes, growth),) = run_ranks(largest, count=1)
    assert nbytes > 800e9  # the weights would take this many bytes
    assert growth < 1024**2  # 1 GiB in KiB


def test_layers_replaces_the_number_of_blocks() -> None:
    def count(layers: int) -> int:
        return sum(p.numel() for p in zoo.build("gpt2", layers=layers).parameters())

    # A block of GPT-2: 12 d^2 weights, 13 d biases and norms (closed form).
    assert count(3) - count(2) == 12 * 768**2 + 13 * 768


def test_default_dtype_is_left_as_it_was() -> None:
    before = torch.get_default_dtype()
    zoo.build("llama-7b", layers=1)
    with pytest.raises(ModelFileError):
        zoo.build(zoo.Spec("broken", "LlamaForCausalLM", {"hidden_act": "?"}, "bfloat16", 1, 8, ""))
    assert torch.get_default_dtype() == before


def test_the_rotary_frequencies_keep_float32() -> None:
    model = zoo.build("llama-7b", layers=1)
    buffers = {name: b.dtype for name, b in model.named_buffers() if name.endswith("inv_freq")}
    assert set(buffers.values()) == {torch.float32}


@pytest.mark.parametrize(
    "name", ["gpt2", "llama-3-8b", "mistral-7b", "mixtral-8x7b", "bert-base", "vit-base"]
)
def test_example_inputs_give_a_loss_through_export(name: str) -> None:
    model = zoo.build(name, layers=1)
    inputs = zoo.example_inputs(name, batch=2, seq=None if name == "vit-base" else 16)
    assert {tensor.shape[0] for tensor in inputs.values()} == {2}
    exported = torch.export.export(model, (), inputs, strict=False)
    first = next(iter(exported.graph_signature.user_outputs))
    node = next(node for node in exported.graph.nodes if node.name == first)
    assert node.meta["val"].shape == ()


@pytest.mark.parametrize("architecture", TINY)
def test_hf_configuration_builds_and_runs(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY[architecture], "architectures": [architecture]}))
    model, inputs = zoo.load(f"hf:{path}", batch=3, seq=12)
    assert type(model).__name__ == architecture
    assert inputs["input_ids"].shape == inputs["labels"].shape == (3, 12)
    assert inputs["input_ids"] is not inputs["labels"]
    assert ("attention_mask" in inputs) == (architecture == "BertForMaskedLM")

    torch.manual_seed(0)
    spec = zoo.read_config(path)
    real = zoo.build(spec, meta=False)
    drawn = zoo.example_inputs(spec, 8, 16, device="cpu")
    assert drawn["input_ids"].data_ptr() != drawn["labels"].data_ptr()
    with torch.no_grad():
        loss = real(**drawn).loss
    # Small initial weights predict every token alike: the loss is the entropy of 64 tokens.
    assert loss.item() == pytest.approx(math.log(64), rel=0.05)


def test_hf_reads_a_folder_its_dtype_and_layers(tmp_path: Path) -> None:
    # With no architecture named it is the causal language model of that type.
    settings = {**TINY["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    model, _ = zoo.load(f"hf:{tmp_path}", layers=1)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    names = [name for name, _ in model.named_parameters() if "layers." in name]
    assert names
    assert all("layers.0." in name for name in names)


def test_hf_runs_no_code_from_beside_the_file(tmp_path: Path) -> None:
    settings = {
        **TINY["LlamaForCausalLM"],
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        "attn_implementation": "someone/kernel-from-a-hub",
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    model, _ = zoo.load(f"hf:{tmp_path}")
    assert type(model).__module__.startswith("transformers.")
    assert not (tmp_path / "ran").exists()


def test_file_gives_model_and_inputs_and_takes_the_flags(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WIDTH = 5\n")
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\nfrom beside import WIDTH\n"
        "def bare():\n    return torch.nn.Linear(WIDTH, 2)\n"
        "def full(batch=1, layers=1):\n"
        "    net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(layers)])\n"
        "    return net, {'input': torch.zeros(batch, 4)}\n"
    )
    before = list(sys.path)
    model, inputs = zoo.load(f"{path}:bare")
    assert isinstance(model, nn.Linear)
    assert model.in_features == 5
    assert inputs == {}
    model, inputs = zoo.load(f"{path}:full", batch=7, layers=3)
    assert isinstance(model, nn.Sequential)
    assert len(model) == 3
    assert inputs["input"].shape == (7, 4)
    assert sys.path == before


@pytest.mark.parametrize(
    ("body", "call", "told"),
    [
        (None, "f", "no such file"),
        ("def g(): pass", "f", "no function 'f'"),
        ("def f():\n    raise RuntimeError('out of tea')", "f", "out of tea"),
        ("def f(:", "f", "SyntaxError"),
        ("raise SystemExit(3)", "f", "SystemExit: 3"),
        ("def f(): return 3", "f", "it returns int"),
        ("def f():\n    import torch\n    return torch.nn.ReLU(), [1]", "f", "it returns (ReLU, "),
        ("def f(size): return size", "f", "missing a required argument: 'size'"),
        ("f = 3", "f", "no function 'f'"),
        ("def f(): pass", "", "names no function"),
    ],
)
def test_bad_files_are_named(body: str | None, call: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    if body is not None:
        path.write_text(body)
    with pytest.raises(ModelFileError) as caught:
        zoo.load(f"{path}:{call}")
    assert told in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_failing_function_is_shown_at_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def f():\n    return g()\n\n\ndef g():\n    return 1 / 0\n")
    with pytest.raises(ModelFileError) as caught:
        zoo.load(f"{path}:f")
    assert caught.value.where == f"{path}:6"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_flag_that_the_function_does_not_take_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def f(): pass")
    with pytest.raises(ModelFileError, match="unexpected keyword argument 'seq'"):
        zoo.load(f"{path}:f", seq=4)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[1, 2]", "it has no model_type"),
        ('{"hidden_size": 8}', "it has no model_type"),
        ('{"model_type": "no-such-model"}', "'no-such-model'"),
        ('{"model_type": "llama", "architectures": ["NoSuchModel"]}', "'NoSuchModel'"),
        ('{"model_type": "llama", "architectures": ["LlamaConfig"]}', "'LlamaConfig'"),
        ('{"model_type": "llama", "hidden_act": "no-such-act"}', "no-such-act"),
        ('{"model_type": "llama", "num_attention_heads": "many"}', "num_attention_heads"),
        ('{"model_type": "llama", "torch_dtype": "int8"}', "'int8'"),
        ('{"model_type": "llama", "architectures": ["LlamaModel"]}', "no example inputs"),
    ],
)
def test_bad_configurations_are_named(text: str | None, told: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ModelFileError) as caught:
        zoo.load(f"hf:{path}", layers=1)
    assert told in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_unknown_name_shows_near_matches() -> None:
    with pytest.raises(UnknownModelError) as caught:
        zoo.load("llama-3-7b")
    assert "llama-3-8b" in str(caught.value)
    with pytest.raises(UnknownModelError, match="gpt2"):
        zoo.spec("###")  # nothing is near: all are listed


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(BatchError, match="1024 positions"):
        zoo.example_inputs("gpt2", seq=1025)
    with pytest.raises(BatchError, match="0 samples"):
        zoo.example_inputs("gpt2", batch=0)
    with pytest.raises(UnknownModelError, match="0 layers"):
        zoo.build("gpt2", layers=0)


def test_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # import then raises ImportError
    with pytest.raises(MissingDependencyError, match=r"autopar\[hf\]"):
        zoo.build("gpt2")

"""Checkpoints and weights that pass between programs and models without autopar."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import autopar
from autopar.errors import CheckpointError, StateError
from tests.support import models

SINGLE = "cpu: x=1"


def test_the_plain_model_takes_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = models.conv_net()
    program = autopar.compile(model, SINGLE, example_inputs=batch)
    program.step(**batch)
    program.save_checkpoint(tmp_path / "one")
    plain, _ = models.conv_net()
    plain.load_state_dict(autopar.load_checkpoint(tmp_path / "one"))
    torch.testing.assert_close(plain.state_dict(), program.state_dict(), rtol=0, atol=0)
    assert int(plain.state_dict()["norm1.num_batches_tracked"]) == 1


def test_hugging_face_folders_are_read(tmp_path: Path) -> None:
    """In several files with a list of them; tied weights are there once; a hollow program."""
    torch.manual_seed(0)
    model, batch = models.gpt2(layers=1)
    model.save_pretrained(tmp_path / "hub", max_shard_size="20KB")
    assert (tmp_path / "hub" / "model.safetensors.index.json").exists()
    with torch.device("meta"):
        hollow, _ = models.gpt2(layers=1)
    program = autopar.compile(hollow, SINGLE, example_inputs=batch)
    with pytest.raises(StateError, match="no weights to save"):
        program.save_checkpoint(tmp_path / "one")
    program.load_weights(tmp_path / "hub")
    torch.testing.assert_close(program.state_dict(), dict(model.state_dict()), rtol=0, atol=0)
    program.save_checkpoint(tmp_path / "one")
    assert "model.lm_head.weight" not in load_file(
        next((tmp_path / "one").rglob("rank_0.safetensors"))
    )
    loaded = autopar.load_checkpoint(tmp_path / "one")
    assert list(loaded) == list(model.state_dict())
    (tmp_path / "hub" / "model-00002-of-00003.safetensors").unlink(missing_ok=True)
    os.remove(next((tmp_path / "hub").glob("*.safetensors")))
    with pytest.raises(CheckpointError, match="cannot be read"):
        program.load_weights(tmp_path / "hub")
    with pytest.raises(CheckpointError, match="no weights in"):
        program.load_weights(tmp_path / "nothing")

"""Definitions that a generated module must have, may have, and must not have."""

from __future__ import annotations

import pytest

from autopar.errors import AutoparError, ProgramError
from autopar.runtime.generated import Generated
from autopar.runtime.module_loader import load

SOURCE = """
from autopar.runtime.api import stored

MESH = "cpu: gpu=2"
INPUTS = {"x": "f32[4, 8]"}
OUTPUTS = {"loss": "f32[]"}
LOSS = "loss"
RANDOM = False


def parameters():
    return [stored("w", "f32[8, 8@gpu]")]


def forward(mesh, p, batch):
    return {"loss": (batch["x"] @ p["w"]).sum()}
"""


def read(source: str) -> Generated:
    return Generated.of(load(source, "<edited>"))


def test_what_is_left_out_has_its_default() -> None:
    program = read(SOURCE)
    assert str(program.mesh) == "cpu: gpu=2"
    assert [str(parameter.type) for parameter in program.parameters] == ["f32[8, 8]"]
    assert (program.bucket, program.written, program.host_bucket) == (1, (), None)
    assert not any((program.fused_update, program.aside, program.received, program.stows))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('LOSS = "loss"', "", "does not define LOSS"),
        ("def forward", "def backward", "does not define forward"),
        ("RANDOM = False", "RANDOM = 'no'", "RANDOM .* wrong type"),
        ("RANDOM = False", "RANDOM = False\nBUCKET = '32MiB'", "BUCKET .* wrong type"),
        ("RANDOM = False", "RANDOM = False\nWRITTEN = ['w']", "WRITTEN .* wrong type"),
        ('{"loss": "f32[]"}', '{"loss": 3}', "tables .* cannot be read"),
        ("return [stored", "return 3  # ", "tables .* cannot be read"),
        ('"cpu: gpu=2"', '"cpu; gpu"', "mesh"),
        ("f32[8, 8@gpu]", "f32[8, 8@gpu", "layout"),
    ],
)
def test_what_is_wrong_is_named(old: str, new: str, says: str) -> None:
    assert old in SOURCE
    with pytest.raises(AutoparError, match=says):
        read(SOURCE.replace(old, new))


def test_a_program_that_does_not_run_is_named() -> None:
    with pytest.raises(ProgramError, match="does not load"):
        read("import nothing_of_this_name")

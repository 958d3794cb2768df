"""Golden sources: emitted programs of each kind, for review.

A change of the printed source shows in a diff of these files; read it before you commit it. To
update the files, run

    python -m pytest tests/golden --update-golden
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.ir.mesh import Mesh
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.plan_model import plan_captured
from autopar.planning.trace import Trace
from autopar.session.compiled import Compiled
from tests.support import families, models

FOLDER = Path(__file__).parent
# Slow devices on fast links, so that small models are worth splitting.
MESH = "toy[2TFLOP/s 1GiB 20GB/s]: data=2 @5GB/s 1us, tensor=2 @20GB/s 100ns"
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {}),
    "mixture": ("mixtral_grouped", {}),
    "encoder_decoder": ("t5", {}),
    "convolutional": ("conv_net", {}),
    "zero3": ("gpt2", {"state": "zero3"}),
    "pipeline": ("llama", {"stages": 2, "microbatches": 2, "schedule": "1f1b"}),
    "offload": ("gpt2", {"offload": "optimizer+activations 2", "state": "zero1"}),
}


def source(name: str) -> str:
    """The program of one case, that of the last stage for a pipeline."""
    family, options = OPTIONS[name]
    model, batch = models.conv_net() if family == "conv_net" else families.make(family)
    given, mesh, silent = Options(**options), Mesh.parse(MESH), Trace(None)
    count = given.microbatches if given.is_pipeline else None
    captured = capture_call(Call(model, (), batch), given, silent, count)
    plan = plan_captured(captured, mesh, given, silent)
    return Compiled.of(captured, plan, given, silent).sources[-1]


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="other versions trace other operators"
)
@pytest.mark.parametrize("name", OPTIONS)
def test_programs_are_printed_as_they_were_reviewed(
    name: str, request: pytest.FixtureRequest
) -> None:
    path = FOLDER / f"{name}.py.txt"
    printed = source(name)
    if request.config.getoption("--update-golden"):
        path.write_text(printed, encoding="utf-8")
    assert printed == path.read_text("utf-8"), "see the docstring of tests/golden/test_golden.py"

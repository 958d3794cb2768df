"""Batches of which every rank passes its own part."""

from __future__ import annotations

import pytest

from autopar.errors import BatchError
from autopar.ir.mesh import Mesh
from autopar.planning.capturing import Call
from autopar.planning.local_batches import capture_parts
from autopar.planning.options import LOCAL, Options
from autopar.planning.trace import Trace
from tests.support import models


def test_a_part_that_does_not_divide_into_microbatches_is_refused() -> None:
    """The whole batch of three parts would divide."""
    model, batch = models.mlp((8, 16, 8), batch=8)
    options = Options(loss_fn=models.squared_error, batches=LOCAL, microbatches=3)
    with pytest.raises(BatchError, match="8 samples does not divide into 3"):
        capture_parts(Call(model, (), batch), Mesh.parse("cpu: x=3"), options, Trace(None), 3)

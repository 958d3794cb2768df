"""Methods of compression as values: texts, bytes, hops, memory; one more from a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cost.model import AnalyticModel
from autopar.errors import PlanMismatchError, PrecisionError
from autopar.ir import compression
from autopar.ir.compression import Messages, method_of
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.ir.storage import Hop, Storage
from autopar.ir.tensor import Layout, TensorType
from autopar.pins import data_parallel
from tests.support.further_modules import find_also
from tests.support.halves import HALVES

MATRIX = TensorType("f32", (1000, 600))
N = 600_000


def hops(text: str, gpus: int, scatter: bool, tensor: TensorType = MATRIX) -> tuple[Hop, ...]:
    """The hops of a gradient over so many replicas."""
    mesh = Mesh.parse(f"H100: gpu={gpus}")
    used = Layout(((), ()), varying=("gpu",))
    whole, part = Layout(((), ())), Layout((("gpu",), ()))
    storage = Storage(used, whole, whole, part if scatter else whole, whole)
    found = storage.hops(tensor, mesh, precision=Precision.read(f"gradients={text}"))
    return tuple(hop for hop in found if hop.when == "reduce")


def sent(text: str, gpus: int, scatter: bool = False) -> list[tuple[str, int]]:
    return [(hop.call.kind, hop.call.nbytes) for hop in hops(text, gpus, scatter)]


def test_hops_say_what_is_sent() -> None:
    blocks = -(-N // 256)
    assert sent("int8", 2) == [("all_gather", 260 * blocks)]
    assert sent("top-k 1 %", 8) == [("all_gather", 8 * 6000)]
    assert sent("1-bit", 4) == [("all_gather", N // 8 + 4)]
    assert sent("powersgd rank 4", 64) == [("all_reduce", 4 * 4000), ("all_reduce", 4 * 2400)]
    # Of many devices messages would be more than the exact sum: sums are encoded again.
    each = -(-(N // 16) // 256) * 260
    assert sent("int8", 16) == [("all_to_all", 16 * each), ("all_gather", each)]
    assert sent("int4 blocks", 4, True) == [("all_to_all", 4 * (150_016 // 2 + 4 * 2344))]
    assert [h.dst.dims for h in hops("powersgd rank 4", 4, True)] == [((), ()), (("gpu",), ())]


def test_what_gets_no_smaller_goes_as_it_is() -> None:
    assert sent("top-k 100 %", 2) == [("all_reduce", 4 * N)]
    assert sent("top-k 60 %", 4, True) == [("reduce_scatter", 4 * N)]
    vector = TensorType("f32", (1000, 1))
    (hop,) = hops("powersgd rank 4", 4, False, vector)
    assert (hop.call.kind, hop.call.compression, hop.residual) == ("all_reduce", "", 0)


def test_a_price_is_that_of_bytes_and_kernels() -> None:
    """Slow links gain by fewer bytes; the kernels of a method take time that links do not."""
    mesh = Mesh.parse("toy[1TFLOP/s 64GiB 1TB/s]: gpu=4 @10MB/s 1us")
    price = AnalyticModel(mesh).collective
    used, whole = Layout(((), ()), varying=("gpu",)), Layout(((), ()))
    storage = Storage(used, whole, whole, whole, whole)
    seconds = {}
    for text in ("", "gradients=1-bit", "gradients=powersgd rank 4"):
        found = storage.hops(MATRIX, mesh, precision=Precision.read(text))
        seconds[text] = sum(price(hop.call) for hop in found)
        bare = sum(price(replace(hop.call, quantised=0)) for hop in found)
        assert (seconds[text] > bare) is bool(text)
    assert seconds[""] > 10 * seconds["gradients=1-bit"] > 0
    assert seconds[""] > 30 * seconds["gradients=powersgd rank 4"] > 0


@pytest.mark.parametrize("text", ["top-k 0 %", "top-k 1", "powersgd", "powersgd rank 0", "zip"])
def test_what_is_no_method_is_refused_by_name(text: str) -> None:
    with pytest.raises(PrecisionError, match="cannot be sent as") as caught:
        Precision(gradients=text)
    assert "powersgd rank 4" in str(caught.value)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def planned(gradients: str | None, state: str) -> autopar.Plan:
    return autopar.plan(
        model(),
        "toy[1TFLOP/s 64GiB 1TB/s]: gpu=2 @10MB/s 1us",
        example_inputs={"input": torch.zeros(8, 64)},
        loss_fn=lambda output: output.square().mean(),
        pins=data_parallel(),
        state=state,
        gradients=gradients,
    )


@pytest.mark.parametrize("state", ["ddp", "zero2"])
def test_a_plan_counts_residuals_and_says_that_numerics_change(state: str) -> None:
    plain, plan = planned(None, state), planned("top-k 1 %", state)
    assert str(plan.precision) == "gradients=top-k 1 %"
    assert autopar.Plan.from_toml(plan.to_toml()) == plan
    assert plan.predicted.step_seconds < plain.predicted.step_seconds
    # Of both matrices a residual in float32 is there all the time.
    residual = 4 * 2 * 64 * 256
    assert plan.predicted.peak_bytes >= plain.predicted.peak_bytes + residual
    assert plan.predicted.parameter_bytes >= plain.predicted.parameter_bytes + residual


def test_a_plan_says_by_itself_how_gradients_go() -> None:
    with pytest.raises(PlanMismatchError, match="precision"):
        autopar.compile(model(), "cpu: gpu=1", plan=planned("1-bit", "ddp"), gradients="int8")


def test_one_more_method_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halves.py").write_text(HALVES)
    find_also(monkeypatch, compression, tmp_path)
    compression._readers.cache_clear()
    method_of.cache_clear()
    try:
        method = method_of("first half")
        assert isinstance(method, Messages)
        assert "first half" in compression.examples()
        assert sent("first half", 2) == [("all_gather", 2 * N)]
        assert Precision.read("bf16 gradients=first half").gradients == "first half"
    finally:
        compression._readers.cache_clear()
        method_of.cache_clear()

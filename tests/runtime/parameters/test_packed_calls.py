"""How many calls the gradients of many parameters take: one for all that go the same way.

Owners need no reduce each: every parameter is split over all owners, in parts that may differ by a
row, and the parts of all parameters for one rank lie together in one flat buffer.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.ir.mesh import Mesh
from autopar.pins import data_parallel
from tests.support.parity import train_plainly
from tests.support.ranks import run_ranks
from tests.support.state_sharding import Calls, recorded

MESH = "cpu[10GFLOP/s 1GiB 5GB/s]: node=2 @1GB/s 5us, gpu=2 @10GB/s 1us"
WIDE = 13  # rows that neither two nor four ranks divide
BATCH = {"x": torch.arange(8.0 * WIDE, dtype=torch.float64).reshape(8, WIDE).sin()}
STEPS = 2


class Experts(nn.Module):
    """Layers that all devices have, and ones that are split like experts; odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(8))
        self.up = nn.ModuleList(nn.Linear(WIDE, 30, bias=False) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(30, WIDE, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.dense:
            x = x + torch.tanh(layer(x))
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x)))
        return x.square().mean()


def trained(state: str, split: bool) -> tuple[list[float], dict[Any, int], int]:
    pins: Any = [data_parallel("node" if split else None)] if split else data_parallel()
    if split:
        for number in range(4):
            pins.append(
                {f"up.{number}.weight": "[30@gpu, 13]", f"down.{number}.weight": "[13, 30@gpu]"}
            )
    session = autopar.compile(
        Experts().double(), MESH, example_inputs=BATCH, pins=pins, state=state
    )
    executor: Any = session._executor
    hops = sum(len(weight.path("reduce")) for weight in executor.weights.all)
    hops += sum(len(weight.path("accumulate")) for weight in executor.weights.all)
    session.step(**BATCH)
    with recorded(Mesh.parse(MESH)) as calls:
        losses = [session.step(**BATCH).item() for _ in range(STEPS)]
    return losses, _reductions(calls), hops


def _reductions(calls: Calls) -> Counter[tuple[str, ...]]:
    """Those of gradients; inside nodes activations are scattered, too."""
    return Counter(axes for kind, axes, _ in calls if kind == "reduce_scatter" and "node" in axes)


def plain() -> list[float]:
    model = Experts().double()
    updates = torch.optim.AdamW(model.parameters())
    return train_plainly(lambda: model(**BATCH), updates, STEPS + 1)[1:]


@pytest.mark.parametrize(
    "state", ["zero2 over none", pytest.param("zero1 over none", marks=pytest.mark.slow)]
)
def test_parameters_of_all_owners_go_in_one_call(state: str) -> None:
    for losses, calls, hops in run_ranks(trained, state, False):
        torch.testing.assert_close(losses, plain(), rtol=1e-11, atol=0)
        assert hops >= 24
        # A handful of buckets, where a reduce for each owner of each parameter would be 96.
        assert sum(calls.values()) <= 6 * STEPS, calls


def test_split_ones_have_buckets_of_their_own() -> None:
    """Their replicas are fewer: they are reduced over other axes than the dense layers."""
    for losses, calls, hops in run_ranks(trained, "zero1 over none", True):
        torch.testing.assert_close(losses, plain(), rtol=1e-11, atol=0)
        assert hops >= 24
        assert 0 < sum(calls.values()) <= 6 * STEPS, calls


class Copied(TorchDispatchMode):
    """Counts the bytes that operators write, other than through collectives."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view and isinstance(result, Tensor):
            made = func.overloadpacket.__name__ in ("empty", "new_empty", "detach", "empty_like")
            self.nbytes += 0 if made else result.nbytes
        return result


def gathered(rows: tuple[int, ...]) -> tuple[int, int, int]:
    """Bytes that a gather after the update copies, of the parameters, and of this rank's parts."""
    layers = nn.Sequential(*(nn.Linear(8, n, bias=False) for n in rows)).double()
    session = autopar.compile(
        layers, "cpu[10GFLOP/s 1GiB 5GB/s]: gpu=2 @1MB/s 1us",
        example_inputs={"input": torch.ones(4, 8, dtype=torch.float64)},
        loss_fn=lambda output: output.mean(), pins=data_parallel(), state="zero1",
    )  # fmt: skip
    executor: Any = session._executor
    weights = executor.weights
    with torch.no_grad():
        for weight in weights.all:
            weight.updated.add_(1.0)
        for weight in weights.all:  # others' parts are wrong until they are gathered
            own = weight.updated.clone()
            weight.held.zero_()
            weight.updated.copy_(own)
    with Copied() as copied:
        weights.gather()
    for weight, layer in zip(weights.all, layers.parameters(), strict=True):
        torch.testing.assert_close(weight.held.detach(), layer.detach() + 1.0, rtol=0, atol=0)
    whole = sum(weight.held.nbytes for weight in weights.all)
    return copied.nbytes, whole, sum(weight.updated.nbytes for weight in weights.all)


def counted() -> list[tuple[int, int, int]]:
    return [gathered(rows) for rows in ((8,), (8,) * 20, (8, 7))]


def test_updated_parameters_arrive_where_they_are_kept() -> None:
    """One that is sent alone is not copied; of several, each is read once out of the buffer.

    A list of tensors, one for each rank, would be copied whole once more, and so would a result
    that is put together before it is stored.
    """
    for alone, several, uneven in run_ranks(counted, count=2):
        assert alone[0] == 0, alone
        copied, whole, parts = several  # four or more in a bucket, a tenth of all
        assert copied == whole + parts
        copied, whole, parts = uneven
        assert copied <= whole + 2 * parts + 2 * 64

"""Training with compressed gradients against one process that compresses alike, in numpy."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.ir.mesh import Mesh
from autopar.ir.storage import EACH
from autopar.pins import data_parallel
from tests.support.compressed_sums import Array, Hop, Judge, spread
from tests.support.ranks import run_ranks
from tests.support.state_sharding import recorded

WIDE = 48
BATCH = {"input": torch.arange(256.0, dtype=torch.float64).reshape(16, 16).sin()}
METHODS = ("int8", "int4 blocks", "1-bit", "top-k 10 %", "powersgd rank 2")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, WIDE), nn.GELU(), nn.Linear(WIDE, 8)).double()


def loss(output: Tensor) -> Tensor:
    # The targets follow from the rows, so that any part of a batch has its own.
    return F.cross_entropy(output, (output.detach().sum(1) * 1e3).long() % 8)


class Case(NamedTuple):
    """What is trained, and how its gradients go."""

    mesh: str
    gradients: str
    state: str = "ddp"
    microbatches: int = 1
    tensor: bool = False
    steps: int = 4
    stages: int = 1

    @property
    def pins(self) -> Any:
        split = {"0.weight": f"[{WIDE}@gpu, 16]", "2.weight": f"[8, {WIDE}@gpu]"}
        return [data_parallel("node"), split] if self.tensor else data_parallel()


class Trained(NamedTuple):
    """What a rank has after training."""

    losses: list[float]
    state: dict[str, Tensor]
    paths: dict[str, tuple[tuple[Hop, ...], tuple[tuple[str, ...], ...]]]
    mesh: str  # of its stage, or of all


def train(cases: list[Case]) -> list[Trained]:
    """Every case on this rank, which sends the bytes that its plan says."""
    return [train_one(case) for case in cases]


def train_one(case: Case) -> Trained:
    session = autopar.compile(
        model(),
        case.mesh,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        example_inputs=BATCH,
        loss_fn=loss,
        pins=case.pins,
        state=case.state,
        gradients=case.gradients,
        microbatches=case.microbatches,
        whole_loss=False,  # counted labels follow from parameters
        stages=case.stages,
    )
    executor: Any = session._executor
    stages = list(executor.stages.values()) if hasattr(executor, "stages") else [executor]
    (mesh,) = {str(stage.runtime.mesh) for stage in stages}
    weights = [weight for stage in stages for weight in stage.weights.all]
    planned: Counter[str] = Counter()
    paths = {}
    for weight in weights:
        hops = [hop for hop in weight.hops if hop.when in ("accumulate", "reduce")]
        paths[weight.name] = (
            tuple(
                Hop(h.when, h.call.kind, h.call.axes, h.dim, h.further, bool(h.call.compression))
                for h in hops
            ),
            weight.storage.used.dims,
        )
        for hop in weight.hops:
            times = case.microbatches if hop.when in EACH else 1
            planned[hop.call.kind] += case.steps * times * hop.call.nbytes
    with recorded(Mesh.parse(case.mesh)) as calls:
        losses = [session.step(**BATCH).item() for _ in range(case.steps)]
    sent: Counter[str] = Counter()
    for kind, _, nbytes in calls:
        sent[kind] += nbytes
    for kind in ("all_gather", "all_to_all", "reduce_scatter"):
        # Besides: losses of microbatches, the agreement on a batch, activations.
        more = sent[kind] - planned[kind]
        assert 0 <= more < (math.inf if case.tensor else 100), (case, sent, planned)
    state = session.state_dict()
    session.close()
    return Trained(losses, state, paths, mesh)


# By hand ------------------------------------------------------------------------------------------


def judged(case: Case, paths: Any, mesh: Mesh) -> tuple[list[float], dict[str, Tensor]]:
    """Training in one process on the same parts of batches."""
    net = model()
    judge = Judge(mesh, case.gradients)
    data = [axis for axis in mesh.names if not (case.tensor and axis == "gpu")]
    copies = math.prod(mesh.axis_size(axis) for axis in data)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(case.steps):
        spent = 0.0
        sums: dict[str, list[Array]] = {}
        for part in BATCH["input"].chunk(case.microbatches):
            gradients: dict[str, list[Array]] = {name: [] for name, _ in net.named_parameters()}
            for own in part.chunk(copies):
                net.zero_grad()
                value = loss(net(own)) / case.microbatches / copies
                value.backward()
                spent += value.item()
                for name, parameter in net.named_parameters():
                    assert parameter.grad is not None
                    gradients[name].append(parameter.grad.numpy().copy())
            for name, found in gradients.items():
                path, dims = paths[name]
                each = spread(mesh, data, dims, found)
                each = judge.reduce(name, path, each, "accumulate")
                known = sums.setdefault(name, [np.zeros_like(x) for x in each])
                sums[name] = [a + b for a, b in zip(known, each, strict=True)]
        net.zero_grad()
        for name, parameter in net.named_parameters():
            path, dims = paths[name]
            each = judge.reduce(name, path, sums[name], "reduce")
            places = [np.arange(parameter.numel()).reshape(parameter.shape)] * copies
            where = spread(mesh, data, dims, places)
            for hop in [h for h in path if h.dim is not None and not h.further]:
                for members in mesh.groups(hop.axes):
                    cuts = np.array_split(where[members[0]], len(members), hop.dim)
                    for rank, cut in zip(members, cuts, strict=True):
                        where[rank] = cut
            whole = np.full(parameter.numel(), np.nan)
            for at, value_of in zip(where, each, strict=True):
                whole[at.ravel()] = value_of.ravel()
            parameter.grad = torch.from_numpy(whole).view(parameter.shape)
        optimizer.step()
        losses.append(spent)
    return losses, dict(net.state_dict())


def check(cases: list[Case]) -> None:
    """Checks that ranks train like the reference, and that something is compressed."""
    count = Mesh.parse(cases[0].mesh).size
    results = run_ranks(train, cases, count=count)
    for number, case in enumerate(cases):
        paths: dict[str, Any] = {}
        for rank in results:  # each of its own stage
            for name, path in rank[number].paths.items():
                assert paths.setdefault(name, path) == path
        assert any(hop.compressed for path, _ in paths.values() for hop in path), case
        # Stages have meshes of one shape.
        losses, state = judged(case, paths, Mesh.parse(results[0][number].mesh))
        for rank in results:
            run = rank[number]
            np.testing.assert_allclose(run.losses, losses, rtol=1e-9, err_msg=str(case))
            for name, value in state.items():
                torch.testing.assert_close(run.state[name], value, rtol=1e-9, atol=1e-9)


TWO = "cpu[10GFLOP/s 1GiB 5GB/s]: gpu=2 @1MB/s 1us"
FOUR = "cpu[10GFLOP/s 1GiB 5GB/s]: node=2 @1MB/s 5us, gpu=2 @10MB/s 1us"


def test_replicas_and_shards_train_as_one_process_that_compresses_alike() -> None:
    """Every method, under another sharding of states each."""
    cases = [Case(TWO, method, "zero2", 2) for method in ("int4 blocks", "powersgd rank 2")]
    cases += [Case(TWO, "top-k 10 %", "zero3", 2), Case(TWO, "1-bit", "zero1", 4)]
    check([Case(TWO, "int8"), *cases])


@pytest.mark.slow
def test_replicas_train_by_every_method() -> None:
    check([Case(TWO, method) for method in METHODS])


def test_four_ranks_in_two_calls_along_two_axes_and_beside_tensor_parallelism() -> None:
    """40 % of a tensor from four ranks is more than the exact sum: sums are encoded again."""
    check(
        [
            Case(FOUR, "top-k 40 %"),
            Case(FOUR, "1-bit", "zero2 over none", 2),
            Case(FOUR, "powersgd rank 2", "paro-iig over node", 2),
            Case(FOUR, "int4 blocks", "ddp", tensor=True),
            Case(FOUR, "top-k 10 %", "zero2", 2, tensor=True),
        ]
    )


def test_stages_of_a_pipeline_compress_their_own_gradients() -> None:
    check(
        [
            Case(FOUR, method, state, count, stages=2)
            for method, state, count in (("1-bit", "zero2", 4), ("powersgd rank 2", "zero1", 2))
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("state", ["zero1", "zero2", "zero3", "paro-iig over node", "NIG"])
def test_every_method_under_every_state_sharding(state: str) -> None:
    check([Case(FOUR, method, state, 2) for method in METHODS])

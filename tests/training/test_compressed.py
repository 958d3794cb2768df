"""Training with compressed gradients against one process that compresses alike, in numpy."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.ir.mesh import Mesh
from autopar.ir.storage import EACH
from autopar.pins import data_parallel
from tests.support.ranks import run_ranks
from tests.support.state_sharding import recorded

Array = NDArray[np.float64]
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


class Hop(NamedTuple):
    """One call that a program makes for a gradient, as far as its structure goes."""

    when: str
    kind: str
    axes: tuple[str, ...]
    dim: int | None
    further: int
    compressed: bool


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


def received(method: str, x: Array) -> Array:
    """What arrives of a vector."""
    n = len(x)
    if method == "1-bit":
        return np.where(x >= 0, 1.0, -1.0) * np.abs(x).mean()
    if method.startswith("top-k"):
        count = max(math.ceil(Fraction(method.split()[1]) * n / 100), 1)
        best = sorted(range(n), key=lambda i: -abs(x[i]))[:count]
        return np.where(np.isin(np.arange(n), best), x, 0.0)
    size, most = (256, 127) if method == "int8" else (64, 7)
    out = []
    for start in range(0, n, size):
        block = x[start : start + size]
        top = np.abs(block).max()
        if not top:
            out.append(block)
        elif method == "int8":
            steps = np.floor(block * (127 / top) + 0.5)
            scale = np.float32(top / 127)
            out.append((steps.astype(np.float32) * scale).astype(np.float64))
        else:
            out.append(np.clip(np.round(block / (top / most)), -most, most) * (top / most))
    return np.concatenate(out)


def added(method: str, rows: list[Array]) -> Array:
    """The sum of what arrives from each rank; int8 blocks are summed in float32."""
    if method == "int8":
        total = np.zeros(len(rows[0]), np.float32)
        for row in rows:
            total = total + received(method, row).astype(np.float32)
        return total.astype(np.float64)
    return np.sum([received(method, row) for row in rows], 0)


class Judge:
    """Reduces the gradients of all ranks, with the residuals of each."""

    def __init__(self, mesh: Mesh, method: str) -> None:
        self.mesh, self.method = mesh, method
        self.left: dict[tuple[Any, ...], Array] = {}
        self.feedback = method != "int8"

    def reduce(self, name: str, path: tuple[Hop, ...], each: list[Array], when: str) -> list[Array]:
        """Every rank's part of the sum."""
        hops = [hop for hop in path if hop.when == when]
        place = 0
        while place < len(hops):
            hop = hops[place]
            result: list[Array] = list(each)
            for members in self.mesh.groups(hop.axes):
                given = [each[rank] for rank in members]
                key = (name, when, place)
                out = self._group(hop, given, [(*key, rank) for rank in members])
                for rank, part in zip(members, out, strict=True):
                    result[rank] = part
            each, place = result, place + 1 + hop.further
        return each

    def _group(self, hop: Hop, given: list[Array], keys: list[tuple[Any, ...]]) -> list[Array]:
        count = len(given)
        if not hop.compressed:
            total = np.sum(given, 0)
            return [total] * count if hop.dim is None else np.array_split(total, count, hop.dim)
        if self.feedback:
            zero = np.zeros_like(given[0])
            given = [x + self.left.get(key, zero) for x, key in zip(given, keys, strict=True)]
        if self.method.startswith("powersgd"):
            total, own = self._factors(given, keys[0])
            out = [total] * count if hop.dim is None else np.array_split(total, count, hop.dim)
        elif hop.dim is not None:
            cuts = [np.array_split(x, count, hop.dim) for x in given]
            longest = cuts[0][0].shape
            rows = [[padded(cut, longest).ravel() for cut in cut_up] for cut_up in cuts]
            shapes = [cut.shape for cut in cuts[0]]
            out = [
                trimmed(added(self.method, [row[n] for row in rows]).reshape(longest), shapes[n])
                for n in range(count)
            ]
            own = [
                np.concatenate(
                    [
                        trimmed(received(self.method, part).reshape(longest), shape)
                        for part, shape in zip(row, shapes, strict=True)
                    ],
                    hop.dim,
                )
                for row in rows
            ]
        elif hop.further:
            out, own = self._twice(given)
        else:
            shape = given[0].shape
            total = added(self.method, [x.ravel() for x in given]).reshape(shape)
            out = [total] * count
            own = [received(self.method, x.ravel()).reshape(shape) for x in given]
        for key, x, said in zip(keys, given, own, strict=True):
            self.left[key] = x - said
        return out

    def _twice(self, given: list[Array]) -> tuple[list[Array], list[Array]]:
        """Each rank sums a part; what it leaves out of that counts as left out of its gradient."""
        count, shape = len(given), given[0].shape
        each = -(-given[0].size // count)
        rows = [np.pad(x.ravel(), (0, each * count - x.size)).reshape(count, each) for x in given]
        own = [np.stack([received(self.method, part) for part in row]) for row in rows]
        parts = [added(self.method, [row[n] for row in rows]) for n in range(count)]
        said = [received(self.method, part) for part in parts]
        for n in range(count):
            own[n][n] -= parts[n] - said[n]
        size = given[0].size
        total = np.concatenate(said)[:size].reshape(shape)
        return [total] * count, [x.ravel()[:size].reshape(shape) for x in own]

    def _factors(self, given: list[Array], key: tuple[Any, ...]) -> tuple[Array, list[Array]]:
        """One step of subspace iteration, orthonormal by numpy's QR."""
        shape, rank = given[0].shape, int(self.method.split()[-1])
        each = [x.reshape(shape[0], -1) for x in given]
        columns = each[0].shape[1]
        i, j = np.arange(columns)[:, None], np.arange(rank)
        q = self.left.get((*key, "q"), np.cos(i * (j + 1) + j))
        p, _ = np.linalg.qr(np.sum([x @ q for x in each], 0))
        shares = [x.T @ p for x in each]
        q = np.sum(shares, 0)
        # Signs of QR's columns are free, and cancel in all products.
        self.left[(*key, "q")] = q
        return (p @ q.T).reshape(shape), [(p @ s.T).reshape(shape) for s in shares]


def padded(x: Array, shape: tuple[int, ...]) -> Array:
    return np.pad(x, [(0, more - own) for own, more in zip(x.shape, shape, strict=True)])


def trimmed(x: Array, shape: tuple[int, ...]) -> Array:
    return x[tuple(slice(size) for size in shape)]


def local(mesh: Mesh, dims: tuple[tuple[str, ...], ...], x: Array) -> list[Array]:
    """Every rank's part of a tensor that tensor parallelism splits."""
    parts = []
    for coordinate in product(*map(range, mesh.shape)):
        part = x
        for dim, axes in enumerate(dims):
            for axis in axes:
                at = mesh.names.index(axis)
                part = np.array_split(part, mesh.shape[at], dim)[coordinate[at]]
        parts.append(part)
    return parts


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


def spread(
    mesh: Mesh, data: list[str], dims: tuple[tuple[str, ...], ...], copies: list[Array]
) -> list[Array]:
    """The gradient of each rank: of its part of the batch, and of that its part of the tensor."""
    whole = [local(mesh, dims, x) for x in copies]
    found = []
    for rank, coordinate in enumerate(product(*map(range, mesh.shape))):
        copy = 0
        for axis in data:
            at = mesh.names.index(axis)
            copy = copy * mesh.shape[at] + coordinate[at]
        found.append(whole[copy][rank])
    return found


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


def test_replicas_train_as_one_process_that_compresses_alike() -> None:
    check([Case(TWO, method) for method in METHODS])


def test_sharded_gradients_and_microbatches_train_alike() -> None:
    cases = [Case(TWO, method, "zero2", 2) for method in ("int4 blocks", "powersgd rank 2")]
    check([*cases, Case(TWO, "top-k 10 %", "zero3", 2), Case(TWO, "1-bit", "zero1", 4)])


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

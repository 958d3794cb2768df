"""Alpa's intra-operator ablation: a GPT of 8 layers on one p3.16xlarge (OSDI 2022, section 8.2).

A row is a hidden size, a number of V100 of 16 GB, a method and, for Alpa's own, a logical mesh
(batch, tensor). Assumptions about the systems:

- Vocabulary 25600 and a tied embedding, as the published numbers of parameters say; heads of 128
  features (benchmark/alpa/exp_intra_ablation.py of the artifact, which also says that peaks are in
  GiB), no dropout, attention in single steps, f16.
- Words are embedded by a product with one-hot rows, as Alpa cannot split look-ups
  (alpa/monkey_patch.py).
- Layers are recomputed, as the published TFLOP/s say. XLA makes one kernel of neighbours without a
  product between them. Reductions of gradients are combined into one without a limit
  (all_reduce_threshold in alpa/shard_parallel/auto_sharding.py).
- Alpa's plan on (a, b) is the batch split a ways and the layers b ways as Megatron does; gradients
  are reduced and scattered and parameters gathered, which is also ZeRO-2's. "heuristic" is (1, n).
  ZeRO-3 gathers parameters before the forward, and before the backward again. Nothing overlaps.
- Memory: the state shardings' bytes of what a device has of the model (f16 parameters and
  gradients, 12 bytes of optimizer state; gradients are whole until the last one is reduced, as the
  published peaks of ZeRO-2 say: 4 and 12 / n bytes a parameter), layers' inputs and logits in f16
  and f32 with the gradient (10 bytes each); ZeRO-3 beside that a layer's parameters. Out of memory
  means more than 16 GB.
- Links: the eight V100 are no switch but a hybrid cube mesh of one or two NVLinks of 25 GB/s
  between neighbours (`nvidia-smi topo -m`): rings among all eight carry 150 GB/s, in a quad 100,
  between two neighbours, as for any pair of a mesh, 25, around four in two quads 50.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from autopar import pins
from autopar.cost.model import AnalyticModel
from autopar.intra_op.states import state
from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh
from autopar.ir.state_sharding import Groups
from benchmarks.published.models import GPT, Sizes
from benchmarks.published.pipeline import update
from benchmarks.published.step import Captured, Part, captured, fuse, merged, parts, regions

BATCH, SEQ, LAYERS, VOCAB = 8, 1024, 8, 25600
MEMORY = 16e9
# GB/s of the links under both axes of a logical mesh.
LINKS = {
    (2, 1): (25, 0), (1, 2): (0, 25),
    (4, 1): (100, 0), (2, 2): (25, 25), (1, 4): (0, 100),
    (8, 1): (150, 0), (4, 2): (50, 25), (2, 4): (25, 100), (1, 8): (0, 150),
}  # fmt: skip
OPTIMIZER_BYTES = 30.0
STATES = {"data_parallel": "NNN", "zero_3": "GNG"}


@dataclass(frozen=True)
class Run:
    """One row; `mesh` is that of "auto_sharding", None otherwise."""

    hidden: int
    gpus: int
    method: str
    mesh: tuple[int, int] | None = None

    @property
    def logical(self) -> tuple[int, int]:
        """Parts of the batch and of the layers."""
        if self.mesh is not None:
            return self.mesh
        return (1, self.gpus) if self.method == "heuristic" else (self.gpus, 1)

    @property
    def parameters(self) -> float:
        """Parameters of the model on a device, before any state is split."""
        whole = 12 * LAYERS * self.hidden**2 + (VOCAB + SEQ) * self.hidden
        return whole / self.logical[1]

    @property
    def heads(self) -> int:
        """Heads of attention."""
        return heads(self.hidden)


def heads(hidden: int) -> int:
    """Heads of 128 features each, of 144 where 128 does not leave a number for eight devices."""
    return hidden // (144 if hidden == 5760 else 128)


def _mesh(logical: tuple[int, int]) -> str:
    links = LINKS.get(logical, (0, 0))
    axes = (
        f"{name}={size}" + (f" @{link}GB/s" if link else "")
        for name, size, link in zip(("dp", "tp"), logical, links, strict=True)
    )
    return "V100: " + ", ".join(axes)


@cache
def layer(hidden: int, logical: tuple[int, int]) -> tuple[Captured, tuple[Part, Part, Part]]:
    """Prices before, in and after a layer, for a device's part of the batch."""
    sizes = Sizes(hidden, heads(hidden), 2, VOCAB, SEQ, dropout=0.0, dense=True)
    with torch.device("meta"):
        model = GPT(sizes).half()
        tokens = torch.zeros(BATCH // logical[0], SEQ, dtype=torch.long)
    whole = _mesh(logical)
    mesh = "V100: " + whole.partition(", ")[2]
    of = captured(model, {"tokens": tokens, "labels": tokens}, mesh, pins.megatron("tp"), whole)
    return of, parts(of, fuse(of, merged(of, of.works), regions(of)))


def step_seconds(run: Run) -> float:
    """Predicted seconds of a step."""
    _, (first, block, last) = layer(run.hidden, run.logical)
    prices = AnalyticModel(Mesh.parse(_mesh(run.logical)), in_step=True)
    kernels = LAYERS * (block.seconds + block.forward.seconds) + first.seconds + last.seconds
    replicas = run.logical[0]
    nbytes = 2 * run.parameters
    gather = prices.collective(Collective("all_gather", ("dp",), int(nbytes / replicas)))
    scatter = prices.collective(Collective("reduce_scatter", ("dp",), int(nbytes)))
    synchronised = scatter + (2 if run.method == "zero_3" else 1) * gather
    parts_of_update = 1 if run.method == "data_parallel" else replicas
    updated = update(prices, run.parameters / parts_of_update, OPTIMIZER_BYTES)
    return kernels + synchronised + updated


def memory_bytes(run: Run) -> float:
    """Predicted bytes of a device."""
    replicas, split = run.logical
    name = STATES.get(run.method, "NNG")
    states = sum(state(name).memory(run.parameters, Groups(replicas, replicas)).values())
    tokens = BATCH * SEQ / replicas
    kept = 2 * tokens * run.hidden * LAYERS + 10 * tokens * VOCAB / split
    return states + kept + (2 * 12 * run.hidden**2 if run.method == "zero_3" else 0)


def ranks(values: list[float]) -> list[float]:
    """The place of each value among all, the mean of the places of equal ones."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def rank_correlation(one: list[float], two: list[float]) -> float:
    """Spearman's: the correlation of the ranks."""
    x, y = ranks(one), ranks(two)
    mean = (len(x) - 1) / 2
    both = sum((a - mean) * (b - mean) for a, b in zip(x, y, strict=True))
    norms = sum((a - mean) ** 2 for a in x) * sum((b - mean) ** 2 for b in y)
    return float(both / norms**0.5)

"""Megatron-LM: iterations of Narayanan et al. 2021 (SC21, arXiv 2104.04473, table 1).

Assumptions about the system, with their sources:

- Full recomputation of every layer: the forward runs twice, with its all_reduces (section 3.5).
- Fused kernels: bias and GeLU, bias, dropout and add, scale, mask and softmax (section 4.2); query,
  key and value are one product, the scale is part of the product of queries and keys. The causal
  mask saves nothing. Everything else is a kernel of its own.
- The loss over a split vocabulary is a kernel for each of its steps: maximum, difference,
  exponential, sum and quotient, a copy and changes of type (48 bytes a logit).
- Mixed precision with f16 parameters, activations and gradients; losses in f32.
- The vocabulary is split as the layers are; the embedding is on the first stage, the logits on the
  last, and the gradients of their weight are summed between the two.
- 1F1B, interleaved where the table says so; scatter and gather of what is sent (section 4.1): each
  device sends a part of it over its own card, and the parts are gathered over NVLink.
- Gradients of microbatches are added up in f16, by a kernel for each weight.
- Gradients are reduced over data parallel replicas when the pipeline is drained, nothing of it is
  overlapped; Adam then moves 60 bytes for each parameter: f16 gradients to f32 (6), unscaled (8),
  their norm (4), clipped (8), parameter, moments and gradient (28), f16 parameters (6).
- TFLOP/s by equation 3 of the paper, which counts what is computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from autopar import pins
from autopar.cost.model import AnalyticModel, NodeWork
from autopar.ir.collective import Collective
from autopar.ir.executed.library_kernels import base
from autopar.ir.mesh import Mesh
from benchmarks.published.models import GPT, Sizes
from benchmarks.published.pipeline import accumulated, pipelined, sends, update
from benchmarks.published.step import Captured, Part, Works, captured, chains, fuse, merged, parts

FUSED = (("mul", "softmax"), ("dropout", "add"))
OPTIMIZER_BYTES = 60.0
# Of each logit: f16 to f32 (6), its maximum (4), difference (8), exponential (8), sum (4) and
# quotient (8); backwards a copy (8), times the loss's gradient (8), f32 to f16 (6).
LOSS_BYTES = (32.0, 16.0)


@dataclass(frozen=True)
class Run:
    """One row: a model's sizes and how it ran.

    Megatron-Core's have dropout only in its functional tests, as well as `groups` of heads that
    share a key and a value.
    """

    hidden: int
    heads: int
    layers: int
    tp: int
    pp: int
    dp: int
    global_batch: int
    micro_batch: int
    chunks: int = 1
    seq: int = 2048
    vocab: int = 51200
    device: str = "A100-80"
    dropout: float = 0.0
    groups: int = 0

    @property
    def microbatches(self) -> int:
        """Returns the number of microbatches of each pipeline in a step."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def gpus(self) -> int:
        """All devices."""
        return self.tp * self.pp * self.dp


def iteration_flops(run: Run) -> float:
    """Equation 3: 96 B s l h^2 (1 + s / 6h + V / 16 l h)."""
    h, s, layers = run.hidden, run.seq, run.layers
    return (
        96 * run.global_batch * s * layers * h**2
        * (1 + s / (6 * h) + run.vocab / (16 * layers * h))
    )  # fmt: skip


@cache
def layer(run: Run) -> tuple[Captured, tuple[Part, Part, Part]]:
    """Prices of one microbatch before, in and after a layer, on the devices of one stage."""
    with torch.device("meta"):
        model = GPT(Sizes(run.hidden, run.heads, 2, run.vocab, run.seq)).half()
        tokens = torch.zeros(run.micro_batch, run.seq, dtype=torch.long)
    mesh, whole = f"{run.device}: tp={run.tp}", f"{run.device}: gpu={run.gpus}"
    of = captured(model, {"tokens": tokens, "labels": tokens}, mesh, pins.megatron("tp"), whole)
    return of, parts(of, fuse(of, with_loss(of, merged(of, of.works)), chains(of, FUSED)))


def with_loss(of: Captured, kernels: Works) -> Works:
    """`kernels` with the loss in the single steps of Megatron's loss over a split vocabulary."""
    found = dict(kernels)
    for node in of.graph.nodes:
        if base(node.op) == "cross_entropy_loss":
            logits = of.nbytes(node.inputs[0]) / 4
            one, two = kernels[node.name].forward[0], kernels[node.name].backward[0]
            found[node.name] = NodeWork(
                (replace(one, nbytes=LOSS_BYTES[0] * logits),),
                (replace(two, nbytes=LOSS_BYTES[1] * logits),),
            )
    return found


def iteration_seconds(run: Run) -> dict[str, float]:
    """Predicted seconds of an iteration, whole ("seconds") and by its parts."""
    _, (first, block, last) = layer(run)
    mesh = Mesh.parse(f"{run.device}: pp={run.pp}, dp={run.dp}, tp={run.tp}")
    prices = AnalyticModel(mesh, in_step=True)
    each = block.seconds + block.forward.seconds  # recomputed
    stage = run.layers / run.pp * each
    sent = run.seq * run.micro_batch * run.hidden * 2.0
    passed = 0.0
    if run.pp > 1:
        passed = sends(prices, sent / run.tp, "pp", run.chunks)
        part = Collective("all_gather", ("tp",), int(sent / run.tp))
        passed += 2 * run.chunks * prices.collective(part) if run.tp > 1 else 0.0
    weights = (12 * run.layers * run.hidden**2 / run.pp + run.vocab * run.hidden) / run.tp
    added = accumulated(prices, weights, run.microbatches)
    stages = [stage + passed + added for _ in range(run.pp)]
    stages[0] += first.seconds
    stages[-1] += last.seconds
    worked = pipelined(stages, run.microbatches, run.chunks)
    reduced = prices.collective(Collective("all_reduce", ("dp",), int(2 * weights)))
    if run.pp > 1:
        embedding = int(2 * run.vocab * run.hidden / run.tp)
        reduced += prices.collective(Collective("send", ("pp",), embedding))
    updated = update(prices, weights, OPTIMIZER_BYTES)
    return {
        "seconds": worked + reduced + updated,
        "layer": each,
        "sent": passed,
        "first": first.seconds,
        "last": last.seconds,
        "reduced": reduced,
        "updated": updated,
    }


def tflops(run: Run) -> float:
    """Predicted TFLOP/s of each device."""
    seconds = iteration_seconds(run)["seconds"]
    return iteration_flops(run) / seconds / run.gpus / 1e12

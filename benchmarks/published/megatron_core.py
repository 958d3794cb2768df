"""Megatron-Core r0.8 on H100: the weak scaling rows of its README.

Assumptions about the system, in addition to its README (sequence 4096, vocabulary 131072,
collectives of data and of tensor parallelism in small pieces beside the computation):

- bf16, no dropout, no recomputation, fused attention, embedding and logits with weights of their
  own (only so the sizes give the parameters named); sequence parallelism within tensor parallelism.
- Fused kernels as in SC21's; query, key and value are one product.
- Tensor parallelism's collectives are cut in as many chunks as devices beside the products
  (--tp-comm-overlap).
- Products add the gradients of weights to those of earlier microbatches, in f32 (gradient
  accumulation fusion, the default), which their multiplications hide.
- The optimizer's state is split over the replicas: gradients, in f32, are reduced and scattered
  beside the last backward, parameters gathered beside the first forward (--overlap-grad-reduce,
  --overlap-param-gather); each device updates its part at 44 bytes a parameter. Interleaved stages
  end with a group of as many microbatches as there are stages, so that the collectives run beside
  as many (Narayanan et al., arXiv 2104.04473, section 2.2.2).
- Interleaved 1F1B with one layer a chunk; what is sent between stages is sent beside kernels. The
  microbatch, which the README leaves out as it does the chunks, is 1.
- The loss is a kernel for each of its steps, as in SC21's.
- TFLOP/s by the README's FLOPs: 72 B s l h^2 (1 + s / 6h + V / 12 l h), a causal mask counted as
  none.
"""

from __future__ import annotations

from functools import cache

import torch

from autopar import pins
from autopar.cost.model import AnalyticModel
from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh
from benchmarks.published.megatron import Run, with_loss
from benchmarks.published.models import GPT, Sizes
from benchmarks.published.overlap import chunked, overlapped
from benchmarks.published.pipeline import pipelined, sends, update
from benchmarks.published.step import Captured, Part, captured, merged, parts

OPTIMIZER_BYTES = 44.0


def iteration_flops(run: Run) -> float:
    """72 B s l h^2 (1 + s / 6h + V / 12 l h)."""
    h, s, layers = run.hidden, run.seq, run.layers
    return (
        72 * run.global_batch * s * layers * h**2
        * (1 + s / (6 * h) + run.vocab / (12 * layers * h))
    )  # fmt: skip


@cache
def layer(run: Run) -> tuple[Captured, tuple[Part, Part, Part]]:
    """Prices of one microbatch before, in and after a layer, on the devices of one stage."""
    sizes = Sizes(run.hidden, run.heads, 2, run.vocab, run.seq, 0.0, tied=False, flash=True)
    with torch.device("meta"):
        model = GPT(sizes).bfloat16()
        tokens = torch.zeros(run.micro_batch, run.seq, dtype=torch.long)
    mesh, whole = f"{run.device}: tp={run.tp}", f"{run.device}: gpu={run.gpus}"
    of = captured(model, {"tokens": tokens, "labels": tokens}, mesh, pins.megatron_sp("tp"), whole)
    return of, parts(of, with_loss(of, merged(of, of.works)))


def iteration_seconds(run: Run) -> dict[str, float]:
    """Predicted seconds of an iteration, whole ("seconds") and by its parts."""
    _, (first, block, last) = layer(run)
    prices = AnalyticModel(
        Mesh.parse(f"{run.device}: pp={run.pp}, dp={run.dp}, tp={run.tp}"), in_step=True
    )
    directions = (block.forward, block.backward)
    each = sum(chunked(half.kernels, half.calls, run.tp) for half in directions)
    stage = run.layers / run.pp * each
    passed = 0.0
    if run.pp > 1:
        sent = 2.0 * run.seq * run.micro_batch * run.hidden / run.tp
        passed = sends(prices, sent, "pp", run.chunks)
    stages = [overlapped(stage, passed) for _ in range(run.pp)]
    stages[0] += first.seconds
    stages[-1] += last.seconds
    worked = pipelined(stages, run.microbatches, run.chunks)
    weights = (12 * run.layers * run.hidden**2 / run.pp + run.vocab * run.hidden) / run.tp
    weights += run.vocab * run.hidden / run.tp if run.pp == 1 else 0
    gathered = prices.collective(Collective("all_gather", ("dp",), int(2 * weights / run.dp)))
    reduced = prices.collective(Collective("reduce_scatter", ("dp",), int(4 * weights)))
    forward, backward = block.forward.seconds, block.backward.seconds
    layers = run.layers / run.pp * min(run.pp, run.microbatches)
    slower = overlapped(layers * forward, gathered) - layers * forward
    slower += overlapped(layers * backward, reduced) - layers * backward
    updated = update(prices, weights / run.dp, OPTIMIZER_BYTES)
    return {
        "seconds": worked + slower + updated,
        "layer": each,
        "sent": passed,
        "first": first.seconds,
        "last": last.seconds,
        "reduced": slower,
        "updated": updated,
    }


def tflops(run: Run) -> float:
    """Predicted TFLOP/s of each device."""
    seconds = iteration_seconds(run)["seconds"]
    return iteration_flops(run) / seconds / run.gpus / 1e12

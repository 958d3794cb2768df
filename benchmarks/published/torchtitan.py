"""torchtitan: Llama 3.1 on H100s of 500 W and 2.4 TB/s.

Rows of its pages benchmarks/llama3_h100_202412_torchtitan.md and
benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md.
Assumptions about the system, in addition to those pages:

- FSDP2 with f32 parameters: bf16 parameters are gathered before each layer's forward and again
  before its backward, gradients reduced and scattered in f32, all beside the kernels but for the
  first gather and the last scatter.
- Activation checkpointing "selective" is by operator: results of attention and of every other
  linear (query, value, w1, w2) are kept, all else is run again; "full" runs a layer again.
- torch.compile is applied to each layer: neighbours without a product between them are one kernel.
  Without it, and in norm, logits and loss, each operator is a kernel.
- Float8: every linear of a layer multiplies in f8: an operand is read for its maximum, read again
  and written (5 bytes an element). Scaled tensor by tensor, it is so once for all readers and
  before it is gathered. Scaled by rows it is gathered in bf16, each linear casts all of it, and for
  the gradients along its other dimension once more. Attention and logits stay in bf16.
- Tensor parallelism is with sequence parallelism; "async" cuts its collectives in as many chunks
  as devices, beside the products. Of products scaled by rows only the reduce_scatters are cut, half
  of the whole: the gathers before them were not recognised (pytorch#149990, found in traces and
  still open when these rows were measured).
- Context parallelism: see context.py.
- AdamW moves 28 bytes for each of a device's parameters.
- Memory: f32 parameters and moments (12 bytes) and gradients (4), split over the devices;
  parameters of two layers, the embedding and the logits in bf16; what checkpointing keeps of every
  layer; and the larger of two peaks, a layer's values run again with their gradients, or the loss:
  logits in bf16 and f32, their log softmax and its gradient (14 bytes a logit; with tensor
  parallelism the four f32 values that torch.distributed.tensor.parallel.loss holds backwards), the
  norm in f32 and the gathered input of the logits with its gradient. An allocator that holds more
  than is alive (torchtitan reports what is reserved) is not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import prod

import torch

from autopar import pins
from autopar.cost.model import AnalyticModel, NodeWork, Work
from autopar.intra_op.pins.pin_functions import PinsLike
from autopar.ir.collective import Collective
from autopar.ir.executed.library_kernels import base
from autopar.ir.mesh import Mesh
from benchmarks.published.context import ring, unbalanced
from benchmarks.published.models import Llama, LlamaSizes
from benchmarks.published.overlap import chunked, overlapped
from benchmarks.published.pipeline import update
from benchmarks.published.step import Captured, Part, Works, captured, fuse, parts, regions

DEVICE = "H100-96"
OPTIMIZER_BYTES = 28.0
CAST_BYTES = 5.0
SIZES = {
    "8B": LlamaSizes(4096, 32, 8, 14336, 32, 128256, 8192),
    "70B": LlamaSizes(8192, 64, 8, 28672, 80, 128256, 8192),
}
KEPT = ("wq", "wv", "w1", "w2")  # what selective checkpointing keeps of the linears


@dataclass(frozen=True)
class Run:
    """One row; `seq` is what a device has of a sequence, `fsdp` counts those of `cp` too.

    `blockwise` is mxfp8, a scale for 32 values. `loss` is "compiled" where torchtitan compiled its
    loss, as it does since 2025 (its train.py of December 2024 says that it was turned off).
    """

    model: str
    fsdp: int
    tp: int
    batch: int
    compiled: bool = True
    float8: bool = False
    asynchronous: bool = False
    full: bool = False
    rowwise: bool = False
    blockwise: bool = False
    seq: int = 8192
    cp: int = 1
    device: str = DEVICE
    loss: str = ""

    @property
    def linears(self) -> str:
        """Returns the 8-bit format of the layers' linears, "" for none."""
        if self.blockwise:
            return "mxfp8"
        return f"float8{'-rows' * self.rowwise}" if self.float8 else ""

    @property
    def tokens(self) -> int:
        """Returns the tokens of a replica's batch on one device of context parallelism."""
        return self.batch * self.seq


@cache
def _captured(model: str, tp: int, fsdp: int, batch: int, seq: int) -> Captured:
    sizes = replace(SIZES[model], layers=2, seq=seq)
    with torch.device("meta"):
        module = Llama(sizes).bfloat16()
        tokens = torch.zeros(batch, sizes.seq, dtype=torch.long)
        turns = torch.zeros(sizes.seq, sizes.hidden // sizes.heads // 2, dtype=torch.complex64)
    inputs = {"tokens": tokens, "labels": tokens, "turns": turns}
    words: PinsLike = [pins.megatron_sp("tp"), _split(sizes, batch)] if tp > 1 else []
    return captured(module, inputs, f"{DEVICE}: tp={tp}", words, f"{DEVICE}: dp={fsdp}, tp={tp}")


def _split(sizes: LlamaSizes, batch: int) -> dict[str, str]:
    """Pins of the linears: without them it is cheaper to gather weights than so many tokens."""
    h, tokens = sizes.hidden, f"{batch}, {sizes.seq}"
    few = h // sizes.heads * sizes.groups
    words = {}
    for name, size in (
        ("wq", h),
        ("wk", few),
        ("wv", few),
        ("w1", sizes.inner),
        ("w3", sizes.inner),
    ):
        words[f"layers.*.{name}.weight"] = f"[{size}@tp, {h}]"
        words[f"layers.*.{name}"] = f"[{tokens}, {size}@tp]"
    for name, size in (("wo", h), ("w2", sizes.inner)):
        words[f"layers.*.{name}.weight"] = f"[{h}, {size}@tp]"
        words[f"layers.*.{name}"] = f"[{tokens}, {h}] +sum(tp)"
    return words


def _float8(of: Captured, kernels: Works, rowwise: bool) -> Works:
    """`kernels` with the linears of layers in f8 and the casts of what they read.

    Backwards the gradient is cast and, for the product with the input, transposed.
    """
    found, cast = dict(kernels), set[str]()
    for node in of.block:
        made = kernels[node.name]
        if base(node.op) != "linear" or not made.forward:
            continue
        source, weight, given = node.inputs[0], of.nbytes(node.inputs[1]) / 2, of.nbytes(node.name)
        while of.graph[source].alias is not None:
            source = str(of.graph[source].alias)
        shape, layout = of.plan.nodes[node.name].operands[0]
        whole = prod(layout.local_shape(shape, of.plan.mesh))
        fresh = 0.0 if source in cast else of.nbytes(source) / 2
        cast.add(source)
        there = (whole if rowwise else fresh) + weight
        before = Work("cast", 0.0, CAST_BYTES * there, "bf16")
        # By rows the gradient, the input and the weight are cast along the other dimension too.
        again = CAST_BYTES * (given / 2 + there) if rowwise else given
        back = Work("cast", 0.0, CAST_BYTES * given / 2 + again, "bf16")
        found[node.name] = NodeWork(
            (before, *map(_narrow, made.forward)), (back, *map(_narrow, made.backward))
        )
    return found


def _narrow(work: Work) -> Work:
    """A product of operands in f8 with a result in bf16."""
    assert work.gemm is not None
    m, n, k = work.gemm.m, work.gemm.n, work.gemm.k
    return replace(work, dtype="f8", nbytes=float(m * k + n * k + 2 * m * n))


def _longer(made: NodeWork, times: int) -> NodeWork:
    """Returns attention over `times` as many keys, otherwise unchanged."""

    def longer(work: Work) -> Work:
        if "attention" not in work.op or work.gemm is None:
            return work
        gemm = replace(work.gemm, n=work.gemm.n * times)
        return replace(work, flops=work.flops * times, gemm=gemm)

    return NodeWork(tuple(map(longer, made.forward)), tuple(map(longer, made.backward)))


@cache
def _priced(run: Run) -> tuple[Captured, Works, tuple[Part, Part, Part]]:
    of = _captured(run.model, run.tp, run.fsdp, run.batch, run.seq)
    inside = {node.name for node in of.block}
    groups = [group for group in regions(of) if group[0].name in inside] if run.compiled else []
    kernels = fuse(of, of.works, groups)
    kernels = _float8(of, kernels, run.rowwise) if run.float8 else kernels
    kernels = {name: _longer(made, run.cp) for name, made in kernels.items()}
    return of, kernels, parts(of, kernels)


def _again(run: Run, of: Captured, kernels: Works) -> float:
    """Seconds of a layer's kernels that are run again in its backward."""
    seconds = 0.0
    for node in of.block:
        kept = base(node.op) == "scaled_dot_product_attention" or any(
            f".{name}" in node.source.module for name in KEPT
        )
        if run.full or not kept:
            seconds += sum(map(of.prices.compute, kernels[node.name].forward))
    return seconds


def parameters(run: Run) -> tuple[float, float]:
    """Parameters of a layer and of all, on one device of tensor parallelism."""
    sizes = SIZES[run.model]
    layer = sizes.layer / run.tp
    return layer, sizes.layers * layer + 2 * sizes.vocab * sizes.hidden / run.tp


def step_seconds(run: Run) -> dict[str, float]:
    """Predicted seconds of a step, whole ("seconds") and by its parts."""
    of, kernels, (first, block, last) = _priced(run)
    layers = SIZES[run.model].layers
    again = _again(run, of, kernels)
    calls = block.forward.calls * (2 if run.full else 1) + block.backward.calls
    if run.float8 and not run.rowwise:
        calls *= 0.75  # of as many gathers as scatters, which cost alike, the gathers are in f8
    computed = block.forward.kernels + block.backward.kernels + again
    if run.cp > 1:
        layer_of = ring(_ring_prices(run), "cp", run.cp, run.tokens * SIZES[run.model].hidden)
        computed = layer_of.layer(computed, 2 if run.full else 1)
    waited = 1.0 if not run.asynchronous else 0.5 if run.rowwise else 0.0
    each = chunked(computed, calls * (1 - waited), run.tp) + calls * waited
    worked = layers * each + first.seconds + last.seconds
    layer, whole = parameters(run)
    prices = AnalyticModel(Mesh.parse(f"{DEVICE}: dp={run.fsdp}, tp={run.tp}"), in_step=True)

    def gather(count: float) -> float:
        return prices.collective(Collective("all_gather", ("dp",), int(2 * count / run.fsdp)))

    def scatter(count: float) -> float:
        return prices.collective(Collective("reduce_scatter", ("dp",), int(4 * count)))

    hidden = layers * (2 * gather(layer) + scatter(layer)) + scatter(whole - layers * layer)
    exposed = gather(whole - layers * layer) + gather(layer) + scatter(layer)
    updated = update(prices, whole / run.fsdp, OPTIMIZER_BYTES)
    return {
        "seconds": overlapped(worked, hidden) + exposed + updated,
        "layer": each,
        "again": again,
        "calls": calls,
        "last": last.seconds,
        "hidden": hidden,
        "exposed": exposed,
        "updated": updated,
    }


def _ring_prices(run: Run) -> AnalyticModel:
    return AnalyticModel(
        Mesh.parse(f"{DEVICE}: dp={run.fsdp // run.cp}, cp={run.cp}"), in_step=True
    )


def attention_seconds(run: Run) -> tuple[float, float]:
    """Predicted seconds a step of attention to a device's own part, and to all it attends to."""
    of, kernels, _ = _priced(replace(run, cp=1))
    seconds = 0.0
    for node in of.block:
        if base(node.op) == "scaled_dot_product_attention":
            made = kernels[node.name]
            forward = sum(map(of.prices.compute, made.forward))
            seconds += (2 if run.full else 1) * forward
            seconds += sum(map(of.prices.compute, made.backward))
    seconds *= SIZES[run.model].layers
    return seconds, run.cp * seconds


def unbalanced_seconds(run: Run) -> float:
    """Predicted seconds of a step, were sequences cut in `cp` parts without regard to the mask."""
    own, whole = attention_seconds(run)
    return step_seconds(run)["seconds"] + unbalanced(run.cp) * own - whole


def tokens_per_second(run: Run) -> float:
    """Predicted tokens a second and device."""
    return run.tokens / step_seconds(run)["seconds"] / run.tp


def memory_gib(run: Run) -> float:
    """Predicted GiB of each device."""
    sizes = SIZES[run.model]
    layer, whole = parameters(run)
    states = 16 * whole / run.fsdp + 2 * (2 * layer + whole - sizes.layers * layer)
    few = sizes.hidden // sizes.heads * sizes.groups
    entered = sizes.hidden / run.tp  # of each token
    rows = [sizes.hidden, few, sizes.hidden, sizes.inner]  # query, value, attention, w1
    kept = entered if run.full else entered + (sum(rows) + sizes.hidden) / run.tp
    saved = 2 * run.tokens * sizes.layers * kept
    each = 16 if run.tp > 1 else 14
    loss = run.tokens * ((each * sizes.vocab + 12 * sizes.hidden) / run.tp + 4 * sizes.hidden)
    inside = (4 * sizes.hidden + 2 * few + 4 * sizes.inner) / run.tp + 2 * sizes.hidden
    run_again = 2 * 2 * run.tokens * inside
    return (states + saved + max(loss, run_again)) / 2**30

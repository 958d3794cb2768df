"""Megatron Bridge: pre-training of Llama 3 in 8 bits on H100, B200 and GB200.

Rows are those of its performance page for dense models, on the devices known here, without context
parallelism, offload, 4 bits, or a plan of 256 GPUs; of equal settings the newest. Llama 8B on H100
is left out, because its page says FSDP where its recipe says DDP with recomputation.

Assumptions about the system, from its recipes (scripts/performance/configs/llama3 and
src/megatron/bridge of v0.2.0 in NVIDIA-NeMo/Megatron-Bridge):

- Linears of layers in 8 bits: FP8-CS has a scale per tensor of the current values, MXFP8 one for 32
  values. Their weights are kept in 8 bits (fp8_param_gather).
- No recomputation. Query, key and value are one product, as are gate and up; what stands between
  two products is fused (TransformerEngine's norms, rotary positions and SwiGLU), and the loss is
  TransformerEngine's kernel.
- Gradients are accumulated and reduced in bf16 (grad_reduce_in_fp32=False). Their products add them
  to those of earlier microbatches.
- The optimizer's state is split over the replicas; gradients are reduced beside the last backward
  and parameters gathered beside the next forward. An update moves 44 bytes as Megatron-Core's, and
  6 for gradients that are copied to f32.
- Sequence parallelism within tensor parallelism, whose collectives run in chunks beside the
  products (tp_comm_overlap). Stages are interleaved, and the microbatches are those of the page's
  GA.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar import pins
from autopar.plan import Plan
from benchmarks.published.models import Llama, LlamaSizes
from benchmarks.published.product import NO_LIMIT, batch_of, mesh_text
from benchmarks.published.torchtitan import SIZES

EXECUTION = "compiled=blocks merged loss=compiled optimizer=50 ahead adds"
LINEARS = {"FP8-CS": "float8", "MXFP8": "mxfp8"}


@dataclass(frozen=True)
class Run:
    """One row of the page; `chunks` of each of `pp` stages."""

    model: str
    device: str
    gpus: int
    precision: str
    global_batch: int
    micro_batch: int
    seq: int
    tp: int
    pp: int
    chunks: int

    @classmethod
    def of(cls, row: dict[str, Any]) -> Run:
        """Returns a row of `published.json` as it ran."""
        return cls(
            row["model"], row["device"], row["gpus"], row["precision"], row["global_batch"],
            row["micro_batch"], row["seq"], row["tp"], row["pp"], row["virtual_stages"],
        )  # fmt: skip

    @property
    def replicas(self) -> int:
        """Returns the number of data parallel replicas."""
        return self.gpus // (self.tp * self.pp)


class Rotated(nn.Module):
    """A Llama whose rotary positions are a buffer, which all microbatches share."""

    turns: Tensor

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.llama = Llama(sizes)
        shape = (sizes.seq, sizes.hidden // sizes.heads // 2)
        self.register_buffer("turns", torch.zeros(shape, dtype=torch.complex64))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean loss of predicting `labels` [batch, seq] from `tokens` [batch, seq]."""
        loss: Tensor = self.llama(tokens, labels, self.turns)
        return loss


@cache
def plan(run: Run) -> Plan:
    """Returns the plan of a row."""
    sizes = replace(SIZES[run.model], seq=run.seq)
    with torch.device("meta"):
        model = Rotated(sizes)
    axes = {"pp": run.pp, "dp": run.replicas, "tp": run.tp}
    pipeline: dict[str, Any] = {}
    if run.pp > 1:
        schedule = f"interleaved_1f1b chunks={run.chunks}"
        pipeline = {"stages": run.pp * run.chunks, "schedule": schedule}
    return autopar.plan(
        model,
        mesh_text(run.device, {name: size for name, size in axes.items() if size > 1}),
        example_inputs=batch_of(run.global_batch, run.seq),
        pins=[pins.data_parallel("dp"), *([pins.megatron_sp("tp")] if run.tp > 1 else [])],
        microbatches=run.global_batch // (run.replicas * run.micro_batch),
        state="zero1",
        precision="bf16 communication=bf16",
        recompute="none",
        fuse=["async_tensor_parallel"] if run.tp > 1 else False,
        execution=f"{EXECUTION} linears={LINEARS[run.precision]} primary"
        + " joined" * (run.tp > 1),
        memory=NO_LIMIT,
        **pipeline,
    )


def tokens_per_second(run: Run) -> float:
    """Returns the predicted tokens a second and device."""
    return run.global_batch * run.seq / plan(run).predicted.seconds / run.gpus

"""DeepSpeed-Ulysses: throughput of a dense 7B model on DGX A100 with sequence parallelism.

A row of the published table is a number of devices, a batch, a sequence length and a degree of
sequence parallelism (SP), and its speed-up over 256 devices without SP. One figure is fitted, the
seconds of a token's kernels on one device, to the first row; the speed-ups of the others are
predicted. A step is, one after the other,

- the kernels: tokens / devices of them. Throughput counts samples of 4K tokens whatever the
  sequence length, and does not fall from 8K to 64K: samples are packed and attend to themselves, so
  a token costs the same in every row. (The fit gives 40 TFLOP/s a device for 6 FLOPs a parameter.)
- ZeRO over all devices: gradients reduce-scattered and parameters gathered once a step. Where the
  sequence is split, gradients are partial sums and are reduced in f32 (bf16 without SP): the loss
  flattens otherwise.
- Ulysses' exchanges (arXiv:2309.14509): before attention q, k and v and after it its output, each
  an all_to_all of a device's tokens x hidden in bf16 over the SP group within a node; forwards and
  backwards, in every layer; each payload is copied into order before and after.

Collectives are priced on A100-80 of devices.toml, in which nothing is fitted here.
"""

from __future__ import annotations

from autopar.cost.model import AnalyticModel
from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh

PARAMETERS, LAYERS, HIDDEN = 6_740_000_000, 32, 4096
NODE = 8
BASE = {"gpus": 256, "bsz": 256, "seq": 8192, "sp": 1, "samples4k_per_s": 60.71}


def communication(gpus: int, tokens: int, sp: int) -> float:
    """Seconds of a step's collectives and of the copies around the exchanges."""
    mesh = Mesh.parse(f"A100-80: node={gpus // NODE}, data={NODE // sp}, sequence={sp}")
    prices = AnalyticModel(mesh, in_step=True)
    element = 2 if sp == 1 else 4
    calls = [
        Collective("reduce_scatter", mesh.names, PARAMETERS * element),
        Collective("all_gather", mesh.names, PARAMETERS * 2 // gpus),
    ]
    seconds = sum(prices.collective(call) for call in calls)
    if sp == 1:
        return seconds
    nbytes = tokens // gpus * HIDDEN * 2
    exchange = prices.collective(Collective("all_to_all", ("sequence",), nbytes))
    chip = prices.device
    # Twice read and written.
    copies = 4 * nbytes / (chip.memory_bandwidth * chip.memory_efficiency)
    return seconds + 2 * LAYERS * 4 * (exchange + copies)


def token_seconds() -> float:
    """Seconds of one token's kernels on one device, fitted to the row without SP."""
    gpus, tokens = int(BASE["gpus"]), int(BASE["bsz"] * BASE["seq"])
    step = tokens / 4096 / BASE["samples4k_per_s"]
    return (step - communication(gpus, tokens, 1)) * gpus / tokens


def samples(gpus: int, bsz: int, seq: int, sp: int) -> float:
    """Predicted samples of 4096 tokens a second."""
    tokens = bsz * seq
    step = token_seconds() * tokens / gpus + communication(gpus, tokens, sp)
    return tokens / 4096 / step


def speedup(gpus: int, bsz: int, seq: int, sp: int) -> float:
    """Predicted throughput over that of 256 devices without SP."""
    return samples(gpus, bsz, seq, sp) / BASE["samples4k_per_s"]

"""Trains a whole model on one GPU: autopar with and without kernels, eager torch, torch.compile.

The model is llama in 8 layers of the 8B shape, bf16, 4 samples of 4096 tokens, with torch's fused
AdamW. All start with the same weights and get the same batch; for some, the losses of 50 steps are
compared with those of eager torch. On the CPU, a small model runs through the same code, without
times and bytes.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.zoo.construction import build, example_inputs
from autopar.zoo.spec import spec

WARM, STEPS, CURVE = 3, 10, 50
OURS: dict[str, dict[str, Any]] = {
    "autopar": {"fuse": False},
    "autopar fused": {"fuse": True},
    "autopar inductor": {"fuse": False, "backend": "inductor"},
    "autopar fused inductor": {"fuse": True, "backend": "inductor"},
    # With masters, which the others have not: what AdamW's kernel updates.
    "autopar fused masters": {"fuse": True, "precision": "bf16"},
    "autopar fused masters graph": {"fuse": True, "precision": "bf16", "cuda_graph": True},
}
PROVIDERS = ("eager", "torch.compile", *OURS)
CURVED = ("eager", "autopar fused", "autopar fused inductor")
FIGURES = ("step_ms", "peak_GiB", "of_eager", "of_compile", "curve_off", "failed")
Step = Callable[[], Tensor]
Row = dict[str, object]


@dataclass(frozen=True)
class Size:
    """The size of a model and of its batch, and the device that trains it.

    Attributes:
        layers, batch, seq: of the model and of its batch.
        device: "cuda" or "cpu".
        config: entries of the 8B configuration that are others.
    """

    layers: int
    batch: int
    seq: int
    device: str
    config: tuple[tuple[str, int], ...] = ()

    @property
    def mesh(self) -> str:
        """One device, as autopar takes it."""
        return "H200: gpu=1" if self.device == "cuda" else "cpu: gpu=1"


REAL = Size(8, 4, 4096, "cuda")
SMALL = Size(
    2, 2, 16, "cpu",
    (("hidden_size", 64), ("intermediate_size", 96), ("num_attention_heads", 4),
     ("num_key_value_heads", 2), ("vocab_size", 128)),
)  # fmt: skip


@dataclass
class Trained:
    """Losses of some steps, the median milliseconds of one, and GiB at the peak; 0 on a CPU."""

    losses: list[float]
    milliseconds: float = 0.0
    peak: float = 0.0

    def __str__(self) -> str:
        ends = f"loss {self.losses[0]:.4f} to {self.losses[-1]:.4f}"
        return f"{ends}, {self.milliseconds:.2f} ms, {self.peak:.2f} GiB"


def empty() -> list[Row]:
    """The rows without a GPU."""
    return [{"provider": name, **dict.fromkeys(FIGURES, "")} for name in PROVIDERS]


def rows(size: Size = REAL, providers: Sequence[str] = PROVIDERS) -> tuple[list[Row], list[Row]]:
    """A row for each provider, and one for each step with the losses of `CURVED`.

    A provider that fails says so in its row.
    """
    found: dict[str, Trained] = {}
    failed: dict[str, str] = {}
    for name in providers:
        try:
            found[name] = _trained(name, size)
            print(f"  {name}: {found[name]}", flush=True)
        except (AutoparError, RuntimeError) as error:  # the others are still worth the run
            failed[name] = " ".join(str(error).split())[:200]
            print(f"  {name} failed: {failed[name]}", flush=True)
    table = [_row(name, found, failed.get(name, "")) for name in providers]
    curved = {name: found[name].losses for name in CURVED if name in found}
    steps = zip(*curved.values(), strict=True)
    return table, [
        {"step": n, **dict(zip(curved, each, strict=True))} for n, each in enumerate(steps)
    ]


def _row(name: str, found: dict[str, Trained], failed: str) -> Row:
    row: Row = {"provider": name, **dict.fromkeys(FIGURES, "")}
    if name not in found:
        return row | {"failed": failed}
    own, eager = found[name], found.get("eager")
    if own.milliseconds:
        row |= {"step_ms": round(own.milliseconds, 2), "peak_GiB": round(own.peak, 2)}
        for column, rival in (("of_eager", "eager"), ("of_compile", "torch.compile")):
            if rival in found:
                row[column] = round(own.milliseconds / found[rival].milliseconds, 3)
    if eager is not None and name in CURVED:
        pairs = zip(own.losses, eager.losses, strict=True)
        row["curve_off"] = f"{max(abs(a - b) / b for a, b in pairs):.1e}"
    return row


def _trained(name: str, size: Size) -> Trained:
    """The steps of one provider, from the first on."""
    count = CURVE if name in CURVED else WARM + STEPS
    torch.compiler.reset()
    gc.collect()
    if size.device == "cpu":
        step = _ready(name, size)
        return Trained([float(step()) for _ in range(count)])
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step = _ready(name, size)
    times, losses = list[float](), list[Tensor]()
    for number in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        losses.append(step())
        end.record()
        end.synchronize()
        if number > WARM:  # in which a graph is captured
            times.append(start.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated() / 2**30
    return Trained([float(loss) for loss in losses], statistics.median(times), peak)


def _ready(name: str, size: Size) -> Step:
    """One step of training from the same weights on the same batch."""
    model, batch = _model(size)
    optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    if name in OURS:
        program = autopar.compile(
            model, size.mesh, optimizer=optimizer, example_inputs=batch, **OURS[name]
        )
        model.to("cpu")  # the session keeps it, but trains weights of its own
        return partial(program.step, **batch)
    forward = torch.compile(model) if name == "torch.compile" else model
    return plain_step(forward, batch, optimizer(model.parameters()))


def plain_step(
    forward: Callable[..., Any], batch: dict[str, Tensor], updates: torch.optim.Optimizer
) -> Step:
    """A step of plain torch; `forward` returns the output of a model of transformers."""

    def step() -> Tensor:
        updates.zero_grad(set_to_none=True)
        loss: Tensor = forward(**batch).loss
        loss.backward()
        updates.step()
        return loss.detach()

    return step


def _model(size: Size) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model with its weights, and a batch, on the device."""
    torch.manual_seed(0)
    known = spec("llama-3-8b")
    wanted = replace(known, config={**known.config, **dict(size.config)})
    module = build(wanted, layers=size.layers).to(torch.bfloat16).to_empty(device=size.device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        for name, buffer in module.named_buffers():
            if name.endswith("inv_freq"):
                places = torch.arange(buffer.numel(), device=size.device).float()
                buffer.copy_(500000.0 ** (-places / buffer.numel()))
    words = next(iter(module.parameters())).shape[0]
    tokens = torch.randint(0, words, (size.batch, size.seq), device=size.device)
    return module, dict.fromkeys(example_inputs(wanted, size.batch, size.seq), tokens)

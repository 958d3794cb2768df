"""A whole model on one GPU: steps by autopar, fused and not, beside eager torch and torch.compile.

llama in 8 layers of the 8B shape, bf16, 4 samples of 4096 tokens, AdamW in torch's fused form.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.zoo import load

LAYERS, BATCH, SEQ = 8, 4, 4096
WARM, STEPS, CURVE = 3, 10, 50
MESH = "H200: gpu=1"
OURS: dict[str, dict[str, Any]] = {
    "autopar": {"fuse": False},
    "autopar fused": {"fuse": True},
    "autopar inductor": {"fuse": False, "backend": "inductor"},
    "autopar fused inductor": {"fuse": True, "backend": "inductor"},
}
PROVIDERS = ("eager", "torch.compile", *OURS)
Step = Callable[[], Tensor]
Row = dict[str, object]


def rows() -> list[Row]:
    """One for each provider; without a GPU their figures are empty."""
    empty: Row = dict.fromkeys(("step_ms", "peak_GiB", "of_compile", "curve_off"), "")
    if not torch.cuda.is_available():
        return [{"provider": name, **empty} for name in PROVIDERS]
    found: dict[str, Row] = {}
    curves: dict[str, list[float]] = {}
    for name in PROVIDERS:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step = _ready(name)
        milliseconds = _timed(step)
        peak = torch.cuda.max_memory_allocated() / 2**30
        found[name] = {"step_ms": round(milliseconds, 2), "peak_GiB": round(peak, 2)}
        del step
        curves[name] = [float(loss) for loss in _losses(_ready(name), CURVE)]
        print(name, found[name], flush=True)
    rival = float(str(found["torch.compile"]["step_ms"]))
    for name, row in found.items():
        pairs = zip(curves[name], curves["eager"], strict=True)
        row["of_compile"] = round(float(str(row["step_ms"])) / rival, 3)
        row["curve_off"] = f"{max(abs(a - b) / b for a, b in pairs):.1e}"
    return [{"provider": name, **row} for name, row in found.items()]


def _ready(name: str) -> Step:
    """One step of training from the same weights on the same batch."""
    model, batch = _model()
    optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    if name in OURS:
        program = autopar.compile(
            model, MESH, optimizer=optimizer, example_inputs=batch, **OURS[name]
        )
        return partial(program.step, **batch)
    updates = optimizer(model.parameters())
    forward = torch.compile(model) if name == "torch.compile" else model

    def step() -> Tensor:
        updates.zero_grad(set_to_none=True)
        loss: Tensor = forward(**batch).loss
        loss.backward()
        updates.step()
        return loss.detach()

    return step


def _model() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model with its weights, and a batch, on the GPU."""
    torch.manual_seed(0)
    module, batch = load("llama-3-8b", batch=BATCH, seq=SEQ, layers=LAYERS)
    module = module.to(torch.bfloat16).to_empty(device="cuda")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        inverse = 500000.0 ** (-torch.arange(0, 128, 2, device="cuda").float() / 128)
        for name, buffer in module.named_buffers():
            if name.endswith("inv_freq"):
                buffer.copy_(inverse)
    words = next(iter(module.parameters())).shape[0]
    tokens = torch.randint(0, words, (BATCH, SEQ), device="cuda")
    return module, dict.fromkeys(batch, tokens)


def _timed(step: Step) -> float:
    """Median milliseconds of a step."""
    times: list[float] = []
    for number in range(WARM + STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        if number >= WARM:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def _losses(step: Step, count: int) -> list[Tensor]:
    return [step() for _ in range(count)]

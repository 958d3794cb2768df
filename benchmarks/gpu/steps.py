"""Trains models on one GPU, and compares their steps with plain torch and with predictions.

    python -m benchmarks.gpu.steps               # on a machine with a GPU, three minutes
    python -m benchmarks.gpu.steps --predict     # anywhere: predicts the measured rows again

Each program trains from the weights of plain torch on the same batch. A step's time is the median
of `STEPS` steps; memory is the peak of the process's allocations. "predicted" is the cost model's
prediction for the program of autopar. Writes results/steps.csv.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.runtime.ranks.processes import device_name
from autopar.zoo.construction import build, example_inputs
from benchmarks.gpu.model import Step, plain_step
from benchmarks.harness import middle, read, write

WARM, STEPS = 4, 8
Row = dict[str, Any]
KEYS = ("model", "layers", "batch", "seq", "options", "device")
FIGURES = ("step_ms", "low_ms", "high_ms", "peak_GiB", "predicted_ms", "predicted_GiB", "failed")


@dataclass(frozen=True)
class Case:
    """A model of the zoo and its batch.

    Attributes:
        model, layers: its name, and its number of blocks, 0 for its own.
        batch, seq: samples, and tokens of each, 0 for images.
        options: of `autopar.compile`.
    """

    model: str
    layers: int
    batch: int
    seq: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def row(self) -> Row:
        """The columns that name the case."""
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return {
            "model": self.model, "layers": self.layers or "", "batch": self.batch,
            "seq": self.seq or "", "options": options,
        }  # fmt: skip

    def made(self, device: str) -> tuple[nn.Module, dict[str, Tensor]]:
        """The model with random weights and a batch, on a device."""
        torch.manual_seed(0)
        with torch.device(device):
            model = build(self.model, layers=self.layers or None, meta=False)
        model = model.to(device)
        return model, example_inputs(self.model, self.batch, self.seq or None, device=device)


CASES = (
    Case("gpt2", 0, 16, 1024),
    Case("gpt2", 0, 16, 1024, {"precision": "bf16"}),
    Case("gpt2", 0, 1, 256, {"precision": "bf16"}),
    Case("llama-3-8b", 4, 2, 4096),
    Case("llama-3-8b", 4, 1, 1024),
    Case("llama-3-8b", 4, 4, 4096, {"recompute": "full"}),
    Case("bert-large", 0, 32, 512, {"precision": "bf16"}),
    Case("mixtral-8x7b", 1, 2, 2048),
    Case("vit-base", 0, 64, 0, {"precision": "bf16"}),
)


def measured(case: Case) -> Iterator[Row]:
    """A row for autopar, and one for plain torch in the model's own dtype."""
    optimizer = partial(torch.optim.AdamW, lr=1e-5, fused=True)
    mesh = f"{device_name('cuda')}: gpu=1"
    for provider in ("autopar", "torch"):
        if provider == "torch" and case.options:
            continue  # it would need the same options
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model, batch = case.made("cuda")
        chip = {"device": torch.cuda.get_device_name(), "provider": provider}
        row: Row = case.row | chip | dict.fromkeys(FIGURES, "")
        try:
            if provider == "autopar":
                program = autopar.compile(
                    model, mesh, optimizer=optimizer, example_inputs=batch, **case.options
                )
                step: Step = partial(program.step, **batch)
                row |= _predicted(program.plan)
                model.to("cpu")  # the session keeps it, but trains weights of its own
            else:
                step = plain_step(model, batch, optimizer(model.parameters()))
            row |= _timed(step)
        except (AutoparError, RuntimeError) as error:  # the others are still worth the run
            row["failed"] = " ".join(str(error).split())[:200]
        yield row


def _timed(step: Step) -> Row:
    times = []
    for number in range(WARM + STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if number >= WARM:
            times.append(1e3 * (time.perf_counter() - began))
    times.sort()
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {
        "step_ms": round(middle(times), 3), "low_ms": round(times[1], 3),
        "high_ms": round(times[-2], 3), "peak_GiB": round(peak, 3),
    }  # fmt: skip


def _predicted(plan: autopar.Plan) -> Row:
    found = plan.predicted
    return {
        "predicted_ms": round(1e3 * found.step_seconds, 3),
        "predicted_GiB": round(found.peak_bytes / 2**30, 3),
    }


def predicted_again() -> None:
    """Writes the predictions of this checkout into the rows that were measured."""
    rows = [dict(row) for row in read("steps")]
    for case in CASES:
        for row in rows:
            if row["provider"] != "autopar" or any(
                row[key] != str(value) for key, value in case.row.items()
            ):
                continue
            model = build(case.model, layers=case.layers or None)
            batch = example_inputs(case.model, case.batch, case.seq or None)
            mesh = f"{row['device'].removeprefix('NVIDIA ').split()[0]}: gpu=1"
            row |= _predicted(autopar.plan(model, mesh, example_inputs=batch, **case.options))
            print(case.row, row["step_ms"], row["predicted_ms"], row["peak_GiB"],
                  row["predicted_GiB"], flush=True)  # fmt: skip
    print(write("steps", rows))


def main() -> None:
    """Measures, or predicts again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predict", action="store_true", help="predict the measured rows again")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases")
    asked = parser.parse_args()
    if asked.predict:
        predicted_again()
        return
    rows: list[Row] = []
    for number, case in enumerate(CASES):
        if asked.only is None or number in asked.only:
            for row in measured(case):
                rows.append(row)
                print(row, flush=True)
                write("steps", rows, keys=(*KEYS, "provider"))  # so far


if __name__ == "__main__":
    main()

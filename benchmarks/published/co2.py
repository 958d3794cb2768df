"""Compares predictions with CO2's published throughputs (arXiv:2401.16265, tables 3 and 4).

Inputs are the published step (0.109 s) and all_reduce (1.566 s) of 7B parameters on 128 GPUs, and
of each row its own figure on 8 GPUs, one machine, on which nothing crosses the network. Three
constants are missing, and each is fitted to one row of the 7B model, which is then no prediction:

- contention of an all_reduce that runs during steps, `CONTENTION` of `autopar/cost/round_price.py`,
  to "TCP CO2 tau12";
- bytes per second and latency of the exchange of gradients, V (n - 1) / n + l (n - 1) seconds for a
  ring of n GPUs, to "TCP AdamW";
- how much faster RDMA is than TCP, to "RDMA AdamW".

The other ten rows, all of the 13B model among them, are predicted. The exchange of gradients runs
beside the backward, two thirds of a step.

One pair of rows is in the wrong order, by a contradiction of the source: with 7B parameters over
RDMA, 16 machines that never communicate reach 16 times the 17980 tokens per second of one, 287680,
less than the 289106 of AdamW, while 307557 are published for CO2.

The rows of SlowMo are those of a synchronisation that runs beside steps. One that blocks loses the
same seconds in every round, but on 128 GPUs over TCP the published throughputs imply 1.6 steps per
round at tau = 48 and 14.9 at tau = 12. `blocking` has the price of one that blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from autopar.cost.round_price import overlap_ratio, round_price

LLM, GPT = "tnllm7b_tokens_per_s", "gpt3_13b_tokens_per_s"
FITTED = ((LLM, "TCP CO2 tau12"), (LLM, "TCP AdamW"), (LLM, "RDMA AdamW"))
BACKWARD = 2 / 3  # of a step's seconds, beside which gradients are exchanged
_BILLIONS = {LLM: 7.0, GPT: 13.0}


@dataclass(frozen=True)
class Figures:
    """The published figures.

    Attributes:
        facts: of `benchmarks/published.json`.
    """

    facts: Mapping[str, Any]

    @classmethod
    def read(cls) -> Figures:
        """Returns the figures of this checkout."""
        path = Path(__file__).parents[1] / "published.json"
        return cls(json.loads(path.read_text(encoding="utf-8"))["co2"]["rows"])

    @property
    def gpus(self) -> list[int]:
        """Returns numbers of GPUs, of which the first is one machine."""
        return list(self.facts["gpus"])

    def row(self, model: str, name: str) -> np.ndarray[Any, Any]:
        """Returns tokens per second on each number of GPUs."""
        return np.array(self.facts[model][name], dtype=np.float64)

    def step(self, model: str, name: str) -> float:
        """Returns the seconds of a step without communication; GPUs take equally many tokens."""
        tokens = self.facts["step_compute_s"] * self.row(LLM, "TCP CO2 tau48")[0]
        return float(tokens / self.row(model, name)[0])

    @cached_property
    def ring(self) -> tuple[float, float]:
        """Returns V and l, seconds, of the gradients of 7B parameters over TCP."""
        gpus = np.array(self.gpus[1:], dtype=np.float64)
        exchanged = self._exchanged("TCP AdamW")
        columns = np.stack([(gpus - 1) / gpus, gpus - 1], axis=1)
        (volume, latency), *_ = np.linalg.lstsq(columns, exchanged, rcond=None)
        return float(volume), float(latency)

    @cached_property
    def faster(self) -> float:
        """Returns how many times faster RDMA is, from the most GPUs, where it is not hidden."""
        return self.gradients(LLM, self.gpus[-1]) / float(self._exchanged("RDMA AdamW")[-1])

    def _exchanged(self, name: str) -> np.ndarray[Any, Any]:
        """Returns seconds of the exchange of gradients that a row of the 7B model implies."""
        row, step = self.row(LLM, name), self.step(LLM, name)
        per_gpu = row / np.array(self.gpus)
        return np.asarray(step * per_gpu[0] / per_gpu[1:] - (1 - BACKWARD) * step)

    def gradients(self, model: str, gpus: int) -> float:
        """Returns the seconds of an exchange of gradients over TCP; latency knows no size."""
        volume, latency = self.ring
        size = _BILLIONS[model] / _BILLIONS[LLM]
        return size * volume * (gpus - 1) / gpus + latency * (gpus - 1)

    def average(self, model: str, gpus: int) -> float:
        """Returns the seconds of an all_reduce of the parameters over TCP, by itself."""
        most = self.gpus[-1]
        share = ((gpus - 1) / gpus) / ((most - 1) / most)
        return float(self.facts["allreduce_s"] * _BILLIONS[model] / _BILLIONS[LLM] * share)

    def efficiency(self, model: str, name: str, gpus: int, blocking: bool = False) -> float:
        """Returns the predicted throughput of a GPU, relative to that on one machine."""
        network, method, *rounds = name.split()
        faster = self.faster if network == "RDMA" else 1.0
        step = self.step(model, name)
        if method == "AdamW":
            exchange = self.gradients(model, gpus) / faster
            return step / ((1 - BACKWARD) * step + max(BACKWARD * step, exchange))
        sync = self.average(model, gpus) / faster
        return round_price(step, sync, not blocking, int(rounds[0][3:])).efficiency


def throughputs() -> list[dict[str, Any]]:
    """Returns a row for every figure on several machines, with what is predicted."""
    figures, found = Figures.read(), []
    for model in (LLM, GPT):
        for name in figures.facts[model]:
            published = figures.row(model, name)
            alone = published[0] / figures.gpus[0]
            for gpus, tokens in list(zip(figures.gpus, published, strict=True))[1:]:
                predicted = gpus * alone * figures.efficiency(model, name, gpus)
                found.append(
                    {"model": model.removesuffix("_tokens_per_s"), "row": name, "gpus": gpus,
                     "published": int(tokens), "model_says": round(float(predicted)),
                     "error": round(float(predicted / tokens - 1), 4),
                     "use": "fitted" if (model, name) in FITTED else "predicted"}
                )  # fmt: skip
                if "SlowMo" in name:
                    other = gpus * alone * figures.efficiency(model, name, gpus, blocking=True)
                    found[-1]["blocking"] = round(float(other))
    return found


def overlaps() -> dict[int, tuple[float, float]]:
    """Returns the published and the predicted overlap ratio, in percent, by tau."""
    facts = Figures.read().facts
    step, sync = facts["step_compute_s"], facts["allreduce_s"]
    return {
        int(tau): (float(percent), 100 * overlap_ratio(step, sync, int(tau)))
        for tau, percent in facts["overlap_ratio_pct"].items()
    }


def misordered(found: list[dict[str, Any]], apart: float = 0.05) -> list[tuple[str, int, str, str]]:
    """Returns the pairs of rows that are predicted in the wrong order.

    Args:
        found: rows of `throughputs`.
        apart: by how much published figures differ, relative, to count as ordered.

    Returns:
        Model, GPUs, and the faster and the slower row.
    """
    return [
        (one["model"], one["gpus"], one["row"], other["row"])
        for one in found
        for other in found
        if (one["model"], one["gpus"]) == (other["model"], other["gpus"])
        and one["published"] > (1 + apart) * other["published"]
        and one["model_says"] < other["model_says"]
    ]

"""Seconds of a pipelined step: its warm-up, its slowest stage, and its transfers."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.model import AnalyticModel, Work
from autopar.cost.work import accumulation_work
from autopar.ir.collective import Collective


def pipelined(stages: Sequence[float], microbatches: int, chunks: int) -> float:
    """Seconds of 1F1B over `stages`, seconds of each for one microbatch in both directions.

    The slowest stage works on all microbatches; the others fill and drain the pipeline once, with
    `chunks` stages interleaved on each device in a part of that time (Narayanan et al., arXiv
    2104.04473, sections 2.2.1 and 2.2.2: a bubble of (p - 1) / (v m)).
    """
    slowest = max(stages)
    return microbatches * slowest + (sum(stages) - slowest) / chunks


def sends(prices: AnalyticModel, nbytes: float, axis: str, chunks: int) -> float:
    """Seconds in which a stage passes activations on and gradients back, for one microbatch."""
    return 2 * chunks * prices.collective(Collective("send", (axis,), int(nbytes)))


def accumulated(prices: AnalyticModel, parameters: float, microbatches: int) -> float:
    """Seconds in which gradients in f16 are added to those of earlier microbatches, for each."""
    nbytes = 2 * parameters
    return prices.compute(accumulation_work(nbytes, nbytes, "f16")) * (microbatches > 1)


def update(prices: AnalyticModel, parameters: float, bytes_each: float) -> float:
    """Seconds of an optimizer that moves so many bytes for each of its parameters."""
    work = Work("optimizer", 12 * parameters, bytes_each * parameters, "f32")
    return prices.compute(work)

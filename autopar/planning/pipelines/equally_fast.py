"""The simplest of the pipelines that are equally fast within the error of prices.

Two pipelines on a device are priced by the same tables, so only the prices in which they differ are
uncertain (see cost/uncertainty.py). If this uncertainty exceeds the difference of their times, the
pipeline with fewer stages is chosen; among pipelines with equally many stages, the fastest.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.device import Device
from autopar.cost.uncertainty import error_seconds
from autopar.inter_op.pipeline_timeline import Timeline
from autopar.inter_op.stage_values import Pipeline

SimulatedPipeline = tuple[float, Timeline, Pipeline]


def sent_seconds(pipeline: Pipeline) -> float:
    """Returns the seconds of collectives in a step of the rank that has most of them."""
    return pipeline.microbatches * max(
        sum(chunk.candidate.sent for chunk in stage.chunks) for stage in pipeline.stages
    )


def simplest_first(
    pipelines: Sequence[SimulatedPipeline], device: Device
) -> list[SimulatedPipeline]:
    """Returns simulated pipelines, the fastest first, behind the simplest that is as fast.

    Args:
        pipelines: seconds, timeline and pipeline of each; not empty.
        device: that runs them, priced by its tables.
    """
    ordered = sorted(pipelines, key=lambda row: row[0])
    best, sent = ordered[0], sent_seconds(ordered[0][2])

    def as_fast(row: SimulatedPipeline) -> bool:
        apart, more = row[0] - best[0], sent_seconds(row[2]) - sent
        return apart <= error_seconds(device, abs(apart - more), abs(more))

    chosen = min(filter(as_fast, ordered), key=lambda row: len(row[2].stages))
    return [chosen, *(row for row in ordered if row is not chosen)]

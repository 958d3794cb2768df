"""Times kernels on a GPU: replays of CUDA graphs over inputs that take turns.

Inputs together are larger than the cache, so that every call reads memory. Providers are timed
one after another and then all again; what differs by less than their spread is noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
CALLS = 20  # of a graph, at most
SPAN = 20.0  # milliseconds that one is to take, or all inputs once
REPLAYS = 15
CACHE = 64 << 20  # bytes, at least those of the largest second-level cache


@dataclass(frozen=True)
class Timed:
    """Milliseconds of one call, and the relative difference of two medians."""

    ms: float
    spread: float


def graph_ms(calls: Sequence[Call]) -> float:
    """Median milliseconds of a call, of those in a graph that makes all of them in turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles, and fills the allocator
            call()
        each = _elapsed(lambda: [call() for call in calls]) / len(calls)
        count = max(len(calls), min(CALLS, int(SPAN / max(each, SPAN / CALLS))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                calls[i % len(calls)]()
    torch.cuda.synchronize()
    times = [_elapsed(graph.replay) / count for _ in range(3 + REPLAYS)]
    return float(statistics.median(times[3:]))


def _elapsed(run: Call) -> float:
    """Milliseconds on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def interleaved(providers: Mapping[str, Sequence[Call]]) -> tuple[dict[str, Timed], dict[str, str]]:
    """Each provider's time, and why others have none: a peer may not be able to do a case."""
    found: dict[str, list[float]] = {name: [] for name in providers}
    failed: dict[str, str] = {}
    for _ in range(2):
        for name, calls in providers.items():
            if name in failed:
                continue
            try:
                found[name].append(graph_ms(calls))
            except Exception as error:  # of a peer's code, which may raise anything
                failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
                torch.cuda.synchronize()
    times = {
        name: Timed(min(ms), abs(ms[0] - ms[1]) / min(ms))
        for name, ms in found.items()
        if len(ms) == 2
    }
    return times, failed


def ceilings() -> tuple[float, float]:
    """(bytes a second of copying memory, FLOP/s of a product of bf16 matrices), on this GPU."""
    source = [torch.randn(1 << 28, device="cuda").repeat(2).bfloat16() for _ in range(2)]
    target = torch.empty_like(source[0])
    copying = graph_ms([lambda x=x: target.copy_(x) for x in source])  # type: ignore[misc]
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    multiplying = graph_ms([lambda: torch.mm(a, b, out=out)])
    return 2e3 * target.nbytes / copying, 2e3 * 8192**3 / multiplying

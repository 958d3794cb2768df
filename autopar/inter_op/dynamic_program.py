"""Compiled kernels of the dynamic program that partitions the model.

Layers are numbered from 0 to L - 1, and sub-meshes by their position in the list. Devices are
counted in the largest unit that divides all sub-meshes involved. Ranges of layers with equal prices
share a row: `row[first, last]`. Each row holds up to K options per sub-mesh:

    time[row, submesh, option]    seconds that the option adds to the sum over stages
    top[row, submesh, option]     seconds that count for the slowest stage
    fixed, each[...]              bytes: fixed + in_flight * each must fit into memory

A stage may only use options whose `top` does not exceed a threshold. Under this constraint the
program minimises the sum of `time` and of the transfers between stages.

Stages take devices in order. In a cluster with several kinds of devices, a sub-mesh fits only
within its part: counted from the end, between `begin[submesh]` and `end[submesh]`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from autopar.loops import entry, inner

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ROUNDING = 1e-12  # relative tolerance for sums in a different order


@entry
def lowest_tops(row: Ints, top: Floats, count: Ints) -> Floats:
    """Computes the smallest top of an option for each (first, last, submesh); infinite if none.

    Returns:
        An array of [L, L, submeshes].
    """
    layers, submeshes = row.shape[0], top.shape[1]
    lowest = np.full((layers, layers, submeshes), np.inf)
    for first in range(layers):
        for last in range(first, layers):
            at = row[first, last]
            for q in range(submeshes):
                for k in range(count[at, q]):
                    lowest[first, last, q] = min(lowest[first, last, q], top[at, q, k])
    return lowest


@entry
def devices_needed(lowest: Floats, sizes: Ints, most: float) -> tuple[Ints, Ints]:
    """Computes the fewest devices for the layers from each one on, and for those before each one.

    Allows any number of stages and ignores memory; no stage takes longer than `most`.
    """
    layers, submeshes = lowest.shape[0], lowest.shape[2]
    never = 2**40
    after = np.full(layers + 1, never)
    before = np.full(layers + 1, never)
    after[layers] = 0
    before[0] = 0
    for first in range(layers - 1, -1, -1):
        for last in range(first, layers):
            for q in range(submeshes):
                if lowest[first, last, q] <= most and after[last + 1] < never:
                    after[first] = min(after[first], sizes[q] + after[last + 1])
    for last in range(layers):
        for first in range(last + 1):
            for q in range(submeshes):
                if lowest[first, last, q] <= most and before[first] < never:
                    before[last + 1] = min(before[last + 1], sizes[q] + before[first])
    return after, before


@entry
def least_work(row: Ints, time: Floats, count: Ints, sizes: Ints) -> Floats:
    """Computes the least sum of time x devices over stages that cover the layers before each one.

    Stages on d devices in total have at most d devices each, so the sum of their times is at least
    this work divided by d.
    """
    layers, submeshes = row.shape[0], time.shape[1]
    least = np.full(time.shape[0], np.inf)
    for at in range(time.shape[0]):
        for q in range(submeshes):
            for k in range(count[at, q]):
                least[at] = min(least[at], time[at, q, k] * sizes[q])
    work = np.full(layers + 1, np.inf)
    work[0] = 0.0
    for last in range(layers):
        for first in range(last + 1):
            work[last + 1] = min(work[last + 1], work[first] + least[row[first, last]])
    return work


@inner
def _option(
    time: Floats, top: Floats, fixed: Floats, each: Floats, count: int,
    most: float, memory: float, in_flight: float,
) -> int:  # fmt: skip
    """Returns the fastest option within the threshold that fits into memory; -1 if none does."""
    found = -1
    for k in range(count):
        fits = fixed[k] + in_flight * each[k] <= memory and top[k] <= most
        if fits and (found < 0 or time[k] < time[found]):
            found = k
    return found


@entry
def sums_before(
    row: Ints, time: Floats, top: Floats, fixed: Floats, each: Floats, count: Ints,
    transfer: Floats, sizes: Ints, begin: Ints, end: Ints, devices: int, in_flight: Floats,
    memory: Floats, most: float, lowest: Floats, after: Ints, before: Ints,
) -> Floats:  # fmt: skip
    """Computes lower bounds on the sum over the stages of the layers before each one.

    They allow any number of stages, each with the fewest microbatches in flight of any place.
    Arguments are those of `sums`.

    Returns:
        An array of [L + 1, devices beyond those needed, submesh of the next stage], including the
        transfer into the next stage.
    """
    layers, submeshes = row.shape[0], time.shape[1]
    width = 1
    for first in range(layers + 1):
        width = max(width, devices - before[first] - after[first] + 1)
    fewest = in_flight[1:].min()
    fastest = np.full((time.shape[0], submeshes), np.inf)
    for at in range(time.shape[0]):
        for q in range(submeshes):
            k = _option(
                time[at, q], top[at, q], fixed[at, q], each[at, q], count[at, q],
                most, memory[q], fewest,
            )  # fmt: skip
            if k >= 0:
                fastest[at, q] = time[at, q, k]
    found = np.full((layers + 1, width, submeshes), np.inf)
    found[0, 0, :] = 0.0
    here = np.empty((width, submeshes))
    for behind in range(1, layers + 1):
        if before[behind] + after[behind] > devices:
            continue
        here[:] = np.inf
        wide = devices - after[behind] - before[behind] + 1
        for first in range(behind):
            if before[first] + after[first] > devices:
                continue
            at, base = row[first, behind - 1], before[first] - before[behind]
            for q in range(submeshes):
                seconds, shift = fastest[at, q], base + sizes[q]
                if seconds == np.inf:
                    continue
                # The stage takes its devices from those that the layers from `behind` on leave.
                for d in range(
                    max(0, -shift, devices - end[q] - before[first]),
                    min(wide - shift, devices - begin[q] - sizes[q] - before[first] + 1),
                ):
                    here[d + shift, q] = min(here[d + shift, q], seconds + found[first, d, q])
        for d in range(wide):
            for q in range(submeshes):
                if here[d, q] < np.inf:
                    for following in range(submeshes):
                        into = transfer[behind, q, following] if behind < layers else 0.0
                        found[behind, d, following] = min(
                            found[behind, d, following], here[d, q] + into
                        )
    return found * (1 - ROUNDING)


@entry
def sums(
    row: Ints, time: Floats, top: Floats, fixed: Floats, each: Floats, count: Ints,
    transfer: Floats, sizes: Ints, begin: Ints, end: Ints, devices: int, in_flight: Floats,
    memory: Floats, most: float, lowest: Floats, after: Ints, before: Ints,
    bounds: Floats, room: float,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Computes the least sum of times and transfers per number of stages, no stage above `most`.

    Args:
        transfer: [L, submesh of the previous stage, submesh of the stage that starts there].
        memory: [submeshes] bytes of a device.
        in_flight: for 1, 2, ... stages from the end, microbatches in flight in the first of them.
        lowest, after, before, bounds: results of the functions above for `most`.
        room: sums of at least this value may be skipped.

    Returns:
        An array of [stages + 1], infinite where infeasible, and the sums of all pipeline suffixes
        for `trace`, [stages + 1, L + 1, devices beyond those needed, submesh before], including the
        transfer into them.
    """
    layers, submeshes = row.shape[0], time.shape[1]
    width = 1
    for first in range(layers + 1):
        width = max(width, devices - before[first] - after[first] + 1)
    stages = min(len(in_flight) - 1, layers)
    totals = np.full(stages + 1, np.inf)
    ends = np.full((min(stages + 1, 4), layers + 1, width, submeshes), np.inf)
    ends[0, layers, 0, :] = 0.0
    # For each (stages, layer), the range of devices with finite sums.
    least = np.full((stages + 1, layers + 1), width)
    largest = np.full((stages + 1, layers + 1), -1)
    least[0, layers] = largest[0, layers] = 0
    here = np.empty((width, submeshes))
    for s in range(1, stages + 1):
        if s == ends.shape[0]:
            more = np.full((min(2 * s, stages + 1), layers + 1, width, submeshes), np.inf)
            more[:s] = ends
            ends = more
        alive = False
        for first in range(layers):
            if before[first] + after[first] > devices:
                continue
            low, high = after[first], devices - before[first]
            lo, hi = width, -1
            here[:] = np.inf
            for last in range(first, layers):
                behind = last + 1
                if largest[s - 1, behind] < 0:
                    continue
                at, base = row[first, last], after[behind] - low
                for q in range(submeshes):
                    if lowest[first, last, q] > most:
                        continue
                    k = _option(
                        time[at, q], top[at, q], fixed[at, q], each[at, q], count[at, q],
                        most, memory[q], in_flight[s],
                    )  # fmt: skip
                    if k < 0:
                        continue
                    shift = base + sizes[q]
                    seconds = time[at, q, k]
                    for d in range(
                        max(least[s - 1, behind], -shift, begin[q] - after[behind]),
                        min(
                            largest[s - 1, behind],
                            high - low - shift,
                            end[q] - sizes[q] - after[behind],
                        )
                        + 1,
                    ):
                        total = seconds + ends[s - 1, behind, d, q]
                        if total < here[d + shift, q]:
                            # `high` is all that the layers before `first` leave.
                            if total + bounds[first, high - low - d - shift, q] >= room:
                                continue
                            here[d + shift, q] = total
                            lo, hi = min(lo, d + shift), max(hi, d + shift)
            if first == 0:
                for q in range(submeshes):
                    totals[s] = min(totals[s], here[devices - low, q])
                continue
            for d in range(lo, hi + 1):
                for q in range(submeshes):
                    if here[d, q] < np.inf:
                        for prior in range(submeshes):
                            total = transfer[first, prior, q] + here[d, q]
                            ends[s, first, d, prior] = min(ends[s, first, d, prior], total)
            least[s, first], largest[s, first] = lo, hi
            alive = alive or hi >= 0
        if not alive:
            break
    return totals, ends


@entry
def trace(
    row: Ints, time: Floats, top: Floats, fixed: Floats, each: Floats, count: Ints,
    transfer: Floats, sizes: Ints, begin: Ints, end: Ints, devices: int, in_flight: Floats,
    memory: Floats, most: float, lowest: Floats, after: Ints, before: Ints,
    ends: Floats, stages: int,
) -> Ints:  # fmt: skip
    """Returns the stages of the least sum, as rows of (first, last, submesh, option)."""
    layers, submeshes = row.shape[0], time.shape[1]
    found = np.zeros((stages, 4), dtype=np.int64)
    first, left, prior = 0, devices, -1
    for s in range(stages, 0, -1):
        best = np.inf
        for q in range(submeshes):
            for last in range(first, layers):
                behind = last + 1
                if lowest[first, last, q] > most or (s == 1) != (behind == layers):
                    continue
                over = left - sizes[q] - after[behind]
                if over < 0 or left - sizes[q] > devices - before[behind]:
                    continue
                if left > end[q] or left - sizes[q] < begin[q]:
                    continue
                at = row[first, last]
                k = _option(
                    time[at, q], top[at, q], fixed[at, q], each[at, q], count[at, q],
                    most, memory[q], in_flight[s],
                )  # fmt: skip
                if k < 0:
                    continue
                total = time[at, q, k] + ends[s - 1, behind, over, q]
                if prior >= 0:
                    total += transfer[first, prior, q]
                if total < best:
                    best = total
                    found[stages - s] = (first, last, q, k)
        _, last, prior, _ = found[stages - s]
        left -= sizes[prior]
        first = last + 1
    return found


@entry
def least_memory(row: Ints, peak: Floats) -> Floats:
    """Computes the least bytes of the fullest stage, for stages on sub-meshes of one shape.

    Args:
        peak: [rows, stages]; the least bytes of a row as the first of s stages from the end at
            [:, s - 1].

    Returns:
        An array of [layers + 1], for a pipeline of the layers from each one on.
    """
    layers, stages = row.shape[0], peak.shape[1]
    ends = np.full(layers + 1, np.inf)
    ends[layers] = 0.0
    for s in range(stages):
        here = np.full(layers + 1, np.inf)
        for first in range(layers):
            for last in range(first, layers):
                total = max(peak[row[first, last], s], ends[last + 1])
                here[first] = min(here[first], total)
        ends = here
    return ends


def unit(sizes: Ints, devices: int) -> int:
    """Returns the largest number of devices that divides all sizes."""
    return math.gcd(devices, *map(int, sizes))

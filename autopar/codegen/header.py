"""The docstring of a generated program: what it is, what it costs, and what it sends in a step."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from autopar.codegen.printer import Printer
from autopar.ir.storage import EACH
from autopar.ir.units import format_bytes, format_seconds
from autopar.lower.literals import docstring

_WIDTH = 96  # of the docstring's lines
# `Hop.when` -> when the runtime sends it, and what other work goes on meanwhile.
_WHEN = {
    "forward": "before their block, while the one before computes",
    "backward": "again before the backward of their block",
    "accumulate": "in the backward, bucket by bucket",
    "reduce": "in the backward, bucket by bucket",
    "owners": "to their owners, or back from them, in the update",
    "update": "after the update",
}
_WHAT = {"accumulate": "gradients", "reduce": "gradients"}


def header(printer: Printer) -> str:
    """The docstring of a program, with its predicted cost where the plan has one."""
    graph, plan = printer.graph, printer.plan
    figures = plan.predicted
    lines = [f"{graph.name}, written by autopar from a plan; edit it freely.", ""]
    lines.append(f"Devices: {plan.mesh}.")
    if figures.step_seconds and figures.peak_bytes:
        lines.append(
            f"Predicted: {format_seconds(figures.step_seconds)} a step, "
            f"{format_bytes(figures.peak_bytes)} a device at the peak."
        )
    lines += [plan.precision.caution] if plan.precision.caution else []
    lines += [
        "A comment such as f32[8@data, 64] +sum(tensor) is the value's dtype, global shape and",
        "layout: split over data, and along tensor a part of a sum that is still owed.",
    ]
    sent = list(_sent(printer))
    if sent:
        title = f"What the runtime sends of parameters in a step{_together(plan.bucket)}:"
        lines += ["", *textwrap.wrap(title, _WIDTH), *sent]
    return docstring(lines)


def _together(bucket: int) -> str:
    """Which of them go in one call."""
    if bucket <= 1:
        return ""
    return (
        ". Those that take the same way share a call: the parameters of a block, or gradients as "
        f"they come, until there are {format_bytes(bucket)} of them"
    )


def _sent(printer: Printer) -> Iterator[str]:
    """A line for each kind of collective of parameters and gradients, with its sums."""
    graph, plan = printer.graph, printer.plan
    sums: dict[tuple[str, str], list[float]] = {}
    for leaf in graph.leaves("param"):
        if leaf.name not in graph.multiplicity or not graph.users[leaf.name]:
            continue  # of a block like the first one of its run, or read by nothing
        count = graph.multiplicity[leaf.name]
        for hop in printer.hops(leaf, printer.storage(leaf)):
            times = count * (plan.microbatches if hop.when in EACH else 1)
            found = sums.setdefault((hop.when, hop.call.title), [0.0, 0.0, 0.0])
            found[0] += times
            found[1] += times * hop.call.nbytes
            found[2] += times * hop.seconds(printer.price, plan.bucket)
    for (when, title), (calls, nbytes, seconds) in sorted(sums.items(), key=_order):
        what = _WHAT.get(when, "parameters")
        size = f"{format_bytes(nbytes):>9} {format_seconds(seconds):>8}"
        yield f"    {title:<19} {size}  {calls:3.0f} {what} {_WHEN[when]}"


def _order(entry: tuple[tuple[str, str], list[float]]) -> int:
    return list(_WHEN).index(entry[0][0])

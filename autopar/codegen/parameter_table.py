"""The comment at the head of a block that prices the collectives of its parameters."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from autopar.codegen.body import WIDTH, noted
from autopar.codegen.printer import Printer
from autopar.ir.storage import Hop, rows
from autopar.ir.units import format_bytes, format_seconds
from autopar.lower.lines import Function, Use
from autopar.lower.literals import comment


def parameter_table(printer: Printer, function: Function) -> list[str]:
    """Returns the comment at the head of a block; [] if its parameters need no collectives.

    Args:
        printer: graph, plan and prices.
        function: function of the block.
    """
    uses = [line for line in function if isinstance(line, Use)]
    notes = {line.target: printer.sent_note(line.leaf, line.storage) for line in uses}
    notes = {target: note for target, note in notes.items() if note}
    if not notes:
        return []
    title = "Collectives of this block's parameters in a step, with their predicted time."
    title += _gathers(printer, uses)
    width = max(map(len, notes))
    table = [row for target, note in notes.items() for row in noted(note, f"  {target:<{width}}  ")]
    return [*map(comment, textwrap.wrap(title, WIDTH - 6)), *table]


def _gathers(printer: Printer, uses: Sequence[Use]) -> str:
    """Returns the sentence on the calls that gather the parameters of a block."""
    hops: dict[str, list[Hop]] = {}
    for line in uses:
        all_hops = printer.hops(line.leaf, line.storage)
        if forward := [hop for hop in all_hops if hop.when == "forward"]:
            hops[line.target] = forward
    if not hops:
        return ""
    plan, gathered = printer.plan, [line for line in uses if line.target in hops]
    together = rows(
        gathered,
        lambda line: (line.leaf.type.dtype, tuple(hop.way for hop in hops[line.target])),
        lambda line: line.storage.used.local_bytes(line.leaf.type, plan.mesh),
        plan.bucket,
    )
    calls = sum(len(hops[row[0].target]) for row in together)
    every = [hop for forward in hops.values() for hop in forward]
    size = format_bytes(sum(hop.call.nbytes for hop in every))
    seconds = format_seconds(math.fsum(hop.seconds(printer.price, plan.bucket) for hop in every))
    verb = "one call gathers" if calls == 1 else f"{calls} calls gather"
    return f" Before the block, {verb} its sharded parameters, {size} in {seconds}."

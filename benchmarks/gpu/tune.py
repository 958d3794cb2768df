"""Times launches on this GPU and writes the best into the table: `python -m benchmarks.gpu.tune`.

For every row of the committed table and every candidate the kernel is timed on typical arguments of
the row's size; a candidate that does not compile or is wrong is passed over. The rows become the
table of this architecture ("sm_90"); "any" is unchanged.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import tomlkit
import torch

from autopar_kernels.registry import launch, operators
from autopar_kernels.registry.draw import Draw
from autopar_kernels.registry.language import architecture
from autopar_kernels.registry.launch import TABLE, Launch
from autopar_kernels.registry.operator import Operator
from benchmarks.gpu.timing import graph_ms
from tests.kernels.checks import error, expected, launched, tolerance


def candidates(row: Launch) -> Iterator[Launch]:
    """Blocks of half to four times that of `row`, each with several numbers of warps; then others
    of stages and of programs."""
    blocks = [row.block * factor // 2 for factor in (1, 2, 4, 8)] if row.block else [0]
    for block, warps in itertools.product(blocks, (2, 4, 8, 16, 32)):
        yield replace(row, block=block, warps=warps)
    for stages, programs in itertools.product((1, 2, 3), (1, 2, 4, 8)):
        yield replace(row, stages=stages, programs=programs)


def milliseconds(operator: Operator, size: int, row: Launch) -> float:
    """The time of one launch with this row; infinite where it fails or is wrong."""
    held = {**launch.table(), operator.table: {"any": (row,)}}
    with patch.object(launch, "table", lambda: held):
        try:
            args = operator.typical(Draw(torch.bfloat16, "cuda"), size)
            out = operator.allocate(*args)
            small = next(iter(operator.samples(Draw(torch.bfloat16, "cuda"))))
            for found, wanted in zip(
                launched(operator, small), expected(operator, small), strict=True
            ):
                assert error(found, wanted) <= 4 * tolerance(operator, found)
            return graph_ms([lambda: operator.launch(out, *args)])
        except Exception as reason:  # whatever compiling or launching a bad candidate raises
            print(f"  {row}: {type(reason).__name__}", file=sys.stderr)
            return float("inf")


def tuned(operator: Operator) -> list[Launch]:
    """The fastest candidate for each row."""
    best = []
    for row in launch.rows(operator.table, "any"):
        tried = dict.fromkeys([row, *candidates(row)])
        times = {c: milliseconds(operator, row.up_to or 0, c) for c in tried}
        fastest = min(tried, key=lambda c: times[c])
        print(f"{operator.table} up to {row.up_to}: {times[row]:.4f} -> {times[fastest]:.4f} ms")
        best.append(fastest)
    return best


def main() -> None:
    """Tune the kernels that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", help="keys of the table; all if none is given")
    wanted = parser.parse_args().tables
    if not torch.cuda.is_available():
        sys.exit("no GPU: launches are tuned where they run")
    document = tomlkit.parse(TABLE.read_text(encoding="utf-8"))
    first = {operator.table: operator for operator in reversed(operators().values())}
    for table, operator in first.items():
        if not table or (wanted and table not in wanted):
            continue
        rows = tomlkit.array().multiline(True)
        for row in tuned(operator):
            fields = {k: v for k, v in vars(row).items() if v != getattr(Launch(), k)}
            entry = tomlkit.inline_table()
            entry.update(fields)
            rows.append(entry)
        document[table][architecture()] = {"rows": rows}
        TABLE.write_text(tomlkit.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()

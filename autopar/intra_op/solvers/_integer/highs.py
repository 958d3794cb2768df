"""Runs HiGHS on the arrays of a mixed-integer program, also as a separate program.

HiGHS checks its time limit seldom. In a process of its own it can be stopped at any time and leaves
the caller's core free: run as a script, this reads an .npz of arrays from standard input and writes
its reports as lines of JSON. It imports nothing of autopar, so that it starts at once.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import highspy
import numpy as np

Tell = Callable[[dict[str, Any]], bool]


def solve(data: Mapping[str, Any], tell: Tell) -> None:
    """Solves a program and reports its progress, until `tell` returns False.

    Reports are {"bound": ...}, with "choice" for a better solution and "looked" whenever HiGHS has
    looked at its limits, and at the end {"status": "optimal" | "infeasible" | "stopped"}.
    """
    make: Any = highspy.Highs
    highs = make()
    for name, value in (
        ("output_flag", False),
        ("time_limit", float(data["time_limit"])),
        ("mip_rel_gap", 0.0),
        ("mip_abs_gap", float(data["gap"])),
        ("threads", 1),
        ("random_seed", int(data["seed"])),
    ):
        highs.setOptionValue(name, value)
    highs.passModel(_model(data))
    binaries, last = int(data["binaries"]), -np.inf

    def chosen(values: Any) -> list[int]:
        return [int(k) for k in np.flatnonzero(np.array(values[:binaries]) > 0.5)]

    def risen(event: Any) -> None:
        nonlocal last
        last = max(last, float(event.data_out.mip_dual_bound))
        if not tell({"bound": last, "looked": True}):
            event.interrupt()

    def better(event: Any) -> None:
        bound = float(event.data_out.mip_dual_bound)
        tell({"bound": bound, "choice": chosen(event.data_out.mip_solution)})

    highs.cbMipImprovingSolution += better
    highs.cbMipInterrupt += risen
    highs.run()
    status, info = highs.getModelStatus(), highs.getInfo()
    empty = highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible
    if status in empty:
        tell({"status": "infeasible"})
        return
    optimal = status == highspy.HighsModelStatus.kOptimal
    end: dict[str, Any] = {
        "bound": float(info.mip_dual_bound),
        "status": "optimal" if optimal else "stopped",
    }
    if info.primal_solution_status == 2:
        end["choice"] = chosen(highs.getSolution().col_value)
    tell(end)


def _model(data: Mapping[str, Any]) -> Any:
    model = highspy.HighsLp()
    columns, binaries = len(data["cost"]), int(data["binaries"])
    model.num_col_, model.num_row_ = columns, len(data["lower"])
    model.col_cost_ = data["cost"]
    model.col_lower_, model.col_upper_ = np.zeros(columns), np.ones(columns)
    model.row_lower_, model.row_upper_ = data["lower"], data["upper"]
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = data["start"]
    model.a_matrix_.index_ = data["index"]
    model.a_matrix_.value_ = data["value"]
    whole, part = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
    model.integrality_ = [whole] * binaries + [part] * (columns - binaries)
    return model


def _main() -> None:
    def tell(report: dict[str, Any]) -> bool:
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
        return True  # the reader ends this process

    solve(np.load(io.BytesIO(sys.stdin.buffer.read())), tell)


if __name__ == "__main__":
    _main()

"""Views of the plan of a single program, for `autopar plan`."""

from __future__ import annotations

from dataclasses import asdict

from autopar.plan import Plan
from autopar.stage_plan import StagePlan


def plan_json(plan: Plan) -> dict[str, object]:
    """Returns the plan of a single program for scripts."""
    stage = plan.stage
    return {
        "graph": plan.graph,
        "mesh": str(plan.mesh),
        "model": plan.model.table(),
        "predicted": plan.predicted.figures(),
        "pins": stage.pins,
        "precision": str(stage.precision),
        "recompute": {run: str(how) for run, how in stage.recompute.items()},
        "offload": stage.offload.to_table(),
        "fuse": list(stage.fuse),
        "fused": {name: asdict(entry) for name, entry in stage.fused.items()},
        "solver": stage.solver.table(),
        "layouts": {name: str(node) for name, node in stage.nodes.items()},
    }


def solver_line(plan: StagePlan) -> str:
    """Returns a line on the solver, its optimality gap and time, recomputation and offload."""
    run = plan.solver
    left = "" if run.left is None else f"reductions left {run.left}, "
    extra = "".join(f"; {blocks} recomputes {how}" for blocks, how in plan.recompute.items())
    extra += f"; in host memory: {plan.offload}" if plan.offload else ""
    verdict = "optimal" if run.gap <= 1e-6 else f"within {100 * run.gap:.2g} % of the optimum"
    ended = f", ended by {run.ended}" if run.ended in ("work", "time") else ""
    return f"{run.name}: {run.nodes} nodes, {left}{verdict}, {run.seconds:.2f} s{ended}{extra}"

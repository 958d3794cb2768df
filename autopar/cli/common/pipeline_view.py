"""The simulated step of a pipeline as text, JSON and a trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopar.cli.common.console import FILE, WIDTH, Console, print_json, print_out
from autopar.cli.common.open_plan import CheckedPlan
from autopar.cost.device import device
from autopar.inter_op.gantt import gantt, legend
from autopar.ir.action import UPDATE
from autopar.ir.graph import Graph
from autopar.ir.units import format_bytes, format_seconds
from autopar.planning.pipelines.simulated import Simulated


def show(opened: CheckedPlan, trace_json: Path | None, as_json: bool) -> None:
    """Prints the pipeline, and writes its trace if `trace_json` names a file."""
    if trace_json is not None:
        FILE.write(trace_json, to_trace(opened))
    print_json(to_json(opened)) if as_json else print_out(*render(opened))


def render(opened: CheckedPlan) -> list[RenderableType]:
    """Renders the step, the stages, the schedule in time, and the memory of each rank group."""
    plan, step = opened.plan, opened.step
    head = (
        f"{plan.graph.partition(' ')[0]} on {plan.mesh}\n"
        f"{plan.schedule}, {plan.microbatches} microbatches, {len(plan.stages)} stages: "
        f"{format_seconds(step.seconds)} a step, {step.bubble:.1%} bubble; simulated"
    )
    head += f"\n{plan.precision.caution}" if plan.precision.caution else ""
    return [
        head,
        "",
        _stages(opened),
        "",
        _picture(step),
        legend(step.timeline),
        "",
        _memory(opened),
    ]


def _stages(opened: CheckedPlan) -> Table:
    """Renders a table with a row for each stage."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    heads = ("stage", "ranks", "mesh", "modules", "forward", "backward", "once", "receives")
    for name in heads:
        right = name in ("forward", "backward", "once", "receives")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    rows = zip(opened.plan.stages, opened.graphs, opened.step.stages, strict=True)
    for number, (stage, graph, figures) in enumerate(rows):
        ranks = ", ".join(_span(stage.ranks(copy)) for copy in range(len(stage.starts)))
        once = figures.gradients + figures.optimizer
        seconds = (figures.forward, figures.backward, once)
        arriving = format_seconds(figures.arriving) if figures.arriving else "-"
        axes = ", ".join(f"{axis.name}={axis.size}" for axis in stage.mesh.axes)
        axes = f"{stage.mesh.device}: {axes}" if opened.plan.mesh.unlike else axes
        table.add_row(
            str(number), ranks, axes, _modules(graph), *map(format_seconds, seconds), arriving
        )
    return table


def _modules(graph: Graph) -> str:
    """Names the first and the last module of a stage."""
    used = [node.source.module for node in graph.nodes if not node.is_leaf and node.source.module]
    names = list(dict.fromkeys(used))
    return " to ".join(dict.fromkeys((names[0], names[-1]))) if names else "-"


def _picture(step: Simulated) -> Text:
    """Draws the schedule in time, a line for each group of ranks."""
    console = Console()
    labels = [f"ranks {_span(ranks)}" for ranks in step.ranks]
    width = max(map(len, labels)) + 1
    whole = console.width if console.is_terminal else WIDTH
    lines = gantt(step.timeline, max(whole - width, 1))
    return Text("\n").join(
        Text(label.ljust(width)) + line for label, line in zip(labels, lines, strict=True)
    )


def _memory(opened: CheckedPlan) -> Table:
    """Renders a table of the memory and idle time of each group of ranks."""
    step, timeline, mesh = opened.step, opened.step.timeline, opened.plan.mesh
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("ranks", "memory", "of", "activations", "idle"):
        table.add_column(name, justify="left" if name == "ranks" else "right")
    figures = zip(
        step.ranks, step.memory, timeline.peak_bytes, timeline.peak_activations, timeline.idle,
        strict=True,
    )  # fmt: skip
    for ranks, nbytes, kept, most, idle in figures:
        limit = device(mesh.parts[mesh.part_of(ranks[0])[0]]).memory
        table.add_row(
            _span(ranks), format_bytes(nbytes), f"{nbytes / limit:.1%}",
            f"{format_bytes(kept)} of {most}", f"{idle:.1%}",
        )  # fmt: skip
    return table


def _span(ranks: Sequence[int]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


def to_json(opened: CheckedPlan) -> dict[str, Any]:
    """Returns the content of `render` as a dictionary for JSON."""
    plan, step = opened.plan, opened.step
    return {
        "simulated": True,
        "graph": plan.graph,
        "mesh": str(plan.mesh),
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "step_seconds": step.seconds,
        "bubble": step.bubble,
        "predicted": plan.predicted.figures(),
        "stages": [
            {
                "starts": stage.starts,
                "mesh": str(stage.mesh),
                "modules": _modules(graph),
                **asdict(figures),
            }
            for stage, graph, figures in zip(plan.stages, opened.graphs, step.stages, strict=True)
        ],
        "ranks": [
            {"ranks": ranks, "peak_bytes": nbytes, "idle": idle}
            for ranks, nbytes, idle in zip(step.ranks, step.memory, step.timeline.idle, strict=True)
        ],
    }


def to_trace(opened: CheckedPlan) -> str:
    """Returns the simulated step as a Chrome trace, in the form of a measured one."""
    step = opened.step
    place = {
        (number, copy): stage.starts[copy]
        for number, stage in enumerate(opened.plan.stages)
        for copy in range(len(stage.starts))
    }
    events: list[dict[str, Any]] = []
    for ranks in step.ranks:
        title = f"rank{'s' * (len(ranks) > 1)} {_span(ranks)}, simulated"
        first = ranks[0]
        events.append(_named("process_name", first, 0, title))
        events += [
            _named("thread_name", first, at, row) for at, row in enumerate(("step", "network"))
        ]
    spans = [(span, 0) for row in step.timeline.spans for span in row]
    spans += [(span, 1) for span in step.timeline.transfers]
    for span, thread in sorted(spans, key=lambda one: one[0].end):
        kind = "phase" if span.action.kind == UPDATE else ("action", "communication")[thread]
        here = place[span.action.stage, span.action.copy]
        events.append(_event(str(span.action), kind, here, thread, span.start, span.end))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _event(
    name: str, kind: str, process: int, thread: int, start: float, end: float
) -> dict[str, Any]:
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"name": name, "cat": kind, "ph": "X", "pid": process, "tid": thread, **times}

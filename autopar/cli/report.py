"""`autopar report`: writes a page about a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from autopar.cli.common.console import FILE, Stages, say, stages
from autopar.cli.common.model_options import MODEL, RULES, own_rules, shapes
from autopar.cli.common.open_plan import CheckedPlan, PlanFile
from autopar.cli.common.open_plan import Stage as Opening
from autopar.cli.common.price_model import CALIBRATION, prices
from autopar.cli.common.replan import Alternative, Case, next_best
from autopar.cli.explain import explained
from autopar.cli.simulate import simulated
from autopar.cost.device import device
from autopar.explain import Explanation, decisions, plan_difference, signed
from autopar.explain.comparison import figure_name
from autopar.explain.report import charts
from autopar.explain.report.page import Part, page
from autopar.intra_op.price_cache import Prices
from autopar.intra_op.rule_table import table
from autopar.intra_op.work.kernel_work import works
from autopar.ir.units import format_bytes, format_seconds
from autopar.plan import Plan
from autopar.plan_entries import ModelSpec
from autopar.planning.frontier import frontier
from autopar.planning.options import Options
from autopar.planning.planner import Planner
from autopar.planning.prices import host_of, limit_of_plan
from autopar.planning.trace import Trace
from autopar.simulate import settings_on

_SUMS = "Times are sums of closed forms, which the search compares, not simulated ones."
_DIFFERENCE = (
    "Figures, then the layouts that differ. Exchange is communication inside operators, parameter "
    "that of parameters and gradients, reshard that of activations, and hidden the part of it that "
    "overlaps with kernels."
)
_ASKED = 3  # decisions that the page asks why-not about


@click.command("report")
@click.argument("file", type=click.Path(path_type=Path), metavar="PLAN")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The page to write.",
)
@click.option(
    "--against", type=click.Path(path_type=Path), metavar="OTHER", help="Compare with this plan."
)
@click.option(
    "--quick", is_flag=True, help="Leave out parts that plan again: the frontier and why-not."
)
@MODEL
@RULES
@shapes
@CALIBRATION
def command(
    file: Path,
    output: Path,
    against: Path | None,
    quick: bool,
    model: str | None,
    rule_files: tuple[Path, ...],
    calibration: Path | None,
    **sizes: Any,
) -> None:
    """Write one page about a plan, with charts, that a browser shows without a network.

    Parameters by mesh axis, time and memory by layer, the schedule of a pipeline, memory over the
    step, the frontier of time and memory, the roofline, alternatives, and the difference to another
    plan. Needs plotly.

    \b
    autopar report plan.toml -o plan.html
    autopar report plan.toml --against other.toml -o plan.html
    """
    known = table(own_rules(rule_files))
    asked = PlanFile(file, model, ModelSpec("", **sizes), known, calibration)
    with stages(quiet=False) as progress:
        about = _PlanPage(asked, asked.open(progress), progress)
        parts = [*about.layouts(), *about.step(), *about.roofline()]
        parts += [] if quick else [*about.frontier(), *about.why_not()]
        parts += [] if against is None else about.difference(Plan.load(against))
        title = f"{asked.plan.graph.partition(' ')[0]} on {asked.plan.mesh}"
        text = page(title, about.facts, parts)
    FILE.write(output, text)
    say(f"{output}: {', '.join(part.title.lower() for part in parts)}")


@dataclass(frozen=True)
class _PlanPage:
    """Contents of the page about a plan.

    Attributes:
        asked, opened: the plan with its graphs.
        progress: reports what is being done.
    """

    asked: PlanFile
    opened: CheckedPlan
    progress: Callable[[str], None]

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.asked.plan

    @cached_property
    def stages(self) -> dict[str, Opening]:
        """The stages by their prefix in charts, "" for the only one."""
        count = len(self.plan.stages)
        return {f"{n}: " if count > 1 else "": self.opened.stage(n) for n in range(count)}

    @cached_property
    def explained(self) -> dict[str, Explanation]:
        """The explanations of the stages."""
        self.progress("explain")
        rules, calibration = self.asked.rules, self.asked.calibration
        return {
            name: explained(
                part.graph, part.plan, limit_of_plan(part.plan), rules,
                prices(part.plan, calibration, part.whole), part.repeated,
            )
            for name, part in self.stages.items()
        }  # fmt: skip

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Figures below the title."""
        plan = self.plan
        sizes = (("samples in a step", plan.model.batch), ("sequence", plan.model.seq))
        facts = [
            ("step", format_seconds(plan.predicted.seconds)),
            ("memory of a device", format_bytes(plan.predicted.peak_bytes)),
            ("mesh", str(plan.mesh)),
            ("precision", str(plan.precision) or "that of the model"),
            ("optimizer", plan.stages[0].update.optimizer),
            *((name, str(size)) for name, size in sizes if size is not None),
        ]
        if plan.is_pipeline:
            facts.append(("schedule", f"{plan.schedule}, {plan.microbatches} microbatches"))
            facts.append(("bubble", f"{plan.predicted.bubble:.1%}"))
        return facts

    @property
    def _numbered(self) -> str:
        """Says what the numbers before names are."""
        return " Numbers before a colon are stages." if self.plan.is_pipeline else ""

    def layouts(self) -> list[Part]:
        """Parameters by axis, time and memory by layer."""
        unit = "a microbatch" if self.plan.is_pipeline else "a step"
        meshes = {name: part.plan.mesh for name, part in self.stages.items()}
        return [
            Part(
                "parameters", "Parameters",
                "Into how many parts each mesh axis cuts a parameter as stored, its optimizer "
                "state, and the parameter in use. White: not cut." + self._numbered,
                charts.heat_map(self.explained, meshes),
            ),
            Part(
                "time", "Time by layer",
                f"Milliseconds of {unit} on a device: compute, and messages with parts of "
                "activations and of parameters. What overlaps counts twice." + self._numbered,
                charts.by_layer(self.explained, memory=False),
            ),
            Part(
                "memory", "Memory by layer", "GiB of a device by cause, also of what is not in "
                "memory at the same time." + self._numbered,
                charts.by_layer(self.explained, memory=True),
            ),
        ]  # fmt: skip

    def step(self) -> list[Part]:
        """The schedule, and memory over the step."""
        self.progress("simulate")
        if self.plan.is_pipeline:
            return self._schedule()
        part, chosen = self.stages[""], self.plan.stage
        price = prices(chosen, self.asked.calibration)
        settings = settings_on(chosen.mesh.device, part.graph.execution, host_of(price))
        timeline = simulated(part.graph, chosen, self.asked.rules, settings, price)
        curve = charts.memory_curve(timeline.memory.curve, limit_of_plan(chosen))
        text = f"Simulated; the peak is in {timeline.memory.task}."
        return [Part("curve", "Memory over the step", text, curve)]

    def _schedule(self) -> list[Part]:
        step = self.opened.step
        named = [f"ranks {ranks[0]}-{ranks[-1]}" for ranks in step.ranks]
        bars = [
            charts.Bar(row, str(action), action.kind, float(start), float(end))
            for row, actions, starts, ends in zip(
                named, step.timeline.rows, step.timeline.starts, step.timeline.ends, strict=True
            )
            for action, start, end in zip(actions, starts, ends, strict=True)
        ]
        limit = limit_of_plan(self.plan.stages[0])
        peaks = list(zip(named, step.memory, strict=True))
        text = (
            "Simulated, with a row for each group of ranks. F is a forward, B a backward, I and W "
            "the halves of a backward for inputs and for weights. Drag to zoom in."
        )
        return [
            Part("schedule", "Schedule", text, charts.gantt(bars)),
            Part(
                "curve",
                "Memory of the ranks",
                "Peaks in GiB of a device.",
                charts.memory_bars(peaks, limit),
            ),
        ]

    def roofline(self) -> list[Part]:
        """Operators below the roof of the device, or of each kind of device."""
        chips: dict[str, list[str]] = {}
        for name, part in self.stages.items():
            chips.setdefault(device(part.plan.mesh).name, []).append(name)
        return [self._roofline(f"roofline{n or ''}", own) for n, own in enumerate(chips.values())]

    def _roofline(self, title: str, stages: list[str]) -> Part:
        """Returns the roofline of stages on devices of one kind."""
        chip = device(self.stages[stages[0]].plan.mesh)
        kernels, dtypes = [], dict[str, float]()
        for stage in stages:
            part = self.stages[stage]
            names = {
                operator.name: (
                    f"{stage}{operator.kind}  {line.module or line.place}",
                    operator.cost.compute,
                )
                for section in self.explained[stage].sections
                for line in section.lines
                for operator in line.operators
            }
            for name, work in works(part.graph, part.plan, self.asked.rules).items():
                both, times = (*work.forward, *work.backward), part.graph.multiplicity[name]
                for one in both:
                    dtypes[one.dtype] = dtypes.get(one.dtype, 0.0) + one.flops * bool(one.gemm)
                if name in names:
                    flops, nbytes = sum(w.flops for w in both), sum(w.nbytes for w in both)
                    label, seconds = names[name]
                    kernels.append(charts.Kernel(label, flops * times, nbytes * times, seconds))
        dtype = max(dtypes, key=lambda name: dtypes[name], default="f32")
        chart = charts.roofline(kernels, chip.rate(dtype, True), chip.memory_bandwidth)
        unit = "a microbatch" if self.plan.is_pipeline else "a step"
        text = f"Operators of {unit} on {chip.name}, {dtype}; the area of a point is its time."
        return Part(title, "Roofline", text, chart)

    def frontier(self) -> list[Part]:
        """The fastest plans within less and less memory."""
        self.progress("frontier")
        points = []
        for plan in frontier(self._planned_again()):
            again = [each for one in plan.stages for each in one.recompute.items()]
            how = ", ".join(dict.fromkeys(f"{run} {blocks}" for run, blocks in again))
            points.append((plan.predicted.peak_bytes, plan.predicted.step_seconds, how))
        text = "The fastest plans within less and less memory, the first without a limit. "
        text += "Stages and schedule stay." if self.plan.is_pipeline else _SUMS
        return [Part("frontier", "Frontier", text, charts.frontier(points))]

    def _planned_again(self) -> Callable[[float], Plan]:
        """Returns the planner for a number of bytes per device."""
        asked, plan = self.asked, self.plan
        if not plan.is_pipeline:
            part = self.stages[""]
            like = Options.like(part.plan, table=asked.rules, calibration=asked.calibration)
            planner = Planner(part.graph, part.plan.mesh, like, Trace(None))
            return lambda most: Plan.of(planner.plan(most))
        from autopar.planning.pipelines.stages import Devices, plan_stages

        graph, observed = asked.microbatch_graph(self.progress)
        parts = {start: stage.mesh for stage in plan.stages for start in stage.starts}
        groups = [Devices(mesh, start) for start, mesh in sorted(parts.items())]

        def planned(most: float) -> Plan:
            return plan_stages(
                graph, plan.ends, groups, plan.mesh, plan.microbatches, plan.schedule,
                replace(asked.options, memory=most), Trace(None), observed=observed,
            )  # fmt: skip

        return planned

    def why_not(self) -> list[Part]:
        """The next best layouts of the largest parameters."""
        self.progress("why not")
        asked, tracer = self.asked, Stages(None, self.progress)
        unit = "a microbatch of the stage" if self.plan.is_pipeline else "a step"
        every = [(name, one) for name in self.stages for one in self.explained[name].parameters]
        largest = sorted(every, key=lambda named: -named[1].nbytes)[:_ASKED]
        rows: list[tuple[object, ...]] = [
            ("parameter", "layout here", "next best layout", unit, "memory")
        ]
        known = {
            name: Prices(part.plan.mesh, prices(part.plan, asked.calibration, part.whole))
            for name, part in self.stages.items()
        }
        for stage, parameter in largest:
            part = self.stages[stage]
            case = Case(
                part.plan, part.graph, False, asked.rules, limit_of_plan(part.plan), tracer,
                asked.calibration, part.whole, part.repeated, known[stage],
            )  # fmt: skip
            for decision in decisions(part.plan, part.graph).values():
                if decision.name == parameter.name and decision.op == "parameter":
                    rows += [
                        (f"{stage}{decision.name}", decision.layout, *_instead(answer))
                        for answer in next_best(case, decision, 1)
                    ]
        text = (
            f"The next best layouts of the {len(largest)} largest parameters, each planned again. "
            "A layout is that of the parameter as stored => in use. The change is in brackets. "
            f"{_SUMS}"
        )
        return [Part("why", "Why not otherwise", text, rows=rows)]

    def difference(self, other: Plan) -> list[Part]:
        """Returns the difference to another plan, as parts of the page."""
        compared = plan_difference(self.plan, other)
        rows: list[tuple[object, ...]] = [("figure", "this plan", "the other", "change")]
        for one in compared.figures:
            if one.before or one.after:
                before, after = (
                    charts.shown(one.name, one.before),
                    charts.shown(one.name, one.after),
                )
                more = f"{one.change / one.before:+.1%}" if one.before else ""
                rows.append((figure_name(one.name).strip(), before, after, more))
        rows += [(name, *texts, "") for name, texts in compared.head.items()]
        for stage in compared.stages:
            for change in stage.difference.changes:
                before, after = _once(change.before), _once(change.after)
                rows.append((change.name.removeprefix("%"), before, after, ""))
        text = "The plans are equal." if compared.equal else _DIFFERENCE
        chart = charts.figures(compared.figures)
        return [Part("difference", "Difference", text, chart, rows)]


def _once(layouts: str) -> str:
    """Returns the layouts of repeated operators without repeats."""
    return "; ".join(dict.fromkeys(layouts.split("; ")))


def _instead(answer: Alternative) -> tuple[str, str, str]:
    """Returns the layouts of an alternative with its step and its memory, or why there is none."""
    if answer.missing:
        return answer.missing, "", ""
    seconds, slower = answer.figure("step_seconds")
    nbytes, more = answer.figure("peak_bytes")
    return (
        answer.layouts,
        f"{format_seconds(seconds)} ({signed(slower, format_seconds) if slower else 'equal'})",
        f"{format_bytes(nbytes)} ({signed(more, format_bytes) if more else 'equal'})",
    )

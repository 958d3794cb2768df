"""`autopar schedules`: lists and draws pipeline schedules with their bubbles and activations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from autopar.cli.common.console import FILE, JSON, SECONDS, WIDTH, Console, print_json, print_out
from autopar.errors import ScheduleError
from autopar.inter_op.complete import complete
from autopar.inter_op.gantt import gantt, legend
from autopar.inter_op.pipeline_timeline import Timeline
from autopar.inter_op.schedule import Schedule, Times
from autopar.inter_op.schedule_time import StageCost, simulate
from autopar.inter_op.schedules import Recipe, schedule, schedules
from autopar.inter_op.steady_state import steady
from autopar.ir.action import format_row
from autopar.ir.pipeline_step import Step

_HEADS = (
    "schedule", "time", "bubble", "published", "activations", "versions", "staleness", "stages",
    "needs",
)  # fmt: skip
_NOTES = """\
activations: peak number of microbatches in flight, times a place's share of the model
versions: weight versions kept in the first and the last place
staleness: largest age of the weights of a gradient, in updates. If it is not 0, the time is that of
  a period in the steady state. Training may need another learning rate or may not converge;
  allow such a schedule with --allow "stale gradients"
* the closed form lets a place begin the next step while others still run this one"""


class _Seconds(click.ParamType[Times]):
    """Three numbers, "1,1,1"."""

    name = "F,I,W"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Times:
        """Parses three positive numbers."""
        if isinstance(value, Times):
            return value
        try:
            times = Times(*map(float, str(value).split(",")))
        except (TypeError, ValueError):
            times = Times(0, 0, 0)
        if str(value).count(",") != 2 or not all(0 < seconds < float("inf") for seconds in times):
            self.fail(f"{value!r} is not three positive numbers such as 1,1,1", param, ctx)
        return times


@dataclass(frozen=True)
class _PipelineOptions:
    """The pipeline to schedule.

    Attributes:
        ranks: number of places.
        microbatches: number in a step.
        times: times of forward, input backward and weight backward of a place's share of the model.
        transfer: time of a transfer between places.
    """

    ranks: int
    microbatches: int
    times: Times
    transfer: float


@click.command("schedules")
@click.argument("name", required=False, metavar="[NAME]")
@click.option(
    "--stages",
    "--ranks",
    "ranks",
    type=click.IntRange(1, 1024),
    default=4,
    show_default=True,
    help="Places of the pipeline, each a device or a sub-mesh. A schedule with several stages per"
    " place cuts the model into smaller stages.",
)
@click.option(
    "--microbatches", type=click.IntRange(1, 4096), default=8, show_default=True, help="Per step."
)
@click.option(
    "--chunks", type=click.IntRange(0, 64), help="Stages per place, for interleaved_1f1b."
)
@click.option(
    "--extra",
    type=click.IntRange(0, 4096),
    help="Additional forwards ahead per place, for eager_1f1b.",
)
@click.option(
    "--times",
    type=_Seconds(),
    default="1,1,1",
    show_default=True,
    help="Times of forward, input backward and weight backward of a place's share of the model.",
)
@click.option(
    "--transfer",
    type=SECONDS,
    default=0.0,
    help="Time of a transfer between places, which overlaps with compute.",
)
@click.option(
    "--complete", "completed", is_flag=True, help="With NAME: list every action of every place."
)
@click.option(
    "--trace-json",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With NAME: write the simulated step to this file, for ui.perfetto.dev.",
)
@JSON
def command(
    name: str | None,
    ranks: int,
    microbatches: int,
    chunks: int | None,
    extra: int | None,
    times: Times,
    transfer: float,
    completed: bool,
    trace_json: Path | None,
    as_json: bool,
) -> None:
    """List the pipeline schedules, or draw the schedule NAME; all figures are simulated.

    \b
    autopar schedules --stages 4 --microbatches 8
    autopar schedules 1f1b --stages 4 --microbatches 8
    autopar schedules zb_v --times 1,1,0.5 --transfer 0.1
    """
    wanted = _PipelineOptions(ranks, microbatches, times, transfer)
    options = {"chunks": chunks, "extra": extra}
    given = {key: value for key, value in options.items() if value is not None}
    if name is None and (given or completed or trace_json is not None):
        raise click.UsageError("--chunks, --extra, --complete and --trace-json need a NAME")
    if name is None:
        _list(wanted, as_json)
        return
    try:
        chosen = schedule(name, ranks, microbatches, **given)
    except TypeError as error:
        raise click.UsageError(f"{name} does not take --" + " or --".join(given)) from error
    timeline = _simulated(chosen, wanted)
    if trace_json is not None:
        FILE.write(trace_json, timeline.to_trace())
    rows = complete(chosen) if completed else None
    if as_json:
        print_json(_json(chosen, timeline, wanted, rows))
    else:
        _draw(chosen, timeline, wanted, rows)


def _costs(built: Schedule, wanted: _PipelineOptions) -> tuple[list[StageCost], list[float]]:
    """Returns the costs of equal stages that add up to one model, and of transfers between them."""
    part = built.ranks / built.stages
    forward, backward, weight = (seconds * part for seconds in wanted.times)
    cost = StageCost(forward, backward, weight, activation=part)
    return [cost] * built.stages, [wanted.transfer] * (built.stages - 1)


def _simulated(built: Schedule, wanted: _PipelineOptions) -> Timeline:
    """Simulates a schedule of equal stages."""
    return simulate(built, *_costs(built, wanted))


def _figures(built: Schedule, timeline: Timeline, wanted: _PipelineOptions) -> dict[str, Any]:
    """Returns the figures of a schedule in the list; without flushes, those of the steady state."""
    seconds, bubble, joined = timeline.seconds, timeline.bubble, timeline.joined_bubble
    if not built.flushes:
        costs, borders = _costs(built, wanted)
        seconds, bubble = steady(complete(built), costs, borders)
        joined = bubble
    allow = schedules()[built.name].allow
    return {
        "name": built.name,
        "stages": built.stages,
        "copies": built.copies,
        "time": seconds,
        "bubble": bubble,
        "bubble_without_barrier": joined,
        "published_bubble": None if wanted.transfer else built.bubble(wanted.times),
        "published_without_barrier": built.joined,
        "activations": max(timeline.peak_bytes),
        "splits_backward": built.splits_backward,
        "flushes": built.flushes,
        "allow": allow,
        "versions": list(built.versions or (1,) * built.stages),
        "staleness": list(built.staleness or (0,) * built.stages),
    }


def _json(
    built: Schedule, timeline: Timeline, wanted: _PipelineOptions, rows: Step | None
) -> dict[str, Any]:
    """Returns a schedule with its figures, rows and timeline for JSON."""
    return {
        "simulated": True,
        **_figures(built, timeline, wanted),
        "microbatches": built.microbatches,
        "placement": built.placement,
        "rows": [format_row(row) for row in (built.rows if rows is None else rows.rows)],
        "starts": [starts.tolist() for starts in timeline.starts],
        "ends": [ends.tolist() for ends in timeline.ends],
        "idle": timeline.idle,
        "in_flight": built.in_flight,
        "peak_activations": timeline.peak_activations,
    }


def _list(wanted: _PipelineOptions, as_json: bool) -> None:
    """Prints all schedules; one that these sizes rule out has the reason in place of figures."""
    tried = [(recipe, *_try(recipe, wanted)) for recipe in schedules().values()]
    if as_json:
        listed = [
            {
                **(figures or {"name": recipe.name, "refused": refusal}),
                "summary": recipe.summary,
                "needs": recipe.needs,
            }
            for recipe, figures, refusal in tried
        ]
        print_json({"simulated": True, "ranks": wanted.ranks, "schedules": listed})
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in _HEADS:
        left = head in ("schedule", "needs")
        table.add_column(head, justify="left" if left else "right", overflow="fold")
    marks = {True: "*", False: " "}
    for recipe, figures, _ in sorted(tried, key=lambda one: one[1]["time"] if one[1] else 1e300):
        if figures is None:
            table.add_row(recipe.name, *"-------", Text(recipe.needs, "dim"))
            continue
        published = figures["published_bubble"]
        closed = (
            "-"
            if published is None
            else f"{published:.1%}{marks[figures['published_without_barrier']]}"
        )
        copies = f" x {figures['copies']}" if figures["copies"] > 1 else ""
        table.add_row(
            recipe.name,
            f"{figures['time']:.4g}",
            f"{abs(figures['bubble']):.1%}",
            closed,
            f"{figures['activations']:.3g}",
            _ends(figures["versions"]),
            _ends(figures["staleness"]),
            f"{figures['stages']}{copies}",
            recipe.needs,
        )
    print_out(
        f"{wanted.ranks} places, {wanted.microbatches} microbatches; simulated, with forward, input"
        f" and weight backward of {', '.join(f'{seconds:g}' for seconds in wanted.times)}",
        table,
        _NOTES,
    )


def _ends(figures: list[int]) -> str:
    """Formats the figures of the first and the last stage: "4-1", or "1" if they are equal."""
    return str(figures[0]) if figures[0] == figures[-1] else f"{figures[0]}-{figures[-1]}"


def _try(recipe: Recipe, wanted: _PipelineOptions) -> tuple[dict[str, Any] | None, str]:
    """Returns a schedule's figures and "", or None and the reason why it cannot be built."""
    try:
        built = recipe.build(wanted.ranks, wanted.microbatches)
    except ScheduleError as error:
        return None, str(error)
    return _figures(built, _simulated(built, wanted), wanted), ""


def _draw(built: Schedule, timeline: Timeline, wanted: _PipelineOptions, rows: Step | None) -> None:
    """Prints a heading, a line for each rank, and the legend."""
    console = Console()
    width = console.width if console.is_terminal else WIDTH
    label = len(f"rank {built.ranks - 1} ")
    lines = gantt(timeline, max(width - label, 1))
    picture = Text("\n").join(
        Text(f"rank {rank}".ljust(label)) + line for rank, line in enumerate(lines)
    )
    if not built.flushes:
        figures = _figures(built, timeline, wanted)
        _draw_streamed(built, figures, picture, timeline, rows)
        return
    published = built.bubble(wanted.times)
    closed = "" if published is None or wanted.transfer else f", published {published:.1%}"
    if closed and built.joined:
        closed += f" without a barrier between steps (here {timeline.joined_bubble:.1%})"
    most = ", ".join(map(str, timeline.peak_activations))
    print_out(
        f"{built.name}: {built.stages} stages in {built.ranks} places, {built.microbatches}"
        f" microbatches, time {timeline.seconds:.4g}, bubble {timeline.bubble:.1%}{closed};"
        " simulated",
        picture,
        legend(timeline),
        f"peak activations in stages times microbatches, by rank: {most}",
    )
    _print_rows(rows)


def _draw_streamed(
    built: Schedule, figures: dict[str, Any], picture: Text, timeline: Timeline, rows: Step | None
) -> None:
    """Prints a schedule without flushes; the picture starts at the first microbatch."""
    most = ", ".join(map(str, timeline.peak_activations))
    print_out(
        f"{built.name}: {built.stages} stages in {built.ranks} places, {built.microbatches}"
        f" microbatches a period, time {figures['time']:.4g}, bubble"
        f" {abs(figures['bubble']):.1%} in the steady state; simulated",
        picture,
        legend(timeline),
        f"peak activations in stages times microbatches, by rank: {most}",
        f"weight versions by stage: {', '.join(map(str, figures['versions']))}",
        f"largest staleness by stage, in updates: {', '.join(map(str, figures['staleness']))}",
        f"needs --allow {figures['allow']!r}: training differs from that on one device",
    )
    _print_rows(rows)


def _print_rows(rows: Step | None) -> None:
    for rank, row in enumerate(() if rows is None else rows.rows):
        click.echo(f"{rank}: {format_row(row)}")

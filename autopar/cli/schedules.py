"""`autopar schedules`: the pipeline schedules, their bubbles, activations and pictures."""

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
from autopar.ir.action import format_row
from autopar.ir.pipeline_step import Step


class _Seconds(click.ParamType[Times]):
    """Three numbers, "1,1,1"."""

    name = "F,I,W"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Times:
        """Read three positive numbers."""
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
class _Wanted:
    """What the pipeline is like: ranks, microbatches, times of a rank's part, of a transfer."""

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
    help="Places of the pipeline, each a device or a sub-mesh. A schedule with several stages in"
    " each place cuts the model into finer ones.",
)
@click.option(
    "--microbatches", type=click.IntRange(1, 4096), default=8, show_default=True, help="In a step."
)
@click.option(
    "--chunks", type=click.IntRange(0, 64), help="Stages in each place, for interleaved_1f1b."
)
@click.option(
    "--extra",
    type=click.IntRange(0, 4096),
    help="Further forwards ahead for each place, for eager_1f1b.",
)
@click.option(
    "--times",
    type=_Seconds(),
    default="1,1,1",
    show_default=True,
    help="Of forward, input backward and weight backward of one place's part of the model.",
)
@click.option(
    "--transfer",
    type=SECONDS,
    default=0.0,
    help="Time from one place to the next, beside the computing.",
)
@click.option(
    "--complete", "completed", is_flag=True, help="With NAME: all that every place does in a step."
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
    """List the pipeline schedules, or draw the one that is NAMEd; all figures are simulated.

    \b
    autopar schedules --stages 4 --microbatches 8
    autopar schedules 1f1b --stages 4 --microbatches 8
    autopar schedules zb_v --times 1,1,0.5 --transfer 0.1
    """
    wanted = _Wanted(ranks, microbatches, times, transfer)
    options = {"chunks": chunks, "extra": extra}
    given = {key: value for key, value in options.items() if value is not None}
    if name is None and (given or completed or trace_json is not None):
        raise click.UsageError("--chunks, --extra, --complete and --trace-json need a NAME")
    if name is None:
        _list(wanted, as_json)
        return
    try:
        made = schedule(name, ranks, microbatches, **given)
    except TypeError as error:
        raise click.UsageError(f"{name} does not take --" + " or --".join(given)) from error
    timeline = _simulated(made, wanted)
    if trace_json is not None:
        FILE.write(trace_json, timeline.to_trace())
    rows = complete(made) if completed else None
    if as_json:
        print_json(_json(made, timeline, wanted, rows))
    else:
        _draw(made, timeline, wanted, rows)


def _simulated(made: Schedule, wanted: _Wanted) -> Timeline:
    """The time line of equal stages that together are one model, whatever their number."""
    part = made.ranks / made.stages
    forward, backward, weight = (seconds * part for seconds in wanted.times)
    cost = StageCost(forward, backward, weight, activation=part)
    return simulate(made, [cost] * made.stages, [wanted.transfer] * (made.stages - 1))


def _figures(made: Schedule, timeline: Timeline, wanted: _Wanted) -> dict[str, Any]:
    """What the list says of a schedule."""
    return {
        "name": made.name,
        "stages": made.stages,
        "copies": made.copies,
        "time": timeline.seconds,
        "bubble": timeline.bubble,
        "bubble_without_barrier": timeline.joined_bubble,
        "published_bubble": None if wanted.transfer else made.bubble(wanted.times),
        "published_without_barrier": made.joined,
        "activations": max(timeline.peak_bytes),
        "splits_backward": made.splits_backward,
    }


def _json(made: Schedule, timeline: Timeline, wanted: _Wanted, rows: Step | None) -> dict[str, Any]:
    """A schedule with all that is drawn of it."""
    return {
        "simulated": True,
        **_figures(made, timeline, wanted),
        "microbatches": made.microbatches,
        "placement": made.placement,
        "rows": [format_row(row) for row in (made.rows if rows is None else rows.rows)],
        "starts": [starts.tolist() for starts in timeline.starts],
        "ends": [ends.tolist() for ends in timeline.ends],
        "idle": timeline.idle,
        "in_flight": made.in_flight,
        "peak_activations": timeline.peak_activations,
    }


def _list(wanted: _Wanted, as_json: bool) -> None:
    """All schedules; those that do not exist for the sizes with the reason."""
    found = [(recipe, *_try(recipe, wanted)) for recipe in schedules().values()]
    if as_json:
        listed = [
            {
                **(figures or {"name": recipe.name, "refused": refusal}),
                "summary": recipe.summary,
                "needs": recipe.needs,
            }
            for recipe, figures, refusal in found
        ]
        print_json({"simulated": True, "ranks": wanted.ranks, "schedules": listed})
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("schedule", "time", "bubble", "published", "activations", "stages", "needs"):
        right = head in ("time", "bubble", "published", "activations", "stages")
        table.add_column(head, justify="right" if right else "left", overflow="fold")
    marks = {True: "*", False: " "}
    for recipe, figures, _ in sorted(found, key=lambda one: one[1]["time"] if one[1] else 1e300):
        if figures is None:
            table.add_row(recipe.name, *"-----", Text(recipe.needs, "dim"))
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
            f"{figures['bubble']:.1%}",
            closed,
            f"{figures['activations']:.3g}",
            f"{figures['stages']}{copies}",
            recipe.needs,
        )
    print_out(
        f"{wanted.ranks} places, {wanted.microbatches} microbatches; simulated, with forward, input"
        f" and weight backward of {', '.join(f'{seconds:g}' for seconds in wanted.times)}",
        table,
        "activations: at most so many microbatches of one place's part of the model\n"
        "* as if the next step began in a place before others have ended this one",
    )


def _try(recipe: Recipe, wanted: _Wanted) -> tuple[dict[str, Any] | None, str]:
    try:
        made = recipe.build(wanted.ranks, wanted.microbatches)
    except ScheduleError as error:
        return None, str(error)
    return _figures(made, _simulated(made, wanted), wanted), ""


def _draw(made: Schedule, timeline: Timeline, wanted: _Wanted, rows: Step | None) -> None:
    """The head, a line for each rank, the legend."""
    console = Console()
    width = console.width if console.is_terminal else WIDTH
    label = len(f"rank {made.ranks - 1} ")
    lines = gantt(timeline, max(width - label, 1))
    picture = Text("\n").join(
        Text(f"rank {rank}".ljust(label)) + line for rank, line in enumerate(lines)
    )
    published = made.bubble(wanted.times)
    closed = "" if published is None or wanted.transfer else f", published {published:.1%}"
    if closed and made.joined:
        closed += f" without a barrier between steps (here {timeline.joined_bubble:.1%})"
    most = ", ".join(map(str, timeline.peak_activations))
    print_out(
        f"{made.name}: {made.stages} stages in {made.ranks} places, {made.microbatches}"
        f" microbatches, time {timeline.seconds:.4g}, bubble {timeline.bubble:.1%}{closed};"
        " simulated",
        picture,
        legend(timeline),
        f"activations of one stage and microbatch, at most, by rank: {most}",
    )
    if rows is not None:
        for rank, row in enumerate(rows.rows):
            click.echo(f"{rank}: {format_row(row)}")

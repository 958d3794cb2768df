"""Charts of a plan, as figures of plotly; texts are escaped, because plotly reads them as HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from autopar.errors import MissingDependencyError
from autopar.explain.difference import Figure
from autopar.explain.explanation import Explanation
from autopar.explain.views import view
from autopar.ir.mesh import Mesh
from autopar.ir.units import format_bytes, format_seconds

GIB, MS = 2**30, 1e-3
# Colours by cause, equal in all charts and pages; Okabe and Ito's, which the colour-blind can tell.
_COLOURS = {
    "compute": "#0072B2", "parameters": "#E69F00", "activations": "#009E73",
    "gradients": "#D55E00", "optimizer": "#CC79A7", "gathered parameters": "#F0E442",
}  # fmt: skip
_SEEN = 0.003  # of the longest bar: what can be seen of another
_ROW, _LEAST = 22, 260  # pixels: a row of a table of bars, and the least height of a chart


@dataclass(frozen=True)
class Bar:
    """A span of time of a row of a Gantt chart.

    Attributes:
        row, name: row of the chart, and name of the action.
        kind: kind of the action; spans of a kind have one colour.
        start, end: seconds.
    """

    row: str
    name: str
    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Kernel:
    """The kernels of one operator in a roofline.

    Attributes:
        name: the operator and its module.
        flops, nbytes, seconds: of forward and backward in a step on one device.
    """

    name: str
    flops: float
    nbytes: float
    seconds: float


def _plotly() -> ModuleType:
    try:
        return import_module("plotly.graph_objects")
    except ImportError as error:
        raise MissingDependencyError(
            "plotly is not installed",
            why="reports are drawn by it",
            todo="pip install autopar[report]",
        ) from error


def _figure(traces: Sequence[Any], height: float, **layout: Any) -> Any:
    chart = _plotly().Figure(data=list(traces))
    chart.update_layout(
        height=max(height, _LEAST), template="plotly_white", margin={"l": 10, "r": 10, "t": 30},
        **layout,
    )  # fmt: skip
    chart.update_yaxes(automargin=True)
    return chart


def _text(value: object) -> str:
    return html.escape(str(value), quote=False)


def heat_map(explained: Mapping[str, Explanation], mesh: Mapping[str, Mesh]) -> Any:
    """Draws parameters against mesh axes: into how many parts each axis cuts each of them.

    Args:
        explained: explanations by stage, "" for the only one.
        mesh: mesh of each of them.
    """
    kinds = (("stored", "axes"), ("state", "updated_axes"), ("used", "used_axes"))
    axes = list(dict.fromkeys(axis for one in mesh.values() for axis in one.names))
    columns = [f"{kind} {axis}" for kind, _ in kinds for axis in axes]
    alike: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
    for stage, explanation in explained.items():
        for parameter in explanation.parameters:
            split = tuple(
                mesh[stage].axis_size(axis) if axis in getattr(parameter, field) else 1
                for _, field in kinds
                for axis in axes
            )
            shown = f"{parameter.stored} => {parameter.used}"
            alike.setdefault((parameter.name, shown, split), []).append(stage)
    names = [_text(f"{_together(stages)}{name}") for (name, _, _), stages in alike.items()]
    trace = _plotly().Heatmap(
        z=[[math.log2(count) for count in split] for _, _, split in alike],
        text=[[str(count) if count > 1 else "" for count in split] for _, _, split in alike],
        customdata=[[_text(shown)] * len(split) for _, shown, split in alike],
        x=[_text(name) for name in columns], y=names, colorscale="Blues", texttemplate="%{text}",
        hovertemplate="%{y}<br>%{x}: 2^%{z} parts<br>%{customdata}<extra></extra>",
        showscale=False, xgap=2, ygap=2,
    )  # fmt: skip
    chart = _figure(
        [trace], _ROW * len(names) + 120, yaxis={"autorange": "reversed"}, xaxis={"side": "top"}
    )
    return chart.update_layout(margin={"t": 70})  # room for the buttons above the names of columns


def _together(stages: Sequence[str]) -> str:
    """Returns one prefix for several stages: "1-3: " for "1: ", "2: " and "3: "."""
    numbers = [int(stage.partition(":")[0]) for stage in stages if stage]
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return ", ".join(texts) + ": " if runs else ""


def by_layer(explained: Mapping[str, Explanation], memory: bool) -> Any:
    """Draws milliseconds of a step, or GiB of a device, of every layer by cause.

    Layers that are too small to be seen share a bar.
    """
    causes: dict[str, dict[str, float]] = {}
    for stage, explanation in explained.items():
        for row in view(explanation, "layer"):
            for cause, value in (row.memory if memory else row.seconds).items():
                layer = _text(f"{stage}{row.name or 'the rest'}")
                causes.setdefault(cause, {})[layer] = value / (GIB if memory else MS)
    layers = _merged(causes)
    unit = "GiB" if memory else "ms"
    traces = [
        _plotly().Bar(
            name=_text(cause), y=layers, x=[values.get(layer, 0.0) for layer in layers],
            orientation="h", hovertemplate="%{y}<br>%{x:.4g} " + unit,
            marker_color=_COLOURS.get(cause),
        )
        for cause, values in sorted(causes.items(), key=lambda named: _place(named[0]))
    ]  # fmt: skip
    return _figure(
        traces, _ROW * len(layers) + 100, barmode="stack", xaxis={"title": unit},
        yaxis={"autorange": "reversed"},
    )  # fmt: skip


def _place(cause: str) -> int:
    """Returns the place of a cause in a bar; causes without a colour come last."""
    return [*_COLOURS, cause].index(cause)


def _merged(causes: dict[str, dict[str, float]]) -> list[str]:
    """Moves the values of the smallest layers to one, and returns the layers that remain."""
    totals: dict[str, float] = {}
    for values in causes.values():
        for layer, value in values.items():
            totals[layer] = totals.get(layer, 0.0) + value
    seen = _SEEN * max(totals.values(), default=0.0)
    small = [layer for layer, total in totals.items() if total < seen]
    if len(small) < 2:
        return list(totals)
    rest = f"{len(small)} smaller rows"
    for values in causes.values():
        values[rest] = sum(values.pop(layer, 0.0) for layer in small)
    return [*(layer for layer in totals if layer not in small), rest]


def gantt(bars: Sequence[Bar]) -> Any:
    """Draws the actions of every group of ranks in time, in milliseconds."""
    kinds = dict.fromkeys(bar.kind for bar in bars)
    rows = list(dict.fromkeys(bar.row for bar in bars))
    traces = []
    for kind in kinds:
        own = [bar for bar in bars if bar.kind == kind]
        traces.append(
            _plotly().Bar(
                name=_text(kind), y=[_text(bar.row) for bar in own], orientation="h",
                base=[bar.start / MS for bar in own],
                x=[(bar.end - bar.start) / MS for bar in own],
                text=[_text(bar.name) for bar in own], textposition="inside", textangle=0,
                hovertemplate="%{text}<br>%{base:.4g} ms, %{x:.4g} ms long",
            )
        )  # fmt: skip
    return _figure(
        traces, 2 * _ROW * len(rows) + 120, barmode="overlay", xaxis={"title": "ms"},
        yaxis={"autorange": "reversed"}, uniformtext={"minsize": 9, "mode": "hide"},
    )  # fmt: skip


def memory_curve(curve: Sequence[tuple[float, float]], limit: float) -> Any:
    """Draws GiB of a device over the milliseconds of a step, with the limit.

    Args:
        curve: (seconds, bytes) after every change.
        limit: bytes of a device.
    """
    seconds, nbytes = [time / MS for time, _ in curve], [held / GIB for _, held in curve]
    trace = _plotly().Scatter(
        x=seconds, y=nbytes, mode="lines", line={"shape": "hv"}, fill="tozeroy",
        hovertemplate="%{x:.4g} ms: %{y:.4g} GiB<extra></extra>",
    )  # fmt: skip
    return _limited([trace], limit, {"title": "ms"})


def memory_bars(groups: Sequence[tuple[str, float]], limit: float) -> Any:
    """Draws the peak GiB of a device of every group of ranks, with the limit."""
    trace = _plotly().Bar(
        x=[_text(name) for name, _ in groups], y=[nbytes / GIB for _, nbytes in groups]
    )
    return _limited([trace], limit, {})


def _limited(traces: Sequence[Any], limit: float, xaxis: Mapping[str, Any]) -> Any:
    chart = _figure(traces, 320, xaxis=xaxis, yaxis={"title": "GiB", "rangemode": "tozero"})
    if math.isfinite(limit):
        chart.add_hline(y=limit / GIB, line_dash="dash", annotation_text="limit")
    return chart


def frontier(points: Sequence[tuple[float, float, str]]) -> Any:
    """Draws the seconds of a step against memory.

    Args:
        points: bytes of a device, seconds of a step, and how blocks are recomputed.
    """
    trace = _plotly().Scatter(
        x=[nbytes / GIB for nbytes, _, _ in points], y=[seconds / MS for _, seconds, _ in points],
        text=[_text(how or "no recomputation") for _, _, how in points], mode="lines+markers",
        hovertemplate="%{x:.4g} GiB: %{y:.4g} ms<br>%{text}<extra></extra>",
    )  # fmt: skip
    return _figure([trace], 320, xaxis={"title": "GiB"}, yaxis={"title": "ms"})


def roofline(kernels: Sequence[Kernel], peak: float, bandwidth: float) -> Any:
    """Draws FLOP/s of operators against FLOPs by byte, below the roof of a device.

    Args:
        kernels: kernels of a step.
        peak: FLOP/s of matrix units.
        bandwidth: bandwidth of memory, bytes a second.
    """
    counted = [one for one in kernels if one.flops and one.nbytes and one.seconds]
    intensities = [one.flops / one.nbytes for one in counted]
    ridge = peak / bandwidth
    span = sorted({min([*intensities, ridge / 10]), ridge, max([*intensities, ridge * 10])})
    roof = _plotly().Scatter(
        x=span, y=[min(peak, bandwidth * at) for at in span], mode="lines", name="roof"
    )
    points = _plotly().Scatter(
        x=intensities, y=[one.flops / one.seconds for one in counted], mode="markers",
        name="operators", text=[_text(one.name) for one in counted],
        marker={"size": _sizes([one.seconds for one in counted]), "opacity": 0.6},
        hovertemplate="%{text}<br>%{x:.3g} FLOP/B, %{y:.3g} FLOP/s<extra></extra>",
    )  # fmt: skip
    return _figure(
        [roof, points], 420,
        xaxis={"title": "FLOP / byte", "type": "log", "exponentformat": "power"},
        yaxis={"title": "FLOP / s", "type": "log", "exponentformat": "power"},
    )  # fmt: skip


def _sizes(seconds: Sequence[float]) -> list[float]:
    """Returns diameters in pixels, by the area of which operators take their seconds."""
    most = max(seconds, default=1.0)
    return [6 + 30 * math.sqrt(each / most) for each in seconds]


def figures(compared: Sequence[Figure]) -> Any:
    """Draws the predicted milliseconds of two plans side by side."""
    times = [one for one in compared if one.name.endswith("_seconds") and (one.before or one.after)]
    names = [_text(one.name.removesuffix("_seconds")) for one in times]
    traces = [
        _plotly().Bar(name=label, x=names, y=[getattr(one, side) / MS for one in times])
        for label, side in (("this plan", "before"), ("the other", "after"))
    ]
    return _figure(traces, 320, barmode="group", yaxis={"title": "ms"})


def shown(name: str, value: float) -> str:
    """Returns a figure of a plan with its unit."""
    if name.endswith("seconds"):
        return format_seconds(value)
    return format_bytes(value) if name.endswith("bytes") else f"{value:.1%}"

"""`autopar explain --dims`: named dimensions of a graph, and what a plan does to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autopar.intra_op.pins.dim_names import name_dims
from autopar.intra_op.pins.dims import Dims, find_dims
from autopar.intra_op.pins.roles import Roles
from autopar.intra_op.rule import OpRule
from autopar.ir.graph import Graph
from autopar.stage_plan import StagePlan

_SHOWN = 3  # operators listed a dimension


@dataclass(frozen=True)
class Row:
    """One class of dimensions.

    Attributes:
        name: as `autopar.layout` takes it.
        size: number of elements.
        parameters, values: how many of each have it as a dimension or the outermost part of one, in
            all blocks.
        inside: how many have it further inside a dimension, where it cannot be split.
        split: how the plan splits it: axes joined by "@" -> parameters and values.
        apart: (operator, reason) -> how often in all blocks it cannot be split there.
    """

    name: str
    size: int
    parameters: int
    values: int
    inside: int
    split: dict[str, int]
    apart: dict[str, int]


def rows(graph: Graph, chosen: StagePlan, rules: Mapping[str, OpRule]) -> list[Row]:
    """The classes of dimensions of a plan's graph, those that most values have first."""
    dims = find_dims(graph, rules)
    names = name_dims(Roles(dims))
    made = [_row(dims, chosen, cls, name) for cls, name in enumerate(names)]
    return sorted(made, key=lambda row: (row.name.startswith("dim"), -row.values - row.parameters))


def _row(dims: Dims, chosen: StagePlan, cls: int, name: str) -> Row:
    graph, times = dims.graph, dims.graph.multiplicity
    counts: Counter[str] = Counter()
    split: Counter[str] = Counter()
    for node in graph.folded:
        share = node.op == "autopar.share" and graph[node.inputs[0]].op == "param"
        inside = any(cls in classes[1:] for classes in dims.of(node.name))
        counts["inside"] += times[node.name] * (inside and not share)
        places = [dim for dim, outer in enumerate(dims.outer(node.name)) if outer == cls]
        if places and not share:
            counts["param" if node.op == "param" else "value"] += times[node.name]
        # A parameter counts as it is used.
        for axes in _splits(chosen, node.name, places) if node.op != "param" else ():
            split[axes] += times[node.name]
    apart: Counter[str] = Counter()
    for item in dims.apart:
        if item.cls == cls:
            apart[f"{item.op} {item.why}"] += times[item.node]
    found = (counts["param"], counts["value"], counts["inside"])
    return Row(name, dims.sizes[cls], *found, dict(split.most_common()), dict(apart.most_common()))


def _splits(chosen: StagePlan, node: str, places: list[int]) -> Iterator[str]:
    """How the plan splits the first of some dimensions of a node's result."""
    (_, layout), *_ = chosen.nodes[node].results
    yield from ("@".join(layout.dims[dim]) for dim in places[:1] if layout.dims[dim])


def to_json(found: list[Row]) -> list[dict[str, object]]:
    """The rows as data."""
    return [asdict(row) for row in found]


def render(found: list[Row]) -> RenderableType:
    """A table of the named dimensions, and a line for those without a name."""
    table = Table(box=None, pad_edge=False, title="Dimensions", title_justify="left")
    for heading in ("name", "size", "parameters", "values", "split by this plan", "kept whole by"):
        numbers = heading in ("size", "parameters", "values")
        table.add_column(heading, justify="right" if numbers else "left")
    unnamed = [row for row in found if row.name.startswith("dim")]
    for row in found:
        if row not in unnamed:
            split = ", ".join(f"{axes} × {count}" for axes, count in row.split.items())
            apart = [f"{what.removeprefix('aten.')} × {n}" for what, n in row.apart.items()]
            more = [f"and {len(apart) - _SHOWN} more"] if len(apart) > _SHOWN else []
            figures = (str(row.size), str(row.parameters), str(row.values))
            table.add_row(row.name, *figures, split, "\n".join([*apart[:_SHOWN], *more]))
    listed = ", ".join(f"{row.name} ({row.size})" for row in unnamed)
    return Group(table, Text(f"\nWithout a name: {listed}")) if unnamed else table

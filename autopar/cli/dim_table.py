"""Output of `autopar explain --dims`: named dimensions of a graph and how a plan splits them."""

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

_SHOWN = 3  # operators listed for a dimension


@dataclass(frozen=True)
class Row:
    """One class of dimensions.

    Attributes:
        name: as `autopar.layout` takes it.
        size: number of elements.
        parameters, values: numbers of parameters and values that have it as a dimension or as the
            outermost factor of one, in all blocks.
        inside: number of parameters and values that have it as an inner factor of a dimension,
            where it cannot be split.
        split: axes joined by "@" -> number of parameters and values that the plan splits so.
        apart: "operator reason" -> number of operators in all blocks that keep it whole.
    """

    name: str
    size: int
    parameters: int
    values: int
    inside: int
    split: dict[str, int]
    apart: dict[str, int]


def rows(graph: Graph, chosen: StagePlan, rules: Mapping[str, OpRule]) -> list[Row]:
    """Returns the classes of dimensions of a plan's graph, the most frequent first."""
    dims = find_dims(graph, rules)
    names = name_dims(Roles(dims))
    listed = [_row(dims, chosen, cls, name) for cls, name in enumerate(names)]
    return sorted(
        listed, key=lambda row: (row.name.startswith("dim"), -row.values - row.parameters)
    )


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
        # A parameter counts by the layout in which it is used.
        for axes in _splits(chosen, node.name, places) if node.op != "param" else ():
            split[axes] += times[node.name]
    apart: Counter[str] = Counter()
    for item in dims.unsplit:
        if item.cls == cls:
            apart[f"{item.op} {item.why}"] += times[item.node]
    numbers = (counts["param"], counts["value"], counts["inside"])
    return Row(
        name, dims.sizes[cls], *numbers, dict(split.most_common()), dict(apart.most_common())
    )


def _splits(chosen: StagePlan, node: str, places: list[int]) -> Iterator[str]:
    """Yields the axes that split the first of some dimensions of a node's result."""
    (_, layout), *_ = chosen.nodes[node].results
    yield from ("@".join(layout.dims[dim]) for dim in places[:1] if layout.dims[dim])


def to_json(listed: list[Row]) -> list[dict[str, object]]:
    """Returns a dictionary for each row."""
    return [asdict(row) for row in listed]


def render(listed: list[Row]) -> RenderableType:
    """Renders a table of the named dimensions and a line for the unnamed ones."""
    table = Table(box=None, pad_edge=False, title="Dimensions", title_justify="left")
    for heading in ("name", "size", "parameters", "values", "split by this plan", "kept whole by"):
        numbers = heading in ("size", "parameters", "values")
        table.add_column(heading, justify="right" if numbers else "left")
    unnamed = [row for row in listed if row.name.startswith("dim")]
    for row in listed:
        if row not in unnamed:
            split = ", ".join(f"{axes} × {count}" for axes, count in row.split.items())
            apart = [f"{op.removeprefix('aten.')} × {n}" for op, n in row.apart.items()]
            more = [f"and {len(apart) - _SHOWN} more"] if len(apart) > _SHOWN else []
            figures = (str(row.size), str(row.parameters), str(row.values))
            table.add_row(row.name, *figures, split, "\n".join([*apart[:_SHOWN], *more]))
    names = ", ".join(f"{row.name} ({row.size})" for row in unnamed)
    return Group(table, Text(f"\nUnnamed: {names}")) if unnamed else table

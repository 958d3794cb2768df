"""One HTML page of sections with charts and tables, which needs nothing else to be shown."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

Rows = Sequence[Sequence[object]]
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1200px; padding: 1rem;
  color: #1c2733; }
nav a { margin-right: 1rem; } h1 { margin-bottom: 0; } section { margin-top: 2.5rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #b8c4d0; } td { font-variant-numeric: tabular-nums; }
.facts td:first-child { color: #5a6b7b; }
"""


@dataclass(frozen=True)
class Part:
    """A section of the page.

    Attributes:
        name: its anchor, one word.
        title, text: its heading and what it shows.
        chart: a figure of plotly; None for none.
        rows: a table whose first row is its head; empty for none.
    """

    name: str
    title: str
    text: str
    chart: Any = None
    rows: Rows = ()


def page(title: str, facts: Rows, parts: Sequence[Part]) -> str:
    """Returns the page.

    Args:
        title: title of the page.
        facts: names and values below the title.
        parts: its sections.
    """
    io, offline = import_module("plotly.io"), import_module("plotly.offline")
    links = " ".join(f'<a href="#{part.name}">{_safe(part.title)}</a>' for part in parts)
    body = []
    for part in parts:
        chart = ""
        if part.chart is not None:
            chart = io.to_html(
                part.chart, include_plotlyjs=False, full_html=False, div_id=f"chart-{part.name}"
            )
        body.append(
            f'<section id="{part.name}"><h2>{_safe(part.title)}</h2><p>{_safe(part.text)}</p>'
            f"{chart}{_table(part.rows)}</section>"
        )
    rows = "".join(f"<tr><td>{_safe(k)}</td><td>{_safe(v)}</td></tr>" for k, v in facts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{_safe(title)}</title><style>{_STYLE}</style><script>{offline.get_plotlyjs()}</script></head><body>"
        f'<h1>{_safe(title)}</h1><table class="facts">{rows}</table><nav>{links}</nav>'
        f"{''.join(body)}</body></html>\n"
    )


def _table(rows: Rows) -> str:
    if not rows:
        return ""
    head, *others = rows
    lines = "".join(
        "<tr>" + "".join(f"<td>{_safe(cell)}</td>" for cell in row) + "</tr>" for row in others
    )
    return f"<table><tr>{''.join(f'<th>{_safe(cell)}</th>' for cell in head)}</tr>{lines}</table>"


def _safe(value: object) -> str:
    return html.escape(str(value))

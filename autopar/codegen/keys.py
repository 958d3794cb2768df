"""How a generated program names its parameters and buffers in `p`.

Outside of blocks by a text, in a block that is called in a loop by a pattern that counts, or, where
the names do not count up evenly, by a table of names.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from autopar.ir.graph import Graph, Node, Repeat


@dataclass(frozen=True)
class Keys:
    """How the blocks of a run name their parameters: a pattern in `i`, or a table of names."""

    repeat: Repeat
    patterns: dict[str, str]
    start: int
    table: str

    def read(self, name: str) -> str:
        """The expression for a leaf of the first block."""
        return self.patterns[name]


def leaf_key(node: Node) -> str:
    """The key of a parameter or buffer in a program's `p`, equal to its `Parameter.key`."""
    dim, start, length = (node.keyword(word) for word in ("dim", "start", "length"))
    if isinstance(dim, int) and isinstance(start, int) and isinstance(length, int):
        return f"{node.target}[{':, ' * dim}{start}:{start + length}]"
    return node.target


def quoted(text: str) -> str:
    """A Python literal in double quotes, whatever the characters of a user's name."""
    return json.dumps(text, ensure_ascii=False)


def block_keys(graph: Graph, repeat: Repeat, name: str) -> Keys:
    """Find one integer that counts up through all names, else fall back to a table."""
    first = repeat.iterations[0]
    places = [j for j, node in enumerate(first) if graph[node].is_leaf]
    names = [[leaf_key(graph[block[j]]) for block in repeat.iterations] for j in places]
    starts, patterns = set(), {}
    for place, row in zip(places, names, strict=True):
        found = _pattern(row)
        if found is None:
            break
        starts.add(found[0])
        patterns[first[place]] = f"p[f{quoted(found[1])}]"
    else:
        if len(starts) <= 1:
            return Keys(repeat, patterns, min(starts, default=0), "")
    columns = (", ".join(map(quoted, column)) for column in zip(*names, strict=True))
    rows = "".join(f"    ({column}{',' * (len(names) == 1)}),\n" for column in columns)
    table = f"{name.upper()}_NAMES = (\n{rows})"
    read = {first[place]: f"p[names[{at}]]" for at, place in enumerate(places)}
    return Keys(repeat, read, 0, table)


def _pattern(names: list[str]) -> tuple[int, str] | None:
    """("h.3.w", "h.4.w") -> (3, "h.{i}.w"), braces doubled; None unless one number counts up."""
    parts = [re.split(r"(?<=\.)(\d+)(?=\.)", "." + name + ".") for name in names]
    if len({len(part) for part in parts}) != 1:
        return None
    differ = [k for k in range(len(parts[0])) if len({part[k] for part in parts}) > 1]
    if len(differ) != 1 or not parts[0][differ[0]].isdigit() or differ[0] % 2 == 0:
        return None
    at = differ[0]
    start = int(parts[0][at])
    if any(part[at] != str(start + k) for k, part in enumerate(parts)):
        return None
    before, after = (
        "".join(part).replace("{", "{{").replace("}", "}}")
        for part in (parts[0][:at], parts[0][at + 1 :])
    )
    return start, (before + "{i}" + after)[1:-1]

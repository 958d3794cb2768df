"""Names the parameters and buffers of a generated program in its mapping `p`.

Outside of blocks a key is a text; in a block that is called in a loop it is a pattern with the
loop's counter, or an entry of a table if the names do not count up evenly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autopar.ir.graph import Graph, Node, Repeat
from autopar.lower.literals import formatted, quoted


@dataclass(frozen=True)
class Keys:
    """The names of parameters in the blocks of a run: patterns in `i`, or a table.

    Attributes:
        repeat: the run.
        patterns: leaf of the first block -> the expression that reads it.
        names: leaf of the first block -> the literal of its name; {} if there is a table.
        start: the value of `i` in the first block.
        table: the source of the table, "" if there is none.
    """

    repeat: Repeat
    patterns: dict[str, str]
    names: dict[str, str]
    start: int
    table: str

    def read(self, name: str) -> str:
        """Returns the expression for a leaf of the first block."""
        return self.patterns[name]


def leaf_key(node: Node) -> str:
    """Returns the key of a parameter or buffer in a program's `p`, equal to its `Parameter.key`."""
    dim, start, length = (node.keyword(name) for name in ("dim", "start", "length"))
    if isinstance(dim, int) and isinstance(start, int) and isinstance(length, int):
        return key_of(node.target, (dim, start, start + length))
    return key_of(node.target)


def block_keys(graph: Graph, repeat: Repeat, name: str) -> Keys:
    """Names the parameters of a run by a number that counts up through all names, or by a table."""
    first = repeat.iterations[0]
    places = [j for j, node in enumerate(first) if graph[node].is_leaf]
    leaves = [[graph[block[j]] for block in repeat.iterations] for j in places]
    starts, patterns, names = set(), {}, {}
    for place, row in zip(places, leaves, strict=True):
        pattern = _pattern([leaf.target for leaf in row])
        if pattern is None:
            break
        start, before, after = pattern
        key = leaf_key(row[0])
        starts.add(start)
        names[first[place]] = formatted(before, "i", after)
        suffix = key.removeprefix(row[0].target)
        patterns[first[place]] = f"p[{formatted(before, 'i', after + suffix)}]"
    else:
        if len(starts) <= 1:
            return Keys(repeat, patterns, names, min(starts, default=0), "")
    columns = (", ".join(map(quoted, map(leaf_key, block))) for block in zip(*leaves, strict=True))
    rows = "".join(f"    ({column}{',' * (len(leaves) == 1)}),\n" for column in columns)
    table = f"{name.upper()}_NAMES = (\n{rows})"
    read = {first[place]: f"p[names[{at}]]" for at, place in enumerate(places)}
    return Keys(repeat, read, {}, 0, table)


def _pattern(names: list[str]) -> tuple[int, str, str] | None:
    """Splits names around a number that counts up: ("h.3.w", "h.4.w") -> (3, "h.", ".w")."""
    parts = [re.split(r"(?<=\.)(\d{1,9})(?=\.)", "." + name + ".") for name in names]
    if len({len(part) for part in parts}) != 1:
        return None
    differ = [k for k in range(len(parts[0])) if len({part[k] for part in parts}) > 1]
    if len(differ) != 1 or differ[0] % 2 == 0:
        return None
    at = differ[0]
    start = int(parts[0][at])
    if any(part[at] != str(start + k) for k, part in enumerate(parts)):
        return None
    return start, "".join(parts[0][:at])[1:], "".join(parts[0][at + 1 :])[:-1]


def key_of(name: str, piece: tuple[int, int, int] | None = None) -> str:
    """Returns a program's key for a tensor: its name, or "qkv.weight[:, 0:768]" for a slice of it.

    Keys are unique: "[:]" is appended to a user's name that ends like a slice.

    Args:
        name: in the model's state_dict.
        piece: dimension, start and stop; None for the whole tensor.
    """
    if piece is None:
        return f"{name}[:]" if name.endswith("]") else name
    dim, start, stop = piece
    return f"{name}[{':, ' * dim}{start}:{stop}]"

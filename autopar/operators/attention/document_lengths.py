"""Lengths of the documents that are packed into rows, for prices of attention under their mask.

    "unknown"             a row may have one document
    "512"                 documents of 512 positions
    "4096 512 512 128"    a sample; rows are packed with documents of these lengths in turn

A row is filled with whole documents and the beginning of one more. Prices are means over a few
batches of such rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.errors import OptionError
from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.rewrite import argument
from autopar.ir.tensor import part_of
from autopar.ir.units import parse_whole
from autopar.operators.attention.sequence_forms import KINDS, SEEN, seen
from autopar.operators.form import Part

DOCUMENTS = "documents"  # a keyword of attention, for prices only
PRICED = (SEEN, DOCUMENTS)  # keywords that affect only prices
UNKNOWN = "unknown"
BLOCKS = 8  # of queries for each device, in the form `balanced`
_BATCHES = 8  # number of batches over which prices are averaged
_LENGTHS = 2**16
Run = tuple[int, int]  # first position and length


@dataclass(frozen=True)
class DocumentLengths:
    """A sample of lengths; prints as the text that `parse` reads.

    Attributes:
        sample: number of positions of each document; empty if unknown.
    """

    sample: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> DocumentLengths:
        """Parses the text of a sample; raises OptionError for other text."""
        words = text.split()
        if words in ([], [UNKNOWN]):
            return cls()
        lengths = [length for word in words if (length := parse_whole(word))]
        if len(lengths) == len(words) <= _LENGTHS:
            return cls(tuple(lengths))
        raise OptionError(
            f"cannot read the lengths of documents {text[:50]!r}",
            todo=f'write "{UNKNOWN}", "512", or a sample of lengths in positions, "4096 512 128"',
        )

    def __str__(self) -> str:
        return " ".join(map(str, self.sample)) or UNKNOWN

    def batches(self, size: int, rows: int) -> list[tuple[tuple[int, ...], ...]]:
        """Returns the first positions of the documents of each row, for a few batches.

        Args:
            size: number of positions of a row.
            rows: number of rows of a batch.
        """
        documents, batches = itertools.cycle(self.sample), []
        for _ in range(_BATCHES):
            batch = []
            for _ in range(rows):
                starts, at = [], 0
                while at < size:
                    starts.append(at)
                    at += next(documents)
                batch.append(tuple(starts))
            batches.append(tuple(batch))
        return batches


def dealt(size: int, work: Callable[[Run], int], devices: int) -> list[tuple[Run, ...]]:
    """Returns the queries of each device, in blocks of equal length.

    Graham, "Bounds on multiprocessing timing anomalies" (1969): no device has more than 4/3 of the
    work of the best distribution.

    Args:
        size: number of queries.
        work: returns the work of a block.
        devices: number of devices.
    """
    parts = BLOCKS * devices
    runs = [part_of(size, parts, at) for at in range(parts)]
    each = {run: work(run) for run in runs if run[1]}
    loads = [(0, 0, at) for at in range(devices)]  # work, number of queries, device
    given: list[list[Run]] = [[] for _ in range(devices)]
    for run in sorted(each, key=lambda run: (-each[run], run)):
        load, queries, at = min(loads)
        loads[at] = load + each[run], queries + run[1], at
        given[at].append(run)
    return [tuple(sorted(own)) for own in given]


def lengths_of(node: Node) -> DocumentLengths:
    """Returns the lengths that prices of attention assume."""
    text = node.keyword(DOCUMENTS)
    return DocumentLengths.parse(text if isinstance(text, str) else UNKNOWN)


def sees_later_keys(node: Node, keys: int) -> bool:
    """Returns whether attention may include later keys, as far as its mask is known."""
    return seen(node) > (keys + 1) / (2 * keys)


def rows_of(part: Part) -> int:
    """Returns the number of rows in a device's part of the mask."""
    return math.prod(part.operand(3).shape[:-2])


def with_documents(graph: Graph, lengths: DocumentLengths) -> Graph:
    """Returns `graph` with these documents as price assumption of attention under input masks."""
    given: set[str] = set()  # values that depend on an input
    nodes = []
    for node in graph.nodes:
        if node.op == "input" or given & set(node.inputs):
            given.add(node.name)
        mask = argument(node, 3, "attn_mask") if node.op in KINDS else None
        if isinstance(mask, Ref) and mask.name in given:
            kind, keys = graph[mask.name].type, graph[node.inputs[1]].type.shape[-2]
            if kind.dtype == "bool" and kind.shape[-2:] == (keys, keys):
                node = replace(node, kwargs=(*node.kwargs, (DOCUMENTS, str(lengths))))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))

"""Offload: training state and activations kept in host memory while they are not needed.

Optimizer state, masters of mixed precision and averages of parameters are copied to the device
bucket by bucket for the update and back afterwards; all computation stays on the device
(ZeRO-Offload, Ren et al., arXiv:2101.06840, updates on the host instead). Tensors that a block
saves for its backward are copied to the host after its forward and back before its backward (vDNN,
Rhu et al., arXiv:1602.08124). In a run, the recomputed blocks come first, then the offloaded
blocks: the earlier a block runs, the longer its tensors would be unused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from autopar.errors import PlanError, PlanMismatchError
from autopar.ir.graph import Graph
from autopar.ir.recompute import Recompute, of_runs, run_names

# Buckets of optimizer state on the device at a time: one arriving, one updated, one leaving.
IN_FLIGHT = 3


class _Sized(Protocol):
    @property
    def nbytes(self) -> float: ...


T = TypeVar("T", bound=_Sized)


def rows(parameters: Sequence[T], bucket: int) -> Iterator[list[T]]:
    """Groups parameters whose state is copied together.

    Yields them in order, in groups of at least `bucket` bytes except for the last.
    """
    row: list[T] = []
    for parameter in parameters:
        row.append(parameter)
        if sum(each.nbytes for each in row) >= bucket:
            yield row
            row = []
    if row:
        yield row


@dataclass(frozen=True)
class Offload:
    """State and activations kept in host memory.

    Attributes:
        optimizer: whether optimizer state, masters and averages are offloaded.
        blocks: run of blocks -> number of blocks whose saved tensors are offloaded.

    Raises:
        PlanError: a run with less than one block.
    """

    optimizer: bool = False
    blocks: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for run, count in self.blocks.items():
            if count < 1:
                raise PlanError(
                    f"activations of {count} blocks of {run!r} are offloaded",
                    why="at least one block is expected",
                    todo="leave the run out",
                )

    def __bool__(self) -> bool:
        return self.optimizer or bool(self.blocks)

    def __str__(self) -> str:
        parts = ["optimizer state"] if self.optimizer else []
        parts += [f"activations of {count} blocks of {run}" for run, count in self.blocks.items()]
        return ", ".join(parts)

    def to_table(self) -> dict[str, object]:
        """Returns its entry of a plan file."""
        table: dict[str, object] = {"optimizer": True} if self.optimizer else {}
        return table | ({"activations": dict(self.blocks)} if self.blocks else {})

    @classmethod
    def from_table(cls, table: object) -> Offload:
        """Reads the entry of `to_table`; raises PlanError if it is malformed."""
        entries: dict[str, object] = table if isinstance(table, dict) else {"": table}
        optimizer, blocks = entries.get("optimizer", False), entries.get("activations", {})
        plain = isinstance(optimizer, bool) and isinstance(blocks, dict)
        if not plain or not set(entries) <= {"optimizer", "activations"}:
            blocks = {"": None}
        counts = dict(blocks) if isinstance(blocks, dict) else {}
        if not all(type(count) is int for count in counts.values()):
            raise PlanError(
                f"offload = {table!r} is not an offload entry",
                why="its entries are optimizer = true and activations, a table of blocks by run",
                todo='write e.g. offload = { activations = { "transformer.h" = 8 } }',
            )
        return cls(bool(optimizer), counts)


NOTHING = Offload()


def offloaded_runs(
    graph: Graph, offload: Offload, recompute: Mapping[str, Recompute]
) -> tuple[tuple[int, int], ...]:
    """Returns for each run the first offloaded block and the block after the last.

    Raises:
        PlanMismatchError: there is no such run, or fewer blocks are left in it.
    """
    names, runs = run_names(graph), []
    again = of_runs(graph, recompute)
    for run in offload.blocks:
        if run not in names:
            raise PlanMismatchError(
                f"the plan offloads activations of {run!r}",
                why=f"the model has no such run of blocks; runs: {', '.join(names) or 'none'}",
                todo="correct the entry `offload` of the plan, or plan again",
            )
    for name, repeat, how in zip(names, graph.repeats, again, strict=True):
        first, count = 0 if how is None else how.blocks, offload.blocks.get(name, 0)
        if first + count > repeat.count:
            raise PlanMismatchError(
                f"the plan offloads activations of {count} blocks of {name!r}",
                why=f"the model has {repeat.count}, of which {first} are recomputed",
                todo="correct the entry `offload` of the plan, or plan again",
            )
        runs.append((first, first + count))
    return tuple(runs)


def left_of(graph: Graph, offload: Offload, recompute: Mapping[str, Recompute]) -> Offload:
    """Restricts the offload to blocks that are not recomputed, since these save little."""
    blocks: dict[str, int] = {}
    runs = zip(run_names(graph), graph.repeats, of_runs(graph, recompute), strict=True)
    for name, repeat, how in runs:
        count = min(offload.blocks.get(name, 0), repeat.count - (0 if how is None else how.blocks))
        blocks |= {name: count} if count else {}
    return Offload(offload.optimizer, blocks)

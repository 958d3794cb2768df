"""Offload: training state and activations that lie in host memory while nothing needs them.

Optimizer state, masters of mixed precision and averages of parameters come to the device bucket by
bucket for the update and go back behind it, so that every number is computed where it always was
(ZeRO-Offload, Ren et al., arXiv:2101.06840, updates on the host instead). What a block keeps for
its backward goes to the host behind its forward and comes back before its backward (vDNN, Rhu et
al., arXiv:1602.08124). Of a run of blocks those that are computed again come first, then those that
are offloaded: what is made first lies idle the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from autopar.errors import PlanError, PlanMismatchError
from autopar.ir.graph import Graph
from autopar.ir.recompute import Recompute, of_runs, run_names

# Buckets of optimizer state on the device at a time: one comes, one is updated, one goes.
IN_FLIGHT = 3


class _Sized(Protocol):
    @property
    def nbytes(self) -> float: ...


T = TypeVar("T", bound=_Sized)


def rows(parameters: Sequence[T], bucket: int) -> Iterator[list[T]]:
    """Those whose state comes together: in their order, of at least so many bytes but for the last
    ones.
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
    """What lies in host memory.

    Attributes:
        optimizer: whether optimizer state, masters and averages do.
        blocks: run of blocks -> of how many what is kept for the backward does.

    Raises:
        PlanError: a run of less than one block.
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
        said = ["optimizer state"] if self.optimizer else []
        said += [f"activations of {count} blocks of {run}" for run, count in self.blocks.items()]
        return ", ".join(said)

    def to_table(self) -> dict[str, object]:
        """Its entry of a plan's file."""
        table: dict[str, object] = {"optimizer": True} if self.optimizer else {}
        return table | ({"activations": dict(self.blocks)} if self.blocks else {})

    @classmethod
    def from_table(cls, table: object) -> Offload:
        """Read `to_table`; PlanError if it is not like that."""
        entries: dict[str, object] = table if isinstance(table, dict) else {"": table}
        optimizer, blocks = entries.get("optimizer", False), entries.get("activations", {})
        plain = isinstance(optimizer, bool) and isinstance(blocks, dict)
        if not plain or not set(entries) <= {"optimizer", "activations"}:
            blocks = {"": None}
        counts = dict(blocks) if isinstance(blocks, dict) else {}
        if not all(type(count) is int for count in counts.values()):
            raise PlanError(
                f"offload = {table!r} says nothing",
                why="it has the entries optimizer = true and activations, blocks by run",
            )
        return cls(bool(optimizer), counts)


NOTHING = Offload()


def offloaded_runs(
    graph: Graph, offload: Offload, recompute: Mapping[str, Recompute]
) -> tuple[tuple[int, int], ...]:
    """Of each run the first offloaded block and the one behind the last.

    Raises:
        PlanMismatchError: a run that is none, or more blocks than are left of it.
    """
    names, found = run_names(graph), []
    again = of_runs(graph, recompute)
    for run in offload.blocks:
        if run not in names:
            raise PlanMismatchError(
                f"the plan offloads activations of {run!r}",
                why=f"the model has no such run of blocks; runs: {', '.join(names) or 'none'}",
            )
    for name, repeat, how in zip(names, graph.repeats, again, strict=True):
        first, count = 0 if how is None else how.blocks, offload.blocks.get(name, 0)
        if first + count > repeat.count:
            raise PlanMismatchError(
                f"the plan offloads activations of {count} blocks of {name!r}",
                why=f"the model has {repeat.count}, of which {first} are computed again",
            )
        found.append((first, first + count))
    return tuple(found)


def left_of(graph: Graph, offload: Offload, recompute: Mapping[str, Recompute]) -> Offload:
    """What is offloaded of it where some blocks are computed again, which keep little."""
    blocks: dict[str, int] = {}
    runs = zip(run_names(graph), graph.repeats, of_runs(graph, recompute), strict=True)
    for name, repeat, how in runs:
        count = min(offload.blocks.get(name, 0), repeat.count - (0 if how is None else how.blocks))
        blocks |= {name: count} if count else {}
    return Offload(offload.optimizer, blocks)

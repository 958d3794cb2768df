"""Errors that peers raise about a failed or lost rank."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from autopar.errors import RankFailedError
from autopar.runtime.ranks.diagnosis import Diagnosis, diagnose
from autopar.runtime.ranks.record import Record

CLOSED = "it closed its program"  # the beginning of a rank's final message


@dataclass(frozen=True)
class Failure:
    """A rank's error as text.

    Attributes:
        rank: the global rank that failed first.
        number: number of failures that the program has survived before.
        summary: the exception in a line.
        trace: its traceback, including causes.
        broken: whether it may come from a collective that another rank broke.
    """

    rank: int
    number: int
    summary: str
    trace: str
    broken: bool = False

    @classmethod
    def of(cls, rank: int, number: int, error: BaseException) -> Failure:
        """Returns the failure of `rank` with `error`."""
        summary = traceback.format_exception_only(error)[-1].partition("\n")[0]
        trace = "".join(traceback.format_exception(error))
        return cls(rank, number, summary, trace, may_follow(error))

    @classmethod
    def read(cls, text: str) -> Failure:
        """Parses the text of `write`."""
        return cls(**json.loads(text))

    def write(self) -> str:
        """Returns the failure as text."""
        return json.dumps(asdict(self))

    def error(self) -> RankFailedError:
        """Returns the error that the other ranks raise."""
        return RankFailedError(
            f"rank {self.rank} failed: {self.summary}",
            where=f"rank {self.rank}",
            why=f"its own error was\n{self.trace.rstrip()}",
            todo=f"fix what rank {self.rank} reports; the other ranks stopped because of it",
        )


def may_follow(error: BaseException) -> bool:
    """Returns whether an error may come from a collective that another rank broke."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


@dataclass(frozen=True)
class RankAnswers:
    """The ranks' answers when a collective had broken and none had an error of its own.

    Attributes:
        failure: failure of the first rank whose collective broke.
        records: records of the ranks that answered.
        absent: ranks that did not.
        seen: their last known activity, where there is any.
        left: final messages of ranks that ended without an error.
    """

    failure: Failure
    records: Mapping[int, Record]
    absent: Sequence[int]
    seen: Mapping[int, str]
    left: Mapping[int, str]

    def error(self) -> RankFailedError | None:
        """Returns who held up the others; None if that is unknown."""
        if self.left:
            rank = min(self.left)
            if self.left[rank].startswith(CLOSED):
                return RankFailedError(
                    f"{_names(self.left)} closed the program while other ranks train",
                    where=_names(self.left),
                    why=f"{self.left[rank]}, and so made fewer calls than the others; "
                    f"{self._noticed}",
                    todo="give every rank as many batches: let samplers drop what is left over "
                    "(drop_last=True), or pad the data set",
                )
            return RankFailedError(
                f"{_names(self.left)} ended in the middle of the training",
                where=_names(self.left),
                why=f"no error of its own reached Python: {self.left[rank]}; {self._noticed}",
                todo=f"look at the output of rank {rank}: all ranks must make the same calls",
            )
        if self.absent:
            return self._lost()
        diagnosis = diagnose(self.records)
        return self._behind(diagnosis) if diagnosis.behind else None

    @property
    def _noticed(self) -> str:
        return f"rank {self.failure.rank} noticed: {self.failure.summary}"

    def _lost(self) -> RankFailedError:
        names, many = _names(self.absent), len(self.absent) > 1
        last = "".join(
            f"; rank {rank} was last seen {self.seen[rank]}"
            for rank in self.absent
            if rank in self.seen
        )
        return RankFailedError(
            f"{names} {'were' if many else 'was'} lost",
            where=names,
            why="no error was left behind: the process was killed or stopped, ran out of memory or "
            f"hangs{last}; {self._noticed}",
            todo="look into that machine's system log, and start again from a checkpoint",
        )

    def _behind(self, diagnosis: Diagnosis) -> RankFailedError:
        described = "; ".join(
            f"rank {r} is {self.records[r].describe()}" for r in diagnosis.behind[:4]
        )
        waiting = next(wait for wait in diagnosis.waits if set(wait.absent) & set(diagnosis.behind))
        return RankFailedError(
            f"{_names(diagnosis.behind)} did not come in time",
            where=_names(diagnosis.behind),
            why=f"{described}. Rank {waiting.rank} is {self.records[waiting.rank].describe()}. "
            f"{self._noticed}",
            todo="look at that line, or give init_process_group a longer timeout",
        )


def _names(ranks: Sequence[int] | Mapping[int, str]) -> str:
    """Lists ranks as text."""
    numbers = sorted(ranks)
    return f"rank {numbers[0]}" if len(numbers) == 1 else "ranks " + ", ".join(map(str, numbers))

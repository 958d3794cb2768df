"""`autopar doctor`: compares the dumps of ranks and reports which rank waits for which."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from autopar.cli.common.console import JSON, print_json, print_out
from autopar.errors import DumpError
from autopar.runtime.ranks.diagnosis import Diagnosis, Disagreement, diagnose
from autopar.runtime.ranks.record import Entry, Record, plain

_MOST = 64  # ranks in a table or a sentence


@click.command("doctor")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DUMP")
@JSON
def command(folder: Path, as_json: bool) -> None:
    """Read the dumps that ranks left in a folder, and report which rank waits for which.

    A rank is behind if others wait for it and it waits for none. Unreadable files are listed, and
    the others are compared.

    \b
    autopar doctor /tmp/autopar-1f2e3d4c5b6a
    """
    records, damaged = read(folder)
    diagnosis = diagnose(records)
    if as_json:
        print_json(_json(records, damaged, diagnosis))
        return
    print_out(_table(records), "")
    for line in conclusions(records, diagnosis):
        print_out(Text(line))
    for error in damaged:
        print_out(Text(f"{error.where} cannot be read: {error.why}", style="yellow"))


def read(folder: Path) -> tuple[dict[int, Record], list[DumpError]]:
    """Reads the dumps in a folder.

    Returns:
        The latest record of each rank, and an error for each file that cannot be read.

    Raises:
        DumpError: no file can be read.
    """
    records: dict[int, Record] = {}
    damaged: list[DumpError] = []
    try:
        files = sorted(path for path in folder.iterdir() if path.name.endswith(".json"))
    except OSError as error:
        raise DumpError(
            f"cannot read {plain(str(folder))}",
            why=plain(str(error)),
            todo="pass the folder that the error message names",
        ) from None
    for path in files:
        try:
            record = Record.load(path)
        except DumpError as error:
            damaged.append(error)
            continue
        other = records.get(record.rank)
        if other is None or record.time > other.time:
            records[record.rank] = record
    if not records:
        raise DumpError(
            f"no dump can be read in {plain(str(folder))}",
            why=damaged[0].why if damaged else "there are no files rank-*.json",
            todo="pass the folder that the error message names",
        )
    return records, damaged


def conclusions(records: dict[int, Record], diagnosis: Diagnosis) -> list[str]:
    """Returns the conclusions from all records, one sentence each.

    Args:
        records: by rank.
        diagnosis: diagnosis of these records.
    """
    lines = []
    if diagnosis.missing:
        lines.append(
            f"{_ranks(diagnosis.missing).capitalize()} left no dump: killed, stopped or on another "
            "machine."
        )
    for rank in diagnosis.behind[:_MOST]:
        record = records.get(rank)
        state = "it left no dump" if record is None else record.describe()
        lines.append(f"Rank {rank} is behind: others wait for it; {state}.")
    if diagnosis.waits and not diagnosis.behind:
        waiting = [wait.rank for wait in diagnosis.waits]
        lines.append(f"{_ranks(waiting).capitalize()} wait for one another.")
    for wait in diagnosis.waits[:_MOST]:
        lines.append(
            f"Rank {wait.rank} waits for {_ranks(wait.absent)} in {_call(wait.entry)}, call "
            f"{wait.entry.number} of channel {wait.entry.channel}."
        )
    if diagnosis.disagreement is not None:
        lines.append(_disagreement(diagnosis.disagreement))
    if not lines:
        lines.append("No rank waits for another, and all calls agree.")
    reasons = {r: record.reason for r, record in sorted(records.items()) if record.reason}
    return lines + [f"Rank {rank}: {reason}" for rank, reason in list(reasons.items())[:_MOST]]


def _disagreement(differing: Disagreement) -> str:
    calls = "; ".join(
        f"rank {rank} calls {_call(entry)}"
        for rank, entry in list(differing.entries.items())[:_MOST]
    )
    return f"Call {differing.number} of channel {differing.channel} differs between ranks: {calls}."


def _call(entry: Entry) -> str:
    line = f" at {entry.file}:{entry.line} {entry.text}" if entry.file else ""
    return f"{entry.kind} of {entry.nbytes} bytes{line}"


def _ranks(ranks: Any) -> str:
    listed = list(ranks)
    more = f" and {len(listed) - _MOST} more" if len(listed) > _MOST else ""
    names = ", ".join(map(str, listed[:_MOST])) + more
    return f"rank {names}" if len(listed) == 1 else f"ranks {names}"


def _table(records: dict[int, Record]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("rank", "host", "where", "for", "waits in", "line"):
        table.add_column(heading, overflow="fold")
    for rank, record in sorted(records.items())[:_MOST]:
        entry = record.waiting
        place = f"{entry.file}:{entry.line}" if entry is not None and entry.file else ""
        row = (
            str(rank),
            record.host,
            record.at,
            f"{max(record.time - record.since, 0.0):.0f} s",
            "" if entry is None else f"{entry.kind}, {entry.nbytes} bytes",
            place or (record.stack[-1] if record.stack else ""),
        )
        table.add_row(*map(Text, row))
    return table


def _json(
    records: dict[int, Record], damaged: list[DumpError], diagnosis: Diagnosis
) -> dict[str, Any]:
    return {
        **asdict(diagnosis),
        "conclusions": conclusions(records, diagnosis),
        "ranks": {
            rank: {"at": record.at, "doing": record.describe(), "reason": record.reason}
            for rank, record in sorted(records.items())
        },
        "damaged": [{"file": error.where, "why": error.why} for error in damaged],
    }

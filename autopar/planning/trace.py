"""Trace: keeps every value between the model and the program as a numbered file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autopar.errors import ProgramError
from autopar.files.kinds import Kind

FILE = Kind("the trace", ProgramError)


class Trace:
    """Writes every value on the way as a numbered file, or nothing if there is no folder."""

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.count = 0

    def __call__(self, name: str, text: Callable[[], str]) -> None:
        """Keep one value, headed by what made it."""
        if self.folder is None:
            return
        self.count += 1
        file = self.folder / f"{self.count:02}_{name}"
        head = "" if file.suffix == ".json" else f"# Constructed by {file.stem[3:]}\n"
        content = head + text()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            FILE.write(file, content)
        except OSError as error:
            raise ProgramError(
                f"cannot write the trace to {self.folder}",
                why=str(error),
                todo="name a folder that can be written",
            ) from error

"""Trace: writes every value between the model and the program to a numbered file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autopar.errors import ProgramError
from autopar.files.kinds import Kind

FILE = Kind("the trace", ProgramError)


class Trace:
    """Writes intermediate values to numbered files; does nothing without a folder.

    Args:
        folder: the folder to write to, or None.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.count = 0

    def tell(self, doing: str) -> None:
        """Hears what planning does now; a command shows it."""

    def __call__(self, name: str, text: Callable[[], str]) -> None:
        """Writes one value with a heading that names the pass that constructed it.

        Args:
            name: file name, without the number.
            text: returns the content; called only if there is a folder.

        Raises:
            ProgramError: the folder cannot be written.
        """
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
                todo="pass a writable folder",
            ) from error

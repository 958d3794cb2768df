"""Dumps: files with the records of a process, written after a failure or on request."""

from __future__ import annotations

import faulthandler
import os
import secrets
import signal as signals
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from autopar.errors import DumpError
from autopar.runtime.ranks.record import Record


@dataclass(frozen=True)
class Dump:
    """Settings of the ranks' records, for `compile(dump=...)`: their place and time.

    Attributes:
        folder: folder for the files of all ranks; by default one in the system's folder for
            temporary files, which the error names.
        signal: signal that requests the records of all ranks, "SIGUSR1" or a number; sending it to
            one rank is enough. None leaves all signals alone. An existing handler in Python or C is
            called as well.
    """

    folder: str | Path | None = None
    signal: str | int | None = None

    @classmethod
    def read(cls, given: str | Path | Dump | None) -> Dump:
        """Converts the value of an option: a folder, a Dump or nothing.

        Raises:
            DumpError: there is no such signal, or the folder is a file.
        """
        dump = given if isinstance(given, Dump) else cls(given)
        dump.number  # noqa: B018  # refuses an unknown signal
        if dump.folder is not None and Path(dump.folder).is_file():
            raise DumpError(f"{dump.folder} is a file", todo="name a folder for dumps")
        return dump

    @property
    def number(self) -> int | None:
        """Number of the signal."""
        if self.signal is None:
            return None
        try:
            if isinstance(self.signal, str):
                return int(signals.Signals[self.signal])
            return int(signals.Signals(self.signal))
        except (KeyError, ValueError):
            raise DumpError(
                f"{self.signal!r} is not a signal", todo='pass signal="SIGUSR1", or leave it out'
            ) from None


class Dumps:
    """The dumps of this process."""

    def __init__(self) -> None:
        self.wanted = Dump()
        self._asked: IO[bytes] | None = None
        self._seen = 0
        self._token = ""

    def configure(self, wanted: Dump) -> None:
        """Applies a program's settings; the last program with settings counts."""
        if wanted == Dump():
            return
        self.wanted = wanted
        if wanted.number is not None and self._asked is None:
            self._listen(wanted.number)

    def _listen(self, number: int) -> None:
        """Notices a signal even while the main thread waits in a collective.

        Python's own handlers run only between lines of Python. `faulthandler`'s runs at once: it
        writes to a file, whose length a thread checks.
        """
        file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by the finaliser
        own = signals.getsignal(number) not in (signals.SIG_DFL, signals.SIG_IGN)
        faulthandler.register(number, file=file, all_threads=False, chain=own)
        self._asked = file
        weakref.finalize(self, _deaf, number, file)

    @property
    def asked(self) -> bool:
        """Returns whether the signal has arrived since the last call."""
        if self._asked is None:
            return False
        length = os.fstat(self._asked.fileno()).st_size
        new, self._seen = length > self._seen, length
        return new

    @property
    def token(self) -> str:
        """Returns a name for the folder of a run, proposed by the first rank that needs one."""
        self._token = self._token or secrets.token_hex(6)
        return self._token

    def folder(self, token: str) -> Path:
        """Returns the folder of the files; the ranks agree on `token`."""
        if self.wanted.folder is not None:
            return Path(self.wanted.folder)
        return Path(tempfile.gettempdir(), f"autopar-{token}")

    def write(self, record: Record, token: str) -> Path:
        """Writes a rank's record as a whole; returns the folder.

        Raises:
            DumpError: it cannot be written.
        """
        folder = self.folder(token)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=folder, prefix=".", suffix=".part", delete=False, encoding="utf-8"
            ) as file:
                file.write(record.write())
            Path(file.name).replace(folder / f"rank-{record.rank}.json")
        except OSError as error:
            raise DumpError(f"no dump is written to {folder}", why=str(error)) from error
        return folder


def _deaf(number: int, file: IO[bytes]) -> None:
    faulthandler.unregister(number)
    file.close()

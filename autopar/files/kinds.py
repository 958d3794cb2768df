"""Kinds of external files: reads are limited in size, and writes are atomic.

A path may lead to a directory, a pipe, a device or a file that vanishes, and a file may have any
content. Reading returns the content or raises one named error, and never waits.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import stat
import tomllib
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.files.atomic import write_text

MIB = 2**20
_SPECIAL = (
    (stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"), (stat.S_ISSOCK, "a socket"),
)  # fmt: skip
_PARTS = re.compile(r"\.[^.,\]\n]{0,500}\.")
_MOST_PARTS = 1000
_RATIO = 100  # by which a compressed file may grow beyond its limit of bytes


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        what: "the plan".
        error: is raised, and says what cannot be read or written.
        todo: what to do where there is no such file, or one that cannot be read.
        limit: bytes of content.
        bad: what is said of a text that cannot be read.
    """

    what: str
    error: type[AutoparError]
    todo: str = ""
    limit: int = 16 * MIB
    bad: str = ""

    def content(self, path: str | Path) -> bytes:
        """The content of a file, unpacked if its name ends with ".gz"; raises `error`."""
        try:
            with open(_opened(path), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                content = file.read(min(size, self.limit) + 1)
            if size <= self.limit and str(path).endswith(".gz"):
                allowed = max(self.limit // _RATIO, _RATIO * size)
                with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
                    content = packed.read(min(self.limit, allowed) + 1)
                if len(content) > min(self.limit, allowed):
                    raise ValueError(f"it unpacks to more than {len(content) - 1} bytes")
            if len(content) > self.limit:
                raise ValueError(f"it has more than {self.limit // MIB} MiB")
        except (OSError, EOFError, ValueError, TypeError, zlib.error) as error:
            raise self.error(
                f"cannot read {self.what} {_shown(path)}", why=_reason(error), todo=self.todo
            ) from error
        return content

    def text(self, path: str | Path) -> str:
        """The text of a file in UTF-8; raises `error`."""
        try:
            return self.content(path).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(
                f"cannot read {self.what} {_shown(path)}",
                why=f"it is no text: {error}",
                todo=self.todo,
            ) from error

    def toml(self, text: str, where: str = "") -> dict[str, Any]:
        """The table that a text in TOML holds; raises `error`."""
        try:
            for line in text.split("\n"):
                # The time of tomllib is quadratic in the number of parts of a key.
                if sum(1 for _ in _PARTS.finditer(line)) > _MOST_PARTS:
                    raise ValueError("a key has too many parts")
            return tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            what, why = f"{self.what} is not readable TOML", _reason(error)
            raise self.error(what, where=where, why=why, todo=self.todo) from error

    def json(self, text: str | bytes, where: str = "") -> Any:
        """The value that a text in JSON holds; raises `error`."""
        try:
            value = json.loads(text)
            raw = text if isinstance(text, bytes) else text.encode("utf-8")
            if b"\\ud" in raw or b"\\uD" in raw:  # perhaps half of a pair, which is no text
                json.dumps(value, ensure_ascii=False).encode("utf-8")
        except (ValueError, RecursionError) as error:
            what = self.bad or f"{self.what} is not readable JSON"
            raise self.error(what, where=where, why=_reason(error), todo=self.todo) from error
        return value

    def write(self, path: str | Path, text: str) -> None:
        """Writes a file, whole or not at all; writes to devices directly.

        Raises `error`, and then leaves an existing file unchanged.
        """
        try:
            target, content = Path(os.path.realpath(path)), text.encode("utf-8")
            if target.is_dir() or target.is_file() or not target.exists():
                write_text(target, text)
                return
            with open(os.open(target, os.O_WRONLY | os.O_NONBLOCK), "wb") as file:
                file.write(content)
        except (OSError, ValueError, TypeError) as error:
            raise self.error(
                f"cannot write {self.what} {_shown(path)}",
                why=_reason(error),
                todo="name a file in a folder that can be written, on a disk with room",
            ) from error


def _opened(path: str | Path) -> int:
    """A descriptor of an ordinary file; OSError or ValueError if it is none."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{type(path).__name__} is no path")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    for special, name in _SPECIAL:
        if special(mode):
            os.close(descriptor)
            raise ValueError(f"it is {name}, not a file")
    return descriptor


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return str(error)[:500]


def _shown(path: object) -> str:
    return str(path)[:300]

"""Atomic writes of files and folders, even if several processes write to the same place.

A file is written under a temporary name, synced and renamed. Several files become visible together
through one more file, the *marker*, which names the others: each writer prepares its files in a
draft, its own folder in the target, and then renames the marker into place. Renaming a file over
another is atomic on local and on shared file systems; renaming a folder over another is not.

    NAME/marker.json               names what is in save-1f3a...
    NAME/save-1f3a5c7e9b2d4f60/    published
    NAME/save-08d2b1c4a7e6f953/    a draft: it has an owner.json, which its writer has locked

If NAME does not exist yet, the draft is in `.NAME.save-...`, which is renamed to NAME.

No writer waits for another. A draft has ended if it has no owner.json, or one whose lock is free.
If no marker that is read afterwards names it, none ever will, and it is removed. Locks can be
checked only on the machine where they were taken; a draft of another machine counts as ended if
nobody touched it for a day.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

OWNER = "owner.json"
_TOKEN = re.compile(r"(save|part)-[0-9a-f]{16}")
_NEW = os.O_CREAT | os.O_EXCL | os.O_RDWR
_DAY = 86_400.0  # seconds


def write_text(path: Path, text: str) -> None:
    """Writes a file, whole or not at all, and flushes it to the disk; writes to devices directly.

    Raises:
        OSError: it cannot be written; it is as it was.
    """
    path = Path(os.path.realpath(path))
    if os.path.exists(path) and not os.path.isfile(path):
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(part, _NEW, 0o666), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Removes a folder with its contents, as far as possible; follows no links."""
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            if stat.S_ISDIR(os.lstat(path / name).st_mode):
                remove(path / name)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(path / name)
        os.rmdir(path)


def is_draft(name: str) -> bool:
    """Returns whether a folder of this name in a target is a draft, or was one."""
    return _TOKEN.fullmatch(name.removeprefix("new-")) is not None


@dataclass(frozen=True)
class Owner:
    """The writer of a draft.

    Attributes:
        machine: the machine on which its lock can be tested; "" if there is none.
        host, process: for people.
        note: what the writers of one target compare.
    """

    machine: str
    host: str
    process: int
    note: str


class Draft:
    """A folder in which one writer prepares the contents of a target folder.

    Args:
        target: an absolute path; there may be a folder or nothing.
        note: information about this writer for other writers to the same target.
        kind: "save" of what stays there, named by a marker; "part" of what is moved out of it.

    Attributes:
        folder: where to write; it will have the same name in the target, which no other has.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, target: Path, note: str = "", kind: str = "save") -> None:
        self.target, self._kind, self._published = target, kind, False
        token = f"{kind}-{secrets.token_hex(8)}"
        self._base = target
        if not os.path.isdir(target):
            self._base = target.with_name(f".{target.name}.{token}")
            os.makedirs(self._base)
        self.folder = self._base / token
        new, self._lock = self._base / f"new-{token}", -1
        try:
            os.mkdir(new)
            # Other writers ignore a draft without an owner.
            self._lock = os.open(new / OWNER, _NEW, 0o666)
            os.write(self._lock, json.dumps(_owner(self._lock, note).__dict__).encode())
            self._born = os.fstat(self._lock).st_mtime
            os.rename(new, self.folder)
        except BaseException:
            self.folder = new
            self.abandon()
            raise

    def others(self) -> list[Owner]:
        """Returns another writer of the target; of two that begin at once, one sees the other."""
        found = [
            _at_work(folder, top, self._born)
            for folder, top in _drafts(self.target, self._kind)
            if folder != self.folder and os.path.isdir(folder) and _TOKEN.fullmatch(folder.name)
        ]
        return [owner for owner in found if owner is not None]

    def publish(self, marker: str) -> None:
        """Publishes the draft: moves its `marker` into the target.

        Raises:
            OSError: it cannot; the target is as it was.
        """
        sync(self.folder)
        sync(self._base)
        if self._base != self.target:
            os.rename(self.folder / marker, self._base / marker)
            if not _renamed(self._base, self.target):
                os.rename(self._base / marker, self.folder / marker)
                self._enter()
        if self._base == self.target:
            os.rename(self.folder / marker, self.target / marker)
        self._base, self.folder = self.target, self.target / self.folder.name
        self._published = True
        try:
            for folder in (self.target, self.target.parent):
                sync(folder)
        finally:
            self._end()

    def _end(self) -> None:
        """Marks the draft as no longer in use."""
        with contextlib.suppress(OSError):
            os.unlink(self.folder / OWNER)
        with contextlib.suppress(OSError):
            os.close(self._lock)
        self._lock = -1

    def unpack(self, marker: str) -> None:
        """Moves all files of the draft into the target, next to its other files.

        Meanwhile there is no `marker`, so that a reader does not take a part for the whole.

        Raises:
            OSError: a file cannot; the target is as it was if a folder is in the way of one.
        """
        names = sorted({*os.listdir(self.folder)} - {OWNER, marker})
        for name in (*names, marker):
            if os.path.isdir(self.target / name):
                raise IsADirectoryError(f"{self.target / name} is a folder")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._base / marker)
        for name in (*names, marker):
            os.rename(self.folder / name, self._base / name)
        sync(self._base)
        if self._base != self.target:
            remove(self.folder)
            os.rename(self._base, self.target)
            sync(self.target.parent)
        self._published = True
        self._end()
        remove(self.folder)

    def _enter(self) -> None:
        """Moves into the target, which another writer has created in the meantime."""
        inside = self.target / self.folder.name
        os.rename(self.folder, inside)
        old, self._base, self.folder = self._base, self.target, inside
        with contextlib.suppress(OSError):
            os.rmdir(old)
        sync(self.target)

    def abandon(self) -> None:
        """Removes the draft unless it is published; leaves the target unchanged."""
        if self._published:
            return
        remove(self.folder)
        if self._base != self.target:
            remove(self._base)
        self._end()

    def sweep(self, named: Callable[[], Collection[str]] = tuple) -> None:
        """Removes drafts whose writers have ended, and published folders that were replaced.

        Args:
            named: reads the marker; the names of the folders that it needs, none by default.
        """
        with contextlib.suppress(OSError):
            ended = [
                (folder, top)
                for folder, top in _drafts(self.target, self._kind)
                if folder != self.folder and _at_work(folder, top, self._born) is None
            ]
            kept = named()  # read after `ended`: a draft that is not named now never will be
            for folder, top in ended:
                if folder.name not in kept or top != folder:
                    remove(top)


def _renamed(source: Path, target: Path) -> bool:
    """Renames a folder, unless `target` exists."""
    try:
        os.rename(source, target)
    except OSError:
        if os.path.isdir(target):
            return False
        raise
    return True


def _owner(lock: int, note: str) -> Owner:
    """Returns this process as owner, after locking the file."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        machine = _machine()
    except OSError:
        machine = ""  # a file system without locks
    return Owner(machine, socket.gethostname(), os.getpid(), note)


def _machine() -> str:
    """The kernel that runs here, since it was started: containers on it share its locks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _drafts(target: Path, kind: str) -> Iterator[tuple[Path, Path]]:
    """Yields all drafts and published folders of a target, each with the folder to remove."""
    start = f".{target.name}."
    for name in os.listdir(target.parent):
        token = name.removeprefix(start)
        if name.startswith(f"{start}{kind}-") and is_draft(token):
            yield target.parent / name / token, target.parent / name
    if os.path.isdir(target):
        for name in os.listdir(target):
            if is_draft(name) and name.removeprefix("new-").startswith(f"{kind}-"):
                yield target / name, target / name


def _at_work(folder: Path, top: Path, now: float) -> Owner | None:
    """Returns the possible writer of a draft; None if the writer has ended."""
    owner = Owner("", "an unknown host", 0, "")
    try:
        handle = os.open(folder / OWNER, os.O_RDONLY | os.O_NONBLOCK)
        try:
            owner = Owner(**json.loads(os.read(handle, 1 << 16)))
            if owner.machine == _machine():
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
        finally:
            os.close(handle)
    except BlockingIOError:
        return owner
    except FileNotFoundError:
        if _TOKEN.fullmatch(folder.name) and os.path.isdir(folder):
            return None  # published, or about to be removed
    except (OSError, ValueError, TypeError, RecursionError):
        pass
    # Its writer is creating it, or died meanwhile, or its lock cannot be tested on this machine.
    return owner if now - _touched(folder, top) < _DAY else None


def _touched(folder: Path, top: Path) -> float:
    """Returns the time at which a draft was last written, by the clock of its file system."""
    times = [0.0]
    with contextlib.suppress(OSError):
        times.append(os.lstat(top).st_mtime)
        times += [os.lstat(folder / name).st_mtime for name in os.listdir(folder)]
    return max(times)

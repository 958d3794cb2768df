"""Writes and runs a program as a folder: `torchrun --nproc-per-node 4 out/program.py`.

program.py           the generated source and a training loop to edit
plan.toml, graph.txt its plan and graph
program.toml         tied names, optimizer, clipping
weights.safetensors  parameters and buffers, whole
batch.safetensors    an example batch
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import tomlkit
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from autopar.errors import ProgramError
from autopar.files.atomic import Draft, sync, write_text
from autopar.files.checked_values import Check, Fields, Number, Table, Text
from autopar.files.kinds import Kind
from autopar.runtime.executor import Executor
from autopar.runtime.generated import Generated
from autopar.runtime.module_loader import load
from autopar.runtime.ranks.agreement import compare_ranks, text_of
from autopar.runtime.ranks.shared import local_device
from autopar.runtime.runtime import Runtime
from autopar.runtime.update.optimizer import OptimizerFactory
from autopar.runtime.update.update import Training

SETTINGS = Kind("the program's settings", ProgramError, "save the program again")
MARKER = "program.toml"  # written last: a folder without it is incomplete
Content = TypeVar("Content")
MAIN = '''

def batches(example):
    """Yields whole batches, the same on every rank. Replace them by your own data."""
    for _ in range(10):
        yield example


if __name__ == "__main__":
    with open_program(__file__) as program:
        for number, batch in enumerate(batches(program.example), 1):
            loss = program.step(batch)
            if program.rank == 0:
                print(f"step {number:3}  loss {loss.item():.6f}")
'''
_IMPORT = re.compile("^from autopar.runtime.api import .*$", re.MULTILINE)


def standalone(source: str) -> str:
    """Returns the source with a training loop."""
    line = "from autopar.runtime.folder import open_program"
    lines = _IMPORT.sub(lambda match: f"{match.group()}\n{line}", source, count=1)
    return lines.rstrip() + "\n" + MAIN


def describe_optimizer(factory: OptimizerFactory) -> dict[str, Any]:
    """Returns name and keywords of a torch optimizer as data; empty for any other factory."""
    base = factory.func if isinstance(factory, functools.partial) else factory
    keywords = dict(factory.keywords) if isinstance(factory, functools.partial) else {}
    name = getattr(base, "__name__", "")
    plain = all(_plain(value) for value in keywords.values())
    if getattr(torch.optim, name, None) is not base or not plain:
        return {}
    return {"name": name, "keywords": keywords}


def _plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_plain(item) for item in value)
    return isinstance(value, (bool, int, float, str))


def write(
    folder: str | Path,
    files: Mapping[str, str],
    tensors: Mapping[str, Mapping[str, Tensor]],
    marker: str = MARKER,
) -> Path:
    """Writes a folder atomically.

    Args:
        folder: its path; files of the same names in it are replaced.
        files: name -> text.
        tensors: name -> tensors of a safetensors file.
        marker: the file that is written last.

    Returns:
        The folder.

    Raises:
        ProgramError: another job is writing there, or the folder cannot be written; it is unchanged
            then.
    """
    folder = Path(folder)
    try:
        draft = Draft(folder.absolute(), kind="part")
        try:
            if draft.others():
                raise ProgramError(
                    f"another job is saving a program to {folder}", todo="save to another place"
                )
            for name, text in files.items():
                write_text(draft.folder / name, text)
            for name, values in tensors.items():
                # Tied tensors share storage, which safetensors refuses.
                apart = {k: v.detach().cpu().clone() for k, v in values.items()}
                save_file(apart, draft.folder / name)
                sync(draft.folder / name)
            draft.unpack(marker if marker in files else next(iter(files)))
        finally:
            draft.abandon()
        draft.sweep()
    except (OSError, SafetensorError) as error:
        todo = "make room, or name another folder"
        raise ProgramError(
            f"cannot write the program to {folder}", why=str(error), todo=todo
        ) from error
    return folder


def settings(tied: Mapping[str, str], training: Training) -> str:
    """The text of program.toml."""
    document = tomlkit.document()
    for name in ("clip_norm", "ema", "on_nonfinite"):
        if getattr(training, name) is not None:
            document[name] = getattr(training, name)
    described = describe_optimizer(training.optimizer)
    if not described:
        document.add(tomlkit.comment("the optimizer was none of torch.optim with plain arguments"))
    document["optimizer"] = described or {"name": "AdamW", "keywords": {}}
    document["tied"] = dict(tied)
    if all(_plain(value) for given in training.options.values() for value in given.values()):
        document["options"] = {name: dict(given) for name, given in training.options.items()}
    else:
        document.add(tomlkit.comment("the options of groups of parameters were no plain values"))
    return tomlkit.dumps(document)


class OpenProgram:
    """A saved program on this device.

    Attributes:
        rank: rank of this process.
        example: the example batch.
        executor: runs the program.
    """

    def __init__(self, folder: Path) -> None:
        with unchanged(folder):
            self._open(folder)

    def _open(self, folder: Path) -> None:
        settings = open_settings(folder / MARKER)
        source = read(folder / "program.py", read_text)
        compare_ranks({"program.py": source, "program.toml": text_of(settings)})
        program = Generated.of(load(source, str(folder / "program.py")))
        runtime = Runtime(program.mesh, local_device(program.mesh))
        self.rank = runtime.rank
        self.example = read(folder / "batch.safetensors", load_file)
        self.executor = Executor(
            program,
            runtime,
            read(folder / "weights.safetensors", load_file),
            training_of(settings, folder),
            tied=settings.get("tied", {}),
        )

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Runs one training step; returns the loss."""
        return self.executor.step(batch)

    def close(self) -> None:
        """Releases the program's threads, descriptors and process groups."""
        self.executor.close()


def open_settings(path: Path) -> dict[str, Any]:
    """Reads program.toml; raises ProgramError if it is missing or an entry is malformed."""
    read(path, lambda path: path)
    fields = Fields(SETTINGS.toml(SETTINGS.text(path), str(path)), ProgramError, str(path))
    tables: dict[str, Check] = {"optimizer": _optimizer, "tied": Table(Text()), "options": _options}
    settings = {name: fields.take(name, check, {}) for name, check in tables.items()}
    bounds = {"clip_norm": Number(above=True), "ema": Number(0, 1)}
    settings |= {name: fields.take(name, check, None) for name, check in bounds.items()}
    policies = Text(known=("raise", "skip", "continue"))
    settings["on_nonfinite"] = fields.take("on_nonfinite", policies, "raise")
    fields.end()
    return settings


def _optimizer(table: Any) -> dict[str, Any]:
    fields = Fields(table, ProgramError, "the optimizer")
    settings = {
        "name": fields.take("name", Text()),
        "keywords": fields.take("keywords", _plains, {}),
    }
    fields.end()
    return settings


def _options(table: Any) -> dict[str, Any]:
    return Table(_plains)(table)


def _plains(table: Any) -> dict[str, Any]:
    """Returns keywords with plain values; raises ValueError for others."""
    keywords = Table(lambda value: value)(table)
    if not all(map(_plain, keywords.values())):
        raise ValueError("plain values are expected")
    return keywords


def optimizer_of(settings: Mapping[str, Any], folder: Path) -> OptimizerFactory:
    """Returns the optimizer that program.toml names; raises ProgramError if it is unknown."""
    chosen = settings.get("optimizer") or {"name": "AdamW"}
    kind = getattr(torch.optim, chosen["name"], None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ProgramError(f"torch.optim has no {chosen['name']!r}", where=str(folder))
    return functools.partial(kind, **chosen.get("keywords", {}))


def training_of(settings: Mapping[str, Any], folder: Path) -> Training:
    """Returns the training settings of program.toml; raises the errors of `optimizer_of`."""
    return Training(
        optimizer_of(settings, folder),
        settings.get("clip_norm"),
        settings.get("options", {}),
        settings.get("ema"),
        settings.get("on_nonfinite", "raise"),
    )


def read(path: Path, reader: Callable[[Path], Content]) -> Content:
    """Reads a file of a saved program; raises ProgramError if it is missing or damaged."""
    if not path.exists():
        if path.suffix != ".safetensors":
            raise ProgramError(f"{path} is missing", todo="save the program again")
        raise ProgramError(
            f"{path} is missing",
            why="a program emitted from a plan alone has neither weights nor data",
            todo="save them there with safetensors, with the names in program.py",
        )
    try:
        return reader(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise ProgramError(f"{path} cannot be read", why=str(error)) from error


@contextmanager
def unchanged(folder: Path, marker: str = MARKER) -> Iterator[None]:
    """Returns a context for reading a program; raises ProgramError if another save replaces it."""

    def version() -> tuple[int, int]:
        try:
            about = (folder / marker).stat()
        except OSError:
            return 0, 0
        return about.st_ino, about.st_mtime_ns

    before = version()
    yield
    if version() != before:
        raise ProgramError(
            f"{folder} was replaced while it was opened",
            why="the files that were read belong to different saves",
            todo="start again",
        )


def read_text(path: Path) -> str:
    """Reads a text file."""
    return path.read_text(encoding="utf-8")


@contextmanager
def open_program(file: str) -> Iterator[OpenProgram]:
    """Opens the program that `file` belongs to, in the process group that torchrun describes.

    Raises:
        ProgramError: a file of the folder is missing or damaged.
        MeshError: the number of processes differs from the mesh's number of devices.
    """
    with processes(), closing(OpenProgram(Path(file).parent)) as program:
        yield program


@contextmanager
def processes() -> Iterator[None]:
    """Returns a context with torchrun's process group, unless there is one already."""
    started = not dist.is_initialized() and dist.is_torchelastic_launched()
    if started:
        join_process_group()
    try:
        yield
    finally:
        if started:
            dist.destroy_process_group()


def join_process_group() -> None:
    """Joins the processes that torchrun started: nccl with one device each, or gloo on the CPU."""
    if torch.cuda.is_available():
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_node_local_rank())
    else:
        dist.init_process_group("gloo")

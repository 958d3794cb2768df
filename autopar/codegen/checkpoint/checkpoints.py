"""Saving and loading the checkpoints of a program, on all of its ranks together."""

from __future__ import annotations

import base64
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from autopar.codegen.checkpoint import index as folder
from autopar.codegen.checkpoint.held import Holder, OptimizerState, optimizer_parts
from autopar.codegen.checkpoint.index import Index
from autopar.codegen.checkpoint.names import Names
from autopar.codegen.checkpoint.plans import Part, ReadPlanner, SavePlanner, Snapshot
from autopar.codegen.checkpoint.storage import Reader, Writer
from autopar.codegen.checkpoint.values import decode, encode
from autopar.codegen.checkpoint.weights import deal, weights_index
from autopar.codegen.processes import from_first_rank
from autopar.errors import AutoparError, CheckpointError, StateError
from autopar.ir.capture import Captured


class Scheduler(Protocol):
    """A learning-rate scheduler, as those of torch."""

    def state_dict(self) -> dict[str, Any]:
        """What it needs to go on."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""


class Saving:
    """A checkpoint that is being written, or is.

    Attributes:
        path: where it is to be.
    """

    def __init__(self, path: Path, future: Future[None]) -> None:
        self.path, self._future = path, future

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Path:
        """Wait until every rank has written its part; the folder.

        Raises:
            CheckpointError: it was not written; what was there before still is.
            TimeoutError: `timeout` seconds were not enough.
        """
        self._future.result(timeout)
        return self.path


class Checkpoints:
    """The checkpoints of one program on this rank; all ranks make the same calls.

    Args:
        holder: what runs the program.
        names: of its parameters and buffers.
        constants: values of what no state_dict holds, for a program without weights.
    """

    @classmethod
    def of(cls, model: nn.Module, captured: Captured, holder: Holder) -> Checkpoints:
        """The checkpoints of a program that was captured from a model."""
        persistent = tuple(model.state_dict())
        constants = {k: v for k, v in captured.buffers.items() if k not in persistent}
        tied = {k: v for k, v in captured.parameter_names.items() if k != v}
        others = frozenset(dict(model.named_buffers())) - frozenset(persistent)
        return cls(holder, Names(persistent, tied, others), constants)

    def __init__(self, holder: Holder, names: Names, constants: Mapping[str, Tensor]) -> None:
        self.holder, self.names, self._constants = holder, names, constants
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._made: dist.ProcessGroup | None = None

    # Saving --------------------------------------------------------------------------------------

    def save(
        self,
        path: Path,
        *,
        scheduler: Scheduler | None = None,
        values: Any = None,
        asynchronous: bool = False,
    ) -> Saving:
        """Write a checkpoint; see `Program.save_checkpoint`."""
        self._wait()
        path = path.absolute()
        with self.holder.watch:
            group = self._group()
            snapshot = self._attempt(scheduler, values, asynchronous)
            if not asynchronous:
                self._write(path, snapshot, group)
                future: Future[None] = Future()
                future.set_result(None)
                return Saving(path, future)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "autopar-checkpoint")
        self._last = self._thread.submit(self._write, path, snapshot, group)
        return Saving(path, self._last)

    def _attempt(
        self, scheduler: Scheduler | None, values: Any, copied: bool
    ) -> Snapshot | AutoparError:
        """What this rank has to save, or why it cannot: the other ranks wait to hear of it."""
        try:
            snapshot = self._snapshot(scheduler, values)
            return snapshot.copied() if copied else snapshot
        except AutoparError as error:
            return error
        except Exception as error:  # a scheduler may be the user's code and raise anything
            return CheckpointError(
                "the state of the program cannot be taken", why=f"{type(error).__name__}: {error}"
            )

    def _snapshot(self, scheduler: Scheduler | None, values: Any) -> Snapshot:
        """What this rank has to save, as it is now."""
        holder, names = self.holder, self.names
        if not holder.loaded:
            raise StateError("the program has no weights to save", todo="load some first")
        parts = [
            Part(f"{names.kind(h.name)}.{h.name}", h.tensor, h.box, h.shape)
            for h in holder.held
            if h.first and names.kind(h.name)
        ]
        parts += [
            Part(f"ema.{h.name}", h.average, h.updated_box, h.shape)
            for h in holder.held
            if h.first and h.average is not None
        ]
        states, optimizer = optimizer_parts(holder.update.optimizer, holder.held)
        details = {
            "names": [n for n in names.persistent if names.tied.get(n, n) in holder.shapes],
            "tied": dict(names.tied),
            "scheduler": None
            if scheduler is None
            else encode(scheduler.state_dict(), "the scheduler"),
            "values": encode(values, "values"),
            "update": encode(holder.update.state_dict(), "the scale of the loss"),
            # The other ranks follow the first one's; see `codegen/random.py`.
            "random": base64.b64encode(bytes(torch.get_rng_state().numpy())).decode(),
        }
        return Snapshot([*parts, *states], optimizer, details)

    def _write(
        self, path: Path, snapshot: Snapshot | AutoparError, group: dist.ProcessGroup | None
    ) -> None:
        with _named(f"the checkpoint {path} was not saved"), _quiet(group):
            try:
                save(
                    {},
                    storage_writer=Writer(path),
                    planner=SavePlanner(snapshot),
                    process_group=group,
                    no_dist=group is None,
                )
            except CheckpointException:
                if group is None or dist.get_rank() == 0:
                    folder.abandon(path)  # every rank has stopped writing
                raise

    def _wait(self) -> None:
        """Until the last save has ended, well or not: its handle says how."""
        if self._last is not None:
            self._last.exception()
            self._last = None

    def _group(self) -> dist.ProcessGroup | None:
        """A group of all ranks for objects and host memory, none for a process alone."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        if self._made is None:
            self._made = dist.new_group(backend="gloo")
        return self._made

    # Loading -------------------------------------------------------------------------------------

    def load(self, path: Path, *, scheduler: Scheduler | None = None) -> Any:
        """Go on from a checkpoint; see `Program.load_checkpoint`."""
        self._wait()
        with self.holder.watch:
            return self._go_on(path.absolute(), scheduler)

    def _go_on(self, path: Path, scheduler: Scheduler | None) -> Any:
        where, index = from_first_rank(lambda: folder.read(path))
        details = index.details
        if scheduler is not None and details["scheduler"] is None:
            raise CheckpointError(
                f"the checkpoint {path} has no scheduler", todo="save it with scheduler=..."
            )
        matches = self.names.match(self.holder.shapes, index.under("model"), str(path))
        states: list[OptimizerState] = []

        def wanted() -> list[Part]:
            states.append(OptimizerState(self.holder.update.optimizer, self.holder.held, index))
            own = self._parts(index, matches, "model.")
            return [*own, *self._averages(index, matches), *states[0].parts]

        self._read(where, index, wanted)
        if not index.under("ema"):
            self.holder.update.restart()
        self.holder.update.load_state_dict(decode(details.get("update", {})))
        for state in states:
            state.give()
        if scheduler is not None:
            scheduler.load_state_dict(decode(details["scheduler"]))
        random = bytearray(base64.b64decode(details["random"]))
        torch.set_rng_state(torch.frombuffer(random, dtype=torch.uint8))
        return decode(details["values"])

    def load_weights(
        self, source: Path | Mapping[str, Tensor], rename: Callable[[str], str] = str
    ) -> None:
        """Take parameters and buffers only; see `Program.load_weights`."""
        self._wait()
        with self.holder.watch:
            self._load_weights(source, rename)
            self.holder.update.restart()

    def _load_weights(
        self, source: Path | Mapping[str, Tensor], rename: Callable[[str], str]
    ) -> None:
        if isinstance(source, Mapping):
            self._fill({})
            deal(source, self.holder, self.names, self._group(), rename)
            self.holder.refresh()
            self.holder.loaded = True
        else:
            self._take(source.absolute(), rename)

    def _take(self, path: Path, rename: Callable[[str], str]) -> None:
        where, index, prefix = from_first_rank(lambda: weights_index(path))
        stored = index.under("model") if prefix else index.tensors
        matches = self.names.match(
            self.holder.shapes, stored, str(path), strict=bool(prefix), rename=rename
        )
        self._read(where, index, lambda: self._parts(index, matches, prefix))

    def _parts(self, index: Index, matches: Mapping[str, str], prefix: str) -> list[Part]:
        """Where the parameters and buffers of this rank go that the folder has."""
        parts = []
        for h in self.holder.held:
            name = f"{prefix}{matches[h.name]}" if h.name in matches else f"buffer.{h.name}"
            stored = index.tensors.get(name)
            if h.name in matches or (stored is not None and stored.shape == h.shape):
                parts.append(Part(name, h.tensor, h.box, h.shape))
        return parts

    def _averages(self, index: Index, matches: Mapping[str, str]) -> list[Part]:
        """Where the averages of this rank's parameters go, if the folder has them."""
        return [
            Part(f"ema.{matches[h.name]}", h.average, h.updated_box, h.shape)
            for h in self.holder.held
            if h.average is not None and f"ema.{matches[h.name]}" in index.tensors
        ]

    @torch.no_grad()
    def _read(self, path: Path, index: Index, wanted: Callable[[], list[Part]]) -> None:
        """Read what each rank wants; nothing is overwritten before all of it is checked."""
        group = self._group()
        rank, world = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
        reader = Reader(path, index, rank, world)
        try:
            self._fill(index.tensors)
            _load(reader, wanted, group)
            self.holder.refresh()
        except BaseException:
            if reader.began:
                self.holder.loaded = False  # some of it is the old, some the new
            raise
        self.holder.loaded = True

    @torch.no_grad()
    def _fill(self, stored: Container[str]) -> None:
        """Give a program without weights what no state_dict holds; `stored` has some of it.

        Raises:
            StateError: on every rank, if the model on the meta device has not got it either.
        """
        if self.holder.loaded:
            return
        lacking = [
            name
            for name, value in self._constants.items()
            if value.is_meta and name in self.holder.shapes and f"buffer.{name}" not in stored
        ]
        if lacking:
            raise StateError(
                f"the program has no value of {', '.join(lacking)}",
                why="a state_dict leaves it out, and on the meta device the model has none",
                todo="make it persistent, or compile a model that has weights",
            )
        for h in self.holder.held:
            value = self._constants.get(h.name)
            if value is not None and not value.is_meta:
                h.tensor.copy_(value[h.box.slices])


def read_alone(path: Path, index: Index, parts: list[Part]) -> None:
    """Read parts of a checkpoint in this process, whatever others there are."""
    _load(Reader(path, index), lambda: parts, None)


def _load(
    reader: Reader, wanted: Callable[[], list[Part]], group: dist.ProcessGroup | None
) -> None:
    with _named(f"the checkpoint {reader.path} was not loaded"), _quiet(group):
        load(
            {},
            storage_reader=reader,
            planner=ReadPlanner(wanted),
            process_group=group,
            no_dist=group is None,
        )


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Errors of torch's checkpoints, or of a rank that is lost, as errors with a name."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise _of_rank(what, rank, cause) from error
    except (RuntimeError, dist.DistError) as error:
        raise CheckpointError(
            what, why=f"the ranks lost one another: {error}", todo="look for the first that failed"
        ) from error


def _of_rank(what: str, rank: int, cause: BaseException) -> AutoparError:
    """What every rank raises where `rank` failed."""
    if isinstance(cause, AutoparError):
        where = f"rank {rank}, {cause.where}" if cause.where else f"rank {rank}"
        return type(cause)(cause.what, where=where, why=cause.why, todo=cause.todo)
    return CheckpointError(what, where=f"rank {rank}", why=f"{type(cause).__name__}: {cause}")


@contextmanager
def _quiet(group: dist.ProcessGroup | None) -> Iterator[None]:
    """torch warns where there is no process group, which is no fault of one process."""
    if group is not None:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
        yield

"""Saves and loads the checkpoints of a program, on all of its ranks together."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import AutoparError, CheckpointError, StateError
from autopar.runtime.checkpoint import publish
from autopar.runtime.checkpoint.contents import check_finite
from autopar.runtime.checkpoint.dcp import ranks_lost, read_parts, write_parts
from autopar.runtime.checkpoint.foreign_weights import ADAPTER, deal, weights_index
from autopar.runtime.checkpoint.handover import exchange, shared_index
from autopar.runtime.checkpoint.holder import Holder, Stateful, fill, loader_state, saved_loader
from autopar.runtime.checkpoint.index import Index
from autopar.runtime.checkpoint.plans import Part, SavePlanner, Snapshot
from autopar.runtime.checkpoint.safetensors_files import Reader, Writer
from autopar.runtime.checkpoint.saved_states import states_of
from autopar.runtime.checkpoint.saving import Saving, taking
from autopar.runtime.checkpoint.tensor_names import Names, Published, of_adapter
from autopar.runtime.checkpoint.values import decode, encode, random_state_of, random_state_text
from autopar.runtime.ranks.processes import from_first_rank
from autopar.runtime.ranks.shared import Lease, Peers


class Checkpoints:
    """The checkpoints of one program on this rank; all ranks make the same calls.

    Args:
        holder: the object that runs the program.
        names: names of its parameters and buffers.
        constants: values of buffers that no state_dict has, for a program without weights.
    """

    @classmethod
    def of(
        cls,
        model: nn.Module,
        holder: Holder,
        buffers: Mapping[str, Tensor],
        aliases: Mapping[str, str],
        published: Published = dict,
    ) -> Checkpoints:
        """Returns the checkpoints of a program that was captured from a model.

        Args:
            model: the model.
            holder: the object that runs the program.
            buffers: its buffers and constants.
            aliases: every name of every parameter -> the name under which it is stored.
            published: see `Names`.
        """
        persistent = tuple(model.state_dict())
        constants = {k: v for k, v in buffers.items() if k not in persistent}
        tied = {k: v for k, v in aliases.items() if k != v}
        others = frozenset(dict(model.named_buffers())) - frozenset(persistent)
        return cls(holder, Names(persistent, tied, others, published), constants)

    def __init__(self, holder: Holder, names: Names, constants: Mapping[str, Tensor]) -> None:
        self.holder, self.names, self._constants = holder, names, constants
        self._thread: ThreadPoolExecutor | None = None
        self._last: Saving | None = None
        self._lease: Lease | None = None

    # Saving --------------------------------------------------------------------------------------

    def save(
        self,
        path: Path,
        *,
        scheduler: Stateful | None = None,
        loader: Stateful | None = None,
        values: Any = None,
        asynchronous: bool = False,
        allow_nonfinite: bool = False,
    ) -> Saving:
        """Writes a checkpoint; see `Session.save_checkpoint`."""
        path = path.absolute()
        future: Future[None] = Future()
        with ranks_lost(f"the checkpoint {path} was not saved"), self.holder.watch:
            group = self._group()
            self._settle(group)
            snapshot = self._attempt(
                partial(self._snapshot, scheduler, loader, values), asynchronous, allow_nonfinite
            )
            if not asynchronous:
                write_parts(Writer(path), SavePlanner(snapshot), group)
                future.set_result(None)
                return Saving(path, future, self.holder.watch)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "autopar-checkpoint")
        future = self._thread.submit(write_parts, Writer(path), SavePlanner(snapshot), group)
        self._last = Saving(path, future, self.holder.watch)
        return self._last

    def close(self, agreed: bool = True) -> None:
        """Waits for a running save, and releases its resources; all ranks call it.

        Args:
            agreed: whether all ranks can compare how the save ended; after an error they may not.

        Raises:
            CheckpointError: an asynchronous save failed, and its result was not requested.
        """
        try:
            if agreed and (self._last or self._lease):
                with ranks_lost("the last checkpoint was not saved"), self.holder.watch:
                    self._settle(self._group())
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=agreed)
                self._thread = None
            if self._lease is not None:
                self._lease.close()

    def _settle(self, group: dist.ProcessGroup | None) -> None:
        """Waits for the last save; raises its error on all ranks unless already raised."""
        last, self._last = self._last, None
        error = None if last is None else last.unheard()
        if error is not None and not isinstance(error, AutoparError):
            raise error  # a rank is lost, so that the ranks cannot agree
        errors = [error]
        if group is not None:
            errors = [None] * dist.get_world_size()
            dist.all_gather_object(errors, error, group=group)
        for unheard in errors:
            if unheard is not None:
                raise unheard

    def snapshot(self) -> Snapshot:
        """Returns a copy of all that this rank holds, in host memory; all ranks call it.

        Raises:
            StateError: the program has no weights.
            CheckpointError: the optimizer has a state that cannot be copied, or an asynchronous
                save failed and nobody has asked for it.
        """
        self._settle(self._group())
        self.holder.drain()
        return self._snapshot().copied()

    def _attempt(
        self, take: Callable[[], Snapshot], copied: bool, allow_nonfinite: bool
    ) -> Snapshot | AutoparError:
        """Returns this rank's snapshot, or the error that the other ranks must learn of."""
        try:
            snapshot = take()
            if not allow_nonfinite:
                check_finite(self.holder.update.optimizer, self.holder.held)
            return snapshot.copied() if copied else snapshot
        except AutoparError as error:
            return error
        except Exception as error:  # a scheduler or loader may be user code and raise anything
            return CheckpointError(
                "the state of the program cannot be read", why=f"{type(error).__name__}: {error}"
            )

    def _snapshot(
        self,
        scheduler: Stateful | None = None,
        loader: Stateful | None = None,
        values: Any = None,
    ) -> Snapshot:
        """Returns this rank's current state."""
        holder, names = self.holder, self.names
        if not holder.loaded:
            raise StateError("the program has no weights to save", todo="load some first")
        parts = [
            Part(f"{names.kind(h.name)}.{h.name}", h.tensor, h.box, h.shape)
            for h in holder.held
            if h.first and names.kind(h.name)
        ]
        values_of_states: dict[str, Any] = {}
        for state in states_of(holder):
            own, more = state.saved()
            parts += own
            values_of_states |= more
        details = {
            "names": [n for n in names.persistent if names.tied.get(n, n) in holder.shapes],
            "tied": dict(names.tied),
            "scheduler": scheduler and encode(scheduler.state_dict(), "the scheduler"),
            "loader": saved_loader(loader, holder.part),
            "values": encode(values, "values"),
            # The other ranks follow the first one's generator; see `runtime/random.py`.
            "random": random_state_text(torch.get_rng_state()),
            **values_of_states,
        }
        if holder.independent is not None:
            parts = holder.independent.saved(parts)
            details["outer"] = encode(holder.independent.details(), "the rounds")
        return Snapshot(parts, details)

    def _group(self) -> dist.ProcessGroup | None:
        """Returns a group of all ranks for objects and host memory, None for a single process."""
        peers = Peers.here()
        if peers.everyone is None:
            return None
        if self._lease is None:
            # A separate group, since saving runs in another thread than the training calls.
            self._lease = peers.own("checkpoints", backend="gloo")
        return self._lease.channels[0].handle

    # Loading -------------------------------------------------------------------------------------

    def load(
        self, path: Path, *, scheduler: Stateful | None = None, loader: Stateful | None = None
    ) -> Any:
        """Continues from a checkpoint; see `Session.load_checkpoint`."""
        path = path.absolute()
        with ranks_lost(f"the checkpoint {path} was not loaded"), self.holder.watch:
            self._settle(self._group())
            self.holder.drain()
            return publish.reading(
                lambda: from_first_rank(lambda: publish.read(path)),
                lambda index: self._go_on(path, index, scheduler, loader),
            )

    def _go_on(
        self, path: Path, index: Index, scheduler: Stateful | None, loader: Stateful | None
    ) -> Any:
        if scheduler is not None and index.details["scheduler"] is None:
            raise CheckpointError(
                f"the checkpoint {path} has no scheduler", todo="save it with scheduler=..."
            )
        random = random_state_of(index.details["random"])
        values = decode(index.details["values"])
        rates = decode(index.details["scheduler"])
        position = None if loader is None else loader_state(index, self.holder.part)
        self._take_state(index, str(path), partial(self._read, path, index))
        if scheduler is not None:
            with taking("the scheduler"):
                scheduler.load_state_dict(rates)
        if loader is not None and position is not None:
            with taking("the loader"):
                loader.load_state_dict(position)
        torch.set_rng_state(random)
        return values

    def take(self, snapshot: Snapshot) -> None:
        """Continues from the state of another program of the same model; all ranks call it.

        Args:
            snapshot: snapshot of this rank, from `snapshot` of the other program's checkpoints.

        Raises:
            CheckpointError: it is of another model or optimizer.
        """
        group = self._group()
        index = shared_index(snapshot, group)

        def receive(wanted: Callable[[], list[Part]]) -> None:
            self._fill(index.tensors)
            exchange(snapshot, index, wanted(), group)
            self.holder.refresh()
            self.holder.loaded = True

        self._take_state(index, "the program before", receive)

    def _take_state(
        self, index: Index, where: str, read: Callable[[Callable[[], list[Part]]], None]
    ) -> None:
        """Gives the program the state that an index describes.

        Args:
            index: index of a checkpoint, or of another program's state.
            where: its name in errors.
            read: fills the parts that this rank needs.
        """
        matches = self.names.match(self.holder.shapes, index.under("model"), where)
        states, independent = states_of(self.holder), self.holder.independent

        def wanted() -> list[Part]:
            parts = self._parts(index, matches, "model.")
            parts += [part for state in states for part in state.wanted(index, matches)]
            return parts if independent is None else independent.wanted(parts, index)

        read(wanted)
        for state in reversed(states):
            state.give()
        if independent is not None:
            with taking("the rounds"):
                independent.take(decode(index.details.get("outer")))

    def load_weights(
        self,
        source: Path | Mapping[str, Tensor],
        rename: Callable[[str], str] = str,
        strict: bool = True,
    ) -> list[str]:
        """Loads only parameters and buffers; see `Session.load_weights`."""
        with ranks_lost("the weights were not loaded"), self.holder.watch:
            self._settle(self._group())
            self.holder.drain()
            matches = self._load_weights(source, rename, strict)
            for state in states_of(self.holder):
                state.restart()
            if self.holder.independent is not None:
                self.holder.independent.take(None)
        kept = (name for name in self.holder.shapes if self.names.kind(name) == "model")
        return [name for name in kept if name not in self.names.tied and name not in matches]

    def _load_weights(
        self, source: Path | Mapping[str, Tensor], rename: Callable[[str], str], strict: bool
    ) -> Mapping[str, str]:
        adapter = not isinstance(source, Mapping) and from_first_rank((source / ADAPTER).exists)
        if not self.holder.loaded and (adapter or not strict):
            raise CheckpointError(
                "some of the weights cannot be loaded before all of them",
                why="the program has no weights yet, so what is missing would have no value",
                todo="load the whole model first",
            )
        if isinstance(source, Mapping):
            self._fill({})
            matches = deal(source, self.holder, self.names, self._group(), rename, strict)
            self.holder.refresh()
            self.holder.loaded = True
            return matches
        return self._take(source.absolute(), rename, strict, adapter)

    def _take(
        self, path: Path, rename: Callable[[str], str], strict: bool, adapter: bool
    ) -> Mapping[str, str]:
        rename = of_adapter(rename) if adapter else rename
        found: dict[str, str] = {}

        def use(contents: tuple[Path, Index, str]) -> None:
            where, index, prefix = contents
            stored = index.under("model") if prefix else index.tensors
            matches = self.names.match(
                self.holder.shapes, stored, str(path), strict=bool(prefix) or adapter,
                partial=adapter or not strict, rename=rename,
            )  # fmt: skip
            found.update(matches)
            self._read(where, index, lambda: self._parts(index, matches, prefix))

        published = self.names.published if rename is str else dict
        publish.reading(lambda: from_first_rank(lambda: weights_index(path, published)), use)
        return found

    def _parts(self, index: Index, matches: Mapping[str, str], prefix: str) -> list[Part]:
        """Returns the destinations of this rank's parameters and buffers that the folder has."""
        parts = []
        for h in self.holder.held:
            name = f"{prefix}{matches[h.name]}" if h.name in matches else f"buffer.{h.name}"
            stored = index.tensors.get(name)
            if h.name in matches or (stored is not None and stored.shape == h.shape):
                parts.append(Part(name, h.tensor, h.box, h.shape))
        return parts

    @torch.no_grad()
    def _read(self, path: Path, index: Index, wanted: Callable[[], list[Part]]) -> None:
        """Reads the parts that each rank wants; nothing is overwritten before all are checked."""
        group = self._group()
        rank, world = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
        reader = Reader(path, index, rank, world)
        try:
            self._fill(index.tensors)
            read_parts(reader, wanted, group)
            self.holder.refresh()
        except BaseException:
            if reader.began:
                self.holder.loaded = False  # a mixture of old and new values
            raise
        self.holder.loaded = True

    @torch.no_grad()
    def _fill(self, stored: Container[str]) -> None:
        """Sets buffers of a program without weights that no state_dict has and `stored` lacks.

        Raises:
            StateError: on every rank, if the model on the meta device has no values either.
        """
        fill(self.holder, self._constants, stored)

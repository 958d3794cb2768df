"""The methods of a session that save and load."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from autopar.runtime.checkpoint.checkpoints import Checkpoints
from autopar.runtime.checkpoint.holder import Stateful
from autopar.runtime.checkpoint.saving import Saving


class Checkpointed(ABC):
    """Saves state, and loads it under any other plan, mesh or world size."""

    @abstractmethod
    def _checkpoints(self) -> Checkpoints:
        """Returns the checkpoints of the program; raises ProgramError before the first batch."""

    def save_checkpoint(
        self,
        path: str | Path,
        *,
        scheduler: Stateful | None = None,
        loader: Stateful | None = None,
        values: Any = None,
        asynchronous: bool = False,
        allow_nonfinite: bool = False,
    ) -> Saving:
        """Writes everything needed to continue; every rank calls it and writes its own part.

        This covers parameters, buffers, the optimizer's state and options, and the state of torch's
        random numbers. An existing checkpoint of the same model at `path` is replaced when the new
        one is complete; several jobs may save to one path, and the last to finish counts.

        Args:
            path: a folder that all machines see.
            scheduler: a learning-rate scheduler to save too.
            loader: a data loader to save too, such as torchdata's StatefulDataLoader; the state of
                every rank's own.
            values: further values of plain Python types, equal on every rank: numbers, strings,
                bytes, None, lists, tuples, mappings, small tensors. The first rank's are saved.
            asynchronous: return when host memory has a copy of this rank's part, and write it while
                training continues.
            allow_nonfinite: also save parameters that are NaN or infinite.

        Returns:
            A handle whose `result()` waits for the end and returns the folder; without
            `asynchronous` the save has already ended.

        Raises:
            CheckpointError: on every rank, also if only one cannot write; the content of `path` is
                unchanged. A parameter is not finite, or `path` is not a checkpoint of this model.
                With `asynchronous`, `result()` raises it, or else the next save or load.
            RankFailedError: another rank was lost; the content of `path` is unchanged.
            ProgramError: before the first batch.
            StateError: the program has no weights yet.
        """
        return self._checkpoints().save(
            Path(path),
            scheduler=scheduler,
            loader=loader,
            values=values,
            asynchronous=asynchronous,
            allow_nonfinite=allow_nonfinite,
        )

    def load_checkpoint(
        self,
        path: str | Path,
        *,
        scheduler: Stateful | None = None,
        loader: Stateful | None = None,
    ) -> Any:
        """Continues from a checkpoint of the same model, whatever plan it was saved under.

        Every rank reads only its own part, and nothing is executed. The losses that follow are
        those of the saved run; torch's CPU generator is set accordingly.

        Args:
            path: a folder that `save_checkpoint` wrote.
            scheduler: a learning-rate scheduler to restore too.
            loader: a data loader to restore too; batches must have as many parts as when it was
                saved.

        Returns:
            The `values` that were saved.

        Raises:
            CheckpointError: on every rank: there is none, it is incomplete or damaged, or it
                belongs to another model or optimizer. The program is unchanged, unless reading
                itself fails: then it has no weights until the next load.
            ProgramError: before the first batch.
        """
        return self._checkpoints().load(Path(path), scheduler=scheduler, loader=loader)

    def load_weights(
        self,
        source: str | Path | Mapping[str, Tensor],
        *,
        rename: Callable[[str], str] = str,
        strict: bool = True,
    ) -> list[str]:
        """Loads only parameters and buffers; no rank holds more than its part of them.

        Of a folder that PEFT wrote, whose names lack that of the adapter, it loads the adapter and
        leaves the model's own weights as they are.

        Args:
            source: a folder of safetensors such as Hugging Face's, one such file, a checkpoint, or
                the model's state_dict on the first rank (ignored on the others).
            rename: maps a name of the state_dict to the name in `source`.
            strict: whether all of the model's tensors must be in `source`. Otherwise those that are
                missing keep their values.

        Returns:
            The names of the tensors that kept their values.

        Raises:
            CheckpointError: on every rank, if it does not fit the model or cannot be read; or if
                `strict` is off, and the program has no weights yet that could stay.
            ProgramError: before the first batch.
        """
        return self._checkpoints().load_weights(
            source if isinstance(source, Mapping) else Path(source), rename, strict
        )

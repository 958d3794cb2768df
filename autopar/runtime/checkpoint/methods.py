"""The methods of a program that save and load."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from autopar.runtime.checkpoint.checkpoints import Checkpoints, Scheduler
from autopar.runtime.checkpoint.saving import Saving


class Checkpointed(ABC):
    """A program whose state can be saved, and loaded under any other plan, mesh or world size."""

    @abstractmethod
    def _checkpoints(self) -> Checkpoints:
        """Those of the program; ProgramError before the first batch."""

    def save_checkpoint(
        self,
        path: str | Path,
        *,
        scheduler: Scheduler | None = None,
        values: Any = None,
        asynchronous: bool = False,
        allow_nonfinite: bool = False,
    ) -> Saving:
        """Write all that a run needs to go on; every rank calls it and writes its own part.

        Parameters, buffers, the optimizer's state and options, and the state of torch's random
        numbers. A checkpoint of the same model that is at `path` already is replaced when the new
        one is whole; several jobs may save to one path, and the last to end counts.

        Args:
            path: a folder that all machines see.
            scheduler: a learning-rate scheduler to save too.
            values: further values of plain Python types, alike on every rank: numbers, texts, None,
                lists, tuples, mappings, small tensors. The first rank's are kept.
            asynchronous: return when host memory has a copy of this rank's part, and write it while
                training goes on.
            allow_nonfinite: save parameters that are NaN or infinite, too.

        Returns:
            A handle whose `result()` waits for the end and gives the folder; without
            `asynchronous` it has ended.

        Raises:
            CheckpointError: on every rank, also if one alone cannot write; what was at `path` is as
                it was: a parameter that is not finite, anything but a checkpoint of this model.
                With `asynchronous`, `result()` raises it, or the next save or load if nobody asked.
            RankFailedError: another rank was lost; what was at `path` is as it was.
            ProgramError: before the first batch.
            StateError: the program has no weights yet.
        """
        return self._checkpoints().save(
            Path(path),
            scheduler=scheduler,
            values=values,
            asynchronous=asynchronous,
            allow_nonfinite=allow_nonfinite,
        )

    def load_checkpoint(self, path: str | Path, *, scheduler: Scheduler | None = None) -> Any:
        """Go on from a checkpoint of the same model, whatever plan it was saved under.

        Every rank reads its own part only, and nothing of it is executed. The losses that follow
        are those of the run that was saved; torch's CPU generator is set for that.

        Args:
            path: a folder that `save_checkpoint` wrote.
            scheduler: a learning-rate scheduler that goes on too.

        Returns:
            The `values` that were saved.

        Raises:
            CheckpointError: on every rank: there is none, it is not whole or damaged, or it is of
                another model or optimizer. The program is as it was, unless reading itself fails:
                then it has no weights until the next load.
            ProgramError: before the first batch.
        """
        return self._checkpoints().load(Path(path), scheduler=scheduler)

    def load_weights(
        self,
        source: str | Path | Mapping[str, Tensor],
        *,
        rename: Callable[[str], str] = str,
    ) -> None:
        """Take parameters and buffers only; no rank holds more than its part of them.

        Args:
            source: a folder of safetensors such as Hugging Face's, one such file, a checkpoint, or
                the model's state_dict on the first rank (what the others pass does not matter).
            rename: the name in `source` of a name of the state_dict, where they differ.

        Raises:
            CheckpointError: on every rank, if it does not fit the model or cannot be read.
            ProgramError: before the first batch.
        """
        self._checkpoints().load_weights(
            source if isinstance(source, Mapping) else Path(source), rename
        )

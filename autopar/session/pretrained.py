"""Writes a session's weights as Hugging Face's `save_pretrained` does, a tensor at a time.

All ranks gather one tensor after the other; the first rank keeps the tensors of one shard until the
shard is written, so no rank ever holds the whole model. Of a PEFT model, only the adapter is
gathered.
"""

from __future__ import annotations

import copy
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from autopar.errors import CheckpointError, ProgramError
from autopar.ir.mesh import parse_quantity
from autopar.runtime.ranks.processes import from_first_rank
from autopar.runtime.trained import Program

WEIGHTS, ADAPTER = "model", "adapter_model"
_PART = ".part"  # between the name of a shard and its number, before all are known
Revert = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


class Shards:
    """Writes tensors to files of limited size.

    Args:
        folder: the folder, which exists.
        stem: stem of the names of the files.
        most: bytes of a file; a larger tensor has a file of its own.
        revert: converts the tensors of a file to the format of published checkpoints.
    """

    def __init__(self, folder: Path, stem: str, most: float, revert: Revert) -> None:
        self.folder, self.stem, self.most, self.revert = folder, stem, most, revert
        self._held: dict[str, Tensor] = {}
        self._files: list[tuple[str, ...]] = []
        self._bytes = self._elements = 0

    def add(self, name: str, value: Tensor) -> None:
        """Adds a whole tensor; raises OSError or SafetensorError if a file cannot be written."""
        held = sum(tensor.nbytes for tensor in self._held.values())
        if self._held and held + value.nbytes > self.most:
            self._write()
        self._held[name] = value.detach().cpu().contiguous().clone()

    def _write(self) -> None:
        tensors = {name: value.contiguous() for name, value in self.revert(self._held).items()}
        path = self._part(len(self._files))
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(self.folder.stat().st_mode & 0o666)  # safetensors restricts it
        self._files.append(tuple(tensors))
        self._bytes += sum(value.nbytes for value in tensors.values())
        self._elements += sum(value.numel() for value in tensors.values())
        self._held = {}

    def _part(self, number: int) -> Path:
        return self.folder / f".{self.stem}{_PART}{number}"

    def publish(self) -> None:
        """Writes the rest, gives the files their names, and removes those of an earlier save."""
        if self._held or not self._files:
            self._write()
        count, index = len(self._files), self.folder / f"{self.stem}.safetensors.index.json"
        names = [f"{self.stem}-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
        names = names if count > 1 else [f"{self.stem}.safetensors"]
        old = [*self.folder.glob(f"{self.stem}-?????-of-?????.safetensors"), index]
        for path in [*old, self.folder / f"{self.stem}.safetensors"]:
            path.unlink(missing_ok=True)
        for number, name in enumerate(names):
            os.replace(self._part(number), self.folder / name)
        if count > 1:
            places = {k: name for name, keys in zip(names, self._files, strict=True) for k in keys}
            sizes = {"total_parameters": self._elements, "total_size": self._bytes}
            text = {"metadata": sizes, "weight_map": dict(sorted(places.items()))}
            index.write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")

    def abandon(self) -> None:
        """Removes the files of a failed save."""
        for path in self.folder.glob(f".{self.stem}{_PART}*"):
            path.unlink(missing_ok=True)


class Pretrained(ABC):
    """The part of a session that writes folders for Hugging Face's libraries."""

    _model: nn.Module

    @abstractmethod
    def _ready(self) -> Program:
        """Returns the executor; raises ProgramError before the first batch."""

    def save_pretrained(self, path: str | Path, *, max_shard_size: str | float = "50GB") -> Path:
        """Writes the weights for `from_pretrained`; every rank calls it, and the first one writes.

        The folder has the shards, the index and the configurations of the model. Tensors are
        gathered one at a time; the first rank holds one shard of them. Of a model of PEFT the
        folder has the adapter only.

        Args:
            path: the folder; the weights of an earlier save there are replaced.
            max_shard_size: bytes of a file, or a text such as "5GB".

        Returns:
            The folder.

        Raises:
            ProgramError: the model is not from transformers or PEFT, or there was no batch yet.
            CheckpointError: on every rank, if the folder cannot be written.
            OptionError: the size cannot be parsed.
        """
        executor, model = self._ready(), self._model
        executor.meet("save_pretrained")
        adapter, names = _content(model)
        most = max_shard_size
        most = parse_quantity(most, "B") if isinstance(most, str) else float(most)
        folder = Path(path)
        revert: Revert = dict if adapter else _revert(model)
        shards = Shards(folder, ADAPTER if adapter else WEIGHTS, most, revert)
        failed = from_first_rank(lambda: _made(folder))
        for name, value in executor.wholes(names):
            if failed or not _writes():
                continue  # other ranks gather on
            try:
                shards.add(names[name], value)
            except (OSError, SafetensorError, RuntimeError) as error:
                failed = f"{type(error).__name__}: {error}"

        def finish() -> Path:
            try:
                if failed:
                    raise OSError(failed)
                _describe(model, folder, adapter)
                shards.publish()
            except (OSError, SafetensorError, RuntimeError) as error:
                shards.abandon()
                raise CheckpointError(
                    f"the weights cannot be written to {folder}",
                    why=str(error),
                    todo="make room, or save to another place",
                ) from error
            return folder

        return from_first_rank(finish)


def _made(folder: Path) -> str:
    """Makes a folder; returns why there is none, "" if there is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return ""


def _writes() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _content(model: nn.Module) -> tuple[bool, dict[str, str]]:
    """Returns whether a model is an adapter, and its tensors to save with their names in files."""
    empty = {name: value.to("meta") for name, value in model.state_dict().items()}
    if hasattr(model, "peft_config") and hasattr(model, "active_adapter"):
        peft = import_module("peft")
        tokens = {name: torch.full((), float(n)) for n, name in enumerate(empty)}
        kept = peft.get_peft_model_state_dict(model, tokens, adapter_name=model.active_adapter)
        order = list(empty)
        return True, {order[int(number)]: name for name, number in kept.items()}
    if not hasattr(model, "config") or not hasattr(model, "save_pretrained"):
        raise ProgramError(
            f"a {type(model).__name__} is not a model of transformers or PEFT",
            why="it has no configuration that from_pretrained could read",
            todo="save session.state_dict(), or a checkpoint",
        )
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return False, {name: tied.get(name, name) for name in empty if name not in ignored}


def _revert(model: nn.Module) -> Revert:
    """Returns the conversion of transformers to the format of published checkpoints."""
    loading = import_module("transformers.core_model_loading")
    return lambda tensors: loading.revert_weight_conversion(model, tensors)


def _describe(model: Any, folder: Path, adapter: bool) -> None:
    """Writes the configurations."""
    if adapter:
        config = copy.copy(model.peft_config[model.active_adapter])
        config.inference_mode = True
        config.save_pretrained(str(folder))
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(str(folder))
    if model.can_generate():
        model.generation_config.save_pretrained(str(folder))

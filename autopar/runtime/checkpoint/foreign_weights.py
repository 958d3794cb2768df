"""Weights from other sources: a folder of safetensors, or the first rank's state_dict."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint import publish
from autopar.runtime.checkpoint.boxes import Box
from autopar.runtime.checkpoint.holder import Holder
from autopar.runtime.checkpoint.index import MARKER, Chunk, Index, Stored
from autopar.runtime.checkpoint.tensor_names import Names, Published
from autopar.runtime.checkpoint.values import dtype_name
from autopar.runtime.parameters.pieces import whole
from autopar.runtime.ranks.processes import from_first_rank

ADAPTER = "adapter_config.json"  # marks a folder of PEFT
_LISTS = ("model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json")


def weights_index(path: Path, published: Published = dict) -> tuple[Path, Index, str]:
    """Returns the contents of a checkpoint, a folder of safetensors or one such file.

    A folder with a list of names and files, as written by Hugging Face, is read by that list;
    otherwise all of its safetensors are.

    Args:
        path: the folder or the file.
        published: see `Names`.

    Returns:
        The folder, its contents, and the prefix of the names in it.

    Raises:
        CheckpointError: it is none of these, a file is missing or damaged, or `published` refuses.
    """
    with publish.readable(path):
        if (path / MARKER).exists():
            return path, publish.read(path), "model."
        files = _files(path)
    if not files:
        raise CheckpointError(
            f"there are no weights in {path}",
            why=f"it has neither {MARKER} nor a file *.safetensors",
            todo="pass a checkpoint, a folder of safetensors or one of its files",
        )
    tensors: dict[str, Stored] = {}
    for file, names in files.items():
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys() if names is None else names:
                    tensors[name] = _stored(opened, file.name, name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read", why=str(error)) from error
    return (path if path.is_dir() else path.parent), Index(published(tensors), {}), ""


def _files(path: Path) -> dict[Path, list[str] | None]:
    """Returns the files of a folder, with the names to take from each; None for all."""
    if not path.is_dir():
        return {path: None} if path.exists() else {}
    for name in _LISTS:
        if (path / name).exists():
            try:
                listed = json.loads((path / name).read_text(encoding="utf-8"))["weight_map"]
                files: dict[Path, list[str] | None] = {}
                for key, file in listed.items():
                    names = files.setdefault(path / Path(file).name, [])
                    assert names is not None
                    names.append(key)
                return files
            except (
                OSError,
                ValueError,
                KeyError,
                TypeError,
                AttributeError,
                RecursionError,
            ) as error:
                raise CheckpointError(f"{path / name} cannot be read", why=str(error)) from error
    return dict.fromkeys(sorted(path.glob("*.safetensors")))


def _stored(opened: Any, file: str, name: str) -> Stored:
    part = opened.get_slice(name)
    shape = tuple(part.get_shape())
    empty = part[tuple(slice(0, 0) for _ in shape)] if shape else opened.get_tensor(name)
    return Stored(dtype_name(empty.dtype), shape, (Chunk(Box.whole(shape), file, name),))


@torch.no_grad()
def deal(
    values: Mapping[str, Tensor],
    holder: Holder,
    names: Names,
    group: dist.ProcessGroup | None,
    rename: Callable[[str], str] = str,
    strict: bool = True,
) -> Mapping[str, str]:
    """Sends every rank its parts of the first rank's state_dict, and no more.

    Args:
        values: the state_dict on the first rank; ignored on others.
        holder: the program.
        names: names of its tensors.
        group: all ranks; None for a single process.
        rename: maps a name of the state_dict to the name in `values`.
        strict: whether all of the program's tensors must be in `values`.

    Returns:
        The name in `values` of each tensor that it has.

    Raises:
        CheckpointError: on every rank, if `values` does not fit the model.
    """

    def check() -> dict[str, str]:
        stored = {k: Stored("float32", tuple(v.shape), ()) for k, v in values.items()}
        where = "the first rank's state_dict"
        return names.match(holder.shapes, stored, where, partial=not strict, rename=rename)

    matches = from_first_rank(check)
    held = [h for h in holder.held if h.name in matches]
    if group is None:
        for h in held:
            h.tensor.copy_(whole(values[matches[h.name]])[h.box.slices])
        return matches
    mine = [(h.name, h.box, h.tensor.dtype) for h in held]
    asked: list[list[tuple[str, Box, torch.dtype]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(asked, mine, group=group)
    if dist.get_rank() == 0:
        for h in held:
            h.tensor.copy_(values[matches[h.name]][h.box.slices])
        for place in range(max(map(len, asked))):
            for rank in range(1, len(asked)):
                if place < len(asked[rank]):
                    name, box, dtype = asked[rank][place]
                    part = values[matches[name]].detach()[box.slices]
                    dist.send(part.to("cpu", dtype).contiguous(), dst=rank, group=group)
        return matches
    for h in held:
        part = torch.empty(h.box.sizes, dtype=h.tensor.dtype)
        dist.recv(part, src=0, group=group)
        h.tensor.copy_(part)
    return matches

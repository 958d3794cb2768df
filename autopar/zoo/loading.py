"""Loads a model and example inputs from the `MODEL` argument of the command line.

It has three forms: a name of the zoo (`gpt2`), `hf:path/to/config.json` for a configuration of
transformers on this machine, and `file.py:function` for anything else.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError, ModelFileError
from autopar.files.checked_values import shown
from autopar.files.kinds import MIB, Kind
from autopar.zoo.construction import (
    build,
    example_inputs,
    import_transformers,
    number_of_layers,
)
from autopar.zoo.spec import Spec, spec

FILE = Kind(
    "the model's configuration",
    ModelFileError,
    "pass the path of a config.json",
    limit=16 * MIB,
    bad="the file is not JSON",
)
# Larger counts are refused, since building that many modules would take hours.
_COUNTED, _MOST_PARTS, _MOST = ("layer", "depth", "block", "stage", "expert", "head"), 2**14, 2**48
# Settings that would make transformers run code of the model's author, or fetch kernels or weights.
# A configuration file is data: the model is built from transformers' own classes alone.
_NEVER = (
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "experts_implementation",
    "_experts_implementation",
    "quantization_config",
    "use_pretrained_backbone",
    "use_kernels",
)


def load(
    text: str, *, batch: int | None = None, seq: int | None = None, layers: int | None = None
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Returns the model that `text` names and keyword arguments for its forward pass.

    Models of the zoo and of `hf:` are on the meta device. A function is called with the arguments
    among `batch`, `seq` and `layers` that are set, and returns a model or (model, example_inputs);
    without example inputs, the dictionary is empty.

    Raises:
        UnknownModelError: neither a name of the zoo nor a file.
        ModelFileError: the file is missing, malformed, or fails when called.
        BatchError: `batch` or `seq` does not fit the model.
        MissingDependencyError: transformers is needed but not installed.
    """
    if text.startswith("hf:"):
        config = read_config(Path(text.removeprefix("hf:")))
        return build(config, layers=layers), example_inputs(config, batch, seq)
    path, _, function = text.rpartition(":")
    if path.endswith(".py") or text.endswith(".py"):
        if not path or not function.isidentifier():
            raise ModelFileError(
                f"{text!r} names no function", todo="write it as 'file.py:function'"
            )
        flags = {"batch": batch, "seq": seq, "layers": layers}
        given = {name: value for name, value in flags.items() if value is not None}
        return _call_file(Path(path), function, given)
    named = spec(text)
    return build(named, layers=layers), example_inputs(named, batch, seq)


def random_inputs(text: str, *, batch: int | None, seq: int | None) -> dict[str, torch.Tensor]:
    """Returns random example inputs on the CPU for a model of the zoo or of `hf:`.

    Raises:
        UnknownModelError, ModelFileError, BatchError, MissingDependencyError: see `load`.
    """
    named = read_config(Path(text.removeprefix("hf:"))) if text.startswith("hf:") else spec(text)
    return example_inputs(named, batch, seq, device="cpu")


def depth(text: str, layers: int | None = None) -> int | None:
    """Returns the number of equal blocks of a model of the zoo or of `hf:`, None if unknown.

    Raises:
        UnknownModelError, ModelFileError, MissingDependencyError: see `load`.
    """
    if text.startswith("hf:"):
        config = read_config(Path(text.removeprefix("hf:")))
    else:
        config = spec(text)
    return number_of_layers(config, layers)


def read_config(path: Path) -> Spec:
    """Reads the transformers configuration in the JSON file `path`, or a folder's `config.json`.

    Reads that file only: no network, and no code from its folder.

    Raises:
        ModelFileError: no such file, not JSON, or not the configuration of a known model.
        MissingDependencyError: transformers is not installed.
    """
    path = path / "config.json" if os.path.isdir(path) else path
    settings = FILE.json(FILE.text(path), str(path))
    _check_counts(settings, path)
    architecture = _architecture(path, settings)
    dtype = settings.pop("dtype", None) or settings.pop("torch_dtype", None) or "float32"
    settings = {name: value for name, value in settings.items() if name not in _NEVER}
    return Spec(
        name=str(path),
        architecture=architecture,
        config=settings,
        dtype=str(dtype),
        batch=1,
        seq=None,
        source=str(path),
    )


def _check_counts(settings: Any, path: Path) -> None:
    """Raises ModelFileError if a count of the configuration is too large to build."""
    waiting: list[tuple[str, Any]] = [("", settings)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(str(key), entry) for key, entry in value.items()]
        elif isinstance(value, list):
            waiting += [(name, entry) for entry in value]
        elif isinstance(value, int):
            counted = any(word in name.lower() for word in _COUNTED)
            most = _MOST_PARTS if counted and not name.endswith(("_dim", "_size")) else _MOST
            if abs(value) > most:
                raise ModelFileError(
                    f"the configuration says {shown(name)} = {shown(value)}",
                    where=str(path),
                    why=f"at most {most} are supported",
                    todo="correct that number",
                )


def _architecture(path: Path, settings: Any) -> str:
    """Returns the model class that the file names, else the causal language model of its type."""
    transformers = import_transformers()
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise ModelFileError(
            "the file is not the configuration of a model that transformers knows",
            where=str(path),
            why=f"model_type is {kind!r}" if kind else "it has no model_type",
            todo="pass a model's config.json",
        )
    asked = settings.get("architectures")
    if isinstance(asked, list) and asked:
        return str(asked[0])
    config_class = transformers.CONFIG_MAPPING[kind]
    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
    if causal is None:
        raise ModelFileError(
            f"the configuration of {kind!r} names no architecture",
            where=str(path),
            todo='add "architectures": ["..."] to it',
        )
    return str(causal.__name__)


def _call_file(
    path: Path, name: str, flags: Mapping[str, int]
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    with opened(path) as module:
        function = _function(path, module, name)
        _check_flags(path, function, flags)
        result = function(**flags)
    model, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    tensors = isinstance(inputs, Mapping) and all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in inputs.items()
    )
    if not isinstance(model, nn.Module) or not tensors:
        raise ModelFileError(
            f"{name} does not return a model",
            where=str(path),
            why=f"it returns {_describe(result)}",
            todo="return an nn.Module, or (nn.Module, {argument name: tensor})",
        )
    return model, dict(inputs)


@contextmanager
def opened(path: Path) -> Iterator[ModuleType]:
    """Runs a user's Python file; its errors, then or inside the block, point at its line.

    Raises:
        ModelFileError: the file is missing, is not Python or fails.
    """
    if not os.path.isfile(path) or path.suffix != ".py":
        raise ModelFileError("there is no such file", where=str(path), todo="correct the path")
    name = f"_autopar_model_{path.stem}"
    with _importable(path.parent), _named_failures(path):
        module_spec = importlib.util.spec_from_file_location(name, path)
        assert module_spec is not None
        assert module_spec.loader is not None  # the suffix .py has a loader
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[name] = module  # dataclasses and pickle look a class's module up here
        module_spec.loader.exec_module(module)
        yield module


def _function(path: Path, module: ModuleType, name: str) -> Callable[..., object]:
    function = getattr(module, name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ModelFileError(
            f"the file has no function {name!r}",
            where=str(path),
            why=f"its functions are {', '.join(there) or 'none'}",
            todo="name one of the file's own functions",
        )
    found: Callable[..., object] = function
    return found


def _check_flags(path: Path, function: Callable[..., object], flags: Mapping[str, int]) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(**flags)
    except TypeError as error:
        given = ", ".join(f"{name}={value}" for name, value in flags.items())
        raise ModelFileError(
            f"{getattr(function, '__name__', 'the function')}{signature} cannot be called "
            f"with ({given})",
            where=str(path),
            why=str(error),
            todo="let the function accept the flags that are set, and default its other arguments",
        ) from error


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Makes the modules of a file's folder importable, as when Python runs the file."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)


@contextmanager
def _named_failures(path: Path) -> Iterator[None]:
    """Turns errors of the user's file into one error that points at its line."""
    try:
        yield
    except AutoparError:
        raise
    except (Exception, SystemExit) as error:
        own = str(path)
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == own]
        line = error.lineno if isinstance(error, SyntaxError) else (lines or [None])[-1]
        raise ModelFileError(
            "the file fails when run",
            where=f"{own}:{line}" if line else own,
            why=f"{type(error).__name__}: {error}",
            todo="make the function run on its own first",
        ) from error


def _describe(result: object) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(type(item).__name__ for item in result)})"
    return type(result).__name__

"""Converts the arguments of `compile` to texts, so that ranks can compare their calls."""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import ProgramError
from autopar.ir.graph import Graph, Source
from autopar.ir.graph_text import format_node
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.runtime.ranks.agreement import text_of
from autopar.runtime.update.optimizer import OptimizerFactory, sample

_OWN = ("trace", "dump")  # output paths of each rank


def texts_of(given: Mapping[str, Any]) -> dict[str, str]:
    """Returns texts of the arguments of a call, of versions, and of torch's settings.

    Args:
        given: all arguments by name.
    """
    found = {"the version of Python": ".".join(platform.python_version_tuple()[:2])}
    found |= {f"the version of {name}": metadata.version(name) for name in ("torch", "autopar")}
    found |= {
        "torch's default dtype": text_of(torch.get_default_dtype()),
        "torch's float32 matmul precision": torch.get_float32_matmul_precision(),
        "torch's deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "torch.backends.cuda.matmul.allow_tf32": str(torch.backends.cuda.matmul.allow_tf32),
        "torch.backends.cudnn.allow_tf32": str(torch.backends.cudnn.allow_tf32),
        "torch.backends.cudnn.deterministic": str(torch.backends.cudnn.deterministic),
    }
    for name, value in given.items():
        if name not in _OWN:
            found[name] = _text(name, value)
    return found


def text_of_graph(graph: Graph) -> str:
    """Returns a graph's operators, a line each, without references to the user's source."""
    return "\n".join(format_node(replace(node, source=Source())) for node in graph.nodes)


def text_of_program(source: str) -> str:
    """Returns a generated program without its comments."""
    return re.sub(r" *#.*", "", source)


def _text(name: str, value: Any) -> str:
    """Returns the text of one argument."""
    if isinstance(value, nn.Module):
        return "\n".join(_lines(value))
    if isinstance(value, Plan):  # the measured seconds of a search differ between ranks
        return value.without_solver().to_toml()
    if isinstance(value, Mesh):
        return str(value)
    if name == "optimizer":
        return _optimizer(value)
    if name == "calibration" and value is not None:
        return _contents(Path(value))
    if name == "example_inputs":
        return text_of(_types(value))
    return text_of(value)


def _lines(model: nn.Module) -> Iterator[str]:
    """Yields the structure of a model without its values, which are taken from the first rank."""
    yield text_of(type(model))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        frozen = "" if parameter.requires_grad else " frozen"
        yield f"{name}: {_types(parameter)}{frozen}"
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield f"{name}: {_types(buffer)}"
    for name, module in model.named_modules():
        yield f"{name}: {type(module).__name__}{'' if module.training else ' in evaluation'}"


def _optimizer(factory: OptimizerFactory) -> str:
    """Returns the optimizer that a factory creates with its options; on failure, the error."""
    try:
        made = sample(factory)
    except ProgramError as error:  # every rank raises this error later
        return str(error)
    options = [
        f"group {number}: {name} {text_of(value)}"
        for number, group in enumerate(made.param_groups)
        for name, value in group.items()
        if name != "params"
    ]
    named = factory.func if isinstance(factory, functools.partial) else factory
    return "\n".join([text_of(type(made)), *options, text_of(named)])


def _contents(path: Path) -> str:
    """Returns the text of a file without its name; unreadable files are refused on use."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return type(error).__name__


def _types(value: Any) -> Any:
    """Replaces the tensors of a batch by their types, because values may differ."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return {name: _types(each) for name, each in value.items()}
    return [_types(each) for each in value] if isinstance(value, (list, tuple)) else value

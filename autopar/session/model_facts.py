"""Describes a model by facts that determine its computation, to match it with a program.

Facts are the types of parameters and buffers, plain attributes of modules and their configurations,
and the code of their classes with the functions and constants that it names. Installed packages are
described by their versions instead of their code. Values of parameters are ignored.
"""

from __future__ import annotations

import sys
import types
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from autopar.runtime.ranks.agreement import shortened, text_of

_PLAIN = (str, int, float, complex, bool, type(None))
_DEPTH = 3  # of nested configurations
_OF_ANY_MODULE = frozenset(vars(nn.Module()))


def facts_of(model: nn.Module) -> dict[str, str]:
    """Returns the facts of a model by name, such as "the parameter h.0.weight".

    Args:
        model: any module, also on the meta device. Identically built models have equal facts.
    """
    facts = {"the model's class": text_of(type(model))}
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        kind = "trained" if parameter.requires_grad else "frozen"
        tied = "" if first == name else f", tied to {first}"
        facts[f"the parameter {name}"] = f"{_type(parameter)} {kind}{tied}"
    for name, buffer in model.named_buffers(remove_duplicate=False):
        facts[f"the buffer {name}"] = _type(buffer)
    classes: dict[type, None] = {}
    for name, module in model.named_modules():
        mode = "in training" if module.training else "in evaluation"
        attributes = text_of(dict(_attributes(vars(module), _OF_ANY_MODULE)))
        facts[f"the module {name or 'itself'}"] = f"{text_of(type(module))} {mode} {attributes}"
        classes |= dict.fromkeys(type(module).__mro__)
    for each in classes:
        package, version = _package(each.__module__)
        if version:
            facts[f"the version of {package}"] = version
        elif package not in ("torch", "builtins"):
            facts[f"the code of {text_of(each)}"] = _code_of(each)
    return facts


def _package(module: str) -> tuple[str, str]:
    """Returns the package of a module, and its version if it is installed."""
    name = module.partition(".")[0]
    package = sys.modules.get(name)
    installed = name != "torch" and "site-packages" in (getattr(package, "__file__", "") or "")
    return name, str(getattr(package, "__version__", "")) if installed else ""


def first_difference(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Describes the first fact in which two models differ; "" if they are equal."""
    for name in {**before, **after}:
        old, new = before.get(name, "missing"), after.get(name, "missing")
        if old != new:
            old, new = shortened(old, new)
            return f"{name} was {old}, and is {new}"
    return ""


def _type(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _attributes(
    values: Mapping[str, Any], without: frozenset[str], depth: int = _DEPTH
) -> Iterator[tuple[str, Any]]:
    """Yields attributes that are plain values, or objects and containers of plain values."""
    for name, value in values.items():
        if name not in without:
            plain = _plain(value, depth)
            if plain is not _UNKNOWN:
                yield name, plain


_UNKNOWN = object()


def _plain(value: Any, depth: int) -> Any:
    """Converts a value to plain values; _UNKNOWN if that is impossible."""
    if isinstance(value, (*_PLAIN, types.FunctionType)):
        return value
    if depth == 0 or isinstance(value, (Tensor, nn.Module, type)):
        return _UNKNOWN
    if isinstance(value, Mapping):
        return dict(_attributes({str(k): v for k, v in value.items()}, frozenset(), depth - 1))
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        found = [_plain(item, depth - 1) for item in items]
        return [item for item in found if item is not _UNKNOWN]
    if hasattr(value, "__dict__"):
        # Private entries of a configuration, such as its path and hashes, do not affect the model.
        public = {name: item for name, item in vars(value).items() if not name.startswith("_")}
        return {"": text_of(type(value)), **dict(_attributes(public, frozenset(), depth - 1))}
    return _UNKNOWN


def _code_of(kind: type) -> str:
    """Returns a digest of a class's functions, and of functions and constants that they name."""
    seen: dict[str, str] = {}
    for value in vars(kind).values():
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isinstance(inner, types.FunctionType):
            _reach(inner, seen)
    return f"{zlib.crc32(text_of(seen).encode()):08x}"


def _reach(function: types.FunctionType, seen: dict[str, str]) -> None:
    """Adds a function, and the names that it uses from its module, to `seen`."""
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, types.FunctionType):
        return
    module = str(function.__module__)  # None for functions that `exec` created
    name = f"{module}.{function.__qualname__}"
    if name in seen or module.partition(".")[0] == "torch":
        return
    seen[name] = text_of(function)
    for used in function.__code__.co_names:
        value = function.__globals__.get(used)
        if isinstance(value, types.FunctionType):
            _reach(value, seen)
        elif isinstance(value, _PLAIN) and used.isupper():
            seen[f"{module}.{used}"] = text_of(value)

"""Saves a Compiled as a folder that one process writes and all processes load.

compiled.toml           versions and fingerprint; written last, so a folder without it is partial
plan.toml, graph.txt    inputs of the generated programs
stage_0.py, ...         the generated source of every stage
call.json               mapping of batches and results to named tensors, and facts of the model
constants.safetensors   tensors of the trace that are not buffers of the model

The sources are code, so load a folder only if you trust its author.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import tomlkit
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from autopar.capture.capture import Captured
from autopar.capture.nonpersistent_buffers import computed
from autopar.capture.structure import Inputs, Structure
from autopar.errors import AutoparError, CheckpointError, ProgramError
from autopar.files.checked_values import Fields, Integer, Row, Table, Text
from autopar.files.kinds import Kind
from autopar.ir.graph import Graph
from autopar.ir.graph_text import format_graph, parse_graph
from autopar.passes.verify import verify
from autopar.plan import Plan
from autopar.runtime import folder
from autopar.runtime.checkpoint.values import decode, encode
from autopar.session.model_facts import facts_of, first_difference

VERSION = 1
MARKER = "compiled.toml"
_AGAIN = "compile the model again, and save it"
HEAD = Kind("the compiled program", ProgramError, _AGAIN)
_TENSOR, _CONSTANT = "a tensor", "a constant"


@dataclass(frozen=True)
class Contents:
    """The contents of a folder; see `Compiled`.

    Attributes:
        plan: the plan.
        captured: the captured model.
        sources: sources of every stage.
        facts: facts of the model.
        fingerprint: digest of all of these.
    """

    plan: Plan
    captured: Captured
    sources: tuple[str, ...]
    facts: Mapping[str, str]
    fingerprint: str


def write(contents: Contents, path: str | Path) -> Path:
    """Writes a folder atomically.

    Returns:
        The folder.

    Raises:
        ProgramError: the batch or the results contain something that cannot be saved as data, or
            the folder cannot be written.
    """
    captured = contents.captured
    if any(leaf.is_cache for leaf in captured.graph.leaves("buffer")):
        raise ProgramError(
            "a program that generates cannot be saved",
            why="a folder holds one call of a model, and a generation makes two",
            todo="save a GenerationPlan, and pass that to compile",
        )
    constants = {
        name: value
        for name, value in captured.buffers.items()
        if f"the buffer {name}" not in contents.facts and not value.is_meta
    }
    names = [f"stage_{number}.py" for number in range(len(contents.sources))]
    head = tomlkit.document()
    head["version"] = VERSION
    head["torch"] = _torch_version()
    head["fingerprint"] = contents.fingerprint
    head["stages"] = names
    files = {
        **dict(zip(names, contents.sources, strict=True)),
        "plan.toml": contents.plan.to_toml(),
        "graph.txt": format_graph(captured.graph),
        "call.json": json.dumps(_call_to_json(captured, contents.facts), indent=1),
        MARKER: tomlkit.dumps(head),
    }
    return folder.write(path, files, {"constants.safetensors": constants}, MARKER)


def _call_to_json(captured: Captured, facts: Mapping[str, str]) -> dict[str, Any]:
    parameters = captured.inputs.signature.parameters.items()
    return {
        "inputs": {
            "signature": [
                [name, parameter.kind.name, parameter.default is not inspect.Parameter.empty]
                for name, parameter in parameters
            ],
            "structure": _structure_to_json(captured.inputs.structure, "the batch"),
            "positional": captured.inputs.positional,
        },
        "output": _structure_to_json(captured.output, "the result"),
        "parameter_names": captured.parameter_names,
        "facts": dict(facts),
    }


def read(path: str | Path, model: nn.Module) -> Contents:
    """Reads a folder that `write` wrote, for the model from which it was compiled.

    Args:
        path: the folder.
        model: equal to the compiled model except for its values; may be on the meta device.

    Raises:
        ProgramError: the folder is missing or damaged, or is for another model or version of
            torch; says what differs.
        PlanError: its plan is damaged.
    """
    place = Path(path)
    with folder.unchanged(place, MARKER):
        head = _head(place)
        call = _call(HEAD.json(HEAD.text(place / "call.json"), str(place)), str(place))
        facts = facts_of(model)
        different = first_difference(call["facts"], facts)
        if different:
            raise ProgramError(
                "the compiled program is for another model",
                where=str(place),
                why=different,
                todo=_AGAIN,
            )
        graph = verify(parse_graph(HEAD.text(place / "graph.txt")))
        constants = folder.read(place / "constants.safetensors", load_file)
        buffers = _buffers(graph, model, constants, str(place))
        return Contents(
            Plan.load(place / "plan.toml"),
            Captured(graph, buffers, call["parameter_names"], call["inputs"], call["output"]),
            tuple(HEAD.text(place / Path(name).name) for name in head["stages"]),
            facts,
            head["fingerprint"],
        )


def _head(place: Path) -> dict[str, Any]:
    """Returns the entries of compiled.toml; ProgramError if damaged or of another version."""
    where = str(place)
    fields = Fields(HEAD.toml(HEAD.text(place / MARKER), where), ProgramError, where)
    version, made_with = fields.take("version", Integer()), fields.take("torch", Text())
    for what, old, new in (
        ("format", version, VERSION),
        ("torch", made_with, _torch_version()),
    ):
        if old != new:
            raise ProgramError(
                f"the compiled program is for another version of {what}",
                where=where,
                why=f"it was compiled with {what} {old}, and this is {new}",
                todo=_AGAIN,
            )
    entries = {
        "fingerprint": fields.take("fingerprint", Text()),
        "stages": fields.take("stages", Row(Text())),
    }
    fields.end()
    return entries


def _buffers(
    graph: Graph, model: nn.Module, constants: Mapping[str, Tensor], where: str
) -> dict[str, Tensor]:
    """Returns the graph's buffers and constants; ProgramError if one has no value."""
    known = {**dict(model.named_buffers(remove_duplicate=False)), **constants}
    targets = [leaf.target for leaf in graph.leaves("buffer")]
    lacking = [name for name in targets if name not in known]
    if lacking:
        raise ProgramError(
            f"the compiled program has no value of {lacking[0]}", where=where, todo=_AGAIN
        )
    return computed(model, {name: known[name] for name in targets})


def _torch_version() -> str:
    return torch.__version__.partition("+")[0]


def _call(table: Any, where: str) -> dict[str, Any]:
    """Returns the entries of call.json; ProgramError names a damaged one."""
    try:
        inputs = table["inputs"]
        parameters = [
            inspect.Parameter(
                str(name),
                inspect._ParameterKind[kind],
                default=None if has_default else inspect.Parameter.empty,
            )
            for name, kind, has_default in inputs["signature"]
        ]
        return {
            "inputs": Inputs(
                inspect.Signature(parameters),
                _structure_from_json(inputs["structure"]),
                int(inputs["positional"]),
            ),
            "output": _structure_from_json(table["output"]),
            "parameter_names": Table(Text())(table["parameter_names"]),
            "facts": Table(Text(2**24))(table["facts"]),
        }
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ProgramError(
            "the compiled program is damaged",
            where=f"{where}/call.json",
            why=f"{type(error).__name__}: {error}",
            todo=_AGAIN,
        ) from error


def _structure_to_json(structure: Structure, what: str) -> Any:
    """Returns a structure as JSON: kind, name, children with their keys, constant, fixed."""
    where = structure.name or what
    if structure.kind is Tensor:
        return [_TENSOR, structure.name, [], None, True]
    if structure.kind is None:
        value = structure.constant if structure.fixed else None
        return [_CONSTANT, structure.name, [], _saved(value, where), structure.fixed]
    kind = structure.kind
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _found(name) is not kind:
        raise ProgramError(
            f"{where} is a {name.replace(':', '.')}, which cannot be saved",
            why="nothing of that name can be imported",
            todo="define the class in a module, at its top level",
        )
    children = [
        [_saved(key, f"a key of {where}"), _structure_to_json(child, what)]
        for key, child in structure.children
    ]
    return [name, structure.name, children, None, structure.fixed]


def _structure_from_json(entry: Any) -> Structure:
    """Parses `_structure_to_json`; raises LookupError, TypeError or ValueError if invalid."""
    kind, name, children, constant, fixed = entry
    if kind == _TENSOR:
        return Structure(Tensor, Text()(name))
    if kind == _CONSTANT:
        return Structure(None, Text()(name), (), _read(constant), bool(fixed))
    container = _found(Text()(kind))
    if container is None or not (
        issubclass(container, (Mapping, tuple, list)) or is_dataclass(container)
    ):
        raise ValueError(f"{kind!r} is no container")
    pairs = tuple((_read(key), _structure_from_json(child)) for key, child in children)
    return Structure(container, Text()(name), pairs, None, bool(fixed))


def _found(name: str) -> type | None:
    """Returns the class of a name "module:Class"; None if it does not exist."""
    module, _, path = name.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError):
        return None
    return value if isinstance(value, type) else None


def _saved(value: Any, where: str) -> Any:
    if isinstance(value, (torch.dtype, torch.device)):
        return {"torch": str(value)}
    try:
        return encode(value, where)
    except CheckpointError as error:
        raise ProgramError(
            f"{error.what}, a constant of the compiled program",
            why=error.why,
            todo="pass numbers, strings, None and containers of these beside the tensors",
        ) from error


def _read(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"torch"}:
        text = Text()(value["torch"])
        found = getattr(torch, text.removeprefix("torch."), None)
        return found if isinstance(found, torch.dtype) else torch.device(text)
    try:
        return decode(value)
    except AutoparError as error:
        raise ValueError(str(error)) from error

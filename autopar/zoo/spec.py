"""The table of published models in `models.toml`."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from autopar.errors import UnknownModelError


@dataclass(frozen=True)
class Spec:
    """One model configuration.

    Attributes:
        name: its name for `spec`, or the path of the file it was read from.
        architecture: name of a transformers model class, such as `LlamaForCausalLM`.
        config: keyword arguments of that class's configuration class.
        dtype: dtype of the weights, `bfloat16` or `float32`.
        batch: default number of samples in the example inputs.
        seq: default number of tokens per sample; None for image models.
        source: paper or model card with the figures.
        parameters: the published number of parameters, None if unpublished.
    """

    name: str
    architecture: str
    config: Mapping[str, Any] = field(hash=False)
    dtype: str
    batch: int
    seq: int | None
    source: str
    parameters: int | None = None


def names() -> tuple[str, ...]:
    """Returns the names of all models of the zoo, in file order."""
    return tuple(_table())


def spec(name: str) -> Spec:
    """Returns the configuration published under `name`.

    Raises:
        UnknownModelError: there is none; names the nearest matches.
    """
    table = _table()
    if name not in table:
        near = difflib.get_close_matches(name.lower(), table, n=3, cutoff=0.5)
        raise UnknownModelError(
            f"no model is named {name!r}",
            why=f"near matches: {', '.join(near)}" if near else f"known: {', '.join(table)}",
            todo="use one of these, 'hf:path/to/config.json' or 'file.py:function'",
        )
    return Spec(name=name, **{"seq": None, **table[name]})


@cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(resources.files("autopar.zoo").joinpath("models.toml").read_text("utf-8"))

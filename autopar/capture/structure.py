"""Structure of nested containers of tensors: flattened to dotted names, and rebuilt."""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autopar.errors import BatchError


@dataclass(frozen=True)
class Structure:
    """The shape of a nested container.

    Attributes:
        kind: the container's class, Tensor for a tensor; None for a constant.
        name: a tensor's dotted name, such as "batch.x" or "hidden_states.0".
        children: the container's (key, structure), in order.
        constant: the value of a leaf that is not a tensor.
        fixed: whether such a leaf must have that value in every batch.
    """

    kind: type | None
    name: str = ""
    children: tuple[tuple[Any, Structure], ...] = ()
    constant: Any = None
    fixed: bool = True

    @classmethod
    def of(cls, value: Any, name: str, *, constants: bool) -> Structure:
        """Returns the structure of `value`.

        Args:
            value: a tensor, a constant, or a mapping, sequence or dataclass of such values.
            name: prefix of its tensors' names.
            constants: whether leaves other than tensors are part of the structure; otherwise None
                takes their places.
        """
        if isinstance(value, Tensor):
            return cls(Tensor, name)
        items = _items(value)
        if items is None:
            return cls(None, name, (), value if constants else None, fixed=constants)
        children = tuple(
            (key, cls.of(item, f"{name}.{key}" if name else str(key), constants=constants))
            for key, item in items
        )
        return cls(type(value), name, children)

    def flatten(self, value: Any) -> dict[str, Any]:
        """Returns every tensor in `value` by name.

        Raises:
            BatchError: `value` has another structure, or a constant differs.
        """
        if self.kind is Tensor:
            if not isinstance(value, Tensor):
                raise BatchError(
                    f"{self.name} is a {type(value).__name__}",
                    why="the model was captured with a tensor",
                    todo="pass a tensor, or compile again",
                )
            if value.is_nested:
                raise BatchError(
                    f"{self.name} is a nested tensor",
                    why="its rows differ in size, but a program is compiled for one size",
                    todo="pass torch.nested.to_padded_tensor(...) and a mask",
                )
            return {self.name: value}
        if self.kind is None:
            if self.fixed and not _equal(value, self.constant):
                shown = "a tensor" if isinstance(value, Tensor) else repr(value)
                raise BatchError(
                    f"{self.name} is {shown}",
                    why=f"captured with {self.constant!r}, which is a constant of the program",
                    todo="compile again for the other value",
                )
            return {}
        items = dict(_items(value) or ())
        if set(items) != {key for key, _ in self.children}:
            raise BatchError(
                f"{self.name or 'the batch'} has {', '.join(map(str, items)) or 'nothing'}",
                why=f"captured with {', '.join(str(key) for key, _ in self.children) or 'nothing'}",
                todo="pass the same keys, or compile again",
            )
        tensors: dict[str, Any] = {}
        for key, child in self.children:
            tensors.update(child.flatten(items[key]))
        return tensors

    def rebuild(self, values: Mapping[str, Any]) -> Any:
        """Returns the container with its tensors replaced by `values`, by name."""
        if self.kind is Tensor:
            return values[self.name]
        if self.kind is None:
            return self.constant
        parts = {key: child.rebuild(values) for key, child in self.children}
        if dataclasses.is_dataclass(self.kind):
            return self.kind(**parts)
        if issubclass(self.kind, defaultdict):
            return parts
        if issubclass(self.kind, Mapping):
            return self.kind(parts)  # type: ignore[call-arg]
        if hasattr(self.kind, "_fields"):
            return self.kind(*parts.values())
        return self.kind(parts.values())  # type: ignore[call-arg]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in order."""
        if self.kind is Tensor:
            return (self.name,)
        return tuple(name for _, child in self.children for name in child.names)


@dataclass(frozen=True)
class Inputs:
    """Maps the arguments of a model call to named tensors.

    Attributes:
        signature: signature of the model's forward.
        structure: the arguments by name, including those in `**keywords`.
        positional: number of arguments that were passed by position.
    """

    signature: inspect.Signature
    structure: Structure
    positional: int

    @classmethod
    def of(
        cls, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Inputs:
        """Returns the inputs of one call; raises BatchError if the signature does not accept it."""
        structure = Structure.of(_bind(signature, args, kwargs), "", constants=True)
        names = structure.names
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise BatchError(f"two tensors of the batch are called {twice!r}", todo="rename a key")
        return cls(signature, structure, len(args))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all input tensors, such as "input_ids" or "batch.x"."""
        return self.structure.names

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Returns the tensors of a batch by name; raises BatchError if its structure differs."""
        return self.structure.flatten(_bind(self.signature, args, kwargs))

    def rebuild(
        self, values: Mapping[str, Any], without: Collection[str] = ()
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments as in the first call, with `values` as their tensors.

        Arguments named in `without` are left out.
        """
        keywords = {k: v for k, v in self.structure.rebuild(values).items() if k not in without}
        args: list[Any] = []
        for name, parameter in self.signature.parameters.items():
            if len(args) < self.positional and name in keywords:
                value = keywords.pop(name)
                args += value if parameter.kind is parameter.VAR_POSITIONAL else [value]
        return tuple(args), keywords


def _bind(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise BatchError(
            "the model does not take this batch",
            why=str(error),
            todo=f"pass the arguments of its forward, {signature}",
        ) from None
    arguments = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD and name in arguments:
            arguments.update(arguments.pop(name))
    return arguments


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """Returns the (key, item) pairs of a container, None for anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        keys = getattr(value, "_fields", range(len(value)))
        return list(zip(keys, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return [(name, getattr(value, name)) for name in fields]
    return None


def _equal(value: Any, constant: Any) -> bool:
    """Returns whether two leaves are the same constant; incomparable ones are not."""
    if value is constant:
        return True
    if isinstance(value, Tensor) or type(value) is not type(constant):
        return False
    try:
        return bool(value == constant)
    except (TypeError, ValueError, RuntimeError):
        return False

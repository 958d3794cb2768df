"""Union-find: classes of values that grow together; a value that is new is a class of its own.

Galler and Fischer, "An Improved Equivalence Algorithm", CACM 7 (1964), with the halving of paths of
Tarjan and van Leeuwen, JACM 31 (1984).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value", bound=Hashable)


class UnionFind(Generic[Value]):
    """Disjoint classes of values, each with a representative."""

    def __init__(self) -> None:
        self._parent: dict[Value, Value] = {}
        self._size: dict[Value, int] = {}

    def __getitem__(self, value: Value) -> Value:
        """Returns the representative of a value's class."""
        parent = self._parent
        parent.setdefault(value, value)
        while (above := parent[value]) != value:
            parent[value] = parent[above]
            value = above
        return value

    def union(self, one: Value, other: Value) -> None:
        """Makes one class of the classes of two values."""
        one, other = self[one], self[other]
        if one == other:
            return
        sizes = self._size.get(one, 1), self._size.get(other, 1)
        small, large = (one, other) if sizes[0] < sizes[1] else (other, one)
        self._parent[small] = large
        self._size[large] = sum(sizes)

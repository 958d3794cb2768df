"""Factors as sets of dimensions, and the factor strings that they form."""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.ir.tensor import TensorType

Position = tuple[int, int]  # tensor, dimension


@dataclass(frozen=True)
class Factor:
    """Dimensions that are split together.

    Attributes:
        operands: positions in the operands, at most one in each.
        results: for each result its dimension, None where the parts are summed.
        added: operands that are added under this contraction.
    """

    operands: tuple[Position, ...]
    results: tuple[int | None, ...]
    added: tuple[int, ...] = ()


@dataclass(frozen=True)
class Terms:
    """A factor string as one list of terms for each operand and result.

    Attributes:
        operands, results: the terms.
        added: operands marked "+".
    """

    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    added: frozenset[int]

    def __str__(self) -> str:
        left = (" ".join(("+",) * (i in self.added) + t) for i, t in enumerate(self.operands))
        return f"{', '.join(left)} -> {', '.join(map(' '.join, self.results))}".replace("+ ", "+")

    def shortened(self) -> Iterator[Terms]:
        """Yields the string with leading dimensions written "...", as many as possible first."""
        lead = list(itertools.takewhile(str.isalpha, self.results[0] if self.results else ()))
        for count in range(len(lead), 0, -1):
            yield self._without(lead[:count])

    def _without(self, lead: list[str]) -> Terms:
        def cut(term: tuple[str, ...]) -> tuple[str, ...]:
            for n in range(min(len(lead), len(term)), 0, -1):
                if all(w in ("1", f) for w, f in zip(term[:n], lead[-n:], strict=True)):
                    return ("...", *term[n:])
            return term

        sides = [tuple(map(cut, side)) for side in (self.operands, self.results)]
        if all(term in ((), ("...",)) for side in sides for term in side):
            sides = [(("...",),) * len(side) for side in sides]  # scalars broadcast, too
        return Terms(sides[0], sides[1], self.added).renamed()

    def renamed(self) -> Terms:
        """Returns the same string with factors named a, b, c, ... in order of appearance."""
        fresh, names = _letters(), dict[str, str]()

        def word(match: re.Match[str]) -> str:
            if match[0] not in names:
                names[match[0]] = next(fresh)
            return names[match[0]]

        def rename(term: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(re.sub("[a-z]+", word, item) for item in term)

        operands, results = (tuple(map(rename, side)) for side in (self.operands, self.results))
        return Terms(operands, results, self.added)


def write(
    operands: Sequence[TensorType], results: Sequence[TensorType], factors: Sequence[Factor]
) -> tuple[Terms, list[str]]:
    """Returns the factor string of tensors with the given factors, and the factors' names."""
    count, fresh = len(operands), _letters()
    at: dict[Position, int] = {}
    for number, factor in enumerate(factors):
        at.update(dict.fromkeys(factor.operands, number))
        places = ((count + i, dim) for i, dim in enumerate(factor.results) if dim is not None)
        at.update(dict.fromkeys(places, number))
    tensors = [*operands, *results]
    names: dict[int, str] = {}
    terms = []
    for i, tensor in enumerate(tensors):
        words = []
        for dim, size in enumerate(tensor.shape):
            number = at.get((i, dim), -1)
            if number < 0:
                words.append("1" if size == 1 else f"{next(fresh)}!")
                continue
            name = names[number] = names.get(number) or next(fresh)
            least = min(tensors[j].shape[d] for (j, d), n in at.items() if n == number)
            words.append(name if size == least else f"({name} {next(fresh)})")
        terms.append(tuple(words))
    added = frozenset(itertools.chain.from_iterable(factor.added for factor in factors))
    written = Terms(tuple(terms[:count]), tuple(terms[count:]), added)
    return written, [names[number] for number in range(len(factors))]


def _letters() -> Iterator[str]:
    """Yields a to z, then aa, ab, ..."""
    for length in itertools.count(1):
        yield from map("".join, itertools.product(string.ascii_lowercase, repeat=length))

"""Sums of compressed gradients over ranks, computed in numpy: a judge of those that ranks make."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.ir.mesh import Mesh

Array = NDArray[np.float64]


class Hop(NamedTuple):
    """One call that a program makes for a gradient, as far as its structure goes."""

    when: str
    kind: str
    axes: tuple[str, ...]
    dim: int | None
    further: int
    compressed: bool


def received(method: str, x: Array) -> Array:
    """What arrives of a vector."""
    n = len(x)
    if method == "1-bit":
        return np.where(x >= 0, 1.0, -1.0) * np.abs(x).mean()
    if method.startswith("top-k"):
        count = max(math.ceil(Fraction(method.split()[1]) * n / 100), 1)
        best = sorted(range(n), key=lambda i: -abs(x[i]))[:count]
        return np.where(np.isin(np.arange(n), best), x, 0.0)
    size, most = (256, 127) if method == "int8" else (64, 7)
    out = []
    for start in range(0, n, size):
        block = x[start : start + size]
        top = np.abs(block).max()
        if not top:
            out.append(block)
        elif method == "int8":
            steps = np.floor(block * (127 / top) + 0.5)
            scale = np.float32(top / 127)
            out.append((steps.astype(np.float32) * scale).astype(np.float64))
        else:
            out.append(np.clip(np.round(block / (top / most)), -most, most) * (top / most))
    return np.concatenate(out)


def added(method: str, rows: list[Array]) -> Array:
    """The sum of what arrives from each rank; int8 blocks are summed in float32."""
    if method == "int8":
        total = np.zeros(len(rows[0]), np.float32)
        for row in rows:
            total = total + received(method, row).astype(np.float32)
        return total.astype(np.float64)
    return np.sum([received(method, row) for row in rows], 0)


class Judge:
    """Reduces the gradients of all ranks, with the residuals of each."""

    def __init__(self, mesh: Mesh, method: str) -> None:
        self.mesh, self.method = mesh, method
        self.left: dict[tuple[Any, ...], Array] = {}
        self.feedback = method != "int8"

    def reduce(self, name: str, path: tuple[Hop, ...], each: list[Array], when: str) -> list[Array]:
        """Every rank's part of the sum."""
        hops = [hop for hop in path if hop.when == when]
        place = 0
        while place < len(hops):
            hop = hops[place]
            result: list[Array] = list(each)
            for members in self.mesh.groups(hop.axes):
                given = [each[rank] for rank in members]
                key = (name, when, place)
                out = self._group(hop, given, [(*key, rank) for rank in members])
                for rank, part in zip(members, out, strict=True):
                    result[rank] = part
            each, place = result, place + 1 + hop.further
        return each

    def _group(self, hop: Hop, given: list[Array], keys: list[tuple[Any, ...]]) -> list[Array]:
        count = len(given)
        if not hop.compressed:
            total = np.sum(given, 0)
            return [total] * count if hop.dim is None else np.array_split(total, count, hop.dim)
        if self.feedback:
            zero = np.zeros_like(given[0])
            given = [x + self.left.get(key, zero) for x, key in zip(given, keys, strict=True)]
        if self.method.startswith("powersgd"):
            total, own = self._factors(given, keys[0])
            out = [total] * count if hop.dim is None else np.array_split(total, count, hop.dim)
        elif hop.dim is not None:
            cuts = [np.array_split(x, count, hop.dim) for x in given]
            longest = cuts[0][0].shape
            rows = [[padded(cut, longest).ravel() for cut in cut_up] for cut_up in cuts]
            shapes = [cut.shape for cut in cuts[0]]
            out = [
                trimmed(added(self.method, [row[n] for row in rows]).reshape(longest), shapes[n])
                for n in range(count)
            ]
            own = [
                np.concatenate(
                    [
                        trimmed(received(self.method, part).reshape(longest), shape)
                        for part, shape in zip(row, shapes, strict=True)
                    ],
                    hop.dim,
                )
                for row in rows
            ]
        elif hop.further:
            out, own = self._twice(given)
        else:
            shape = given[0].shape
            total = added(self.method, [x.ravel() for x in given]).reshape(shape)
            out = [total] * count
            own = [received(self.method, x.ravel()).reshape(shape) for x in given]
        for key, x, said in zip(keys, given, own, strict=True):
            self.left[key] = x - said
        return out

    def _twice(self, given: list[Array]) -> tuple[list[Array], list[Array]]:
        """Each rank sums a part; what it leaves out of that counts as left out of its gradient."""
        count, shape = len(given), given[0].shape
        each = -(-given[0].size // count)
        rows = [np.pad(x.ravel(), (0, each * count - x.size)).reshape(count, each) for x in given]
        own = [np.stack([received(self.method, part) for part in row]) for row in rows]
        parts = [added(self.method, [row[n] for row in rows]) for n in range(count)]
        said = [received(self.method, part) for part in parts]
        for n in range(count):
            own[n][n] -= parts[n] - said[n]
        size = given[0].size
        total = np.concatenate(said)[:size].reshape(shape)
        return [total] * count, [x.ravel()[:size].reshape(shape) for x in own]

    def _factors(self, given: list[Array], key: tuple[Any, ...]) -> tuple[Array, list[Array]]:
        """One step of subspace iteration, orthonormal by numpy's QR."""
        shape, rank = given[0].shape, int(self.method.split()[-1])
        each = [x.reshape(shape[0], -1) for x in given]
        columns = each[0].shape[1]
        i, j = np.arange(columns)[:, None], np.arange(rank)
        q = self.left.get((*key, "q"), np.cos(i * (j + 1) + j))
        p, _ = np.linalg.qr(np.sum([x @ q for x in each], 0))
        shares = [x.T @ p for x in each]
        q = np.sum(shares, 0)
        # Signs of QR's columns are free, and cancel in all products.
        self.left[(*key, "q")] = q
        return (p @ q.T).reshape(shape), [(p @ s.T).reshape(shape) for s in shares]


def padded(x: Array, shape: tuple[int, ...]) -> Array:
    return np.pad(x, [(0, more - own) for own, more in zip(x.shape, shape, strict=True)])


def trimmed(x: Array, shape: tuple[int, ...]) -> Array:
    return x[tuple(slice(size) for size in shape)]


def local(mesh: Mesh, dims: tuple[tuple[str, ...], ...], x: Array) -> list[Array]:
    """Every rank's part of a tensor that tensor parallelism splits."""
    parts = []
    for coordinate in product(*map(range, mesh.shape)):
        part = x
        for dim, axes in enumerate(dims):
            for axis in axes:
                at = mesh.names.index(axis)
                part = np.array_split(part, mesh.shape[at], dim)[coordinate[at]]
        parts.append(part)
    return parts


def spread(
    mesh: Mesh, data: list[str], dims: tuple[tuple[str, ...], ...], copies: list[Array]
) -> list[Array]:
    """The gradient of each rank: of its part of the batch, and of that its part of the tensor."""
    whole = [local(mesh, dims, x) for x in copies]
    found = []
    for rank, coordinate in enumerate(product(*map(range, mesh.shape))):
        copy = 0
        for axis in data:
            at = mesh.names.index(axis)
            copy = copy * mesh.shape[at] + coordinate[at]
        found.append(whole[copy][rank])
    return found

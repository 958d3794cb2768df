"""Measured kernels and collectives of a device, read from a CSV file.

A row is of the kind whose columns it fills; one file may hold several kinds:

    m, n, k                        a matrix product, of bf16
    batch_size, isl, num_heads, num_key_value_heads, head_dim
                                   the forward of causal attention in bf16
    nbytes                         a kernel that is bound by memory: bytes read and written
    op_name, num_gpus, total_bytes a collective inside a node, in bytes as nccl-tests counts them

and of each, `latency_ms`. A column `dtype` names another dtype of products and attention;
`overhead_ms` is the part of the latency that the way of measuring adds. With a column `device` only
the rows of one device count.
"""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from autopar.cost.attention_seconds import NAMES
from autopar.cost.collective_seconds import collective_seconds
from autopar.cost.compute import kernel_seconds
from autopar.cost.device import Device
from autopar.cost.network import Network
from autopar.cost.work import Gemm, Work
from autopar.errors import CostError
from autopar.ir.mesh import Mesh
from autopar.ir.tensor import DTYPE_BYTES

PRODUCTS, ATTENTION, MEMORY, LINKS = "products", "attention", "memory", "links"
COLUMNS = {
    PRODUCTS: ("m", "n", "k"),
    ATTENTION: ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim"),
    MEMORY: ("nbytes",),
    LINKS: ("op_name", "num_gpus", "total_bytes"),
}
_CALLS = {
    "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce",
    "alltoall": "all_to_all", "all_to_all": "all_to_all", "broadcast": "broadcast",
}  # fmt: skip


class Call(NamedTuple):
    """A collective of some devices of a node, with the bytes that each has before the call."""

    kind: str
    devices: int
    nbytes: float


@dataclass(frozen=True)
class Sample:
    """A kernel or a collective and its measured seconds.

    Attributes:
        kind: PRODUCTS, ATTENTION, MEMORY or LINKS.
        key: names its sizes, and decides its half.
        what: what was measured.
        seconds: how long it took.
    """

    kind: str
    key: str
    what: Work | Call
    seconds: float

    @property
    def fitted(self) -> bool:
        """Returns whether it is of the half that constants are fitted to."""
        return hashlib.sha256(self.key.encode()).digest()[0] % 2 == 0

    def predicted(self, device: Device) -> float:
        """Returns the seconds that it takes on a device by the closed forms."""
        what = self.what
        if isinstance(what, Work):
            flops, nbytes = what.flops, what.nbytes
            return kernel_seconds(device, what.op, flops, nbytes, what.dtype, what.gemm)
        network = Network(_node(device.name, what.devices), device)
        return collective_seconds(what.kind, network.levels(("gpu",)), what.nbytes)


@cache
def _node(name: str, devices: int) -> Mesh:
    return Mesh.parse(f"{name}: gpu={devices}")


def samples(path: Path, device: str | None = None) -> tuple[Sample, ...]:
    """Reads measurements from a CSV file whose first lines may be comments.

    Args:
        path: the file.
        device: the value of a column `device` of the rows to read; None for all.

    Raises:
        CostError: the file cannot be read, has other columns, or a figure that is not positive.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    except (OSError, UnicodeDecodeError) as error:
        raise CostError(f"cannot read {path}", why=str(error), todo="give a CSV file") from error
    rows = list(csv.DictReader(lines))
    if device is not None and rows and "device" in rows[0]:
        rows = [row for row in rows if row["device"] == device]
    return tuple(_sample(row, f"{path}, row {number}") for number, row in enumerate(rows, 1))


def _sample(row: dict[str, str], where: str) -> Sample:
    try:
        seconds = (float(row["latency_ms"]) - float(row.get("overhead_ms") or 0)) / 1e3
        if not (math.isfinite(seconds) and seconds > 0):
            less = " and not positive after overhead_ms" if row.get("overhead_ms") else ""
            raise ValueError(f"latency_ms is {row['latency_ms']}{less}")
        kinds = [kind for kind, names in COLUMNS.items() if row.get(names[0])]
        if len(kinds) != 1:
            raise ValueError(f"it is {' and '.join(kinds) or 'of no kind'}")
        values = [row[name] for name in COLUMNS[kinds[0]]]
        what = _READERS[kinds[0]](values)
        if isinstance(what, Work) and (dtype := row.get("dtype")):
            if dtype not in DTYPE_BYTES:
                raise ValueError(f"dtype is {dtype!r}, not one of {', '.join(DTYPE_BYTES)}")
            what = replace(what, dtype=dtype, nbytes=what.nbytes * DTYPE_BYTES[dtype] / 2)
        return Sample(kinds[0], " ".join(values), what, seconds)
    except (KeyError, ValueError, TypeError) as error:
        raise CostError(
            "a measurement cannot be read",
            where=where,
            why=str(error),
            todo="give latency_ms and one of " + "; ".join(map(", ".join, COLUMNS.values())),
        ) from error


def _lengths(values: Sequence[str]) -> list[int]:
    lengths = list(map(int, values))
    if min(lengths) < 1:
        raise ValueError(f"lengths of {lengths}")
    return lengths


def _product(values: Sequence[str]) -> Work:
    m, n, k = _lengths(values)
    gemm = Gemm(1, m, n, k, rows=0)
    return Work("aten.mm", gemm.flops, 2.0 * (m * k + k * n + m * n), "bf16", gemm)


def _causal(values: Sequence[str]) -> Work:
    batch, tokens, heads, groups, width = _lengths(values)
    gemm = Gemm(batch * heads, tokens, (tokens + 1) // 2, 2 * width, rows=0)
    nbytes = 4.0 * batch * tokens * width * (heads + groups)
    return Work(NAMES[0], gemm.flops, nbytes, "bf16", gemm)


def _moved(values: Sequence[str]) -> Work:
    (nbytes,) = _lengths(values)
    return Work("aten.add", 0.0, float(nbytes), "bf16")


def _collective(values: Sequence[str]) -> Call:
    kind, sizes = _CALLS.get(values[0].strip()), _lengths(values[1:])
    if kind is None:
        raise ValueError(f"op_name is {values[0]!r}, not one of {', '.join(_CALLS)}")
    devices, nbytes = sizes
    if devices < 2:
        raise ValueError(f"a collective of {devices} device")
    return Call(kind, devices, nbytes / (devices if kind == "all_gather" else 1))


_READERS: dict[str, Callable[[Sequence[str]], Work | Call]] = {
    PRODUCTS: _product,
    ATTENTION: _causal,
    MEMORY: _moved,
    LINKS: _collective,
}

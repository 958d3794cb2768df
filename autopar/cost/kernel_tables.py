"""Tables of the efficiency of kernels on devices, fitted to measurements (`tables/*.csv`).

The first lines of each file say where the measurements come from, which rows were fitted, and the
errors on the others. A row holds the constants of one formula for one device. `measured` names the
device to whose measurements they were fitted. If a device has no public measurements, this is
another device, whose constants are reused, since they are relative to peaks. A device without a row
uses that of the nearest device (cost/device.py).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from functools import cache, cached_property
from importlib import resources
from typing import ClassVar, Self

from autopar.errors import CostError
from autopar.operators.device_work import Convolved

# Rows and columns of the results' tiles of libraries on GPUs, largest first.
TILES = (
    (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64),
    (32, 64), (64, 32), (16, 64), (64, 16),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """The constants of one formula on one device.

    Attributes:
        measured: the device whose measurements were fitted; "" if none were.
        error: median of the relative errors on measurements that were not fitted, or on all if the
            row has a `base`; 0 if unknown.
        spread: their 90th percentile.
    """

    FILE: ClassVar[str] = ""

    measured: str = ""
    error: float = 0.0
    spread: float = 0.0

    @classmethod
    def known(cls, device: str) -> bool:
        """Returns whether the table has a row for a device."""
        return device in _rows(cls.FILE)

    @classmethod
    def of(cls, device: str) -> Self:
        """Returns the row of a device.

        Raises:
            CostError: the table has no row for it, or other columns.
        """
        known = _rows(cls.FILE)
        if device not in known:
            raise CostError(
                f"tables/{cls.FILE} has no row for the device {device!r}",
                why=f"its rows are {', '.join(known)}",
                todo="add one: fit measurements with `autopar devices fit`, or name a similar one",
            )
        row, keys = known[device], [field.name for field in fields(cls)]
        if set(row) != {"device", *keys}:
            raise CostError(
                f"tables/{cls.FILE} has the wrong columns",
                why=f"missing or unknown: {', '.join(sorted(set(row) ^ {'device', *keys}))}",
            )
        words = {field.name for field in fields(cls) if isinstance(field.default, str)}
        return cls(**{key: row[key] if key in words else float(row[key]) for key in keys})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Products(Row):
    """Constants of matrix products on one device; cost/compute.py has formulas and reasons.

    Attributes:
        base: the device whose constants were kept but for a few, fitted to few measurements; "" if
            some were held out.
        efficiency: share of the matmul peak that the largest tile attains in a short kernel.
        k_half: the start of a tile takes as long as this many more of its terms in 16 bits.
        k_latency: least seconds a term, however small the tile, in 16 bits.
        small_tile: how much more a tile of 64 x 64 loads, in units of its computing time / 2.
        split: seconds of splitting k, in addition to the time of its bytes.
        memory, memory_small: shares of the memory bandwidth of large and of small transfers.
        memory_ramp: bytes at which half of the small share's loss is over.
        throttle: how much longer a long kernel computes, as clocks fall: 0.2 is a fifth.
        throttle_after: seconds of computing at which half of that is reached.
        tile_rows, tile_columns: the only tile, 0 for those of GPUs.
    """

    FILE: ClassVar[str] = "products.csv"

    base: str = ""
    efficiency: float = 0.5
    k_half: float = 0.0
    k_latency: float = 0.0
    small_tile: float = 0.0
    split: float = 0.0
    memory: float = 0.7
    memory_small: float = 0.7
    memory_ramp: float = 0.0
    throttle: float = 0.0
    throttle_after: float = 1.0
    tile_rows: float = 1
    tile_columns: float = 1

    @cached_property
    def tiles(self) -> tuple[tuple[int, int, float], ...]:
        """Rows, columns and relative rate of each tile: the smaller, the more it loads a product.

        A tile of m x n loads m + n values for m n products, so that its time for one grows with
        1/m + 1/n.
        """
        if self.tile_rows:
            return ((int(self.tile_rows), int(self.tile_columns), 1.0),)
        loads = [1 + self.small_tile * 64 * (1 / rows + 1 / columns) for rows, columns in TILES]
        return tuple((*tile, loads[0] / load) for tile, load in zip(TILES, loads, strict=True))


@dataclass(frozen=True)
class Attention(Row):
    """Constants of fused attention on one device; cost/attention_seconds.py has the formula.

    Attributes:
        base: as of products.
        efficiency: share of the matmul peak that the two products attain.
        softmax: exponentials of a score take as long as this many more widths of a head.
        start: a block of queries starts for as long as it takes for this many blocks of keys.
        block_latency: least seconds from one block of keys of width 128 to the next.
        memory: share of the memory bandwidth with which queries, keys and values are moved.
        overlap: exponent by which the times of moving and of computing combine; 1 adds them.
        call: seconds of a call in addition to these.
        backward: rate of the backward relative to the forward's.
    """

    FILE: ClassVar[str] = "attention.csv"

    base: str = ""
    efficiency: float = 0.5
    softmax: float = 0.0
    start: float = 0.0
    block_latency: float = 0.0
    memory: float = 0.7
    overlap: float = 1.0
    call: float = 10e-6
    backward: float = 0.8


@dataclass(frozen=True)
class Convolutions(Row):
    """Constants of convolutions on one device, relative to the equivalent matrix product.

    Attributes:
        forward, image, weight: computing rate of the forward and of the gradients.
        winograd: multiplications that Winograd's transforms save in f32: 2 is half of them.
        forward_call, gradient_call: seconds of a call in addition to a product's launch.
    """

    FILE: ClassVar[str] = "convolutions.csv"

    forward: float = 1.0
    image: float = 1.0
    weight: float = 1.0
    winograd: float = 1.0
    forward_call: float = 0.0
    gradient_call: float = 0.0

    def rate(self, how: Convolved, dtype: str) -> float:
        """Returns the computing rate relative to a product's."""
        rate = {"forward": self.forward, "image": self.image, "weight": self.weight}[how.result]
        return rate * (self.winograd if how.winograd and dtype == "f32" else 1.0)

    def call(self, how: Convolved) -> float:
        """Returns the seconds of a call in addition to a product's launch."""
        return self.forward_call if how.result == "forward" else self.gradient_call


@dataclass(frozen=True)
class Links(Row):
    """Constants of NCCL on the links inside one device's node; see cost/protocol.py.

    Attributes:
        ll_base, ll128_base, simple_base: seconds before the first byte of a ring.
        ll_hop, ll128_hop, simple_hop: seconds a message.
        ll_share, ll128_share: bandwidth relative to Simple's.
        own: a ring takes as long as for this many more shards, as a device copies its own.
        first_base, second_base, third_base: seconds before the first byte of a direct exchange,
            as of an all_to_all, in its three protocols.
        first_share, second_share, third_share: bandwidth of these relative to a ring's Simple.
        direct_hop: seconds a message of such an exchange.
        switch_base: seconds of a reduction in the switches in addition to the time of its bytes.
    """

    FILE: ClassVar[str] = "links.csv"

    ll_base: float = 0.0
    ll128_base: float = 0.0
    simple_base: float = 0.0
    ll_hop: float = 0.0
    ll128_hop: float = 0.0
    simple_hop: float = 0.0
    ll_share: float = 1.0
    ll128_share: float = 1.0
    own: float = 0.0
    first_base: float = 0.0
    second_base: float = 0.0
    third_base: float = 0.0
    first_share: float = 1.0
    second_share: float = 1.0
    third_share: float = 1.0
    direct_hop: float = 0.0
    switch_base: float = 0.0


@dataclass(frozen=True)
class Host(Row):
    """Seconds in which a host's thread issues one kernel or collective to its device.

    Attributes:
        operator: a kernel of an operator of the forward.
        autograd: a kernel of the backward, which autograd's nodes issue.
        collective: a collective in either.
        optimizer: a kernel of the optimizer.
    """

    FILE: ClassVar[str] = "hosts.csv"

    operator: float = 0.0
    autograd: float = 0.0
    collective: float = 0.0
    optimizer: float = 0.0


@cache
def _rows(file: str) -> dict[str, dict[str, str]]:
    text = resources.files("autopar.cost").joinpath("tables", file).read_text(encoding="utf-8")
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return {row["device"]: row for row in csv.DictReader(lines)}

"""Figures of one accelerator and of the links between several."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources
from statistics import NormalDist
from typing import Any, TypeVar

from autopar.cost.kernel_tables import Attention, Convolutions, Links, Products, Row
from autopar.cost.protocol import KINDS, LIBRARIES
from autopar.errors import CostError, MeshError, UnknownDeviceError
from autopar.ir.mesh import Description, Mesh

DTYPES = ("f64", "f32", "tf32", "bf16", "f16", "f8")
_FORMAT = {"f8e4": "f8", "f8e5": "f8", "c128": "f64"}
_MAY_BE_ZERO = ("launch", "switch_reduction", "memory_ramp", "fragmentation", "variation")
_TABLES = ("products", "attention", "links", "convolutions")
Table = TypeVar("Table", bound=Row)
PLAIN = Convolutions()  # as fast as products
_ROUNDED = 0.08  # by which names round sizes of memory: 80 GB are 85.0 or 81.6 billion bytes
_VECTOR = frozenset({"bool", "u8", "i8", "i16", "i32", "i64", "c64"})


@dataclass(frozen=True)
class Device:
    """One device; rates in FLOP/s and bytes/s, memory in bytes, times in seconds.

    Each of the `processors` computes one tile of a matrix product at a time. `peak` holds a dense
    matmul rate for each of `DTYPES`; efficiencies are the attainable shares of the peaks. The head
    of devices.toml explains each figure. `products`, `attention` and `convolutions` are rows of the
    tables of kernels (cost/kernel_tables.py), `links` that of the links in a node, None if unknown;
    `intra_pairs` counts the links between each pair of a node's devices, empty behind a switch.

    Raises:
        CostError: a figure that is not finite or not positive (latencies, start-up costs and the
            reduction in switches may be 0), an efficiency above 1, or a kind of link or a library
            that cost/protocol.py does not know.
    """

    name: str
    source: str
    peak: tuple[tuple[str, float], ...]
    memory: float
    memory_bandwidth: float
    fragmentation: float
    devices_per_node: int
    intra_bandwidth: float
    intra_latency: float
    inter_bandwidth: float
    inter_latency: float
    nic_bandwidth: float
    host_bandwidth: float
    host_efficiency: float
    host_memory: float
    intra_link: str
    inter_link: str
    intra_efficiency: float
    inter_efficiency: float
    switch_reduction: float
    library: str
    step_efficiency: float
    variation: float
    memory_efficiency: float
    memory_ramp: float
    launch: float
    slowdown: float
    processors: int
    products: Products
    attention: Attention
    links: Links | None = None
    convolutions: Convolutions = PLAIN
    intra_pairs: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        figures = {f"peak.{dtype}": rate for dtype, rate in self.peak}
        for field in fields(self):
            if field.name not in ("peak", "intra_pairs", *_TABLES) and field.type != "str":
                figures[field.name] = getattr(self, field.name)
        for name, value in figures.items():
            zero_fits = name in _MAY_BE_ZERO or name.endswith("latency")
            share = name.endswith("efficiency") or name == "fragmentation"
            top = 1.0 if share else math.inf
            if not (math.isfinite(value) and 0 <= value <= top and (value or zero_fits)):
                raise CostError(
                    f"device {self.name!r} has {name} = {value}",
                    why="figures are finite and positive, efficiencies and shares at most 1",
                    todo="correct that figure of the device",
                )
        for name, word, known in (
            ("intra_link", self.intra_link, tuple(KINDS)),
            ("inter_link", self.inter_link, tuple(KINDS)),
            ("library", self.library, LIBRARIES),
        ):
            if word not in known:
                raise CostError(
                    f"device {self.name!r} has {name} = {word!r}",
                    why=f"the known ones are {', '.join(known)}",
                    todo="correct that entry of the device",
                )
        if {dtype for dtype, _ in self.peak} != set(DTYPES):
            raise CostError(
                f"device {self.name!r} has peaks for {[dtype for dtype, _ in self.peak]}",
                why=f"one peak is needed for each of {', '.join(DTYPES)}",
            )

    @property
    def usable(self) -> float:
        """Bytes that tensors may occupy: the memory less the share lost to fragmentation."""
        return self.memory * (1 - self.fragmentation)

    def step_share(self, devices: int) -> float:
        """Returns the share of a short kernel's rate that is left in a step of several devices.

        The devices wait for the slowest of them. Their rates are taken as normally distributed, of
        which the lowest of n is expected so many deviations below the mean (Blom, "Statistical
        Estimates and Transformed Beta-Variables", 1958).
        """
        below = NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))
        return self.step_efficiency * max(1 - self.variation * below, 0.0)

    def rate(self, dtype: str, matmul: bool) -> float:
        """Returns the peak FLOP/s for operands of `dtype`, a dtype of the IR or "tf32".

        Matmuls run on matrix units at `peak`. Everything else runs on vector units: in f32, or at
        half that rate in f64, whatever the matmul peak of its dtype.

        Raises:
            CostError: the dtype is not known.
        """
        peak = dict(self.peak)
        name = "f32" if dtype in _VECTOR else _FORMAT.get(dtype, dtype)
        if name not in peak:
            raise CostError(
                f"the device has no peak for dtype {dtype!r}", why=f"peaks: {', '.join(peak)}"
            )
        if matmul:
            return peak[name]
        return min(peak["f64"], peak["f32"] / 2) if name == "f64" else peak["f32"]


@cache
def devices() -> tuple[Device, ...]:
    """Returns the devices of devices.toml, in file order.

    One without a row in a table of kernels has that of the nearest device, whose constants are
    relative to peaks; the row's `measured` names where they come from.
    """
    text = resources.files("autopar.cost").joinpath("devices.toml").read_text(encoding="utf-8")
    found = [_from_table(name, table) for name, table in tomllib.loads(text).items()]
    return tuple(
        replace(
            entry,
            products=_row(Products, entry, found),
            attention=_row(Attention, entry, found),
            convolutions=_row(Convolutions, entry, found),
        )
        for entry in found
    )


def _row(table: type[Table], entry: Device, found: Sequence[Device]) -> Table:
    """Returns a device's row, or the row of the device whose peak and bandwidth are nearest."""
    if table.known(entry.name):
        return table.of(entry.name)

    def distance(other: Device) -> float:
        ratios = (
            entry.rate("f16", matmul=True) / other.rate("f16", matmul=True),
            entry.memory_bandwidth / other.memory_bandwidth,
        )
        return math.hypot(*map(math.log, ratios))

    near = min((other for other in found if table.known(other.name)), key=distance)
    row = table.of(near.name)
    return replace(row, measured=row.measured or near.name, error=0.0, spread=0.0)


def _from_table(name: str, table: dict[str, Any]) -> Device:
    keys = {field.name for field in fields(Device)} - {"name", *_TABLES}
    if set(table) | {"intra_pairs"} != keys:
        raise CostError(
            f"device {name!r} in devices.toml has the wrong keys",
            why=f"missing or unknown: {', '.join(sorted(set(table) ^ keys))}",
        )
    kernels: dict[str, Any] = {"products": Products(), "attention": Attention()}
    kernels |= {"links": Links.of(name) if Links.known(name) else None}
    pairs = tuple(map(tuple, table.get("intra_pairs", ())))
    given = {**table, "peak": tuple(table["peak"].items()), "intra_pairs": pairs}
    return Device(name=name, **given, **kernels)


def device(mesh: Mesh) -> Device:
    """Returns the device of `mesh`: described in the mesh text, or found in devices.toml.

    Raises:
        MeshError: the mesh has unlike devices, over which no collective runs.
        UnknownDeviceError: the device is neither described nor in devices.toml.
        CostError: a figure of the description is not finite and positive.
    """
    refuse_unlike(mesh)
    if mesh.description is not None:
        return _described(mesh.device, mesh.description)
    known = {entry.name: entry for entry in devices()}
    if mesh.device in known:
        return known[mesh.device]
    folded = {name.lower(): name for name in known}
    near = difflib.get_close_matches(mesh.device.lower(), folded, cutoff=0.5)
    names = [folded[name] for name in near] or list(known)
    axes = str(mesh).partition(": ")[2]
    raise UnknownDeviceError(
        f"device {mesh.device!r} is not known",
        where=str(mesh),
        why=f"{'the nearest known' if near else 'known'} devices are {', '.join(names)}",
        todo="use one of those, or describe the device by its 16-bit matmul peak, memory and "
        f'memory bandwidth: "{mesh.device}[400TFLOP/s 64GiB 1.6TB/s]: {axes}"',
    )


def name_of_product(product: str, memory: float) -> str:
    """Returns the name in devices.toml of a product, as its driver names it.

    "NVIDIA A100-SXM4-80GB" is A100-80, "NVIDIA H100 PCIe" is H100-PCIe. Of several names that fit,
    the one with most words is chosen. A product that is not in devices.toml keeps its own name,
    with hyphens for spaces, as a mesh can have it.

    Args:
        product: the driver's name, as `torch.cuda.get_device_name` returns it.
        memory: bytes of memory, which tells apart products of one name.
    """
    words = set(re.split(r"[\s-]+", product.upper()))
    gigabytes = {f"{size}" for size in range(1, 1025) if abs(size * 1e9 / memory - 1) < _ROUNDED}
    words |= gigabytes | {word.removesuffix("GB") for word in words}
    names = (entry.name for entry in devices())
    fitting = [name for name in names if set(name.upper().split("-")) <= words]
    return max(fitting, key=lambda name: name.count("-"), default="-".join(product.split()))


def refuse_unlike(mesh: Mesh) -> None:
    """Raises MeshError if the mesh has unlike devices, over which no collective runs."""
    if mesh.unlike:
        raise MeshError(
            f"one program cannot span the devices of {mesh}",
            why=f"its collectives would run over {len(mesh.parts)} parts of different devices, at "
            "the speed of the slowest",
            todo="let a search cut the model into stages, each on one part: pass --global-batch or "
            'stages="auto"; or plan for one part',
        )


def _described(name: str, given: Description) -> Device:
    """Returns a device made from three figures; the others are conservative defaults.

    The compute figure is the dense 16-bit matmul peak. f8 runs at the same rate, tf32 at half, f32
    at a sixteenth and f64 at a thirty-second of it (the A100's ratios, except for f64). Its tiles
    are unknown, so that no shape is slow. Links: nodes of 8 devices on PCIe 4.0 x16 (25 GB/s, 10
    us) that share one 100 Gb/s port (20 us), at full efficiency, with a library whose protocols are
    unknown. Collectives gain nothing by overlapping with kernels. Tensors may fill all the memory;
    the host has as much again, behind a link of the same speed.
    """
    share = {"f64": 1 / 32, "f32": 1 / 16, "tf32": 1 / 2, "bf16": 1.0, "f16": 1.0, "f8": 1.0}
    return Device(
        name=name,
        source="described in the mesh text",
        peak=tuple((dtype, given.flops * share[dtype]) for dtype in DTYPES),
        memory=given.memory,
        memory_bandwidth=given.bandwidth,
        fragmentation=0.0,
        devices_per_node=8,
        intra_bandwidth=25e9,
        intra_latency=10e-6,
        inter_bandwidth=12.5e9 / 8,
        inter_latency=20e-6,
        nic_bandwidth=12.5e9,
        host_bandwidth=25e9,
        host_efficiency=1.0,
        host_memory=given.memory,
        intra_link="PCIe",
        inter_link="Ethernet",
        intra_efficiency=1.0,
        inter_efficiency=1.0,
        switch_reduction=0.0,
        library="unknown",
        step_efficiency=1.0,
        variation=0.0,
        memory_efficiency=0.7,
        memory_ramp=0.0,
        launch=10e-6,
        slowdown=2.0,
        processors=1,
        products=Products(),
        attention=Attention(),
    )

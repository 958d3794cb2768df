"""Rings over two levels: PaRO's all_gather of 1 GB on 16 nodes of 8 A100 (arXiv:2310.06003).

Its rings are its own, not NCCL's, and its times, 162 to 288 ms, are some fifty times those that the
hardware it describes allows (8 InfiniBand cards a node: 6 ms). So its network is fitted: two
figures for the three times together, 6 GB/s a node, which one device alone may use, and 0.97 ms a
message. Inside a node the figures are those of A100-80 in devices.toml. "1 GB" is taken as
nccl-tests does, for all that is gathered.
"""

from __future__ import annotations

from autopar.cost.algorithms import INTER, INTRA, Level
from autopar.cost.collective_seconds import collective_seconds
from autopar.cost.device import devices

NODES, DEVICES, NODE_BANDWIDTH, MESSAGE = 16, 8, 6e9, 0.97e-3


def levels() -> tuple[Level, Level]:
    """The fitted network, and the inside of a node as devices.toml has it."""
    chip = next(entry for entry in devices() if entry.name == "A100-80")
    return (
        Level(NODES, NODE_BANDWIDTH / DEVICES, MESSAGE, alone=NODE_BANDWIDTH, resource=INTER),
        Level(
            DEVICES,
            chip.intra_bandwidth * chip.intra_efficiency,
            chip.intra_latency,
            resource=INTRA,
        ),
    )


def all_gather_ms(algorithm: str, total: float = 1e9) -> float:
    """Milliseconds of an all_gather of `total` bytes by "ring", "h_ring" or "ho_ring"."""
    shard = total / (NODES * DEVICES)
    return 1e3 * collective_seconds("all_gather", levels(), shard, algorithm)

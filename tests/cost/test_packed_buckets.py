"""One flat call for the gradients of many owners against a reduce for each owner.

DeepSpeed calls this multi-rank bucketing: under ZeRO-1 and ZeRO-2 with a bucket that is cut at the
borders of the owners' partitions, each piece is a reduce to one rank, and the pieces get smaller as
ranks get more; packed, a bucket is one all_reduce. The source is DeepSpeed's report on its
communication at scale: on 512 A100 the gradients of a dense model of 7B take half the time. Its 5
to 8 times for experts are not reproduced here: they depend on how experts were laid out.
"""

from __future__ import annotations

import math

import pytest

from autopar.cost.collective_seconds import collective_seconds
from autopar.cost.device import device
from autopar.cost.network import Network
from autopar.ir.mesh import Mesh

GRADIENTS = 2 * 7e9  # bytes of a dense model of 7B in 16 bits
BUCKET = 2 * 5e8  # DeepSpeed's `reduce_bucket_size`, 5e8 elements


def seconds(ranks: int, packed: bool, nbytes: float = GRADIENTS) -> float:
    """Of all gradients in a step, over ranks in nodes of eight.

    A reduce to an owner is a broadcast from it run backwards: a chain through all ranks.
    """
    mesh = Mesh.parse(f"A100-80: node={ranks // 8}, gpu=8")
    levels = Network(mesh, device(mesh)).levels(("node", "gpu"))
    if packed:
        return math.ceil(nbytes / BUCKET) * collective_seconds("all_reduce", levels, BUCKET)
    return ranks * collective_seconds("broadcast", levels, nbytes / ranks)


def test_packing_halves_the_time_of_a_dense_model_on_512_devices() -> None:
    assert seconds(512, False) / seconds(512, True) == pytest.approx(2.0, rel=0.2)


def test_reduces_to_owners_grow_with_their_number_and_packed_ones_do_not() -> None:
    """What the source gives as the reason: on 256 devices there is nothing to gain yet."""
    gains = [seconds(ranks, False) / seconds(ranks, True) for ranks in (256, 512, 1024)]
    assert gains == sorted(gains)
    assert gains[-1] > 5
    assert seconds(1024, False) > 2 * seconds(512, False)
    assert seconds(1024, True) == pytest.approx(seconds(256, True), rel=0.05)

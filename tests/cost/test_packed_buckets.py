"""One flat call for the gradients of many owners against a reduce for each owner.

DeepSpeed calls this multi-rank bucketing: under ZeRO-1 and ZeRO-2 with a bucket that is cut at the
borders of the owners' partitions, each piece is a reduce to one rank, and the pieces get smaller as
ranks get more; packed, a bucket is one all_reduce. The source is DeepSpeed's post on communication
at scale (blogs/comm-opt, 2023): a dense model of 7B takes half the time.

Of a mixture of experts it says 5 to 8 times with many devices. Here it is 1.6 to 2.2 on 1024, and
less on fewer. Its times of a step, 16 s that become 4.9 s on 1024 devices and 13 s that become 9.5
on 512, mean that the reduces took about 12 s and 4 s; here they take 1.4 to 1.9 s on 1024, with 16
to 128 experts, whether they are cut at the borders of owners alone or also between layers. All
messages are priced; to reproduce the gain one would have to know three things that the post leaves
out:

- The network. Half the time for a dense model, and 1 s more on 512 devices than on 256, mean that a
  packed 14 GB took 0.5 to 1 s, so that a node sent at most 56 GB/s and not the 200 of eight cards.
- How many experts a device has, in which layers, and the dtype in which gradients are sent.
- The time of a reduce. 12 s for the 1024 pieces of the dense part and 32 layers of 64 replicas are
  4 ms each, here 0.3 to 1 ms. A fixed 1 to 3 ms each would give 5 to 8 times for experts, but 5 to
  11 times for the dense model.
"""

from __future__ import annotations

import math

import pytest

from autopar.cost.algorithms import Level
from autopar.cost.collective_seconds import collective_seconds
from autopar.cost.device import device
from autopar.cost.network import Network
from autopar.ir.mesh import Mesh

GRADIENTS = 2 * 7e9  # bytes of a dense model of 7B in 16 bits
BUCKET = 2 * 5e8  # DeepSpeed's `reduce_bucket_size`, 5e8 elements
EXPERTS = 2 * 32 * 3 * 4096 * 11008  # bytes of one expert in every layer of Llama 7B
REST = 2 * 6_738_415_616 - EXPERTS
LAYERS = 32


def levels_over(mesh_text: str, *axes: str) -> tuple[Level, ...]:
    mesh = Mesh.parse(mesh_text)
    return Network(mesh, device(mesh)).levels(axes)


def packed_seconds(levels: tuple[Level, ...], nbytes: float) -> float:
    return math.ceil(nbytes / BUCKET) * collective_seconds("all_reduce", levels, BUCKET)


def reduced_seconds(levels: tuple[Level, ...], nbytes: float, pieces: int) -> float:
    """A reduce to an owner is a broadcast from it run backwards: a chain through all ranks."""
    return pieces * collective_seconds("broadcast", levels, nbytes / pieces)


def dense_seconds(ranks: int, packed: bool, nbytes: float = GRADIENTS) -> float:
    """Of all gradients in a step, over ranks in nodes of eight."""
    levels = levels_over(f"A100-80: node={ranks // 8}, gpu=8", "node", "gpu")
    return packed_seconds(levels, nbytes) if packed else reduced_seconds(levels, nbytes, ranks)


def mixture_seconds(ranks: int, experts: int, packed: bool, groups: int = LAYERS) -> float:
    """Experts in `groups`, each split over replicas on different nodes, and the rest."""
    replicas = ranks // experts
    text = f"A100-80: replica={replicas}, node={experts // 8}, gpu=8"
    levels = levels_over(text, "replica")
    if packed:
        return packed_seconds(levels, EXPERTS) + dense_seconds(ranks, True, REST)
    own = reduced_seconds(levels, EXPERTS, groups * replicas)
    return own + dense_seconds(ranks, False, REST)


def test_packing_halves_the_time_of_a_dense_model_on_512_devices() -> None:
    assert dense_seconds(512, False) / dense_seconds(512, True) == pytest.approx(2.0, rel=0.2)


def test_reduces_to_owners_grow_with_their_number_and_packed_ones_do_not() -> None:
    """What the source gives as the reason: on 256 devices there is nothing to gain yet."""
    gains = [dense_seconds(ranks, False) / dense_seconds(ranks, True) for ranks in (256, 512, 1024)]
    assert gains == sorted(gains)
    assert gains[-1] > 5
    assert dense_seconds(1024, False) > 2 * dense_seconds(512, False)
    assert dense_seconds(1024, True) == pytest.approx(dense_seconds(256, True), rel=0.05)


@pytest.mark.parametrize("experts", [16, 32, 64, 128])
def test_a_mixture_gains_on_many_devices_only(experts: int) -> None:
    """ "We see higher performance gain on MoE architectures when using large number of GPUs"."""
    gains = [
        mixture_seconds(ranks, experts, False) / mixture_seconds(ranks, experts, True)
        for ranks in (256, 512, 1024)
    ]
    assert gains[-1] > 1.6 * gains[0]
    assert gains[-1] > 1.6 * gains[1]
    assert gains[-1] > 1.6

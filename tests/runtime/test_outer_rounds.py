"""Rounds of outer methods on plain tensors: published sequences, options, tau, and other files."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

import autopar
from autopar.errors import OptionError
from autopar.ir.replicas.outer_value import Outer
from autopar.ir.replicas.tau import Tau
from autopar.ir.update import ADAMW
from autopar.runtime.outer.buckets import Bucket
from autopar.runtime.outer.methods import method_of, methods
from autopar.runtime.outer.rounds import Rounds, best_tau


def played(text: str, steps: int, gradient: float = 2.0) -> list[list[float]]:
    """Values of two scalars, a fragment each, in steps of SGD with rate 1; one replica."""
    outer = Outer.parse(text)
    method = method_of(outer)
    cpu = torch.device("cpu")
    tensors = [torch.ones(1, dtype=torch.float64) for _ in range(2)]
    last = method.fragments - 1
    buckets = [Bucket([t], [id(t)], min(n, last), cpu) for n, t in enumerate(tensors)]
    for bucket in buckets:
        bucket.restart(method)
    rounds = Rounds(method, outer.tau, buckets, None, lambda x: x, lambda: None)
    found = [[t.item() for t in tensors]]
    for _ in range(steps):
        for tensor in tensors:
            tensor.sub_(gradient)
        rounds.step(torch.zeros(()), 1.0)
        found.append([t.item() for t in tensors])
    return found


# torchft's fixtures of DiLoCo: sync_every 6, two fragments, an outer SGD with rate 2.
@pytest.mark.parametrize(
    ("delay", "alpha", "first"),
    [
        (0, 0.0, [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37]),
        (0, 0.5, [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5]),
        (1, 0.0, [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29]),
        (1, 0.5, [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5]),
    ],
)
def test_streaming_diloco_is_torchfts(delay: int, alpha: float, first: list[float]) -> None:
    text = f"diloco over node, tau=6, fragments=2, rate=2, beta=0, delay={delay}, alpha={alpha}"
    assert [row[0] for row in played(text, 10)] == first


def test_co2_by_hand() -> None:
    """One parameter from 1, gradient 2 and rate 1, rounds of 2 steps: each takes 4 away.

    Nothing has come after the first round: 1 -> -3, and the replica goes on. After the second one
    -3 has come: m = (1 + 3) / 2 = 2, the anchor is -1. After the third one -7 has come, the end of
    the second round: m = 0.5 * 2 + (-1 + 7) / 2 = 4, the anchor -5. With the origin of a round the
    second one begins from 1 again: -3 comes twice, m = 2 and then 0.5 * 2 + (1 + 3) / 2 = 3.
    """
    rows = played("co2 over node, tau=2, beta=0.5, penalty=rate, clip=off", 6)
    assert [row[0] for row in rows] == [1, -1, -3, -5, -1, -3, -5]
    rows = played("co2 over node, tau=2, beta=0.5, clip=off, origin=round", 6)
    assert [row[0] for row in rows] == [1, -1, 1, -1, -1, -3, -4]


def test_slowmo_without_momentum_is_local_sgd() -> None:
    slow = played("slowmo over node, tau=3, beta=0, rate=1", 9)
    assert slow == played("local over node, tau=3", 9)


@pytest.mark.parametrize(
    "outer",
    [
        autopar.outer.local("node", 4),
        autopar.outer.post_local(("node", "rack"), 8, after=100),
        autopar.outer.adaptive("node", 16, by="1/loss"),
        autopar.outer.slowmo("node", "auto"),
        autopar.outer.overlap("node", 2, beta=0.0),
        autopar.outer.co2("node", 12, penalty="off", clip=None),
        autopar.outer.co2("node", 12, penalty=2.5, clip=0.5, origin="round"),
        autopar.outer.diloco("node", 500),
        autopar.outer.streaming_diloco("node", 30, fragments=3, delay=2, message="int8"),
    ],
)
def test_texts_parse_back(outer: Outer) -> None:
    assert Outer.parse(str(outer)) == outer
    method_of(outer)


@pytest.mark.parametrize(
    "text",
    [
        "co2",
        "co2 over",
        "co2 over node, tau=0",
        "co2 over node, tau=12, tau=13",
        "co2 over node, tau=1 until 5 then",
        "nothing over node, tau=1",
        "co2 over node, tau=2, gamma=1",
        "co2 over node, tau=2, beta=nan",
        "co2 over node, node, tau=2",
        "diloco over node, tau=2, fragments=1.5",
    ],
)
def test_nonsense_is_refused_by_name(text: str) -> None:
    with pytest.raises(OptionError):
        method_of(Outer.parse(text))


def test_schedules_of_tau() -> None:
    assert [Tau.read("1 until 9 then 12").steps_at(n, 0, 0, 0) for n in (0, 8, 9)] == [1, 1, 12]
    assert Tau.read("16 by loss").steps_at(50, 0.25, 1.0, 0) == 8  # 16 sqrt(1 / 4)
    assert Tau.read("4 by 1/loss").steps_at(50, 0.25, 1.0, 0) == 16
    assert Tau.read("auto").steps_at(50, 0.0, 0.0, 7) == 7
    assert Tau.read("3 by loss").steps_at(0, float("nan"), float("nan"), 0) == 3


def test_tau_hides_the_synchronisation() -> None:
    assert best_tau(1.566, 0.109, late=True) == 15  # CO2's own figures
    assert best_tau(1.0, 1.0, late=False) == 20  # a twentieth of the time is exposed
    assert best_tau(0.0, 0.1, late=True) == 1
    assert best_tau(0.1, 0.02, late=True, taken=0.03) == 50  # three hundredths are taken
    assert best_tau(0.1, 0.02, late=False, taken=0.1) == 200


def test_a_method_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "halving.py").write_text(
        textwrap.dedent(
            """
            from autopar.runtime.outer.method import PromptMethod

            class Halving(PromptMethod):
                NAME = "halving"

                def update(self, x, average, states, now):
                    x.copy_(average / 2)
            """
        )
    )
    (halving,) = methods([str(tmp_path)]).values()
    x = torch.tensor([4.0])
    halving({}).update(x, torch.tensor([6.0]), {}, None)
    assert x.item() == 3.0
    assert halving({}).added_to(ADAMW) == ADAMW

"""Prices of rounds against CO2's published throughputs."""

from __future__ import annotations

import pytest

from autopar.cost.round_price import round_price
from autopar.errors import CostError
from benchmarks.published.co2 import FITTED, GPT, LLM, Figures, misordered, overlaps, throughputs


def test_published_throughputs() -> None:
    """Ten rows on 16 to 128 GPUs are predicted; three are what constants were fitted to."""
    found = throughputs()
    predicted = [row for row in found if row["use"] == "predicted"]
    assert len({(row["model"], row["row"]) for row in predicted}) == 10
    assert len(found) - len(predicted) == 4 * len(FITTED)
    for row in found:
        assert row["model_says"] == pytest.approx(row["published"], rel=0.15), row


def test_published_orderings() -> None:
    """All but one, where the published row grows by more than the number of machines."""
    assert misordered(throughputs()) == [("tnllm7b", 128, "RDMA CO2 tau12", "RDMA AdamW")]


def test_published_figures_that_no_price_explains() -> None:
    """CO2's row exceeds machines that never communicate, and AdamW's lies between the two."""
    figures = Figures.read()
    machine, *_, co2 = figures.row(LLM, "RDMA CO2 tau12")
    machines = figures.gpus[-1] / figures.gpus[0]
    assert machine * machines < figures.row(LLM, "RDMA AdamW")[-1] < co2


def test_published_slowmo_does_not_block() -> None:
    """Steps that a round loses, which would be equal at every tau if it blocked."""
    figures = Figures.read()
    lost = {}
    for tau in (48, 12):
        row = figures.row(GPT, f"TCP SlowMo tau{tau}")
        lost[tau] = tau * (row[0] / figures.gpus[0] * figures.gpus[-1] / row[-1] - 1)
    assert lost == {48: pytest.approx(1.6, abs=0.05), 12: pytest.approx(14.9, abs=0.05)}


def test_published_overlaps() -> None:
    for published, predicted in overlaps().values():
        assert predicted == pytest.approx(published, abs=4)


def test_tau_that_hides_everything() -> None:
    price = round_price(0.109, 1.566, hidden=True)
    assert price.tau == 26  # 1.8 times CO2's 1.566 / 0.109
    assert price.efficiency == 1.0
    blocking = round_price(0.1, 1.0, hidden=False)
    assert blocking.exposed_seconds <= 0.05 * blocking.step_seconds
    with pytest.raises(CostError):
        round_price(0.0, 1.0, hidden=True)

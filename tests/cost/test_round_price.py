"""Prices of rounds against CO2's published throughputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.cost.round_price import round_price
from autopar.errors import CostError

FACTS = json.loads((Path("benchmarks") / "published.json").read_text())["co2"]["rows"]
LLM, GPT = "tnllm7b_tokens_per_s", "gpt3_13b_tokens_per_s"
ROWS = [
    (LLM, "RDMA CO2 tau12", 12, True),
    (GPT, "RDMA CO2 tau12", 12, True),
    (GPT, "RDMA SlowMo tau12", 12, False),
    (LLM, "TCP CO2 tau48", 48, True),
    (LLM, "TCP CO2 tau12", 12, True),
    (GPT, "TCP CO2 tau48", 48, True),
    (GPT, "TCP CO2 tau12", 12, True),
    (GPT, "TCP SlowMo tau12", 12, False),
]


@pytest.mark.parametrize(("model", "row", "tau", "hidden"), ROWS)
def test_published_throughputs(model: str, row: str, tau: int, hidden: bool) -> None:
    """From the step and the all_reduce that are published for 7B parameters on 128 GPUs.

    GPUs of both models are equally fast; a ring's all_reduce grows with the parameters and with
    (n - 1) / n. On 8 GPUs, one machine, nothing crosses the network. RDMA has 800 Gbit/s, TCP 80.
    """
    alone = FACTS[model][row][0] / 8
    step = FACTS["step_compute_s"] * (FACTS[LLM]["TCP CO2 tau48"][0] / 8) / alone
    size = 1.0 if model == LLM else 13 / 7
    for gpus, published in list(zip(FACTS["gpus"], FACTS[model][row], strict=True))[1:]:
        sync = FACTS["allreduce_s"] * size * ((gpus - 1) / gpus) / (127 / 128)
        sync = sync / 10 if row.startswith("RDMA") else sync
        predicted = gpus * alone * round_price(step, sync, hidden, tau).efficiency
        assert predicted == pytest.approx(published, rel=0.15), f"{row} on {gpus} GPUs"


def test_tau_that_hides_everything() -> None:
    price = round_price(0.109, 1.566, hidden=True)
    assert price.tau == 26  # 1.8 times CO2's 1.566 / 0.109
    assert price.efficiency == 1.0
    blocking = round_price(0.1, 1.0, hidden=False)
    assert blocking.exposed_seconds <= 0.05 * blocking.step_seconds
    with pytest.raises(CostError):
        round_price(0.0, 1.0, hidden=True)

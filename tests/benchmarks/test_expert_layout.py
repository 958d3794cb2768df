"""E+D against D+E: DeepSpeed's figures for a mixture of experts on nodes of eight devices."""

from __future__ import annotations

import pytest

from benchmarks.published.expert_layout import AFTER, EXPERTS, Order, step_seconds

ORDERS = [Order(devices, experts, "replicas") for devices in AFTER for experts in EXPERTS]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_steps_with_replicas_in_a_node(order: Order) -> None:
    """The post does not say how many experts there are: each number gives its seconds."""
    for published in AFTER[order.devices]:
        assert step_seconds(order) == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize("order", [o for o in ORDERS if o.replicas > 8], ids=str)
def test_an_eighth_of_the_gradients_leaves_a_node(order: Order) -> None:
    """ "About 8x reduction in cross-node communication-volume for the parameter update"."""
    spread = Order(order.devices, order.experts, "experts")
    assert spread.crossing_bytes() == pytest.approx(8 * order.crossing_bytes())
    assert spread.expert_seconds() > 5 * order.expert_seconds()


@pytest.mark.parametrize("order", [o for o in ORDERS if o.replicas <= 8], ids=str)
def test_replicas_that_fit_a_node_send_nothing_out(order: Order) -> None:
    assert order.crossing_bytes() == 0

"""Independent replicas are considered only on request, and priced by closed forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import OptionError, ScheduleError
from autopar.ir.mesh import Mesh
from autopar.planning.capturing import Call
from autopar.planning.local_batches import capture_parts
from autopar.planning.local_choice import ORDINARY, asks_for_local, offers, table
from autopar.planning.options import Options
from autopar.planning.plan_model import plan_model
from autopar.planning.trace import Trace
from autopar.runtime.outer.round_clock import FEW
from tests.support.ranks import run_ranks

SLOW = "cpu: node=2 @10MB/s 50us, gpu=1"
LOCAL = "local updates"


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


BATCH = {"x": torch.randn(64, 256)}


def test_local_methods_are_offered_only_on_request() -> None:
    assert autopar.plan(Wide(), SLOW, example_inputs=BATCH).outer is None
    plan = autopar.plan(Wide(), SLOW, example_inputs=BATCH, allow=LOCAL)
    assert plan.outer is not None
    assert plan.outer.axes == ("node",)
    assert "round late" in plan.changes
    assert autopar.Plan.from_toml(plan.to_toml()) == plan


def test_a_fast_network_needs_no_replicas_that_train_apart() -> None:
    plan = autopar.plan(Wide(), "cpu: gpu=1", example_inputs=BATCH, allow=LOCAL)
    assert plan.outer is None
    assert plan.changes == ""


def test_offers_are_priced_by_their_plans() -> None:
    """A step is that of a replica's own plan; a sum of 10 MB/s is what a ring of two sends."""
    mesh, options = Mesh.parse(SLOW), Options(allow=LOCAL)
    call = Call.of(Wide(), BATCH)

    def capture(replicas: int, inside: Mesh) -> object:
        part = call.part_of(replicas) if replicas > 1 else call
        return capture_parts(part, inside, options, Trace(None), None)

    found = offers(capture, mesh, options)  # type: ignore[arg-type]
    assert [offer.seconds for offer in found] == sorted(offer.seconds for offer in found)
    named = {offer.plan.outer.method: offer for offer in found if offer.plan.outer is not None}
    assert sorted(named) == ["co2", "diloco", "local", "overlap", "slowmo"]
    inside = plan_model(call.part_of(2), Mesh.parse("cpu: node=1, gpu=1"), options, Trace(None))
    nbytes = 4 * sum(parameter.numel() for parameter in Wide().parameters())
    for name, offer in named.items():
        rounds = offer.rounds
        assert rounds is not None
        assert offer.plan.predicted.step_seconds == inside.predicted.step_seconds
        assert rounds.shard_bytes == nbytes
        assert rounds.state_bytes == {"local": 0, "co2": 3, "overlap": 3}.get(name, 2) * nbytes
        assert offer.tokens_per_second == pytest.approx(64 / offer.seconds)
        alone = rounds.price.sync_seconds / (1.8 if rounds.price.hidden else 1)
        assert alone == pytest.approx(nbytes / 10e6, rel=0.05)
        exposed = offer.seconds - inside.predicted.step_seconds
        assert exposed <= 0.05 * inside.predicted.step_seconds
    text = table(found)
    assert ORDINARY in text
    assert "an outer momentum" in text


def test_permissions_are_names() -> None:
    assert asks_for_local("stale gradients, local updates")
    assert not asks_for_local("stale gradients")
    with pytest.raises(ScheduleError, match="local updates"):
        asks_for_local("local update")
    with pytest.raises(OptionError, match="search for stages"):
        autopar.plan(Wide(), SLOW, example_inputs=BATCH, allow=LOCAL, stages="auto")


def trained() -> tuple[str, float, float]:
    torch.manual_seed(0)
    with autopar.compile(Wide(), SLOW, example_inputs=BATCH, allow=LOCAL) as session:
        for _ in range(FEW + 1):  # a round, whose steps measure
            session.step(**BATCH)
        loss = session.eval_step(**BATCH).loss
        assert loss is not None
        return str(session.plan.outer), float(loss), session.rounds.number


def test_the_chosen_method_trains() -> None:
    first, second = run_ranks(trained, count=2)
    assert first == second
    assert first[0].startswith("co2 over node")
    assert first[2] > 0

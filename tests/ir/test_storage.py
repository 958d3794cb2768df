"""A parameter's collectives against those of its state sharding, and against arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.model import AnalyticModel
from autopar.errors import LayoutError, StateError
from autopar.intra_op.node_choices import parameter_options, storages, stored_option
from autopar.intra_op.states import StateChoice
from autopar.intra_op.storage_choices import (
    HostStateCost,
    StoredCost,
    StoredTraffic,
    stored_traffic,
    undominated,
)
from autopar.ir.mesh import Mesh
from autopar.ir.state_sharding import StateSharding, shardings
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout, TensorType
from autopar.ir.update import ADAMW

MESH = Mesh.parse("A100-80: node=4, gpu=3")
WEIGHT = TensorType("f32", (24, 5))
RULE = ADAMW.rules[0]
USED = Layout(((), ()), varying=("node", "gpu"))


@pytest.mark.parametrize("one", [*shardings(), StateSharding.parse("GGG+I")], ids=str)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_storage_sends_what_the_state_sharding_counts(
    one: StateSharding, microbatches: int
) -> None:
    storage = StateChoice(one, ("node",)).storages(USED, WEIGHT, MESH)[0]
    if not one.secondary:  # gathered again for the backward, as PaRO counts
        storage = replace(storage, kept=storage.held)
    found = [
        (hop.when, hop.call.kind, set(hop.call.axes), hop.call.nbytes, hop.times)
        for hop in storage.hops(WEIGHT, MESH, microbatches)
    ]
    counted = one.collectives(WEIGHT.numel, MESH, ("node",), microbatches, element=4)
    assert found == [
        (call.when, made.kind, set(made.axes), made.nbytes, call.times) for call, made in counted
    ]
    for state, name in (("held", "params"), ("grads", "grads"), ("updated", "optimizer")):
        assert set(storage.axes(state)) == set(one.axes(name, MESH, ("node",)))


@pytest.mark.parametrize("one", shardings(), ids=str)
def test_every_sharding_is_among_the_choices_of_a_parameter(one: StateSharding) -> None:
    (wanted, *_) = StateChoice(one, ("node",)).storages(USED, WEIGHT, MESH)
    assert wanted in set(storages(USED, WEIGHT, MESH, microbatches=2))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), microbatches=st.integers(1, 4))
def test_storages_are_read_back_and_their_hops_join(data: st.DataObject, microbatches: int) -> None:
    """Each hop begins with what the one before it leaves, and the last leaves what is asked for."""
    mesh = Mesh.parse(data.draw(st.sampled_from(["cpu: a=2, b=3", "cpu: a=2, b=2, c=2"])))
    shape = data.draw(st.sampled_from([(24, 8), (7, 12), (3,), (16,)]))
    tensor = TensorType("f32", shape)
    every = [option.storage for option in parameter_options(tensor, mesh, True)]
    storage = data.draw(st.sampled_from(every))
    assert storage is not None
    assert Storage.of(storage.used, storage.layouts) == storage
    ends = {
        "forward": (storage.held, storage.used),
        "backward": (storage.kept, storage.used),
        "accumulate": (storage.used, storage.grads),
        "reduce": (storage.grads, storage.updated),
        "update": (storage.updated, storage.held),
    }
    hops = storage.hops(tensor, mesh, microbatches)
    for when, (src, dst) in ends.items():
        at = src.dims
        for hop in hops:
            if hop.when == when:
                assert hop.src.dims == at
                at = hop.dst.dims
        assert at == dst.dims
    summed = {
        a for h in hops if h.call.kind in ("reduce_scatter", "all_reduce") for a in h.call.axes
    }
    assert summed == set(storage.used.varying)


def as_good(one: StoredCost, other: StoredCost) -> bool:
    """Returns whether the first is at least as good as the second in every respect."""
    faster = all(a <= b * (1 + 1e-12) for a, b in zip(one.parts, other.parts, strict=True))
    return faster and all(one.nbytes[role] <= other.nbytes[role] for role in one.nbytes)


def test_what_is_left_out_is_dominated_and_what_stays_is_not() -> None:
    """Against all pairs: of choices with one layout in use no better one is left out."""
    model = AnalyticModel(MESH)
    every = [stored_option(s, WEIGHT) for s in storages(USED, WEIGHT, MESH, 3)]
    traffic = [
        stored_traffic(WEIGHT, True, o.storage, MESH, model, RULE) for o in every if o.storage
    ]
    costs = [one.cost(3, waits=False) for one in traffic]
    kept, together = undominated(every, StoredTraffic.of(traffic).cost(3, waits=False))
    prices = [costs[every.index(option)] for option in kept]
    assert together.seconds.tolist() == [cost.seconds for cost in prices]
    assert len(kept) < len(every)
    for option, cost in zip(every, costs, strict=True):
        assert option in kept or any(as_good(other, cost) for other in prices)
    for option, a in zip(kept, prices, strict=True):
        assert option.storage is not None
        plain = not option.storage.axes("updated")  # the one that splits nothing always stays
        assert plain or not any(as_good(b, a) for b in prices if b is not a)


@pytest.mark.parametrize("device", ["H100", "cpu"])
@pytest.mark.parametrize("away", [None, HostStateCost(1e-10, 0.25)])
@pytest.mark.parametrize(("count", "fused", "again"), [(1, True, 0.0), (3, False, 0.5)])
def test_several_choices_cost_what_each_does(
    device: str, away: HostStateCost | None, count: int, fused: bool, again: float
) -> None:
    mesh = Mesh.parse(str(MESH).replace(MESH.device, device))
    model = AnalyticModel(mesh)
    traffic = [
        stored_traffic(WEIGHT, True, storage, mesh, model, RULE)
        for storage in storages(USED, WEIGHT, mesh, 3)
    ]
    every = StoredTraffic.of(traffic).cost(count, False, again, away, fused)
    for at, one in enumerate(traffic):
        alone = one.cost(count, False, again, away, fused)
        for name in ("seconds", "synchronised", "fetched", "refetched", "reduced", "gathered"):
            assert getattr(every, name)[at] == getattr(alone, name)
        assert (every.added[at], every.host[at]) == (alone.added, alone.host)
        assert every.held(True)[at] == alone.held(True)
        assert {role: each[at] for role, each in every.nbytes.items()} == alone.nbytes


def test_one_microbatch_needs_no_layout_of_its_own_for_gradients() -> None:
    """Gradients of a single microbatch may as well lie where they are updated."""
    model = AnalyticModel(MESH)

    def best(count: int, options: int) -> float:
        found = (
            stored_traffic(WEIGHT, True, s, MESH, model, RULE).cost(count, waits=True)
            for s in storages(USED, WEIGHT, MESH, options)
        )
        return float(min(cost.seconds for cost in found))

    assert best(1, 1) == pytest.approx(best(1, 2))


@pytest.mark.parametrize(
    ("said", "inter", "levels"),
    [
        ("zero2", ("node",), "NGG"),
        (" paro-iig over node", ("node",), "IIG"),
        ("NIG over gpu", ("gpu",), "NIG"),
        ("mics in groups of 3", ("node",), "III"),
        ("III in groups of 12", (), "III"),
        (StateSharding.parse("GGG+I"), ("node",), "GGG+I"),
    ],
)
def test_what_users_say(said: str | StateSharding, inter: tuple[str, ...], levels: str) -> None:
    choice = StateChoice.read(said, MESH)
    assert (choice.inter, str(choice.sharding)) == (inter, levels)
    assert StateChoice.read(str(choice), MESH) == choice


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("zero4", "zero3"),
        ("GNN", "third letter"),
        ("IIG over rack", "node, gpu"),
        ("IIG in groups of 5", "groups"),
        ("IIG in groups of 4", "1, 3, 12"),
        ("IIG sideways", "over node"),
    ],
)
def test_nonsense_is_refused(said: str, why: str) -> None:
    with pytest.raises(StateError) as caught:
        StateChoice.read(said, MESH)
    assert why in str(caught.value)


def test_a_parameter_that_cannot_be_split_stays_whole() -> None:
    small = TensorType("f32", (2,))
    (only,) = StateChoice.read("zero3", MESH).storages(Layout(((),), varying=("gpu",)), small, MESH)
    assert only.held == only.updated == Layout(((),))


def test_states_that_are_not_cut_out_of_one_another_are_refused() -> None:
    rows, columns = Layout((("node",), ())), Layout(((), ("node",)))
    whole = Layout(((), ()))
    for layouts in ([rows, whole, whole], [whole, rows, columns], [rows, rows]):
        with pytest.raises(LayoutError):
            Storage.of(USED, layouts)
    with pytest.raises(LayoutError):
        Storage.of(Layout(((), ()), varying=("gpu",)), [rows])

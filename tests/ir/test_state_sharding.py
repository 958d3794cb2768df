"""State shardings against the published tables and against rings that are counted link by link."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.model import AnalyticModel
from autopar.errors import MeshError, StateError
from autopar.intra_op.states import STATES, state
from autopar.ir.mesh import Mesh
from autopar.ir.state_sharding import Groups, StateSharding, shardings

# PaRO (arXiv:2310.06003), Table 2 for 7e9 parameters on 64 devices in groups of 8, Adam: GB of
# parameters, gradients, optimizer state and all.
MEMORY = {
    "NNN": ("14.0", "14.0", "84.0", "112.0"),
    "NNI": ("14.0", "14.0", "10.5", "38.5"),
    "NNG": ("14.0", "14.0", "1.312", "29.31"),
    "NII": ("14.0", "1.75", "10.5", "26.25"),
    "NIG": ("14.0", "1.75", "1.312", "17.06"),
    "NGG": ("14.0", "0.219", "1.312", "15.53"),
    "INI": ("1.75", "14.0", "10.5", "26.25"),
    "ING": ("1.75", "14.0", "1.312", "17.06"),
    "III": ("1.75", "1.75", "10.5", "14.0"),
    "IIG": ("1.75", "1.75", "1.312", "4.81"),
    "IGG": ("1.75", "0.219", "1.312", "3.28"),
    "GNG": ("0.219", "14.0", "1.312", "15.53"),
    "GIG": ("0.219", "1.75", "1.312", "3.28"),
    "GGG": ("0.219", "0.219", "1.312", "1.75"),
    "GGG+I": ("1.969", "0.219", "1.312", "3.50"),
}
# Its Table 3, corrected, with 8 microbatches: 10^12 elements between and inside the groups.
VOLUME = {
    "zero1": ("0.165", "1.158"),
    "zero2": ("0.496", "3.473"),
    "zero3": ("1.323", "9.261"),
    "mics": ("0.098", "10.094"),
    "zero++": ("0.882", "9.310"),
    "paro-igg": ("0.441", "9.408"),
    "paro-iig": ("0.098", "9.408"),
    "paro-nig": ("0.098", "3.528"),
}
PARAMS, PODS = 7e9, Groups(64, 8)


def digits(value: float, printed: str) -> str:
    """`value` with as many digits behind the point as are printed."""
    return f"{value:.{len(printed.partition('.')[2])}f}"


@pytest.mark.parametrize("levels", MEMORY)
def test_memory_is_that_of_the_published_table(levels: str) -> None:
    found = StateSharding.parse(levels).memory(PARAMS, PODS)
    for value, printed in zip([*found.values(), sum(found.values())], MEMORY[levels], strict=True):
        assert digits(value / 1e9, printed) == printed


@pytest.mark.parametrize("name", VOLUME)
def test_volumes_are_those_of_the_corrected_table(name: str) -> None:
    found = state(name).volume(PARAMS, PODS, microbatches=8, whole_sum=True)
    for value, printed in zip(found, VOLUME[name], strict=True):
        assert digits(value / 1e12, printed) == printed


def test_fourteen_of_the_27_are_legal() -> None:
    assert len(shardings(legal=False)) == 27
    assert {str(one) for one in shardings()} == set(MEMORY) - {"GGG+I"}


@settings(deadline=None)
@given(group=st.integers(1, 16), count=st.integers(1, 16))
def test_zero_sends_1_1_1_and_a_half_more(group: int, count: int) -> None:
    """Relative to data parallelism's all_reduce: arXiv:1910.02054, section 7."""
    groups = Groups(group * count, group)
    if groups.devices == 1:
        return
    sent = {name: state(name).volume(1e9, groups) for name in ("ddp", "zero1", "zero2", "zero3")}
    n = groups.devices
    assert sum(sent["ddp"]) == pytest.approx(n * 2 * (n - 1) / n * 1e9)
    for name, times in (("zero1", 1), ("zero2", 1), ("zero3", 1.5)):
        for part, whole in zip(sent[name], sent["ddp"], strict=True):
            assert part == pytest.approx(times * whole)


@settings(deadline=None)
@given(group=st.integers(1, 8), count=st.integers(1, 8), microbatches=st.integers(1, 9))
def test_what_accumulation_inside_the_groups_saves(
    group: int, count: int, microbatches: int
) -> None:
    """PaRO's equation 1: the difference between IGG and IIG, a device."""
    groups = Groups(group * count, group)
    far, near = (state(n).volume(1e9, groups, microbatches) for n in ("paro-igg", "paro-iig"))
    saved = 1e9 * (microbatches - 1) * (groups.count - 1) / groups.devices  # PaRO, equation 1
    assert (far.inter - near.inter) / groups.devices == pytest.approx(saved, abs=1e-3)
    assert far.intra == near.intra
    assert (saved == 0) == (microbatches == 1 or count == 1)


def test_two_thirds_cross_between_groups_with_a_second_copy() -> None:
    """ZeRO++ against ZeRO-3, as PaRO says."""
    with_copy, without = (state(n).volume(PARAMS, PODS, 8).inter for n in ("zero++", "zero3"))
    assert with_copy == pytest.approx(2 / 3 * without)


@pytest.mark.parametrize("one", shardings(), ids=str)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_every_step_ends_with_the_parts_that_the_sharding_tells(
    one: StateSharding, microbatches: int
) -> None:
    """Follow the parts in which the states lie through the collectives of a step."""
    groups = Groups(12, 3)
    factor = {"intra": 3, "inter": 4, "global": 12}
    parts = {"params": groups.parts(one.params), "grads": 1}
    for when in ("forward", "backward"):
        split = parts["params"]
        for call in one.exchanges(microbatches):
            if call.when == when:
                assert (call.kind, call.times) == ("all_gather", microbatches)
                split //= factor[call.over]
        assert split == 1
    summed = 1
    for call in one.exchanges(microbatches):
        if call.state != "grads":
            continue
        if call.kind == "reduce_scatter":
            parts["grads"] *= factor[call.over]
        assert call.times == (microbatches if call.when == "accumulate" else 1)
        summed *= factor[call.over]
        if call.when == "accumulate":
            assert parts["grads"] <= groups.parts(one.grads)
    # Each device has the sum over all devices of what its optimizer updates.
    assert summed == 12
    assert parts["grads"] == groups.parts(one.optimizer)
    split = groups.parts(one.optimizer)
    for call in one.exchanges(microbatches):
        split //= factor[call.over] if call.when == "update" else 1
    assert split == groups.parts(one.params)


@pytest.mark.parametrize("one", shardings(), ids=str)
def test_calls_on_a_mesh_bring_the_bytes_that_are_counted(one: StateSharding) -> None:
    """Each device of a ring of n sends (n-1)/n of the tensor; all devices and calls together."""
    mesh = Mesh.parse("A100-80: node=4, gpu=3")
    counted = one.volume(12e6, Groups(12, 3), 2)
    sent = 0.0
    for call, made in one.collectives(int(12e6), mesh, ("node",), microbatches=2):
        n = math.prod(mesh.axis_size(axis) for axis in made.axes)
        tensor = made.nbytes * (n if made.kind == "all_gather" else 1) / 2
        twice = 2 if made.kind == "all_reduce" else 1
        sent += call.times * 12 * twice * (n - 1) / n * tensor
    # What PaRO counts besides, on the way of an all_reduce between groups.
    besides = 2 * 3 * 2 * 12e6 if one.optimizer == "I" else 0
    assert sent == pytest.approx(sum(counted) - besides)


def test_calls_have_a_price_and_axes() -> None:
    """Where the network is slow, what stays in the groups is worth it, as PaRO measures."""
    mesh = Mesh.parse("A100-80: node=8 @2GB/s, gpu=8")
    model = AnalyticModel(mesh)

    def seconds(name: str) -> float:
        calls = state(name).collectives(int(PARAMS), mesh, ("node",), microbatches=8)
        return sum(call.times * model.collective(made) for call, made in calls)

    assert seconds("paro-iig") < seconds("paro-igg") < seconds("zero3")
    assert seconds("paro-nig") < seconds("zero2")
    names = ("params", "grads", "optimizer")
    assert [state("paro-nig").axes(part, mesh, ("node",)) for part in names] == [
        (),
        ("gpu",),
        ("node", "gpu"),
    ]
    with pytest.raises(MeshError, match="pod"):
        state("zero3").collectives(8, mesh, ("pod",))


def test_of_few_trained_parameters_little_is_kept_and_sent() -> None:
    few = state("zero2").memory(1e9, PODS, trainable=1e6)
    assert few == {"params": 2e9, "grads": 2e6 / 64, "optimizer": 12e6 / 64}
    assert sum(state("zero2").volume(1e9, PODS, trainable=1e6)) == pytest.approx(2 * 63 * 1e6)
    frozen = sum(state("zero3").volume(1e9, PODS, trainable=0))
    assert frozen == pytest.approx(2 * 63 * 1e9)


@pytest.mark.parametrize("levels", [*MEMORY, *STATES])
def test_names_and_letters_are_read_back(levels: str) -> None:
    assert state(str(state(levels))) == state(levels)


@pytest.mark.parametrize("bad", ["", "NI", "NIGG", "nig", "XYZ", "NNN+I", "GGG+G", "GGG+"])
def test_what_is_no_state_sharding_is_refused(bad: str) -> None:
    with pytest.raises(StateError):
        StateSharding.parse(bad)
    with pytest.raises(StateError, match="state sharding"):
        state(bad)


def test_other_bad_input_is_refused() -> None:
    with pytest.raises(StateError, match="zero3"):
        state("zero")
    with pytest.raises(StateError, match="GNN"):
        StateSharding.parse("GNN").volume(1.0, PODS)
    with pytest.raises(StateError, match="0 microbatches"):
        state("ddp").exchanges(0)
    for devices, size in ((12, 5), (0, 1), (8, 0)):
        with pytest.raises(StateError, match="groups"):
            Groups(devices, size)

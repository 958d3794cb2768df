"""State shardings in planning: what fits in memory by the literature, and the user's options."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import transformers

from autopar.cli.common.model_options import capture_model
from autopar.errors import InfeasibleError, StateError
from autopar.explain import moves as explain_moves
from autopar.ir.mesh import Mesh
from autopar.ir.update import Update
from autopar.ir.update.update_rules import WHOLE, dims_of
from autopar.pins import data_parallel
from autopar.plan import Plan
from autopar.plan_entries import ModelSpec
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.runtime.update.observation import observed
from autopar.stage_plan import StagePlan

# PaRO (arXiv:2310.06003), section 5: LLaMA-65B on 32 A100-80, mixed precision, 4 samples of 512
# tokens a device, checkpointing; the others run out of memory.
FITS = {"zero3": True, "zero++": True, "paro-igg": True, "paro-iig": True}
FITS |= {"zero2": False, "mics": False, "hsdp": False, "paro-nig": False}


@pytest.mark.slow
def test_of_the_shardings_of_llama_65b_those_fit_that_are_said_to() -> None:
    mesh = Mesh.parse("A100-80: node=4, gpu=8")
    graph = capture_model(ModelSpec("llama-65b", 128, 512, None), Options(), Trace(None))
    found = {}
    for name in FITS:
        options = Options(
            pins=[data_parallel()], state=name, recompute="full", microbatches=10, memory="80GB",
            # Six times two bytes of a bf16 parameter: master, momentum and variance in float32.
            update=Update.of_bytes(6.0),
        )  # fmt: skip
        try:
            plan = make_plan(graph, mesh, options, Trace(None))
            found[name] = plan.predicted.peak_bytes <= 80e9
        except InfeasibleError:
            found[name] = False
    assert found == FITS


@pytest.mark.slow
def test_llama_70b_on_eight_devices_says_what_is_missing() -> None:
    """No fewer bytes than a split of parameters, gradients and two moments in bf16 needs."""
    mesh = Mesh.parse("H100: gpu=8")
    graph = capture_model(ModelSpec("llama-3-70b", 8, 2048, None), Options(), Trace(None))
    with pytest.raises(InfeasibleError, match=r"GiB more; largest: ") as caught:
        make_plan(graph, mesh, Options(state="zero3"), Trace(None))
    needs = re.search(r"needs ([0-9.]+) GiB", str(caught.value))
    assert needs
    states = 4 * sum(leaf.type.nbytes for leaf in graph.leaves("param")) / 8
    assert states <= float(needs[1]) * 2**30 <= 2 * states
    assert "more devices" in str(caught.value)


def small(**more: object) -> StagePlan:
    graph = capture_model(ModelSpec("gpt2", 8, 16, 2), Options(), Trace(None))
    options = Options(**more)  # type: ignore[arg-type]
    return make_plan(graph, Mesh.parse("H100: node=2, gpu=2"), options, Trace(None))


def test_a_state_is_kept_by_the_plan_and_its_file() -> None:
    plan = small(state="NIG over node", pins=[data_parallel()], microbatches=4)
    assert plan.state == "NIG over node"
    assert Plan.from_toml(Plan.of(plan).to_toml()).stage == plan
    storages = [plan.storage(name, f"{name}_share") for name in _parameters(plan)]
    # The gradient of positions is summed before it reaches the table: that has no parts to reduce.
    reduced = [s for s in storages if s.used.varying]
    assert len(storages) - len(reduced) <= 1
    axes = {(s.axes("held"), s.axes("grads"), s.axes("updated")) for s in reduced}
    assert axes == {((), ("gpu",), ("gpu", "node"))}


def test_whether_parameters_are_gathered_again_may_be_said() -> None:
    for said, again in (("zero3, kept", False), ("zero3 over none, gathered again", True)):
        plan = small(state=said, pins=[data_parallel()])
        storages = [plan.storage(name, f"{name}_share") for name in _parameters(plan)]
        reduced = [storage for storage in storages if storage.axes("held")]
        assert reduced
        assert all((s.kept.dims == s.held.dims) == again for s in reduced)
    with pytest.raises(StateError, match="never"):
        small(state="zero3, never")


def _parameters(plan: StagePlan) -> list[str]:
    shares = [name for name in plan.nodes if f"{name}_share" in plan.nodes]
    return [name for name in shares if not plan.nodes[name].operands]


@pytest.mark.parametrize("mesh", ["H100: node=2, gpu=4", "A100-80: gpu=8"])
def test_no_named_sharding_is_faster_than_the_one_that_is_found(mesh: str) -> None:
    """In the simulation, whose update takes as long as its bytes."""
    graph = capture_model(ModelSpec("gpt2", 8, 512, 4), Options(), Trace(None))

    def seconds(state: str | None) -> float:
        options = Options(state=state)
        return make_plan(graph, Mesh.parse(mesh), options, Trace(None)).predicted.simulated_seconds

    named = {state: seconds(state) for state in ("ddp", "zero1", "zero2", "zero3")}
    assert seconds(None) <= 1.001 * min(named.values())
    assert named["ddp"] > 1.01 * seconds(None)


def test_the_owners_of_whole_parameters_are_a_price_of_splitting_them() -> None:
    """Gradient and parameter reach the owner, the parameter leaves it: three all_to_alls each."""
    update = observed(partial(torch.optim.Adafactor, lr=1e-2))
    plan, free = small(update=update, state="zero3"), small(state="zero3")
    graph = capture_model(ModelSpec("gpt2", 8, 16, 2), Options(), Trace(None))
    moved = explain_moves(graph, plan, lambda call: 1.0)
    split = [
        leaf
        for leaf in graph.leaves("param")
        if plan.storage(
            graph.template[leaf.name], graph.template[graph.users[leaf.name][0]]
        ).updated.sharded_axes
    ]
    times = sum(
        move.times * len([c for c in move.calls if c.kind == "all_to_all"]) for move in moved
    )
    assert times == 3 * len(split) > 0
    assert plan.predicted.step_seconds > free.predicted.step_seconds


@pytest.mark.parametrize(
    "adafactor",
    [
        torch.optim.Adafactor,
        partial(transformers.Adafactor, lr=1e-2, scale_parameter=False, relative_step=False),
    ],
)
def test_an_update_whose_norm_is_bounded_needs_the_whole_vector(adafactor: Any) -> None:
    """Adafactor divides an update by its root mean square, if that exceeds a bound."""
    needs = {rule.dims: rule.needs for rule in observed(adafactor).rules}
    assert needs[dims_of(1)] == needs[dims_of(2)] == WHOLE

"""State shardings of GPT-2 and Llama, with tensor parallelism, stages and recomputation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from autopar.ir.state_sharding import shardings
from tests.support.ranks import run_ranks
from tests.support.state_sharding import ADAMW, Case, Jobs, Run, gpt2, llama, unsharded

STATES = [str(one) for one in shardings()]
MODELS = {"gpt2": gpt2, "llama": llama}
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
# Keys' biases have no gradient but rounding, 1e-17. By default Adafactor divides it by itself: even
# one device would be 1e-8 off if it took its samples in another order. This is AdamW's epsilon.
ADAFACTOR = partial(torch.optim.Adafactor, lr=1e-2, eps=(1e-8, 1e-3))

OPTIMIZERS = {"adamw": ADAMW, "momentum": MOMENTUM}


def train(cases: list[Case], tolerance: float = 1e-9) -> None:
    """Train all cases in one process group, and compare each with one device."""
    ranks = run_ranks(Jobs(cases).train)
    known: dict[tuple[Any, ...], Run] = {}
    wrong = {}
    for number, case in enumerate(cases):
        key = (case.make, case.optimizer, case.microbatches, case.steps)
        whole = known.setdefault(key, known.get(key) or unsharded(case))
        error = max(rank[number][0].error(whole) for rank in ranks)
        if not error <= tolerance:
            wrong[case] = error
    assert not wrong


@pytest.mark.slow
def test_states_train_beside_tensor_parallelism_stages_recomputation_and_other_optimizers() -> None:
    train(
        [
            Case("zero2", 2, tensor=True),
            Case("zero3", 2, stages=2, again=True),
            Case("zero3", recompute="full", again=True),
            Case("zero3", recompute="selective"),
            Case("zero3", 2, again=True, offload="optimizer+activations"),
            Case("paro-iig", 2, optimizer=MOMENTUM),
            Case("ddp", 2, optimizer=ADAFACTOR),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_train_as_one_device_does(name: str, microbatches: int) -> None:
    """Under all fourteen, with ZeRO++'s second copy, and where blocks are gathered again."""
    case = Case("", microbatches, make=MODELS[name], steps=5)
    cases = [replace(case, state=state) for state in [*STATES, "zero++"]]
    cases += [replace(case, state=state, again=True) for state in ("zero3", "hsdp", "paro-igg")]
    train(cases)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_momentum_is_split_like_any_state(name: str, microbatches: int) -> None:
    case = Case("", microbatches, make=MODELS[name], steps=5, optimizer=MOMENTUM)
    cases = [replace(case, state=state) for state in [*STATES, "zero++"]]
    train([*cases, *(replace(case, state=state, again=True) for state in ("zero3", "hsdp"))])


@pytest.mark.slow
def test_adafactor_updates_whole_parameters() -> None:
    case = Case("ddp", make=gpt2, steps=5, optimizer=ADAFACTOR)
    train([replace(case, make=make, microbatches=n) for make, n in product((gpt2, llama), (1, 4))])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_states_are_split_beside_tensor_parallelism(name: str, optimizer: str) -> None:
    how = OPTIMIZERS[optimizer]
    case = Case("", 4, make=MODELS[name], steps=5, tensor=True, optimizer=how)
    states = ["NNN", "NNG", "NGG", "GGG", "III over none", "NIG over none", "IIG over none"]
    cases = [replace(case, state=state) for state in states]
    train([*cases, replace(case, state="GGG", again=True)])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_states_are_split_in_stages(name: str, optimizer: str) -> None:
    """Each on two devices; what two stages share is added up before it is updated."""
    case = Case("", 4, make=MODELS[name], steps=5, stages=2, optimizer=OPTIMIZERS[optimizer])
    states = [
        "NNN",
        "NNG",
        "NGG",
        "GGG",
        "III",
        "NIG over none",
        "IIG over none",
        "zero++ over none",
    ]
    cases = [replace(case, state=state) for state in states]
    train([*cases, replace(case, state="GGG", again=True)])


@pytest.mark.slow
def test_adafactor_updates_whole_parameters_of_stages() -> None:
    """One device for each stage, or two."""
    case = Case("ddp", 4, steps=5, optimizer=ADAFACTOR)
    pairs = product((gpt2, llama), (2, 4))
    train([replace(case, make=make, stages=count) for make, count in pairs])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_blocks_that_are_computed_again_gather_again(name: str) -> None:
    case = Case("", 2, make=MODELS[name], steps=5)
    cases = [
        replace(case, state=state, recompute=how)
        for how, state in product(("full", "selective", "full 1"), ("NGG", "GGG", "zero++", "IIG"))
    ]
    cases += [replace(one, again=True) for one in cases if one.state == "GGG"]
    train(cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_what_lies_in_host_memory_changes_no_number(name: str) -> None:
    """Beside whatever is split, gathered again, computed again or cut into stages."""
    both = Case("zero3", make=MODELS[name], steps=5, offload="optimizer+activations")
    train(
        [
            *(replace(both, microbatches=n, again=a) for n, a in product((1, 4), (False, True))),
            replace(both, state="ddp", offload="optimizer", optimizer=MOMENTUM),
            replace(both, state="zero2", microbatches=4, tensor=True, offload="activations"),
            replace(both, state="zero++", microbatches=4, recompute="full 1"),
            replace(both, state="paro-iig", microbatches=4),
            replace(both, state="zero1", microbatches=4, stages=2),
        ]
    )


def gpt2_bf16() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return gpt2(torch.bfloat16)


@pytest.mark.slow
def test_bf16_runs_stay_within_its_roundings_of_the_unsharded_bf16_run() -> None:
    """Losses and norms within two roundings of bf16 (2^-7), as sums go over devices in its order.

    Parameters: AdamW moves a parameter by its rate at most, whatever the gradient's rounding.
    """
    case = Case("", 4, make=gpt2_bf16, steps=5, optimizer=partial(torch.optim.AdamW, lr=1e-3))
    cases = [replace(case, state=state) for state in ("NNN", "NGG", "GGG", "IIG", "zero++")]
    whole = unsharded(case)
    for rank in run_ranks(Jobs(cases).train):
        for one, (run, _) in zip(cases, rank, strict=True):
            pairs = [*zip(run.losses, whole.losses, strict=True)]
            pairs += zip(run.norms, whole.norms, strict=True)
            worst = max(abs(a - b) / abs(b) for a, b in pairs)
            assert worst <= 2**-7, (one, worst)

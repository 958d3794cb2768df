"""Update as a value: its text, the bytes of its states, and who owns what."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError, ProgramError
from autopar.ir.tensor import TensorType
from autopar.ir.update import ADAMW, Update, deal
from autopar.runtime.update.observation import observed
from tests.support.mixing import Shampoo

TEXTS = [
    "* -> step f32[] on host, exp_avg[*], exp_avg_sq[*]",
    "scalar -> nothing",
    "a b whole -> row_var[a 1], col_var[1 b], step f32[] on host",
    "a b dealt, 5 (s s l + s s s + s l s) bf16 -> momentum_buffer[*]",
    "wte.weight, h.*.bias: * -> state u8[0.25 *], blocks[12 a a] in the update",
]

OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "rmsprop": partial(torch.optim.RMSprop, centered=True),
    "asgd": torch.optim.ASGD,
    "adafactor": torch.optim.Adafactor,
    "muon": autopar.muon(),
    "torch's muon": torch.optim.Muon,
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_reads_back(text: str) -> None:
    assert Update.parse([text]).texts == [text]


@pytest.mark.parametrize(
    "text",
    ["", "*", "* -> ", "* -> m", "* -> m[z]", "a c -> m[*]", "* -> m f7[*]", "* whole m[*]",
     "a b dealt, 5 (s s) bf16 -> m[*]", "* -> m[*] on disk"],
)  # fmt: skip
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="of an update"):
        Update.parse([text])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "shampoo"])
def test_states_have_the_bytes_that_are_counted(name: str, dtype: torch.dtype) -> None:
    """Against the tensors of an optimizer after a step on parameters of other shapes."""
    factory = OPTIMIZERS.get(name, Shampoo)
    update = observed(factory)
    for shape in ((6, 17), (13,), (4, 9, 8), ()):
        if name == "torch's muon" and len(shape) != 2:
            with pytest.raises(ProgramError, match="cannot train w"):
                update.rule("w", shape)
            continue
        parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
        optimizer = factory([parameter])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        state = optimizer.state[parameter].values()
        held = sum(t.nbytes for t in state if isinstance(t, Tensor) and t.ndim)
        kind = {torch.float32: "f32", torch.float64: "f64"}[dtype]
        rule = update.rule("w", shape)
        assert rule.nbytes(TensorType(kind, shape)) == (
            held if shape else rule.nbytes(TensorType(kind, ()))
        )


def test_needs_are_observed() -> None:
    assert observed(torch.optim.AdamW) == ADAMW
    needs = {
        n: {rule.dims: rule.needs for rule in observed(f).rules} for n, f in OPTIMIZERS.items()
    }
    assert needs["adamw"] == needs["momentum"] == needs["asgd"] == {"*": ""}
    assert needs["muon"] == {"a b": "dealt", "*": ""}
    assert {needs["adafactor"]["a"], needs["adafactor"]["a b"]} == {"whole"}
    shampoo = {rule.dims: rule.needs for rule in observed(Shampoo).rules}
    assert shampoo["a b"] == "whole"
    assert shampoo["a"] == shampoo["a b c"] == ""


class Columns(torch.optim.Optimizer):
    """Divides the gradient by the norm of each row, so that parts of columns differ."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm(dim=-1, keepdim=True) if p.ndim else p.grad)


def test_elements_that_are_mixed_along_one_dimension_are_mixed() -> None:
    assert Update(observed(Columns).rules).rule("w", (4, 4)).needs == "whole"


def test_groups_have_rules_of_their_own() -> None:
    factory = partial(torch.optim.SGD, lr=0.1)
    update = observed(factory, {"a": {}, "b": {"momentum": 0.9}}, average=True)
    names = {name: [s.name for s in update.rule(name, (3,)).states] for name in ("a", "b", "c")}
    assert names == {"a": ["average"], "b": ["momentum_buffer", "average"], "c": ["average"]}


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(1, 3))
def test_owners_have_at_most_four_thirds_of_the_best_deal(loads: list[int], owners: int) -> None:
    def most(dealt: tuple[int, ...]) -> int:
        return max(
            sum(n for n, o in zip(loads, dealt, strict=True) if o == own) for own in range(owners)
        )

    best = min(map(most, itertools.product(range(owners), repeat=len(loads))))
    assert best <= most(deal(loads, owners)) <= best * (4 / 3 - 1 / (3 * owners)) + 1e-9


def test_old_plans_say_bytes() -> None:
    update = Update.of_bytes(2.5)
    assert Update.parse(update.texts) == update
    assert update.rule("w", (4, 3)).nbytes(TensorType("f32", (4, 3))) == 2.5 * 48
    assert Update.of_bytes(2.0) == ADAMW

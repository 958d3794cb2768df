"""Containers of tensors are flattened to names and rebuilt."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from autopar.capture.structure import Inputs, Structure
from autopar.errors import BatchError

Pair = namedtuple("Pair", "left right")


@dataclass
class Sample:
    image: Tensor
    label: Tensor
    note: str = ""
    total: int = field(init=False, default=0)


A, B, C = torch.zeros(1), torch.zeros(2), torch.zeros(3)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (A, ("batch",)),
        ({"x": A, "y": B}, ("batch.x", "batch.y")),
        ([A, (B, C)], ("batch.0", "batch.1.0", "batch.1.1")),
        (Pair(A, B), ("batch.left", "batch.right")),
        (Sample(A, B, "n"), ("batch.image", "batch.label")),
        (OrderedDict(x=[{"y": A}]), ("batch.x.0.y",)),
        ({"x": A, "scale": 2.0, "mode": None}, ("batch.x",)),
        (CausalLMOutput(loss=A, logits=B), ("batch.loss", "batch.logits")),
        ([], ()),
    ],
)
def test_a_container_comes_back_with_its_kind_constants_and_tensors(
    value: Any, names: tuple[str, ...]
) -> None:
    structure = Structure.of(value, "batch", constants=True)
    assert structure.names == names
    tensors = structure.flatten(value)
    assert tuple(tensors) == names
    rebuilt = structure.rebuild(tensors)
    assert type(rebuilt) is type(value)
    again = Structure.of(rebuilt, "batch", constants=True)
    assert again == structure
    assert all(again.flatten(rebuilt)[name] is tensors[name] for name in names)


def test_a_defaultdict_comes_back_as_a_dict() -> None:
    value: defaultdict[str, Any] = defaultdict(list, x=A)
    structure = Structure.of(value, "", constants=True)
    assert structure.rebuild({"x": B}) == {"x": B}


def test_without_constants_anything_stands_in_their_place() -> None:
    structure = Structure.of({"x": A, "cache": object()}, "", constants=False)
    assert structure.flatten({"x": B, "cache": 3}) == {"x": B}
    assert structure.rebuild({"x": B}) == {"x": B, "cache": None}


@pytest.mark.parametrize(
    ("captured", "given", "told"),
    [
        (A, 3, "a tensor"),
        ({"x": 3}, {"x": A}, "x is a tensor"),
        ({"x": 3}, {"x": 4}, "captured with 3"),
        ({"x": None}, {"x": 4}, "captured with None"),
        ({"x": 1}, {"x": True}, "x is True"),
        ({"x": A}, {"y": A}, "captured with x"),
        ([A], [A, B], "captured with 0"),
        ([A], 7, "has nothing"),
    ],
)
def test_another_structure_is_refused(captured: Any, given: Any, told: str) -> None:
    structure = Structure.of(captured, "", constants=True)
    with pytest.raises(BatchError, match=told):
        structure.flatten(given)


def forward(x: Tensor, /, y: Any, *rest: Tensor, scale: float = 1.0, **extra: Any) -> None:
    """A signature with every kind of argument."""


SIGNATURE = inspect.signature(forward)


def test_positional_and_keyword_arguments_are_put_back_where_they_belong() -> None:
    args, kwargs = (A, {"a": B}, C), {"scale": 2.0, "mask": A}
    inputs = Inputs.of(SIGNATURE, args, kwargs)
    assert inputs.names == ("x", "y.a", "rest.0", "mask")
    assert inputs.rebuild(inputs.flatten(args, kwargs)) == (args, kwargs)


def test_a_call_may_spell_an_argument_either_way() -> None:
    signature = inspect.signature(lambda x, y: None)
    inputs = Inputs.of(signature, (A,), {"y": B})
    assert inputs.flatten((), {"y": B, "x": A}) == {"x": A, "y": B}


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((A,), {}), ((A, B), {"y": C}), ((A,), {"y": B, "x": C, "z": 1})]
)
def test_a_batch_that_the_signature_does_not_take_is_refused(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(BatchError, match="does not take"):
        Inputs.of(inspect.signature(lambda x, y: None), args, kwargs)


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(BatchError, match=r"x\.a"):
        Inputs.of(inspect.signature(lambda **extra: None), (), {"x.a": A, "x": {"a": B}})

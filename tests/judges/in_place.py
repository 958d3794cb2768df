"""Every operator of ATen that writes, on a buffer, a view of one and a local value, against eager.

Operators are found by their schemas: the name ends in an underscore and an argument is written.
Arguments are made up by type, until torch takes them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from autopar.capture.capture import capture
from autopar.capture.decompose import decompose_unknown
from autopar.errors import AutoparError
from autopar.intra_op.rules import rules
from autopar.operators.interpret import run
from autopar.passes.normalise import NORMALISING, prepare
from autopar.passes.verify import verify

PLACES = ("buffer", "view", "local")
STEPS = 2
RULES = rules()
_TRIES = 400
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """How an operator fares in one place.

    Attributes:
        operator: "aten.add_.Tensor".
        place: one of PLACES.
        status: "right", "refused", "wrong", or "no call" where eager torch takes none either.
        reason: what the error says.
    """

    operator: str
    place: str
    status: str
    reason: str = ""


def overloads() -> Iterator[OpOverload]:
    """The operators of ATen that write, by name."""
    schemas = (s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::"))
    for schema in sorted(schemas, key=lambda s: (s.name, s.overload_name)):
        name = schema.name.removeprefix("aten::")
        written = any(
            a.alias_info is not None and a.alias_info.is_write and not a.is_out
            for a in schema.arguments
        )
        if not name.endswith("_") or not written or not hasattr(torch.ops.aten, name):
            continue
        if name.startswith("_sobol_engine_"):
            continue  # arguments that are made up crash the process
        found = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default", None)
        if isinstance(found, OpOverload):  # others are of TorchScript only
            yield found


def _tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    square = torch.rand(4, 4, generator=generator, dtype=torch.float64) * 0.6 + 0.2
    return [
        square, square > 0.5, torch.tensor([2, 0, 1, 3]), torch.tensor(0.5, dtype=torch.float64),
        torch.randint(0, 4, (4, 4), generator=generator), square[0], square.expand(4, 4, 4).clone(),
        torch.tensor(2), torch.tensor(1.0),
    ]  # fmt: skip


def _values(kind: str, name: str) -> list[Any]:
    """Values of an argument, the likeliest first."""
    tensors = _tensors()
    if kind.startswith("Optional["):
        inner = kind.removeprefix("Optional[").removesuffix("]")
        return [None] if inner in ("Generator", "MemoryFormat") else [*_values(inner, name), None]
    if kind in ("Tensor", "t"):
        return tensors
    if kind == "List[Tensor]":
        return [[tensors[0], tensors[0] + 0.1], [tensors[3], tensors[3]]]
    if kind == "List[Optional[Tensor]]":
        return [[tensors[2]], [tensors[1]]]
    simple: dict[str, list[Any]] = {
        "number": [0.5, 2], "float": [0.5, 2.0], "int": [0, 1, 2], "SymInt": [0, 1, 2],
        "bool": [False, True], "str": ["sum", "prod", "amax", "add", "mean"],
        "List[int]": [[0], [0, 1]], "List[SymInt]": [[4, 4], [0]],
        "List[number]": [[0.5, 2.0]], "List[float]": [[0.5, 2.0]], "Generator": [None],
    }  # fmt: skip
    return simple.get(kind, [])


def calls(operator: OpOverload) -> Iterator[Call]:
    """Arguments with which torch takes the operator; those that change what is written first."""
    arguments = operator._schema.arguments
    kept = [a for a in arguments if not a.has_default_value() or a.name in ("accumulate",)]
    candidates = [_values(str(a.type), a.name) for a in kept]
    idle: list[Call] = []
    for values in itertools.islice(itertools.product(*candidates), _TRIES):
        args = tuple(v for a, v in zip(kept, values, strict=True) if not a.kwarg_only)
        kwargs = {a.name: v for a, v in zip(kept, values, strict=True) if a.kwarg_only}
        given, named = copy.deepcopy((args, kwargs))
        try:
            torch.manual_seed(0)
            operator(*given, **named)
        except Exception:
            continue
        after = _flat(given[0])
        if any(t.is_floating_point() and not t.isfinite().all() for t in after):
            continue
        if all(map(torch.equal, after, _flat(args[0]))):
            idle.append((args, kwargs))
        else:
            yield args, kwargs
    yield from idle


def _flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


class Writes(nn.Module):
    """Calls an operator that writes, and computes a loss of what is written."""

    def __init__(self, operator: OpOverload, call: Call, place: str, flows: bool = True) -> None:
        super().__init__()
        self.operator, self.place, self.flows = operator, place, flows
        (first, *rest), self.kwargs = call
        self.listed = not isinstance(first, Tensor)
        self.w = nn.Parameter(torch.linspace(0.9, 1.1, 4, dtype=torch.float64))
        self.count = 0
        self.rest = [self._held(arg) for arg in rest]
        for number, tensor in enumerate(_flat(first)):
            whole = torch.stack([tensor, tensor]) if place == "view" else tensor.clone()
            self.register_buffer(f"b{number}", whole)
        self.size = len(_flat(first))

    def _held(self, arg: Any) -> Any:
        if isinstance(arg, list):
            return [self._held(item) for item in arg]
        if not isinstance(arg, Tensor):
            return arg
        self.register_buffer(f"arg{self.count}", arg.clone())
        self.count += 1
        return f"arg{self.count - 1}"

    def _given(self, arg: Any) -> Any:
        if isinstance(arg, list):
            return [self._given(item) for item in arg]
        named = isinstance(arg, str) and arg.startswith("arg")
        return getattr(self, arg) if named else arg

    def forward(self, x: Tensor) -> Tensor:
        held = [getattr(self, f"b{number}") for number in range(self.size)]
        before = sum((tensor.double().sum() for tensor in held), torch.zeros(()))
        if self.place == "view":
            held = [tensor[1] for tensor in held]
        if self.place == "local":
            scale = self.w.sum() if self.flows else x.sum()
            held = [(t * scale).to(t.dtype) if t.is_floating_point() else t.clone() for t in held]
        with torch.set_grad_enabled(self.place == "local"):
            args = [self._given(arg) for arg in self.rest]
            self.operator(held if self.listed else held[0], *args, **self.kwargs)
        after = sum((tensor.double().square().sum() for tensor in held), torch.zeros(()))
        return (self.w * x).sum() + self.w[0] * after + before


Outcome = tuple[list[Tensor], dict[str, Tensor]]
X = torch.linspace(0.3, 0.6, 4, dtype=torch.float64)


def _eager(model: Writes) -> Outcome:
    """Losses of a few calls, gradients added up, and what the buffers are afterwards."""
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        loss = model(X.clone())
        loss.backward()
        losses.append(loss.detach())
    assert model.w.grad is not None
    return losses, {"gradient": model.w.grad, **dict(model.named_buffers())}


def _captured(model: Writes) -> Outcome:
    """The same of the graph that a program is made of."""
    captured = capture(model, (X,), known=RULES)
    graph = prepare(verify(decompose_unknown(captured.graph, RULES)), passes=NORMALISING)
    buffers = {name: tensor.clone() for name, tensor in captured.buffers.items()}
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        loss = run(graph, {"x": X.clone(), "w": model.w, **buffers})["loss"]
        loss.backward()
        losses.append(loss.detach())
    assert model.w.grad is not None
    return losses, {"gradient": model.w.grad, **buffers}


def judge(operator: OpOverload, place: str) -> Verdict:
    """The operator with the first call that eager torch takes a gradient of, in one place."""
    name = str(operator)
    for flows, call in itertools.product((True, False), itertools.islice(calls(operator), 4)):
        model = Writes(operator, call, place, flows)
        try:
            expected = _eager(copy.deepcopy(model))
        except RuntimeError:
            continue
        try:
            found = _captured(model)
        except AutoparError as error:
            return Verdict(name, place, "refused", error.what)
        except Exception as error:
            return Verdict(name, place, "wrong", f"{type(error).__name__}: {error}"[:200])
        return Verdict(name, place, *_compare(expected, found))
    return Verdict(name, place, "no call")


def _compare(expected: Outcome, found: Outcome) -> tuple[str, str]:
    values: Sequence[tuple[str, Tensor, Tensor]] = [
        *((f"loss {i}", a, b) for i, (a, b) in enumerate(zip(expected[0], found[0], strict=True))),
        *((name, value, found[1][name]) for name, value in expected[1].items()),
    ]
    for name, value, other in values:
        if value.shape != other.shape:
            return "wrong", f"{name} has the shape {tuple(other.shape)}"
        if not torch.allclose(value.double(), other.double(), rtol=1e-9, atol=1e-9, equal_nan=True):
            error = float((value.double() - other.double()).abs().max())
            return "wrong", f"{name} is off by {error:.2g}"
    return "right", ""

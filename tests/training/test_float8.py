"""Linears in 8 bits: products and training against plain torch that rounds operands alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import ProgramError
from autopar.explain.moves import moves
from autopar.intra_op.proofs.thread_ranks import ThreadDevice, on_all_devices
from autopar.ir.mesh import Mesh
from autopar.operators.narrow.float8_linear import Scaling, float8_linear
from autopar.pins import data_parallel, megatron, megatron_sp
from autopar.runtime.communication.group import Group
from tests.support.parity import train_plainly
from tests.support.ranks import run_ranks

BY_ROW = {"float8": False, "float8-rows": True}
RATE, STEPS, WIDTH, WORDS = 0.3, 4, 24, 12  # 8-bit products need multiples of 16
DEVICE = "cpu[1TFLOP/s 64GiB 1TB/s]"


def refused_rows() -> str:
    """Returns in torch's words why it multiplies no rows of which each has a scale, or nothing."""
    narrow, scales = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch.ops.aten._scaled_mm(narrow, narrow.t(), scales, scales.t(), out_dtype=torch.float32)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


REFUSED = refused_rows()
needs_rows = pytest.mark.skipif(bool(REFUSED), reason=f"torch: {REFUSED}")
EACH_SCALE = [False, pytest.param(True, marks=needs_rows)]

# By hand, in plain torch on one device -----------------------------------------------------------


def rounded(x: Tensor, dtype: torch.dtype, by_row: bool) -> Tensor:
    """A matrix as torchao's recipes round it, with a scale for all of it or for each row."""
    top = x.abs().amax(-1, keepdim=True) if by_row else x.abs().max()
    scale = (torch.finfo(dtype).max / top.double().clamp(min=1e-12)).float()
    scale = 2 ** scale.log2().floor() if by_row else scale
    narrow: Tensor = (x * scale).to(dtype).to(x.dtype) / scale
    return narrow


class ByHand(torch.autograd.Function):
    """x weightᵀ, whose three products round their operands along what they contract."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_row = by_row
        e4 = torch.float8_e4m3fn
        return rounded(x, e4, by_row) @ rounded(weight, e4, by_row).T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, weight), (given,), by_row = ctx.saved_tensors, gradients, ctx.by_row
        e4, of_results = torch.float8_e4m3fn, torch.float8_e4m3fn if by_row else torch.float8_e5m2
        into_x = rounded(given, of_results, by_row) @ rounded(weight.T, e4, by_row).T
        into_weight = rounded(given.T, of_results, by_row) @ rounded(x.T, e4, by_row).T
        return into_x, into_weight, None


class Linear(nn.Linear):
    """A linear of a block; `by_row` is None as it is compiled, and set to compute by hand."""

    by_row: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.by_row is None:
            return F.linear(x, self.weight, self.bias)
        rows: Tensor = ByHand.apply(x.flatten(0, -2), self.weight, self.by_row)  # type: ignore[no-untyped-call]
        result: Tensor = rows.view(*x.shape[:-1], -1) + self.bias
        return result


class Block(nn.Module):
    """Two linears in a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = Linear(WIDTH, 40), Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + added


class Words(nn.Module):
    """Predicts for each word a word that follows from it."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.to(dtype)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, WORDS, (8, 6), generator=torch.manual_seed(1))
    return {"tokens": tokens, "labels": (5 * tokens + 1) % WORDS}


def by_hand(by_row: bool | None, steps: int = STEPS) -> list[float]:
    """The losses of plain torch on one device; in full precision if `by_row` is None."""
    model = Words()
    for module in model.modules():
        if isinstance(module, Linear):
            module.by_row = by_row
    updates = torch.optim.SGD(model.parameters(), lr=RATE)
    return train_plainly(lambda: model(**batch()), updates, steps)


# Products ----------------------------------------------------------------------------------------


def products(by_row: bool, x: Tensor, weight: Tensor, given: Tensor) -> list[Tensor]:
    """The result and the gradients of a linear that no device splits."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    scaling = Scaling(None, by_row, (), (), ())  # type: ignore[arg-type]
    result = float8_linear(x, weight, scaling)
    result.backward(given)
    assert x.grad is not None
    assert weight.grad is not None
    return [result.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_row", EACH_SCALE)
def test_three_products_of_operands_that_are_rounded_for_each(
    by_row: bool, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = ((3, 5, 24), (40, 24), (3, 5, 40))
    x, weight, given = (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)
    x[0, 1], weight[:, 2], given[1] = 0.0, 1e3, given[1] * 1e-3
    found = products(by_row, x, weight, given)
    wide = [tensor.double().flatten(0, -2).requires_grad_() for tensor in (x, weight, given)]
    result: Tensor = ByHand.apply(wide[0], wide[1], by_row)  # type: ignore[no-untyped-call]
    result.backward(wide[2].detach())
    places = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-6
    for own, other in zip(found, (result, wide[0].grad, wide[1].grad), strict=True):
        assert other is not None
        assert own.dtype == dtype
        error = (own.double().flatten(0, -2) - other).norm() / other.norm()
        assert error < places


SPLITS = [
    {"rows": "a"},
    {"columns": "a"},
    {"contracted": "a"},
    {"rows": "a", "columns": "b"},
    {"rows": "b", "contracted": "a"},
    {"columns": "a", "contracted": "b"},
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("by_row", EACH_SCALE)
def test_devices_with_parts_round_as_one_device_with_the_whole(
    by_row: bool, split: dict[str, str]
) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight, given = (torch.randn(n, generator=draw) for n in ((7, 32), (18, 32), (7, 18)))
    mesh = Mesh.parse("cpu: a=2, b=2")

    def part(device: ThreadDevice, whole: Tensor, *dims: str) -> Tensor:
        for dim, name in enumerate(dims):
            if axis := split.get(name):
                start, length = device.group(axis).own(whole.shape[dim])
                whole = whole.narrow(dim, start, length)
        return whole

    def run(rank: int, device: ThreadDevice) -> list[Tensor]:
        operands = (
            part(device, x, "rows", "contracted"),
            part(device, weight, "columns", "contracted"),
        )
        own = [operand.clone().requires_grad_() for operand in operands]
        result = device.float8_linear(*own, by_row=by_row, **split)  # type: ignore[arg-type]
        result.backward(part(device, given, "rows", "columns"))
        into_x, into_weight = (operand.grad for operand in own)
        assert into_x is not None
        assert into_weight is not None
        summed = []
        for tensor, name in ((result, "contracted"), (into_x, "columns"), (into_weight, "rows")):
            axis = split.get(name)
            summed.append(device.group(axis).reduce(tensor.detach()) if axis else tensor.detach())
        expected = products(by_row, x, weight, given)
        dims = ("rows", "columns"), ("rows", "contracted"), ("columns", "contracted")
        whole = [part(device, value, *names) for value, names in zip(expected, dims, strict=True)]
        return [a - b for a, b in zip(summed, whole, strict=True)]

    for differences in on_all_devices(mesh, run):
        assert max(float(difference.abs().max()) for difference in differences) < 1e-4


def test_an_infinite_element_spoils_its_tensor() -> None:
    x, weight, given = torch.ones(2, 16), torch.ones(16, 16), torch.ones(2, 16)
    x[0, 0] = torch.inf
    assert products(False, x, weight, given)[0].isnan().all()


@needs_rows
def test_no_row_at_all() -> None:
    x, weight, given = torch.ones(0, 16), torch.ones(16, 16), torch.ones(0, 16)
    result, into_x, into_weight = products(True, x, weight, given)
    assert result.shape == into_x.shape == (0, 16)
    assert not into_weight.any()


def test_frozen_operands_save_nothing_and_get_no_gradient() -> None:
    x, weight = torch.ones(4, 16), torch.ones(16, 16, requires_grad=True)
    scaling = Scaling(None, False, (), (), ())  # type: ignore[arg-type]
    float8_linear(x, weight, scaling).sum().backward()
    assert weight.grad is not None
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        float8_linear(x.requires_grad_(), weight.detach(), scaling)
    assert [tensor.shape for tensor in kept] == [(16, 16)]


def test_a_device_without_such_products_refuses_with_torch_s_reason() -> None:
    def refuses(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("only supported on compute capability >= 8.9\nand so on")

    with (
        patch.object(torch.ops.aten, "_scaled_mm", refuses),
        pytest.raises(ProgramError, match=r"cannot multiply in 8 bits.*\n.*capability >= 8\.9"),
    ):
        products(False, torch.ones(2, 16), torch.ones(16, 16), torch.ones(2, 16))


# Training ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One run: the format, the mesh's axes, and further options."""

    linears: str
    axes: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mesh(self) -> str:
        """Quick devices on fast links, where what a plan leaves open is not split."""
        return f"{DEVICE}: {', '.join(f'{axis} @10GB/s 1us' for axis in self.axes.split(', '))}"


@dataclass(frozen=True)
class Run:
    """Losses, source, and bytes of largest elements: of the last step, and as a plan lists them."""

    losses: list[float]
    source: str
    sent: int
    listed: int


def train(cases: list[Case], steps: int = STEPS) -> list[Run]:
    """The runs of this rank."""
    return [_train(case, steps) for case in cases]


def _train(case: Case, steps: int) -> Run:
    program = autopar.compile(
        Words(),
        case.mesh,
        example_inputs=batch(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        execution=f"linears={case.linears}",
        **case.options,
    )
    losses, sent, maximum = [], list[int](), Group.maximum

    def counted(group: Group, x: Tensor) -> Tensor:
        sent.append(x.numel() * x.element_size())
        return maximum(group, x)

    with patch.object(Group, "maximum", counted):
        for _ in range(steps):
            sent.clear()
            losses.append(program.step(**batch()).item())
    listed = sum(
        move.count(call) * call.nbytes
        for move in moves(program.graph, program.plan.stages[0], lambda _: 0.0)
        for call in move.calls
        if move.inside
    )
    return Run(losses, program.source, sum(sent), listed)


TENSOR, SEQUENCE, DATA = megatron("gpu"), megatron_sp("gpu"), data_parallel("gpu")
TWO = [
    Case("float8", "gpu=2", {"pins": DATA, "state": "zero3"}),
    Case("float8", "gpu=2", {"pins": TENSOR, "recompute": "save linear:2"}),
    Case("float8", "gpu=2", {"pins": SEQUENCE}),
]
TWO_BY_ROW = [
    Case("float8-rows", "gpu=2", {"pins": DATA, "state": "zero3", "recompute": "full"}),
    Case("float8-rows", "gpu=2", {"pins": SEQUENCE}),
]
FOUR, FOUR_BY_ROW = (
    [Case(linears, "node=2, gpu=2", {"pins": [data_parallel("node"), pin], "state": state})]
    for linears, pin, state in (
        ("float8", SEQUENCE, "zero3"),
        ("float8-rows", TENSOR, "zero1"),
    )
)


def agree(found: list[Run], cases: list[Case]) -> None:
    """Checks losses: sums in other orders may round an operand of a million to its neighbour."""
    whole = by_hand(None)
    for case, run in zip(cases, found, strict=True):
        expected = by_hand(BY_ROW[case.linears])
        assert run.source.count("mesh.float8_linear(") == 2, run.source
        torch.testing.assert_close(run.losses[:STEPS], expected, rtol=1e-4, atol=0)
        if "recompute" not in case.options:
            assert run.sent == run.listed
        apart = max(abs(a - b) / b for a, b in zip(expected, whole, strict=True))
        assert apart > 1e-3  # what full precision would give


@pytest.mark.parametrize("linears", ["float8", pytest.param("float8-rows", marks=needs_rows)])
def test_one_process_trains_as_by_hand_and_converges(linears: str) -> None:
    cases = [Case(linears, "gpu=1")]
    runs = train(cases, steps=40)
    agree(runs, cases)
    assert runs[0].losses[0] > 2
    assert runs[0].losses[-1] < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "cases"),
    [
        pytest.param(2, TWO, id="two"),
        pytest.param(4, FOUR, id="four"),
        pytest.param(2, TWO_BY_ROW, id="two by rows", marks=needs_rows),
        pytest.param(4, FOUR_BY_ROW, id="four by rows", marks=needs_rows),
    ],
)
def test_ranks_train_as_one_process_by_hand(count: int, cases: list[Case]) -> None:
    for found in run_ranks(train, cases, count=count):
        agree(found, cases)


def test_a_format_that_only_prices_know_is_refused_where_a_program_is_written() -> None:
    options: dict[str, Any] = {"example_inputs": batch(), "execution": "linears=mxfp8"}
    mesh = "H100: gpu=2"
    assert autopar.plan(Words(), mesh, **options).mesh == Mesh.parse(mesh)
    with pytest.raises(ProgramError, match="mxfp8"):
        autopar.emit(Words(), mesh, **options)

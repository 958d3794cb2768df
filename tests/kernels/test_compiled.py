"""Kernels compiled for absent GPUs stay within budgets of registers and instructions."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what Triton does; unset, it warns

from autopar_kernels.registry import launch, operators
from autopar_kernels.registry.draw import Draw
from autopar_kernels.registry.operator import Operator, listed
from tests.kernels.compiled import Compiled, compiling

KERNELS = [operator for operator in operators().values() if operator.table]
# Bytes of shared memory of a program; instructions of threads for each byte that memory moves, at
# nine tenths of its bandwidth: processors x 128 lanes x clock / bandwidth (NVIDIA's data sheets of
# A100, H200 and B200).
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
ISSUED = {
    80: 108 * 128 * 1.41e9 / (0.9 * 2.04e12),
    90: 132 * 128 * 1.98e9 / (0.9 * 4.8e12),
    100: 148 * 128 * 1.97e9 / (0.9 * 8.0e12),
}
# The generation of quick tests; without a cache of Triton's, a row takes about a second to compile.
QUICK = 90
# As much of the issue budget as leaves a kernel bound by memory.
SHARE = {80: 0.7, 90: 0.7, 100: 1.0}
REGISTERS = {
    "rms_norm": 128,
    "layer_norm": 96,
    "rms_norm_backward": 128,
    "layer_norm_backward": 128,
}
# Rows of three numbers, and a sum over one: neither is read 16 bytes at a time, nor matters.
NARROW = ("cross_entropy_combine",)


def sizes(table: str, capability: int) -> Iterator[int]:
    """The largest size of each row; 0, for any, where there is but one."""
    least = 0
    for row in launch.rows(table, f"sm_{capability}"):
        yield row.up_to or 2 * least
        least = row.up_to or 0


# Of the operators that share a kernel, the one that does most with it.
FULLEST = {operator.table: operator for operator in KERNELS}.values()


def every() -> Iterator[tuple[Operator, int, int]]:
    for operator in FULLEST:
        for capability in SHARED:
            for size in sizes(operator.table, capability):
                yield operator, size, capability


def named(case: tuple[Operator, int, int]) -> str:
    return f"{case[0].name}-{case[1]}-sm_{case[2]}"


def executed(kernel: Compiled, trips: float) -> float:
    """Instructions of all threads: those of a loop as often as it goes round."""
    return (kernel.body + kernel.loop * max(trips - 1, 0)) * kernel.threads * kernel.programs


def trips(operator: Operator, args: tuple[object, ...], kernel: Compiled) -> float:
    """Returns the number of rounds of a program's loop; 1 where it has none."""
    if not kernel.loop:
        return 1
    first = next(t for t in operator.operands(args).values() if t is not None)
    block = launch.rows(operator.table, "any")[0].block
    each = first.numel() / block if block else first.numel() / first.shape[-1]
    return each / kernel.programs


def within_budgets(operator: Operator, size: int, capability: int) -> None:
    args = operator.typical(Draw(torch.bfloat16, "meta"), size)
    with compiling(capability) as made:
        if operator.unfit(args):
            assert operator.name == "quantize_f8"
            assert capability < 89
            return
        results = operator.allocate(*args)
        operator.launch(results, *args)
    moved = operator.nbytes(list(operator.operands(args).values()), listed(results))
    assert made
    issued = 0.0
    for kernel in made:
        assert not kernel.spilled, kernel.name
        assert kernel.registers <= REGISTERS.get(operator.table, 64), kernel.name
        assert kernel.shared <= SHARED[capability]
        assert kernel.wide or operator.table in NARROW or "combine" in kernel.name
        assert not kernel.narrow_offsets
        issued += executed(kernel, trips(operator, args, kernel))
    assert issued / moved <= SHARE[capability] * ISSUED[capability]


# Of each kernel the row of the largest size, which needs most.
LARGEST = [(operator, max(sizes(operator.table, QUICK)), QUICK) for operator in FULLEST]


@pytest.mark.parametrize("case", LARGEST, ids=named)
def test_the_largest_row_of_every_kernel_for_one_generation(
    case: tuple[Operator, int, int],
) -> None:
    within_budgets(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in every() if case not in LARGEST], ids=named)
def test_every_other_row_of_the_table_for_three_generations(
    case: tuple[Operator, int, int],
) -> None:
    within_budgets(*case)


@pytest.mark.slow
def test_sizes_of_one() -> None:
    """Triton compiles kernels anew for arguments that are 1, which are then no tensors."""
    draw = Draw(torch.bfloat16, "meta")
    ce, experts = draw.normal(1, 1), (draw.integers(1, 1), draw.integers(1, 1))
    one = draw.normal(1, dtype=torch.float32)
    heads, angle = draw.normal(1, 1, 1, 2), draw.normal(1, 1)
    cases = {
        "cross_entropy": (ce, draw.integers(1, 1), -100, 0.0),
        "cross_entropy_backward": (ce, draw.integers(1, 1), one, one, 0, -100, 0.0),
        "rms_norm_backward": (ce, ce, ce, draw.normal(1), one),
        "layer_norm_backward": (ce, ce, ce, draw.normal(1), one, one),
        "add_rms_norm": (ce, ce, draw.normal(1), 1e-6),
        "adamw_": (one, one, one, one, one, draw.normal(8, dtype=torch.float32)),
        "square_sum": (one,),
        "geglu_again": (ce, ce, ce),
        "rotary_pack": (heads, heads, heads, angle, angle, 1),
        "experts_unpermute": (ce, experts[1], ce),
        "experts_unpermute_backward": (ce, ce, experts[0], ce),
        "quantize_int8": (one, 1),
        "attention_merge_": (heads, draw.normal(1, 1, 1, dtype=torch.float32)) * 2,
    }
    with compiling(90) as made:
        for name, args in cases.items():
            operator = operators()[name]
            assert not operator.unfit(args)
            operator.launch(operator.allocate(*args), *args)
    assert len(made) >= len(cases)


def test_the_table_has_a_row_for_every_kernel_and_no_other() -> None:
    assert set(launch.table()) == {operator.table for operator in KERNELS}


def test_an_offset_of_32_bits_is_found() -> None:
    """The check itself, on what it is there to find."""
    ttir = """
      tt.func public @k(%x: !tt.ptr<bf16>, %n: i32) {
        %row = tt.get_program_id x : i32
        %at = arith.muli %row, %n : i32
        %wide = arith.extsi %row : i32 to i64
        %right = arith.muli %wide, %n64 : i64
    """
    found = Compiled("k", 1, 32, 8, 0, (), ttir).narrow_offsets
    assert [line.partition(" ")[0] for line in found] == ["%at"]

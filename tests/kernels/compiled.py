"""Compiles kernels for GPUs that are not present, and reads properties of the compiled code.

A driver that runs nothing replaces CUDA's: launchers are called with tensors that have no elements,
and every launch compiles the kernel as that call would. ptxas and cuobjdump come with Triton.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_INSTRUCTION = re.compile(
    r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);"
)


@dataclass(frozen=True)
class Compiled:
    """One kernel for one GPU.

    Attributes:
        name: of the kernel's function.
        programs: how many the launch starts.
        threads: of a program.
        registers: of a thread.
        shared: bytes of shared memory of a program.
        instructions: operation and operands of every instruction, with its address.
        ttir: Triton's own program.
    """

    name: str
    programs: int
    threads: int
    registers: int
    shared: int
    instructions: tuple[tuple[int, str, str], ...]
    ttir: str

    def count(self, pattern: str) -> int:
        """How many instructions match."""
        return sum(re.match(pattern, op) is not None for _, op, _ in self.instructions)

    @property
    def spilled(self) -> bool:
        """Whether a register goes through local memory."""
        return self.count(r"(LDL|STL)\b") > 0

    @property
    def wide(self) -> bool:
        """Whether 16 bytes are loaded at a time somewhere."""
        return self.count(r"LDG\.E\S*\.128") > 0 or self.count(r"LDGSTS\.E\S*\.128") > 0

    @property
    def loop(self) -> int:
        """Instructions of the largest loop, 0 where there is none."""
        best = 0
        addresses = [at for at, _, _ in self.instructions]
        for at, op, operands in self.instructions:
            target = re.search(r"0x([0-9a-f]+)", operands)
            if not op.startswith("BRA") or target is None or int(target[1], 16) >= at:
                continue
            best = max(best, sum(int(target[1], 16) <= a <= at for a in addresses))
        return best

    @property
    def body(self) -> int:
        """Instructions of a program that has no loop, those after its end left out."""
        return sum(not op.startswith("NOP") for _, op, _ in self.instructions)

    @property
    def narrow_offsets(self) -> list[str]:
        """Products of a program's number that have 32 bits: such an offset overflows.

        Sizes are arguments of the kernel; a number times a constant is an index within a
        dimension, of which there are fewer.
        """
        header = re.search(r"tt\.func[^\n]*", self.ttir)
        sizes = set(re.findall(r"(%\w+): i32", header[0] if header else ""))
        derived: set[str] = set()
        found = []
        for line in self.ttir.splitlines():
            looped = re.search(r"scf\.for (%\w+) = (%\w+)", line)
            if looped and looped[2] in derived:
                derived.add(looped[1])
            made = re.match(r"\s*(%\w+) = (\S+) (.*)", line)
            if not made:
                continue
            name, op, rest = made.groups()
            read = set(re.findall(r"%\w+", rest))
            narrow = op in ("arith.addi", "arith.muli", "arith.subi") and ": i32" in rest
            if op == "arith.muli" and narrow and read & derived and read & sizes:
                found.append(line.strip())
            if op == "tt.get_program_id" or (narrow and read & derived):
                derived.add(name)
        return found


class _Driver:
    """As much of CUDA's driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def compiling(capability: int) -> Iterator[list[Compiled]]:
    """Kernels that are launched within are compiled for sm_<capability>, and listed; none runs."""
    made: list[Compiled] = []
    run, held = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        programs = 1
        for size in grid:
            programs *= size
        made.append(_read(self.fn.__name__, programs, kernel))
        return kernel

    driver.set_active(_Driver(capability))
    JITFunction.run = compile_only
    try:
        yield made
    finally:
        JITFunction.run = run
        driver._active = held


def _read(name: str, programs: int, kernel: Any) -> Compiled:
    text = _disassembled(kernel.asm["cubin"])
    registers = re.search(r"REG:(\d+)", text)
    assert registers is not None, text[:500]
    instructions = tuple(
        (int(at, 16), op, operands) for at, op, operands in _INSTRUCTION.findall(text)
    )
    return Compiled(
        name,
        programs,
        32 * kernel.metadata.num_warps,
        int(registers[1]),
        kernel.metadata.shared,
        instructions,
        kernel.asm["ttir"],
    )


def _disassembled(cubin: bytes) -> str:
    """What cuobjdump says of it, kept beside Triton's cache: it takes as long as compiling."""
    folder = Path(triton.knobs.cache.dir) / "disassembled"
    kept = folder / f"{hashlib.sha256(cubin).hexdigest()}.txt"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{kept.stem}.{os.getpid()}.cubin"
        file.write_bytes(cubin)
        command = [TOOL, "--dump-resource-usage", "--dump-sass", file]
        made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        file.write_text(made, encoding="utf-8")
        file.replace(kept)  # whole at once: other processes read it
    return kept.read_text(encoding="utf-8")

"""Compares context parallelism with torch's: `python benchmarks/context_parallel.py [--ranks N]`.

Causal attention of a sequence that gloo ranks of this machine split, forwards and backwards, by a
form and by torch.distributed.tensor.experimental, whose ring takes any kernel; on CPUs that is
the one of F.scaled_dot_product_attention. All take turns in one run. Torch's balanced ring gets its
operands in the zigzag order, for which its users deal the batch; ours are contiguous, and
the seconds contain that. `written_mib` are the results of operators other than kernels of attention
and collectives, on the rank that writes most: copies, sums and merges. Errors are those of the
result and of all gradients against float64 in one process. Writes results/context_parallel.csv and
prints the table of docs/results/runtime.md.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ir.mesh import Mesh
from autopar.operators.attention.sequences import Parcel, contiguous, dealt, zigzag
from autopar.runtime.communication.communicator import Communicator
from benchmarks.harness import markdown, write
from tests.support.ranks import run_ranks

HEADS, WIDTH = 8, 64
# Form here, and torch's: rotation of keys and values, and whether it is balanced.
PAIRS = {
    "gathered": ("ALL_GATHER", False),
    "ring": ("ALL_TO_ALL", False),
    "zigzag": ("ALL_TO_ALL", True),
    "ulysses": ("ALL_TO_ALL", True),
}
Call = Callable[[], tuple[Tensor, ...]]
theirs: Any = importlib.import_module(
    "torch.distributed.tensor.experimental._context_parallel._attention"
)


def drawn(length: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, length, WIDTH)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for _ in "qkvg"]


def whole(length: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The result and gradients in float64, of operands rounded to a dtype."""
    query, key, value, given = (x.double() for x in drawn(length, dtype))
    inputs = [x.requires_grad_() for x in (query, key, value)]
    out = F.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=True)
    return (out.detach(), *torch.autograd.grad(out, inputs, given))


def ours(mesh: Communicator, form: str, parts: list[Tensor], length: int) -> Call:
    """Attention and its gradients by a form."""

    def call() -> tuple[Tensor, ...]:
        inputs = [x.detach().requires_grad_() for x in parts[:3]]
        run = getattr(mesh, f"{form}_attention")
        out = run(*inputs, axis="cp", size=(length, length), is_causal=True)
        return (out.detach(), *torch.autograd.grad(out, inputs, parts[3]))

    return call


def torchs(rotation: str, balanced: bool, parts: list[Tensor]) -> Call:
    """Attention and its gradients by torch's ring, with its kernel for CPUs."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    group, options = dist.group.WORLD, theirs._cp_options

    def call() -> tuple[Tensor, ...]:
        options.enable_load_balance = balanced
        theirs.set_rotate_method({"ALL_GATHER": "allgather", "ALL_TO_ALL": "alltoall"}[rotation])
        query, key, value, given = parts
        out, lse, *_ = theirs._templated_ring_attention(
            group, 2, kernel, query, key, value, is_causal=True
        )
        found = theirs._templated_ring_attention_backward(
            group, 2, backward, given, "grad_out", query, key, value, out, lse, True, dropout_p=0.0
        )
        return (out, *found[:3])

    return call


Calls = dict[tuple[str, str], Call]  # by form, and "here" or "torch"


def calls_on(group: Any, mesh: Communicator, length: int, dtype: torch.dtype) -> Calls:
    """Attention and its gradients by every form, here and by torch."""
    flat, turned = contiguous(group, length), zigzag(group, length)
    parts = [x.narrow(-2, *group.own(length)).contiguous() for x in drawn(length, dtype)]
    there = dealt([Parcel(x, flat, turned) for x in parts], group)()
    calls: Calls = {}
    for form, (rotation, balanced) in PAIRS.items():
        calls[form, "here"] = ours(mesh, form, parts, length)
        calls[form, "torch"] = torchs(rotation, balanced, there if balanced else parts)
    return calls


def written_on_rank(count: int, length: int, dtype: torch.dtype) -> dict[tuple[str, str], float]:
    """Mebibytes that every call writes on this rank, see `written_by`."""
    mesh = Communicator(Mesh.parse(f"cpu: cp={count}"))
    calls = calls_on(mesh.group("cp"), mesh, length, dtype)
    return {key: written_by(call) for key, call in calls.items()}


def on_rank(count: int, length: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Seconds, results and written mebibytes of all calls, in turns."""
    mesh = Communicator(Mesh.parse(f"cpu: cp={count}"))
    group: Any = mesh.group("cp")
    flat, turned = contiguous(group, length), zigzag(group, length)
    calls = calls_on(group, mesh, length, dtype)
    written = {key: written_by(call) for key, call in calls.items()}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    results: dict[tuple[str, str], list[Tensor]] = {}
    for _ in range(rounds + 1):
        for key, call in calls.items():
            dist.barrier()
            began = time.perf_counter()
            found = call()
            dist.barrier()
            seconds[key].append(time.perf_counter() - began)
            if key[1] == "torch" and PAIRS[key[0]][1]:
                found = tuple(dealt([Parcel(x, turned, flat) for x in found], group)())
            results[key] = [group.gather(x.contiguous(), 2, length) for x in found]
    times = {key: each[1:] for key, each in seconds.items()}
    return {"seconds": times, "results": results, "written": written}


class _Written(TorchDispatchMode):
    """Counts the bytes that operators write, except for attention and communication."""

    OTHERS = ("c10d", "attention", "empty", "view")
    nbytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if not (views or any(part in str(func) for part in self.OTHERS)):
            results = out if isinstance(out, tuple | list) else [out]
            self.nbytes += sum(x.nbytes for x in results if isinstance(x, Tensor))
        return out


def written_by(call: Call) -> float:
    """Returns the mebibytes that a call writes outside its attention kernels and collectives."""
    count = _Written()  # type: ignore[no-untyped-call]
    with count:
        call()
    return count.nbytes / 2**20


def row(form: str, made: dict[str, Any], known: tuple[Tensor, ...]) -> dict[str, Any]:
    """Compares one form with torch's: seconds, their ratio and errors."""

    def error(by: str) -> float:
        found = made["results"][form, by]
        return max(float((x.double() - y).abs().max()) for x, y in zip(found, known, strict=True))

    here, there = (statistics.median(made["seconds"][form, by]) for by in ("here", "torch"))
    pairs = zip(made["seconds"][form, "here"], made["seconds"][form, "torch"], strict=True)
    return {
        "form": form.replace("zigzag", "ring zigzag"),
        "torch_form": f"{PAIRS[form][0].lower()}{', balanced' if PAIRS[form][1] else ''}",
        "ms": round(1e3 * here, 1),
        "torch_ms": round(1e3 * there, 1),
        "ratio": round(statistics.median(a / b for a, b in pairs), 3),
        "written_mib": round(made["written"][form, "here"]),
        "torch_written_mib": round(made["written"][form, "torch"]),
        "error": f"{error('here'):.1e}",
        "torch_error": f"{error('torch'):.1e}",
    }


def main() -> None:
    """Run, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    known = whole(given.length, dtype)
    ranks = run_ranks(on_rank, given.ranks, given.length, dtype, given.rounds, count=given.ranks)
    made = ranks[0]
    made["written"] = {key: max(rank["written"][key] for rank in ranks) for key in made["written"]}
    shape = {"ranks": given.ranks, "tokens": given.length, "dtype": given.dtype}
    rows = [{**shape, **row(form, made, known)} for form in PAIRS]
    print(f"wrote {write('context_parallel', rows, keys=('ranks', 'tokens', 'dtype', 'form'))}")
    print(markdown(list(rows[0]), [[str(item) for item in each.values()] for each in rows]))


if __name__ == "__main__":
    main()

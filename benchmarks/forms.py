"""Compares the forms of each operator: `python benchmarks/forms.py [attention|mixture|linear ...]`.

A layer of one operator, pinned to each of its forms and to none ("plain"), trains on gloo ranks of
this machine, all forms of a mesh in turns: seconds, and the largest difference from training on one
device in float64, as a share of the largest change in training. Proofs run the examples of the
forms on threads, under every strategy. Prices are those of plans of a larger layer on H100 with the
same axes: nothing is run there. Writes results/forms.csv and prints the table of
docs/results/runtime.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import InfeasibleError, PinError
from autopar.intra_op.proofs.prove import prove_forms
from autopar.intra_op.rules import rules
from autopar.ir.mesh import Mesh
from autopar.operators.forms import PLAIN, forms
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from benchmarks.harness import markdown, write
from tests.support.ranks import run_ranks

ROUNDS = 5
Sizes = tuple[int, int]  # tokens and width


class Attention(nn.Module):
    """Causal attention of 8 heads, or attention within documents, between two linears."""

    def __init__(self, width: int, documents: bool) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.documents = documents

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the result."""
        tokens, width = x.shape[-2:]
        parts = self.into(x).view(-1, tokens, 3, 8, width // 8).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        mask = None
        if self.documents:
            at = torch.arange(tokens, device=x.device)
            mask = (at[:, None] // (tokens // 4) == at // (tokens // 4)) & (at <= at[:, None])
        found = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        result: Tensor = self.out(found.transpose(1, 2).reshape(x.shape))
        return result.square().mean()


class Experts(nn.Module):
    """Eight experts, of which each token has two."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 8)
        self.up = nn.Parameter(torch.empty(8, 2 * width, width).normal_(std=width**-0.5))
        self.down = nn.Parameter(torch.empty(8, width, 2 * width).normal_(std=width**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the result."""
        weights, ids = self.router(x).softmax(-1).topk(2)
        found: Tensor = autopar.mixture(x, ids, weights, self.up, self.down)
        return (x + found).square().mean()


class Linears(nn.Module):
    """Two linears and the operators between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the result."""
        result: Tensor = self.out(torch.relu(self.into(x)))
        return result.square().mean()


@dataclass(frozen=True)
class Case:
    """A layer, and the meshes on which its operator's forms are compared.

    Attributes:
        op: the operator.
        build: makes the layer of a width.
        sizes, large: tokens and width on gloo, and on H100.
        meshes: axes of a mesh -> the forms that are compared on it.
    """

    op: str
    build: Callable[[int], nn.Module]
    sizes: Sizes
    large: Sizes
    meshes: dict[str, tuple[str, ...]]


SPLIT = ("gathered", "ring", "ring zigzag", "ulysses", PLAIN)
ATTENTION = "aten.scaled_dot_product_attention"
CASES = {
    "attention": Case(
        ATTENTION, lambda width: Attention(width, False), (2048, 256), (65536, 4096),
        {"x=4": SPLIT, "y=2, x=2": ("ulysses ring", "ring zigzag", PLAIN)},
    ),
    "documents": Case(
        ATTENTION, lambda width: Attention(width, True), (2048, 256), (16384, 4096),
        {"x=4": ("balanced", "gathered", "ring", PLAIN)},
    ),
    "mixture": Case(
        "autopar.mixture", Experts, (2048, 128), (65536, 4096),
        {"y=2, x=2": ("dispatch direct", PLAIN)},
    ),
    "linear": Case(
        "aten.linear", Linears, (512, 768), (16384, 12288),
        {
            "r=2, c=2": ("2d", PLAIN), "d=3, r=2, c=2": ("2.5d", PLAIN),
            "d=2, r=2, c=2": ("3d", PLAIN),
        },
    ),
}  # fmt: skip


def layer(case: Case, sizes: Sizes) -> tuple[nn.Module, dict[str, Tensor]]:
    """The layer in float64 and its batch, the same at every call."""
    torch.manual_seed(0)
    tokens, width = sizes
    model, x = case.build(width).double(), torch.randn(tokens, width, dtype=torch.float64)
    return model, {"x": x.unsqueeze(0) if case.op == ATTENTION else x}


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """SGD, large steps of which would show a wrong gradient."""
    return torch.optim.SGD(parameters, lr=0.1)


def train_whole(case: Case) -> tuple[dict[str, Tensor], float]:
    """Parameters after the rounds on one device, and by how much these changed them at most."""
    model, batch = layer(case, case.sizes)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    update = optimizer(model.parameters())
    for _ in range(ROUNDS + 1):
        update.zero_grad()
        model(**batch).backward()
        update.step()
    after = dict(model.state_dict())
    return after, max(float((after[key] - value).abs().max()) for key, value in before.items())


def on_rank(name: str, axes: str) -> dict[str, dict[str, Any]]:
    """Seconds of a step and parameters after all of them, for each form; "" where none fits."""
    case, programs = CASES[name], {}
    seconds: dict[str, list[float]] = {form: [] for form in case.meshes[axes]}
    for form in case.meshes[axes]:
        model, batch = layer(case, case.sizes)
        kind = case.op.partition(".")[2]
        programs[form] = autopar.compile(
            model,
            f"cpu[20GFLOP/s 64GiB 10GB/s]: {axes}",
            optimizer=optimizer,
            example_inputs=batch,
            pins=autopar.pins.form(f"*{kind}*", form),
        )
    _, batch = layer(case, case.sizes)
    for _ in range(ROUNDS + 1):
        for form, program in programs.items():
            dist.barrier()
            began = time.perf_counter()
            program.step(**batch)
            dist.barrier()
            seconds[form].append(time.perf_counter() - began)
    return {
        form: {
            "seconds": statistics.median(seconds[form][1:]),
            "state": program.state_dict(),
        }
        for form, program in programs.items()
    }


def price(case: Case, axes: str, form: str) -> str:
    """Predicted milliseconds of a step of the larger layer on H100; "" where no plan fits."""
    tokens, width = case.large
    with torch.device("meta"):
        model = case.build(width).bfloat16()
        x = torch.empty(tokens, width, dtype=torch.bfloat16)
    options = Options(pins=autopar.pins.form(f"*{case.op.partition('.')[2]}*", form))
    batch = {"x": x.unsqueeze(0) if case.op == ATTENTION else x}
    graph = capture_graph(model, (), batch, options, Trace(None)).graph
    try:
        plan = make_plan(graph, Mesh.parse(f"H100: {axes}"), options, Trace(None))
    except (InfeasibleError, PinError) as error:
        print(form, axes, str(error).partition("\n")[0], file=sys.stderr)
        return ""
    return f"{1e3 * plan.predicted.step_seconds:.2f}"


def rows_of(name: str) -> Iterator[dict[str, Any]]:
    """The rows of a case."""
    case = CASES[name]
    whole, change = train_whole(case)
    report = prove_forms(rules()[case.op], (2,))
    for axes, compared in case.meshes.items():
        made = run_ranks(on_rank, name, axes, count=Mesh.parse(f"cpu: {axes}").size)[0]
        for form in compared:
            state = made[form]["state"]
            error = max(float((state[key] - value).abs().max()) for key, value in whole.items())
            proved = f"{report.strategies} strategies" if report.proved else "no"
            yield {
                "case": name,
                "mesh": axes,
                "form": form,
                "proved": proved if (case.op, form) in forms() else "by its rule",
                "error": f"{error / change:.1e}",
                "ms": round(1e3 * made[form]["seconds"], 1),
                "h100_ms": price(case, axes, form),
            }


def main() -> None:
    """Run, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    rows = []
    for name in parser.parse_args().cases:
        rows += list(rows_of(name))
        print(f"wrote {write('forms', rows, keys=('case', 'mesh', 'form'))}", flush=True)
    print(markdown(list(rows[0]), [[str(item) for item in row.values()] for row in rows]))


if __name__ == "__main__":
    main()

"""Extends autopar by one of each kind of file or table that CONTRIBUTING names, and uses it.

The extensions come from a folder outside the project. The tests run in a process of their own, so
that other tests are not affected.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.halves import HALVES

FILES = {
    "rules/wave.py": '''
"""An operator of a user's own."""

from autopar.intra_op.rule import rule

RULES = (rule("mine.wave", "... -> ...", examples=("f64[4, 6]",)),)
''',
    "schedules/slow_fill.py": '''
"""GPipe by another name."""

from dataclasses import replace

from autopar.inter_op.schedules import gpipe

NAME, NEEDS = "slow_fill", "any sizes"


def schedule(ranks, microbatches):
    return replace(gpipe.schedule(ranks, microbatches), name=NAME)
''',
    "solvers/first_fit.py": '''
"""Coordinate descent by another name."""

from dataclasses import replace

from autopar.intra_op.solvers import greedy


def solve(problem, **options):
    return replace(greedy.solve(problem), solver="first_fit")
''',
    "patterns/squared_relu.py": '''
"""The square of ReLU (Primer, arXiv:2109.08668)."""

from autopar.ir.fusion.pattern import Pattern, computes

PATTERNS = (
    Pattern(
        "squared_relu", "squared_relu", ("relu(x) ** 2",), ("x",),
        fits=lambda match: computes(match, "x") and match.found.type == match.type("x"),
    ),
)
''',
    "rules/squared_relu.py": '''
"""The rule of the kernel."""

from autopar.intra_op.rule import rule

RULES = (rule("kernels.squared_relu", "... -> ...", flops="2 ...", examples=("f64[4, 6]",)),)
''',
    "kernels/squared_relu.py": '''
"""The square of ReLU, and its gradient."""

import torch

from .registry.language import blocks, jit, tl
from .registry.launch import launch
from .registry.operator import Gradient, Operator, contiguous


@jit
def _kernel(x: tl.tensor, out: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.maximum(tl.load(x + at, mask=at < n, other=0.0), 0.0)
    tl.store(out + at, value * value, mask=at < n)


def _launch(out, x):
    row = launch("sum_partials", out.numel())
    _kernel[(blocks(out.numel(), row.block),)](x, out, out.numel(), BLOCK=row.block)


def reference(x: torch.Tensor, *, wide: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.relu(x) ** 2


def _allocate(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _backward(ctx, dy):
    (x,) = ctx.saved_tensors
    return 2 * torch.relu(x) * dy


OPERATORS = (
    Operator(
        name="squared_relu", allocate=_allocate, launch=_launch, reference=reference,
        factors="... -> ...", flops="2 ...", table="sum_partials",
        samples=lambda draw: [(draw.normal(3, 5),)],
        typical=lambda draw, n: (draw.normal(8, n or 4096),),
        fits=lambda x: contiguous(x=x),
        gradient=Gradient(lambda ctx, inputs, output: ctx.save_for_backward(*inputs), _backward),
    ),
)
''',
    "forms/upright.py": '''
"""The same with its rows split, by a call of its own."""

import torch

from autopar.operators.form import Form


def run(mesh, x, *, axis):
    return torch.ops.mine.wave(x)


FORM = Form(
    "upright", "mine.wave", lambda node, types: "rows columns -> rows columns",
    lambda part: bool(part.axes(0, 0)), "rows that are split", "upright_wave", run,
    lambda node, types, operands: (node.args, (("axis", operands[0].dims[0]),)),
    lambda part: ((), ()),
)
''',
    "compression/halves.py": HALVES,
    "optimizers/signs.py": '''
"""Updates by the sign of the momentum, which is kept in a quarter of its bytes."""

from autopar.ir.update import Rule, State

NAME = "signs"


def rules(optimizer):
    if type(optimizer).__name__ != "Signs":
        return None
    return (Rule((State("momentum", "i8"),)),)
''',
    "methods/quarters.py": '''
"""Replicas go a quarter of the way to their average."""

from autopar.runtime.outer.method import PromptMethod


class Quarters(PromptMethod):
    """Moves parameters towards the average."""

    NAME = "quarters"
    STATES = ("anchor",)
    CHANGES = "replicas stay apart"

    def update(self, x, average, states, now):
        x.lerp_(average, 0.25)
''',
    "toml/models.toml": """
["tiny"]
architecture = "GPT2LMHeadModel"
dtype = "float32"
batch = 2
seq = 8
source = "a test"

["tiny".config]
vocab_size = 32
n_positions = 8
n_embd = 8
n_layer = 1
n_head = 2
""",
}

FOUND = """
import sys
from importlib import import_module
from pathlib import Path

folder = Path(sys.argv[1])
for package, name in (
    ("autopar_kernels", "kernels"),
    ("autopar.intra_op.rules", "rules"),
    ("autopar.operators.forms", "forms"),
    ("autopar.inter_op.schedules", "schedules"),
    ("autopar.intra_op.solvers", "solvers"),
    ("autopar.ir.fusion.patterns", "patterns"),
    ("autopar.runtime.optimizers", "optimizers"),
    ("autopar.ir.compression", "compression"),
    ("autopar.runtime.outer.methods", "methods"),
):
    import_module(package).__path__.append(str(folder / name))
from importlib import resources

real, more = resources.files, {"devices.toml", "models.toml"}
for package, file in (("autopar.cost", "devices.toml"), ("autopar.zoo", "models.toml")):
    table = folder / "toml" / file
    table.write_text(real(package).joinpath(file).read_text() + table.read_text())


class Extended:
    def __init__(self, package):
        self.package = package

    def joinpath(self, *names):
        return (folder / "toml" if names[0] in more else real(self.package)).joinpath(*names)


resources.files = lambda package: (
    Extended(package) if package in ("autopar.cost", "autopar.zoo") else real(package)
)
"""

USED = """
import torch
from click.testing import CliRunner
from torch import nn

import autopar
from autopar.session.compiled import Compiled
from autopar import pins
from autopar.cli import main
from autopar.intra_op.proofs.prove import prove, prove_forms
from autopar.intra_op.rule_table import table
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.plan_model import plan_captured
from autopar.planning.trace import Trace
from autopar.zoo import load


@torch.library.custom_op("mine::wave", mutates_args=())
def wave(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


wave.register_fake(torch.empty_like)
wave.register_autograd(
    lambda ctx, dy: dy * torch.cos(ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) ** 2
        return torch.ops.mine.wave(x).sum()


mesh = autopar.Mesh.parse("Abacus: gpu=2")


def compiled(model, batch, **options):
    given = Options(unknown_ops="error", **options)
    count = given.microbatches if given.is_pipeline else None
    captured = capture_call(Call(model, (), batch), given, Trace(None), count)
    plan = plan_captured(captured, mesh, given, Trace(None))
    return Compiled.of(captured, plan, given, Trace(None))


torch.manual_seed(0)
batch = {"x": torch.randn(8, 8)}

print("operator", prove(table()["mine.wave"]) is not None)
done = compiled(Model(), batch, solver="first_fit", fuse=("squared_relu",))
print("operator used", "mine.wave" in done.source)
print("form proved", prove_forms(table()["mine.wave"]).proved)
pinned = compiled(Model(), batch, pins=pins.form("*", "upright"))
print("form used", "mesh.upright_wave(" in pinned.source, " by upright" in str(pinned.plan))
print("solver", done.plan.stage.solver.name)
print("device", done.plan.mesh.device, done.plan.stage.predicted.step_seconds > 0)
listed = CliRunner().invoke(main, ["devices"]).stdout.splitlines()
print(*(line for line in listed if "Abacus" in line))
print("pattern", done.plan.stage.fused["squared_relu"].count, "squared_relu(" in done.source)

from autopar.operators import kernels

x = torch.randn(5, requires_grad=True)
kernels.squared_relu(x).sum().backward()
print("kernel", torch.equal(x.grad, 2 * torch.relu(x.detach())))
from autopar.ir.precision import Precision
from autopar.pins import data_parallel

half = Precision.read("gradients=first half")
sent = compiled(Model(), batch, precision=half, pins=data_parallel(), state="ddp", solver="ilp")
print("compression", "first half all_gather" in sent.source)
piped = compiled(Model(), batch, stages=2, microbatches=2, schedule="slow_fill")
print("schedule", piped.plan.schedule, len(piped.sources))


class Signs(torch.optim.SGD):
    pass


plan = autopar.plan(Model(), mesh, example_inputs=batch, optimizer=lambda p: Signs(p, lr=0.1))
print("optimizer", plan.stages[0].update)
apart = autopar.plan(Model(), mesh, example_inputs=batch, outer="quarters over gpu, tau=3")
print("outer", apart.outer, apart.changes, "outer_anchor[*]" in str(apart.stages[0].update))
model, inputs = load("tiny")
print("zoo", "def forward" in compiled(model, inputs).source)
"""


def test_one_of_each_is_added_from_a_folder_and_used(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    abacus = (Path(__file__).parents[1] / "autopar" / "cost" / "devices.toml").read_text()
    table = abacus[abacus.index("\n[cpu]") :].replace("[cpu]", "[Abacus]", 1)
    (tmp_path / "toml" / "devices.toml").write_text(table)
    done = subprocess.run(
        [sys.executable, "-c", FOUND + USED, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "operator True",
        "operator used True",
        "form proved True",
        "form used True True",
        "solver first_fit",
        "device Abacus True",
        "Abacus     products as cpu, attention as cpu, links by its links' figures",
        "pattern 4 True",
        "kernel True",
        "compression True",
        "schedule slow_fill 2",
        "optimizer * -> momentum i8[*]",
        "outer quarters over gpu, tau=3 replicas stay apart True",
        "zoo True",
    ]

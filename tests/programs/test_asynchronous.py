"""Asynchronous pipelines against a simulation of stale weights in one process.

The simulation shares no code with autopar: the layers' backwards are written out by hand, a
microbatch after the other, and every one of them is told by a closed form on which version of each
stage's weights its forward and its backward run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.pipelines.stages import equal_parts, plan_stages, schedule_of
from autopar.planning.trace import Trace
from tests.programs.test_saved_program import run
from tests.support.ranks import run_ranks

WIDTH, BATCH, STEPS = 6, 8, 10
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.2),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.8),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.02),
}


class Net(nn.Module):
    """Layers of a linear map and a tanh, one for each stage."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(stages))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


def made(stages: int) -> tuple[Net, list[dict[str, Tensor]]]:
    """The model and its batches; the same at every call."""
    torch.manual_seed(0)
    model = Net(stages).double()
    batches = [
        {name: torch.randn(BATCH, WIDTH, dtype=torch.float64) for name in "xy"}
        for _ in range(STEPS)
    ]
    return model, batches


@dataclass(frozen=True)
class Method:
    """A method, as its paper has it.

    Attributes:
        schedule: what it is called, with options.
        microbatches: of a batch.
        every: microbatches in an update, 0 for all.
        forward, backward: (stage, stages, microbatch) -> the version that it runs on, where the
            pipeline does not stop.
        annealed, decay, flushed: of PipeMare.
    """

    schedule: str
    microbatches: int
    every: int
    forward: Callable[[int, int, int], int]
    backward: Callable[[int, int, int], int]
    annealed: int = 0
    decay: float = 0.0
    flushed: int = 0

    @property
    def taken(self) -> int:
        """Microbatches whose gradients an update takes."""
        return self.every or self.microbatches


def pipemare(options: str = "", **how: Any) -> Method:
    """PipeMare with four microbatches in an update."""
    n = 4
    return Method(
        f"pipemare {options}".strip(), n, 0,
        lambda s, p, k: max(0, (k - 2 * (p - s - 1) - 1) // n), lambda s, p, k: k // n, **how,
    )  # fmt: skip


METHODS = {
    "pipedream": Method(
        "pipedream", 4, 1,
        lambda s, p, k: max(0, k - (p - 1 - s)), lambda s, p, k: max(0, k - (p - 1 - s)),
    ),
    "few": Method(
        "pipedream", 2, 1,
        lambda s, p, k: max(0, k - (p - 1 - s)), lambda s, p, k: max(0, k - (p - 1 - s)),
    ),
    "vertical": Method(
        "pipedream vertical=1", 4, 1,
        lambda s, p, k: max(0, k - (p - 1)), lambda s, p, k: max(0, k - (p - 1)),
    ),
    "2bw": Method(
        "2bw", 4, 0, lambda s, p, k: max(0, k // 4 - 1), lambda s, p, k: max(0, k // 4 - 1)
    ),
    "bounded": Method(
        "bounded_staleness ahead=2", 4, 0,
        lambda s, p, k: max(0, k // 4 - 2), lambda s, p, k: max(0, k // 4 - 2),
    ),
    "ampnet": Method("ampnet", 4, 1, lambda s, p, k: max(0, k - (p - 1 - s)), lambda s, p, k: k),
    "ampnet of two": Method(
        "ampnet every=2", 4, 2,
        lambda s, p, k: max(0, k - (p - 1 - s)) // 2, lambda s, p, k: k // 2,
    ),
    "pipemare plain": pipemare("correction=0"),
    "pipemare": pipemare("annealed=6", annealed=6, decay=0.135),
    "pipemare flushed": pipemare("correction=300 flushed=3", decay=0.3, flushed=3),
}  # fmt: skip


@dataclass
class Stage:
    """One stage: all versions of its weight and bias, and what updates the newest."""

    layer: nn.Linear
    optimizer: torch.optim.Optimizer
    versions: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    velocity: list[Tensor] = field(default_factory=list)

    def keep(self) -> None:
        """Remember the newest weights as one more version."""
        self.versions.append((self.layer.weight.detach().clone(), self.layer.bias.detach().clone()))


def simulated(
    method: Method, stages: int, optimizer: str, clip: float | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of all batches, and the weights after the last update."""
    model, batches = made(stages)
    held = [
        Stage(layer, OPTIMIZERS[optimizer](layer.parameters()))  # type: ignore[arg-type]
        for layer in model.layers
    ]
    for stage in held:
        stage.keep()
        stage.velocity = [torch.zeros_like(p) for p in stage.layer.parameters()]
    n, losses = method.microbatches, []
    for step, batch in enumerate(batches):
        total, flushed = 0.0, step < method.flushed
        for number in range(n):
            k = (step - method.flushed) * n + number
            x, y = (batch[name].chunk(n)[number] for name in "xy")
            inputs, outputs = [], []
            for s, stage in enumerate(held):
                version = -1 if flushed else method.flushed + method.forward(s, stages, k)
                weight, bias = stage.versions[version]
                inputs.append(x)
                x = torch.tanh(x @ weight.T + bias)
                outputs.append(x)
            total += float(((x - y) ** 2).mean()) / n
            gradient = 2 * (x - y) / y.numel() / (n if flushed else method.taken)
            for s in reversed(range(stages)):
                stage = held[s]
                version = -1 if flushed else method.flushed + method.backward(s, stages, k)
                weight = stage.versions[version][0]
                if method.decay and not flushed and step > method.flushed:
                    weight = weight - (2 * (stages - s - 1) + 1) / n * stage.velocity[0]
                inner = gradient * (1 - outputs[s] ** 2)
                given = inner.T @ inputs[s], inner.sum(0)
                for parameter, own in zip(stage.layer.parameters(), given, strict=True):
                    parameter.grad = own if parameter.grad is None else parameter.grad + own
                gradient = inner @ weight
            if (number + 1) % (n if flushed else method.taken) == 0:
                update(method, held, None if flushed else step - method.flushed, clip)
        losses.append(total)
    return losses, {k: v.detach() for k, v in model.state_dict().items()}


def update(method: Method, held: list[Stage], number: int | None, clip: float | None) -> None:
    """Update all stages; `number` of the update, None for one of a flushed step."""
    for s, stage in enumerate(held):
        delay = (2 * (len(held) - s - 1) + 1) / method.microbatches
        rate = 1.0
        if number is not None and number < method.annealed:
            rate = max(delay, 1.0) ** -(1 - number / method.annealed)
        (group,) = stage.optimizer.param_groups
        before = [p.detach().clone() for p in stage.layer.parameters()]
        own, group["lr"] = group["lr"], group["lr"] * rate
        if clip is not None:
            nn.utils.clip_grad_norm_(stage.layer.parameters(), clip)
        stage.optimizer.step()
        group["lr"] = own
        stage.optimizer.zero_grad()
        stage.keep()
        if method.decay and number is not None:
            kept = math.exp(math.log(method.decay) / delay)
            for velocity, old, new in zip(
                stage.velocity, before, stage.layer.parameters(), strict=True
            ):
                velocity.mul_(kept).add_((1 - kept) * (new.detach() - old))


def mesh(ranks: int) -> str:
    return f"cpu[1GFLOP/s 64GiB 1GB/s]: gpu={ranks} @10GB/s 1us"


def program_of(method: Method, stages: int, optimizer: str, ranks: int, **how: Any) -> Any:
    """The compiled model, and its batches."""
    model, batches = made(stages)
    planned = {name: how.pop(name) for name in ("pins", "state") if name in how}
    planned |= {"precision": Precision.read(how.pop("precision", None))}
    options = Options(
        microbatches=method.microbatches, schedule=method.schedule, stages=stages,
        allow="stale gradients", **planned,
    )  # fmt: skip
    call, trace = Call(model, (), batches[0]), Trace(None)
    graph = capture_call(call, options, trace, method.microbatches).graph
    ends = ["tanh", *(f"tanh_{number}" for number in range(1, stages - 1))]
    whole = Mesh.parse(mesh(ranks))
    plan = plan_stages(
        graph, ends, equal_parts(whole, stages), whole, method.microbatches, method.schedule,
        options, trace,
    )  # fmt: skip
    how |= {"plan": plan, "optimizer": OPTIMIZERS[optimizer], "example_inputs": batches[0]}
    program = autopar.compile(model, str(whole), **how)
    return program, batches


def trained(
    names: list[str], stages: int, ranks: int, how: dict[str, Any]
) -> dict[tuple[str, str], tuple[list[float], dict[str, Tensor]]]:
    """Losses and weights of every method with every optimizer."""
    found = {}
    for name in names:
        for optimizer in OPTIMIZERS:
            program, batches = program_of(METHODS[name], stages, optimizer, ranks, **how)
            losses = [program.step(**batch).item() for batch in batches]
            found[name, optimizer] = losses, program.state_dict()
            program.close()
    return found


def check(names: list[str], stages: int, ranks: int, **how: Any) -> None:
    every = run_ranks(trained, names, stages, ranks, how, count=ranks)
    wrong = []
    for name in names:
        method = METHODS[name]
        for optimizer in OPTIMIZERS:
            losses, weights = simulated(method, stages, optimizer, how.get("clip_norm"))
            late = method.flushed
            # A step gives the loss of the one before, the first one that does not flush its own.
            told = [*losses[: late + 1], *losses[late:-1]]
            for rank in every:
                ours, state = rank[name, optimizer]
                error = max(
                    *(abs(a - b) for a, b in zip(ours, told, strict=True)),
                    *(float((state[k] - v).abs().max()) for k, v in weights.items()),
                )
                if not error < 1e-12:
                    wrong.append(f"{name} with {optimizer} in {stages} stages: off by {error:.2g}")
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_stages_that_do_not_wait_train_as_stale_weights_do() -> None:
    check(["pipedream", "2bw", "pipemare", "ampnet"], 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_method_trains_as_stale_weights_do(stages: int) -> None:
    check([*METHODS], stages, stages)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["ddp", "zero1"])
def test_stages_of_two_devices_train_as_those_of_one(state: str) -> None:
    """Data parallelism inside a stage, and its optimizer's state split."""
    names = ["pipedream", "few", "2bw", "ampnet of two", *(["bounded"] if state == "ddp" else [])]
    pins = autopar.pins.data_parallel("gpu")
    check(names, 2, 4, state=state, pins=pins)


@pytest.mark.slow
def test_each_stage_clips_the_norm_of_its_own_gradients() -> None:
    check(["pipedream", "2bw", "pipemare plain"], 3, 3, clip_norm=0.1)


# What does not compose, checkpoints, bytes --------------------------------------------------------


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))), y)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tied": ({}, "'first.weight' is held by the stages 0 and 1"),
    "skip": ({"on_nonfinite": "skip"}, 'on_nonfinite="skip"'),
    "fp16": ({"precision": "fp16"}, "float16"),
    "host": ({"offload": "optimizer"}, "optimizer state in host memory"),
    "kernel": ({"fuse": ["adamw"]}, "the kernel of AdamW"),
    "zero3": ({"state": "zero3"}, "gathered for every use"),
    "split": ({"state": "zero1", "schedule": "pipemare"}, "optimizer state is split"),
    "compiled": ({"backend": "aot_eager"}, "stages under the schedule '2bw' are not compiled"),
    "not allowed": ({"allow": ""}, "trains with stale gradients"),
}


def refused() -> dict[str, str]:
    """What is said of each."""
    said = {}
    for name, (how, _) in REFUSED.items():
        model, batches = made(2)
        chosen: Any = Tied().double() if name == "tied" else model.float()
        batch = {k: v if name == "tied" else v.float() for k, v in batches[0].items()}
        given = {"schedule": "2bw", "allow": "stale gradients", "microbatches": 2, **how}
        pins = autopar.pins.data_parallel("gpu")
        try:
            autopar.compile(
                chosen, mesh(4), example_inputs=batch, stages=2, pins=pins,
                optimizer=OPTIMIZERS["adamw"], **given,
            )  # fmt: skip
        except AutoparError as error:
            said[name] = str(error)
    return said


@pytest.mark.slow
def test_what_does_not_compose_is_refused_by_name() -> None:
    for said in run_ranks(refused):
        assert set(said) == set(REFUSED)
        for name, (_, what) in REFUSED.items():
            assert what in said[name], said[name]
            assert "why:" in said[name]


def resumed(folder: str) -> dict[str, tuple[list[float], list[float], bool]]:
    """Losses after a checkpoint, of the run that wrote it and of one that goes on from it."""
    found = {}
    for name in ("pipedream", "2bw", "ampnet", "pipemare", "pipemare flushed"):
        method, path = METHODS[name], f"{folder}/{name}"
        program, batches = program_of(method, 2, "adamw", 2)
        for batch in batches[:4]:
            program.step(**batch)
        program.save_checkpoint(path)
        losses = [program.step(**batch).item() for batch in batches[4:]]
        again, _ = program_of(method, 2, "adamw", 2)
        again.load_checkpoint(path)
        told = [again.step(**batch).item() for batch in batches[4:]]
        ours, its = program.state_dict(), again.state_dict()
        found[name] = losses, told, all(torch.equal(ours[k], v) for k, v in its.items())
    return found


@pytest.mark.slow
def test_a_resumed_run_continues_to_the_bit() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for rank in run_ranks(resumed, folder, count=2):
            for name, (losses, told, same) in rank.items():
                assert losses == told, name
                assert same, name


def held() -> dict[str, tuple[list[int], list[int]]]:
    """Bytes of older versions on this rank after every step, and those of its parameters."""
    found = {}
    for name in ("pipedream", "vertical", "2bw", "ampnet"):
        program, batches = program_of(METHODS[name], 4, "sgd", 4)
        pipeline = program._executor
        (own,), (stage,) = pipeline.continuous.versions.values(), pipeline.stages.values()
        nbytes = []
        for batch in batches:
            program.step(**batch)
            nbytes.append(own.nbytes)
        found[name] = nbytes, [tensor.nbytes for tensor in stage.tensors]
    return found


@pytest.mark.slow
def test_stages_hold_the_bytes_of_as_many_versions_as_the_closed_form_says() -> None:
    for number, rank in enumerate(run_ranks(held)):
        for name, (nbytes, parameters) in rank.items():
            scheduled = schedule_of(METHODS[name].schedule, 4, METHODS[name].microbatches)
            assert max(nbytes) == (scheduled.versions[number] - 1) * sum(parameters)
            assert nbytes[-1] == max(nbytes)


def evaluated() -> float:
    """The loss of a batch after all steps."""
    program, batches = program_of(METHODS["2bw"], 2, "sgd", 2)
    for batch in batches:
        program.step(**batch)
    return float(program(**batches[0]))


def test_evaluation_sees_all_updates() -> None:
    """A pipeline is drained before anybody looks at its weights."""
    _, weights = simulated(METHODS["2bw"], 2, "sgd")
    model, batches = made(2)
    model.load_state_dict(weights)
    wanted = model(**batches[0]).item()
    assert run_ranks(evaluated, count=2) == pytest.approx([wanted, wanted], rel=1e-12)


def saved(path: str) -> list[float]:
    """Losses of steps of a program that was saved before any."""
    program, batches = program_of(METHODS["pipemare flushed"], 2, "sgd", 2)
    program.save(path)
    return [program.step(**batches[0]).item() for _ in range(6)]


@pytest.mark.slow
def test_a_saved_program_trains_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    losses = run_ranks(saved, str(path), count=2)[0]
    source = (path / "program.py").read_text()
    assert "FLUSHED_STEPS = 3" in source
    assert "ADJUSTMENT = ((0.75, 0.25), 0, 0.3)" in source
    assert "UPDATE0.-1" in source
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = run(sys.executable, *launch, str(path / "program.py"))
    steps = [line.split() for line in printed.splitlines() if line.startswith("step")]
    assert [step[3] for step in steps[:6]] == [f"{loss:.6f}" for loss in losses]


def closed() -> dict[str, Tensor]:
    """This rank's weights once the program is closed."""
    program, batches = program_of(METHODS["pipedream"], 2, "sgd", 2)
    (stage,) = program._executor.stages.values()
    for batch in batches:
        program.step(**batch)
    program.close()
    return {name: tensor.detach() for name, tensor in stage.named.items()}


def test_what_is_under_way_ends_before_a_program_closes() -> None:
    """Other ranks wait for messages of this one, and their last updates are made."""
    _, weights = simulated(METHODS["pipedream"], 2, "sgd")
    first, second = run_ranks(closed, count=2)
    assert len(first) == len(second) == 2
    for name, tensor in (first | second).items():
        assert torch.allclose(tensor, weights[name], rtol=0, atol=1e-12)


def in_bf16(names: list[str]) -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    """Losses and masters of runs that compute in bfloat16."""
    found = {}
    for name in names:
        program, batches = program_of(METHODS[name], 2, "momentum", 2, precision="bf16")
        losses = [program.step(**batch).item() for batch in batches]
        found[name] = losses, program.state_dict()
        program.close()
    return found


def simulated_in_bf16(method: Method) -> tuple[list[float], dict[str, Tensor]]:
    """The same by autograd, for methods whose backward runs on the weights of its forward."""
    model, batches = made(2)
    model = model.float()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    names = [name for name, _ in model.named_parameters()]
    versions = [[p.detach().clone() for p in model.parameters()]]
    n, losses = method.microbatches, []
    for step, batch in enumerate(batches):
        total = 0.0
        for number in range(n):
            k = step * n + number
            x, y = (batch[name].float().bfloat16().chunk(n)[number] for name in "xy")
            used = []
            for place, name in enumerate(names):
                version = versions[method.forward(int(name.split(".")[1]), 2, k)]
                used.append(version[place].bfloat16().requires_grad_())
            for weight, bias in zip(used[::2], used[1::2], strict=True):
                x = torch.tanh(F.linear(x, weight, bias))
            loss = F.mse_loss(x, y)
            total += loss.item() / n
            (loss / method.taken).backward()
            for parameter, own in zip(model.parameters(), used, strict=True):
                assert own.grad is not None
                known = 0.0 if parameter.grad is None else parameter.grad
                parameter.grad = own.grad.float() + known
            if (number + 1) % method.taken == 0:
                optimizer.step()
                optimizer.zero_grad()
                versions.append([p.detach().clone() for p in model.parameters()])
        losses.append(total)
    return losses, dict(model.state_dict())


@pytest.mark.slow
def test_masters_are_updated_and_versions_held_in_bfloat16() -> None:
    names = ["pipedream", "2bw"]
    (ours, _), (reference, exact) = run_ranks(in_bf16, names, count=2), ({}, {})
    for name in names:
        reference[name] = simulated_in_bf16(METHODS[name])
        exact[name] = simulated_in_bf16(
            dataclasses.replace(
                METHODS[name], forward=lambda s, p, k, n=name: newest(METHODS[n], k)
            )
        )
    for name in names:
        losses, weights = ours[name]
        told, state = reference[name]
        # Losses are rounded to bfloat16 where they are made, or not.
        assert losses == pytest.approx([told[0], *told[:-1]], abs=0.01)
        error, apart = (
            max(float((weights[k] - v).abs().max()) for k, v in other.items())
            for other in (state, exact[name][1])
        )
        assert error < 1e-6 < 1e-2 < apart


def newest(method: Method, k: int) -> int:
    """The version of a run that does not fall behind."""
    return k // method.taken

"""Compares our plan with hand-written torch, on the cores of a laptop or the GPUs of a cluster.

    python benchmarks/end_to_end.py                               # four gloo processes here
    torchrun --nproc-per-node 8 benchmarks/end_to_end.py --model llama-3-8b --batch 8 --seq 4096
    sbatch benchmarks/end_to_end.slurm                            # several hosts

Every program starts with the same weights and gets the same batches. All programs are loaded and
take turns step by step, so that other load affects all of them; if memory cannot hold them all,
`--apart` builds one after the other. A step's time is that of the slowest process. Each program
trains one more step under torch's profiler: exposed communication is the time of the first process
in which something communicates and nothing computes.

MFU counts 6 FLOPs for each parameter and token, and attention. "predicted" is the cost model's
prediction for our plan and, for a baseline with a plan of the same name in `autopar.pins`, for that
plan.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import pins
from autopar.cost.device import device as device_of
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.plan_entries import UNPREDICTED, Prediction
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.runtime.folder import join_process_group
from autopar.runtime.profile import profiled
from autopar.runtime.ranks.processes import device_name, from_first_rank, local_device
from autopar.zoo import Spec, build, example_inputs, spec
from benchmarks.baselines import BASELINES, RefusedError, Rival, Setting
from benchmarks.exposure import exposed
from benchmarks.harness import markdown, middle, read, write

ROOT = Path(__file__).parent.parent
# What a laptop trains: named like the models of the zoo, so that the same plans apply.
TINY = {
    "llama-tiny": Spec(
        "llama-tiny",
        "LlamaForCausalLM",
        {
            "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 768,
            "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
            "max_position_embeddings": 512, "attn_implementation": "sdpa",
        },
        "float32",
        batch=8,
        seq=128,
        source="none: small enough for four cores",
    ),
}  # fmt: skip
# The plan that a baseline follows, in the words of autopar, by the axes of one host or several.
WORDS: dict[str, Callable[[tuple[str, ...]], Any]] = {
    "ddp": lambda axes: pins.data_parallel(),
    "fsdp2": lambda axes: pins.fsdp(),
    "tp": lambda axes: [pins.megatron_sp(axis) for axis in axes],
    "tp+fsdp2": lambda axes: [pins.fsdp(axes[0]), pins.megatron_sp(axes[-1])],
}


@dataclass
class Runner:
    """A program that is measured.

    Attributes:
        name: "autopar" or a baseline's.
        step: one step; the loss, on every process.
        predicted: seconds of a step and bytes a device, where there is a prediction.
        held: bytes that it allocated on its device before its first step.
    """

    name: str
    step: Callable[[], Tensor]
    predicted: Prediction
    held: float = 0.0
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: float = 0.0
    exposed: float = 0.0


class Bench:
    """One model, one batch, one device a process."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.device = given, local_device()
        self.world, self.first = dist.get_world_size(), dist.get_rank() == 0
        hosts = max(1, self.world // int(os.environ.get("LOCAL_WORLD_SIZE", self.world)))
        shape = f"node={hosts}, gpu={self.world // hosts}" if hosts > 1 else f"gpu={self.world}"
        self.mesh = Mesh.parse(given.mesh or f"{device_name(self.device.type)}: {shape}")
        torch.manual_seed(0)
        self.spec = TINY.get(given.model) or spec(given.model)
        self.model = build(self.spec, layers=given.layers, meta=False)
        batch = example_inputs(self.spec, given.batch, given.seq, device="cpu")
        self.batch = {name: value.to(self.device) for name, value in batch.items()}
        factory = functools.partial(torch.optim.AdamW, lr=given.lr, fused=self.device.type != "cpu")
        self.setting = Setting(self.device, factory, hosts, given.microbatches)

    def make(self, name: str) -> Runner:
        """A program by name; RefusedError or AutoparError where it does not apply."""
        before = self.allocated()
        # Every program updates weights of its own.
        model = copy.deepcopy(self.model)
        if name.startswith("autopar"):
            program = self._ours(model, staged=name != "autopar")
            runner = Runner(name, lambda: program.step(**self.batch), program.plan.predicted)
        else:
            rival: Rival = BASELINES[name](model, self.setting)
            runner = Runner(name, lambda: rival.step(self.batch), self._predicted(name))
        del model
        gc.collect()
        runner.held = self.allocated() - before
        return runner

    def _ours(self, model: nn.Module, staged: bool) -> autopar.Session:
        given = self.given
        options: dict[str, Any] = {"memory": given.memory, "calibration": given.calibration}
        if staged:
            options |= {"stages": self.world, "microbatches": given.microbatches}
        elif given.plan:
            options["plan"] = autopar.Plan.load(given.plan)
        return autopar.compile(
            model, self.mesh, optimizer=self.setting.optimizer, example_inputs=self.batch, **options
        )

    def _predicted(self, name: str) -> Prediction:
        """Returns the cost model's figures of a baseline's plan."""
        if name not in WORDS or (name == "tp+fsdp2" and len(self.mesh.axes) < 2):
            return UNPREDICTED

        def made() -> Prediction:
            model = build(self.spec, layers=self.given.layers)
            inputs = example_inputs(self.spec, self.given.batch, self.given.seq)
            options = Options(
                pins=WORDS[name](self.mesh.names), memory="1PB", calibration=self.given.calibration
            )
            graph = capture_graph(model, (), inputs, options, Trace(None)).graph
            try:
                return make_plan(graph, self.mesh, options, Trace(None)).predicted
            except AutoparError:
                return UNPREDICTED  # the words do not apply to this model

        return from_first_rank(made)

    def allocated(self) -> float:
        """Bytes on this process's device, 0 where nobody counts them."""
        return float(torch.cuda.memory_allocated()) if self.device.type == "cuda" else 0.0

    def time(self, runner: Runner, measured: bool) -> None:
        """One step."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = self.allocated()
        dist.barrier()
        self._wait()
        began = time.perf_counter()
        loss = runner.step()
        self._wait()
        seconds = time.perf_counter() - began
        runner.losses.append(float(loss))
        if measured:
            runner.seconds.append(self._largest(seconds))
        if self.device.type == "cuda":
            most = torch.cuda.max_memory_allocated() - before + runner.held
            runner.peak = max(runner.peak, self._largest(most))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _largest(self, value: float) -> float:
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def profile(self, runner: Runner, file: Path) -> None:
        """One more step, in a trace."""
        with profiled(file):
            runner.step()
        if self.first:
            runner.exposed = exposed(file)

    def flops(self) -> float:
        """Returns the operations of forward and backward on the whole batch.

        They are 6 N + 12 L H T for each of a sample's T tokens, with N parameters, L layers and
        the width H (PaLM, arXiv:2204.02311, appendix B).
        """
        config: Any = self.model.config
        length = self.batch["input_ids"].shape[1]
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        attention = 12 * config.num_hidden_layers * config.hidden_size * length
        return float((6 * parameters + attention) * self.batch["input_ids"].numel())

    def row(self, runner: Runner, ours: Runner, flops: float) -> dict[str, Any]:
        """Returns the CSV row of a program."""
        given, seconds = self.given, sorted(runner.seconds)
        step = middle(seconds)
        dtype = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[
            next(self.model.parameters()).dtype
        ]
        peak_rate = device_of(self.mesh).rate(dtype, True) * self.world
        tokens = self.batch["input_ids"].numel()
        apart = [abs(a - b) / abs(b) for a, b in zip(runner.losses, ours.losses, strict=True)]
        return {
            "model": given.model,
            "layers": given.layers or "",
            "batch": given.batch,
            "seq": given.seq,
            "mesh": str(self.mesh),
            "program": runner.name,
            "step_ms": 1e3 * step,
            "step_low_ms": 1e3 * seconds[len(seconds) // 4],
            "step_high_ms": 1e3 * seconds[-1 - len(seconds) // 4],
            "steps": len(seconds),
            "tokens_per_second": tokens / step,
            "mfu": flops / step / peak_rate,
            "exposed_ms": 1e3 * runner.exposed,
            "peak_bytes": runner.peak or "",
            "predicted_ms": 1e3 * runner.predicted.step_seconds or "",
            "predicted_bytes": runner.predicted.peak_bytes or "",
            "ours_over_it": middle(
                [a / b for a, b in zip(ours.seconds, runner.seconds, strict=True)]
            ),
            "last_loss": runner.losses[-1],
            "loss_difference": max(apart),
            "device": _device(self.device),
            "backend": dist.get_backend(),
        }


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def measure(bench: Bench, names: list[str]) -> list[Runner]:
    """All programs that apply, ours first."""
    given = bench.given
    runners: list[Runner] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            try:
                runner = bench.make(name)
            except (RefusedError, AutoparError) as error:
                if bench.first:
                    print(f"{name} is left out: {error}", flush=True)
                continue
            runners.append(runner)
            if given.apart:
                for number in range(given.warmup + given.steps):
                    bench.time(runner, number >= given.warmup)
                bench.profile(runner, Path(folder, "trace.json"))
                runner.step = _gone
                gc.collect()
        if not given.apart:
            for number in range(given.warmup + given.steps):
                # Another one begins every time.
                at = number % len(runners)
                for runner in runners[at:] + runners[:at]:
                    bench.time(runner, number >= given.warmup)
            for runner in runners:
                bench.profile(runner, Path(folder, "trace.json"))
    return runners


def _gone() -> Tensor:
    raise RuntimeError("this program has made room for others")


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each program, on the first process."""
    bench = Bench(given)
    names = ["autopar", *(["autopar pp"] if "pp" in given.baselines else []), *given.baselines]
    runners = measure(bench, names)
    flops = bench.flops() if bench.first else 0.0
    for runner in runners if bench.first else []:
        row = bench.row(runner, runners[0], flops)
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        yield row


def table() -> str:
    """The table of docs/results, from the CSV."""
    heads = ["model", "program", "a step", "tokens/s", "MFU", "exposed", "predicted", "ours / it"]
    lines = []
    for row in read("end_to_end"):
        low, high = (float(row[f"step_{end}_ms"]) for end in ("low", "high"))
        predicted = f"{float(row['predicted_ms']):.0f} ms" if row["predicted_ms"] else "-"
        lines.append(
            [
                f"{row['model']}, {row['batch']} x {row['seq']}, {row['mesh']}",
                row["program"],
                f"{float(row['step_ms']):.0f} ms ({low:.0f} to {high:.0f})",
                f"{float(row['tokens_per_second']):.0f}",
                f"{float(row['mfu']):.1%}",
                f"{float(row['exposed_ms']):.0f} ms",
                predicted,
                f"{float(row['ours_over_it']):.2f}",
            ]
        )
    return markdown(heads, lines)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="llama-tiny", help="a language model of the zoo, or llama-tiny"
    )
    parser.add_argument("--layers", type=int, help="number of blocks, in place of its own")
    parser.add_argument("--batch", type=int, default=8, help="samples of a step, on all devices")
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=11, help="steps that do not count")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--baselines", type=lambda text: text.split(","), default=[*BASELINES])
    parser.add_argument("--microbatches", type=int, default=8, help="of pipelines")
    parser.add_argument("--mesh", help="by default this machine's: hosts x devices")
    parser.add_argument("--memory", help="bytes a device for our plan, such as 70GiB")
    parser.add_argument("--plan", type=Path, help="a plan file, in place of planning")
    parser.add_argument("--calibration", type=Path, help="what autopar calibrate wrote here")
    parser.add_argument("--apart", action="store_true", help="one program at a time in memory")
    parser.add_argument("--processes", type=int, default=4, help="where torchrun did not start it")
    parser.add_argument("--output", default="end_to_end", help="the CSV's name; none with ''")
    parser.add_argument("--table", action="store_true", help="print the documented table, no more")
    return parser.parse_args()


def main() -> None:
    """Start processes if torchrun did not, measure, write."""
    given = arguments()
    if given.table:
        print(table())
        return
    unknown = set(given.baselines) - set(BASELINES)
    if unknown:
        sys.exit(f"there is no baseline {', '.join(sorted(unknown))}; there are {[*BASELINES]}")
    if not dist.is_torchelastic_launched():
        launch = ["-m", "torch.distributed.run", "--standalone"]
        command = [sys.executable, *launch, f"--nproc-per-node={given.processes}", __file__]
        sys.exit(subprocess.call([*command, *sys.argv[1:]], cwd=ROOT))
    join_process_group()
    torch.set_num_threads(1 if dist.get_backend() == "gloo" else torch.get_num_threads())
    found = list(rows(given))
    if found and given.output:
        keys = ("model", "layers", "batch", "seq", "mesh", "device", "program")
        print(write(given.output, found, keys=keys))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

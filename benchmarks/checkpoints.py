"""Saves and loads 100 M parameters on four processes: `python benchmarks/checkpoints.py`.

The model is a perceptron of four square layers under a ZeRO-3 plan, with Adam's state, three times
400 MB in float32. It is saved, saved asynchronously, and loaded under the same plan and under
another one; then as many numbers are saved as DTensors in torch.distributed.checkpoint's own files,
which have no checksums. Seconds are those of the slowest rank, and memory is the largest growth of
a rank's process, both the best of three alternating rounds. All reads come from the page cache.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import autopar
from autopar.pins import fsdp
from benchmarks import checkpoints
from benchmarks.harness import write
from tests.support.models import Mlp
from tests.support.ranks import run_ranks

MESH = "cpu: gpu=4 @1TB/s 1ns"
ROUNDS = 3


def grown() -> Callable[[], int]:
    """Starts to watch this process's memory; called, tells by how many bytes it grew at most."""
    status = Path("/proc/self/status")

    def read(name: str) -> int:
        (line,) = (x for x in status.read_text().splitlines() if x.startswith(name))
        return 1024 * int(line.split()[1])

    Path("/proc/self/clear_refs").write_text("5")  # the peak is now
    before = read("VmRSS")
    return lambda: read("VmHWM") - before


def measured(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds and megabytes of something that all ranks do, of the slowest and the largest."""
    dist.barrier()
    peak, began = grown(), time.perf_counter()
    work()
    found = torch.tensor([time.perf_counter() - began, peak() / 1e6], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found[0]), float(found[1])


def square(output: Tensor) -> Tensor:
    """A loss."""
    return output.square().mean()


def program(model: nn.Module, x: Tensor, pins: Any) -> autopar.Session:
    """The perceptron under a plan, after one step."""
    made = autopar.compile(model, MESH, loss_fn=square, example_inputs=x, pins=pins)
    made.step(x)
    return made


def as_dtensors(width: int) -> dict[str, Tensor]:
    """Tensors of the sizes of the perceptron and of Adam's state of it, a quarter of each here."""
    grid = init_device_mesh("cpu", (4,))
    names = [f"{kind}.{n}" for kind in ("model", "exp_avg", "exp_avg_sq") for n in range(4)]
    part = (width // 4, width)
    return {name: DTensor.from_local(torch.randn(part), grid, [Shard(0)]) for name in names}


def rounds(folder: str, width: int) -> dict[str, list[tuple[float, float]]]:
    """Returns the seconds and bytes of each operation in each round."""
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")
    root = Path(folder)
    torch.manual_seed(0)
    model, x = Mlp((width,) * 5), torch.randn(4, width)
    across = {f"layers.{n}.weight": f"[{width}, {width}@gpu]" for n in range(4)}
    sharded, other = (program(model, x, pins) for pins in (fsdp("gpu"), across))
    dtensors = as_dtensors(width)
    own, torchs = root / "own", root / "torch"
    works: dict[str, Callable[[], Any]] = {
        "save": lambda: sharded.save_checkpoint(own),
        "save, asynchronous: until training goes on": lambda: handles.append(
            sharded.save_checkpoint(own, asynchronous=True)
        ),
        "load": lambda: sharded.load_checkpoint(own),
        "load, cut the other way": lambda: other.load_checkpoint(own),
        "torch's files: save": lambda: save(dtensors, storage_writer=FileSystemWriter(torchs)),
        "torch's files: load": lambda: load(dtensors, storage_reader=FileSystemReader(torchs)),
    }
    handles: list[Any] = []
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            found[name].append(measured(work))
            while handles:
                handles.pop().result()
    return found


def main() -> None:
    """Measure and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=5000, help="of the layers")
    width = parser.parse_args().width
    with tempfile.TemporaryDirectory() as folder:
        # By its module's name, which processes can import.
        first = run_ranks(checkpoints.rounds, folder, width)[0]
        size = sum(f.stat().st_size for f in (Path(folder) / "own").iterdir())
    rows = [
        {
            "what": name,
            "parameters": 4 * width * width + 4 * width,
            "checkpoint_MB": round(size / 1e6),
            "seconds": round(min(seconds for seconds, _ in results), 2),
            "grown_MB": round(min(memory for _, memory in results)),
        }
        for name, results in first.items()
    ]
    for row in rows:
        print(f"{row['what']:45} {row['seconds']:7.2f} s {row['grown_MB']:6} MB")
    print(f"wrote {write('checkpoints', rows)}")


if __name__ == "__main__":
    main()

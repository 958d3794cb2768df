"""`autopar calibrate`: measures kernels and collectives on this machine."""

from __future__ import annotations

import datetime
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click
import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch.multiprocessing.spawn import spawn

from autopar.cli.common.console import FILE, JSON, Console, print_json, print_out, say
from autopar.cost.calibration import Calibration
from autopar.cost.kernel_tables import Host
from autopar.cost.measured_host import MEASURED, is_host, role_of
from autopar.cost.model import AnalyticModel
from autopar.cost.programs.choice import SIZES
from autopar.cost.work import Work
from autopar.errors import AutoparError, MeshError, ProgramError
from autopar.ir.chosen_algorithms import LIBRARY
from autopar.ir.collective import Collective
from autopar.ir.mesh import Mesh
from autopar.ir.units import format_bytes, format_seconds
from autopar.runtime.communication.compare import QUICK, ROUNDS, Effort, compare
from autopar.runtime.communication.measure import calibrate, settings
from autopar.runtime.folder import join_process_group
from autopar.runtime.ranks.processes import device_name, local_device


class Extent(NamedTuple):
    """Choices of what to measure, and whether to show progress."""

    quick: bool
    algorithms: bool
    quiet: bool


@click.command("calibrate")
@click.option("--mesh", "mesh_text", help='The mesh to measure: "cpu: data=2, tensor=2".')
@click.option("--ranks", type=click.IntRange(1), help="Number of processes, instead of --mesh.")
@click.option("--quick", is_flag=True, help="Measure a few small problems only, as a trial.")
@click.option(
    "--collectives",
    "algorithms",
    is_flag=True,
    help='Also measure other algorithms of collectives, for plans with collectives="auto".',
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("calibration.toml"),
    show_default=True,
    help="Write the calibration to this file.",
)
@JSON
def command(
    mesh_text: str | None,
    ranks: int | None,
    quick: bool,
    algorithms: bool,
    output: Path,
    as_json: bool,
) -> None:
    """Measure kernels and collectives on this machine, to predict times of plans for it.

    Measures matrix products, memory-bound operators, attention, the optimizer, and every kind of
    collective over every group of the mesh, with one process per device. Starts the processes
    itself, unless torchrun did. Takes some minutes on an otherwise idle machine.

    \b
    autopar calibrate --mesh "cpu: data=2, tensor=2" -o calibration.toml
    autopar calibrate --mesh "cpu: node=2, gpu=2" --collectives
    torchrun --no-python --nproc-per-node 8 autopar calibrate --mesh "H100: gpu=8"
    autopar plan gpt2 --mesh "cpu: data=2, tensor=2" --calibration calibration.toml
    """
    mesh, extent = _mesh(mesh_text, ranks), Extent(quick, algorithms, as_json)
    if not output.parent.is_dir():
        raise ProgramError(f"there is no folder {output.parent}", todo="create it, or correct -o")
    with tempfile.TemporaryDirectory() as folder:
        measured = Path(folder, "calibration.toml")
        if dist.is_torchelastic_launched():
            join_process_group()
            _measure(mesh, extent, measured)
            first = dist.get_rank() == 0
            dist.destroy_process_group()
            if not first:
                return
        elif mesh.size > 1:
            spawn(_process, args=(str(mesh), extent, folder), nprocs=mesh.size)
            if (error := Path(folder, "error")).exists():
                raise pickle.loads(error.read_bytes())
        else:
            _measure(mesh, extent, measured)
        calibration = Calibration.load(measured)
    FILE.write(output, calibration.to_toml())
    if as_json:
        points = list(_rows(calibration))
        print_json({"mesh": str(mesh), "date": calibration.date, "points": points})
        return
    print_out(_table(calibration))
    say(f"written to {output}; next: autopar plan ... --calibration {output}", err=True)


def _mesh(text: str | None, ranks: int | None) -> Mesh:
    """Returns the mesh to measure; raises MeshError if both options are given and differ."""
    if text is None:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        return Mesh.parse(f"{device_name(kind)}: ranks={ranks or 1}")
    mesh = Mesh.parse(text)
    AnalyticModel(mesh)  # refuses a device or links without a price
    if ranks not in (None, mesh.size):
        raise MeshError(f"--ranks {ranks} for a mesh of {mesh.size} devices", todo="omit --ranks")
    return mesh


def _process(rank: int, text: str, extent: Extent, folder: str) -> None:
    """Runs in each process that the command starts."""
    mesh, cuda = Mesh.parse(text), torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)  # as torchrun starts them
    store = f"file://{folder}/store"
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=mesh.size)
    try:
        _measure(mesh, extent, Path(folder, "calibration.toml"))
    except AutoparError as error:  # all ranks raise the same one
        if rank == 0:
            Path(folder, "error").write_bytes(pickle.dumps(error))
    dist.destroy_process_group()


def _measure(mesh: Mesh, extent: Extent, file: Path) -> None:
    """Measures with all processes; the first shows progress and writes the result."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    device = local_device(mesh)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    chosen = settings(device, extent.quick)
    with _progress(extent.quiet or not first) as progress:
        calibration = calibrate(mesh, device, chosen, today, progress)
        if extent.algorithms:
            payloads = tuple(size for size in chosen.payloads if size >= SIZES[0])
            effort = Effort(payloads, QUICK if extent.quick else ROUNDS)
            compared = compare(mesh, device, effort, progress)
            exchanges = (*calibration.exchanges, *compared)
            calibration = replace(calibration, exchanges=exchanges)
    if first:
        file.write_text(calibration.to_toml(), encoding="utf-8")


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Shows a progress bar on stderr if it is a terminal and `quiet` is not set."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda name, number, total: None
        return
    columns = (TextColumn("{task.description:48}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("calibrate")
        yield lambda name, number, total: bar.update(
            task, description=name, completed=number - 1, total=total
        )


def _rows(calibration: Calibration) -> Iterator[dict[str, object]]:
    """Yields every measured point with its closed-form price, the largest of each kind last."""
    model = AnalyticModel(calibration.mesh)
    for p in calibration.products:
        work = Work("aten.mm", p.gemm.flops, 0.0, p.dtype, p.gemm)
        shape = f"{p.gemm.m} x {p.gemm.n} x {p.gemm.k}"
        yield _row("matmul", p.dtype, shape, p.time.seconds, p.time.spread, model.compute(work))
    for k in calibration.kernels:
        if is_host(k):
            price, size = getattr(Host.of(MEASURED), role_of(k)), "a call"
        else:
            price = model.compute(Work(k.op, k.flops, k.nbytes, k.dtype))
            size = format_bytes(k.nbytes)
        yield _row(k.op, k.dtype, size, k.time.seconds, k.time.spread, price)
    for c in calibration.exchanges:
        by = "" if c.by == LIBRARY else c.by
        price = model.collective(Collective(c.kind, c.axes, int(c.nbytes), 0, by))
        yield _row(c.kind, c.over, format_bytes(c.nbytes), c.time.seconds, c.time.spread, price)


def _row(
    what: str, over: str, size: str, seconds: float, spread: float, closed_form: float
) -> dict[str, object]:
    return {
        "what": what,
        "over": over,
        "size": size,
        "seconds": seconds,
        "spread": spread,
        "closed_form": closed_form,
    }


def _table(calibration: Calibration) -> Table:
    """Renders the measured and the closed-form seconds of the largest problem of each kind."""
    plain = replace(calibration, exchanges=tuple(c for c in calibration.exchanges if not c.by))
    largest = {(row["what"], row["over"]): row for row in _rows(plain)}
    table = Table(title=f"measured on {calibration.mesh}, the largest problem of each kind")
    for name in ("what", "dtype or axes", "size"):
        table.add_column(name)
    for name in ("measured", "spread", "closed form"):
        table.add_column(name, justify="right")
    for row in largest.values():
        seconds, spread, price = (float(str(row[x])) for x in ("seconds", "spread", "closed_form"))
        names = (str(row[x]) for x in ("what", "over", "size"))
        table.add_row(*names, format_seconds(seconds), f"{spread:.0%}", format_seconds(price))
    return table

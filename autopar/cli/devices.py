"""`autopar devices`: lists devices and the data of their kernel tables; fits a new device."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import click

from autopar.cli.common.console import JSON, print_json
from autopar.cost.device import Device, device, devices
from autopar.cost.fitting.device_fit import (
    CONSTANTS,
    Residuals,
    fit_attention,
    fit_links,
    fit_memory,
    fit_products,
)
from autopar.cost.fitting.measurements import (
    ATTENTION,
    COLUMNS,
    LINKS,
    MEMORY,
    PRODUCTS,
    samples,
)
from autopar.cost.kernel_tables import Row
from autopar.errors import CostError
from autopar.ir.mesh import Mesh


@click.group("devices", invoke_without_command=True)
@JSON
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """List the devices that a mesh may name, and the measurements that they were fitted to.

    The errors are medians on measurements that were not fitted; "as H100" are the constants of
    another device, relative to the device's own peaks. "1.0% fitted, else as RTX-4090" is the error
    on few measurements, to which few constants were fitted.
    """
    if context.invoked_subcommand is not None:
        return
    rows = [
        {
            "device": entry.name,
            "products": _origin(entry.name, entry.products),
            "attention": _origin(entry.name, entry.attention),
            "links": _origin(entry.name, entry.links),
            "source": entry.source,
        }
        for entry in devices()
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        kinds = (f"{kind} {row[kind]}" for kind in ("products", "attention", "links"))
        click.echo(f"{row['device']:10} {', '.join(kinds)}")


@command.command("fit")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), metavar="MEASURED.csv")
@click.option(
    "--device",
    "name",
    required=True,
    help='The measured device, a name or a description: "H200", "mine[400TFLOP/s 64GiB 1.6TB/s]".',
)
@click.option(
    "--only",
    default="",
    metavar="NAMES",
    help="Constants of products or attention to fit, such as efficiency,throttle; the others stay.",
)
def fit(file: Path, name: str, only: str) -> None:
    """Fit the constants of a device's kernels and collectives to measured seconds.

    MEASURED.csv has latency_ms, and of each row one kind of columns: m, n, k of a product of bf16;
    batch_size, isl, num_heads, num_key_value_heads, head_dim of a causal attention forward; nbytes
    that a kernel bound by memory reads and writes; op_name, num_gpus, total_bytes of a collective
    inside a node. Half of the rows of a kind are fitted; the printed error and spread are the
    median and the 90th percentile of the others. If --only names few constants, fewer than 40
    rows suffice, all of which are fitted. Put the printed rows into autopar/cost/tables/, and the
    figures into devices.toml.
    """
    chip = device(Mesh.parse(f"{name}: gpu=1"))
    measured = samples(file, chip.name)
    if not measured:
        raise CostError(
            f"{file} has no measurement of {chip.name}",
            todo="name the device as its column `device` does, or leave the column out",
        )
    kinds = {kind: [each for each in measured if each.kind == kind] for kind in COLUMNS}
    names = _names(only)
    launch = None
    if moved := kinds[MEMORY]:
        chip, far = fit_memory(chip, moved)
        launch = chip.launch
        _print_errors(far)
        _print_figures(chip, "memory_efficiency", "memory_ramp", "launch")
    if (products := kinds[PRODUCTS]) and (names is None or names[PRODUCTS]):
        chosen = names[PRODUCTS] if names else ()
        table, launch = fit_products(chip, products, launch, chosen)
        _print_row(chip.name, table)
        if not moved and (not chosen or "launch" in chosen):
            click.echo(f"launch = {launch:.3g}")
    if (attention := kinds[ATTENTION]) and (names is None or names[ATTENTION]):
        _print_row(chip.name, fit_attention(chip, attention, names[ATTENTION] if names else ()))
    if calls := kinds[LINKS]:
        chip, far = fit_links(chip, calls)
        _print_errors(far)
        if chip.links is None:
            _print_figures(chip, "intra_bandwidth", "intra_latency")
        else:
            _print_figures(chip, "intra_efficiency", "switch_reduction")
            _print_row(chip.name, chip.links)


def _names(only: str) -> dict[str, tuple[str, ...]] | None:
    """Returns the constants of each kind that `only` names; None if it names none.

    Raises:
        CostError: it names a constant that no kind has.
    """
    names = [each.strip() for each in only.split(",") if each.strip()]
    every = {name for known in CONSTANTS.values() for name in known}
    if unknown := [name for name in names if name not in every]:
        raise CostError(
            f"no constant is named {', '.join(unknown)}",
            why=f"those of products and attention are {', '.join(sorted(every))}",
            todo="correct --only",
        )
    chosen = {kind: tuple(n for n in names if n in known) for kind, known in CONSTANTS.items()}
    return chosen if names else None


def _print_errors(far: Residuals) -> None:
    click.echo(f"# devices.toml (error {far.error:.4g}, spread {far.spread:.4g})")


def _print_figures(chip: Device, *names: str) -> None:
    for name in names:
        click.echo(f"{name} = {getattr(chip, name):.4g}")


def _print_row(name: str, row: Row) -> None:
    values = [getattr(row, field.name) for field in fields(row)]
    texts = (value if isinstance(value, str) else f"{value:.4g}" for value in values)
    click.echo(f"# tables/{row.FILE}")
    click.echo(",".join(("device", *(field.name for field in fields(row)))))
    click.echo(",".join((name, *texts)))


def _origin(name: str, row: Row | None) -> str:
    if row is None:
        return "by its links' figures"
    if not row.measured:
        return "estimated"
    if row.measured != name:
        return f"as {row.measured}"
    base = getattr(row, "base", "")
    return f"{row.error:.1%}" + (f" fitted, else as {base}" if base else "")

"""`autopar devices`: lists devices and what their kernels were fitted to; fits a new one."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import click

from autopar.cli.common.console import JSON, print_json
from autopar.cost.device import device, devices
from autopar.cost.device_fit import fit_attention, fit_products, samples
from autopar.cost.kernel_tables import Row
from autopar.errors import CostError
from autopar.ir.mesh import Mesh


@click.group("devices", invoke_without_command=True)
@JSON
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """List the devices that meshes may name, and what their prices were fitted to.

    The errors are medians on measurements that were not fitted; "as H100" are the constants of
    another device, relative to the device's own peaks.
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
    help='The device measured, known or described: "H200", "mine[400TFLOP/s 64GiB 1.6TB/s]".',
)
def fit(file: Path, name: str) -> None:
    """Fit the tables of kernels to measured seconds of a device.

    MEASURED.csv has columns m, n, k, latency_ms for products of bf16, or batch_size, isl,
    num_heads, num_key_value_heads, head_dim, latency_ms for causal attention forwards. Half of its
    rows are fitted; the printed error and spread are the median and the 90th percentile of the
    others. Put the printed row into autopar/cost/tables/, and the launch into devices.toml.
    """
    chip = device(Mesh.parse(f"{name}: gpu=1"))
    measured = samples(file, chip.name)
    if not measured:
        raise CostError(
            f"{file} has no measurement of {chip.name}",
            todo="name the device as its column `device` does, or leave the column out",
        )
    if "attention" in measured[0].work.op:
        _print_row(chip.name, fit_attention(chip, measured))
    else:
        table, launch = fit_products(chip, measured)
        _print_row(chip.name, table)
        click.echo(f"launch = {launch:.3g}")


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
    return f"{row.error:.1%}" if row.measured == name else f"as {row.measured}"

"""The command line: `autopar plan | explain | simulate | why | diff | emit | report | rules |
schedules | solve | calibrate | devices | doctor | prepare`, one command per file.

Only this package prints. A command's module is imported when the command is used, so that
`autopar --help` needs neither torch nor a solver.
"""

from __future__ import annotations

import gc

import click

from autopar.cli.common.command_group import Group


@click.group(cls=Group, package=__name__)
@click.version_option(package_name="autopar", message="autopar %(version)s")
def main() -> None:
    """Plan the parallel training of a model, explain the plan, and write its program.

    \b
    autopar plan gpt2 --mesh "H100: node=2, gpu=8" -o plan.toml
    autopar explain plan.toml
    autopar simulate plan.toml
    autopar why plan.toml transformer.wte.weight
    autopar diff plan.toml other.toml
    autopar emit plan.toml -o program
    autopar report plan.toml -o plan.html
    autopar rules "aten.conv*"
    autopar schedules --stages 4 --microbatches 8
    autopar solve instance.json.gz
    autopar calibrate --mesh "cpu: data=2, tensor=2"
    autopar devices
    autopar doctor /tmp/autopar-1f2e3d
    autopar prepare
    """
    # A plan has millions of small values without cycles, which need not be looked through so often.
    gc.set_threshold(100_000, 50, 100)

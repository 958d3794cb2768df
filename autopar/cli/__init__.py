"""The command line: `autopar plan | explain | simulate | why | diff | emit | rules | schedules |
solve | calibrate | devices | doctor`, one command per file.

Only this package prints.
"""

from __future__ import annotations

import click

from autopar.cli import (
    calibrate,
    devices,
    diff,
    doctor,
    emit,
    explain,
    plan,
    rules,
    schedules,
    simulate,
    solve,
    why,
)
from autopar.cli.common.console import Group


@click.group(cls=Group)
def main() -> None:
    """Plan the parallel training of a model, explain the plan, and write its program.

    \b
    autopar plan gpt2 --mesh "H100: node=2, gpu=8" -o plan.toml
    autopar explain plan.toml
    autopar simulate plan.toml
    autopar why plan.toml lm_head.weight
    autopar diff plan.toml other.toml
    autopar emit plan.toml -o program
    autopar rules "aten.conv*"
    autopar schedules --stages 4 --microbatches 8
    autopar solve instance.json.gz
    autopar calibrate --mesh "cpu: data=2, tensor=2"
    autopar devices
    autopar doctor /tmp/autopar-1f2e3d
    """


COMMANDS = (
    plan, explain, simulate, why, diff, emit, rules, schedules, solve, calibrate, devices,
    doctor,
)  # fmt: skip
for module in COMMANDS:
    main.add_command(module.command)
main.add_command(why.why_not)

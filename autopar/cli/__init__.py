"""The command line: `autopar plan | explain | emit | rules | solve`, one command a file.

Only here is printed.
"""

from __future__ import annotations

import click

from autopar.cli import emit, explain, plan, rules, solve
from autopar.cli.console import Group


@click.group(cls=Group)
def main() -> None:
    """Plan how a model trains in parallel, see why, write the program, and look into the rules.

    \b
    autopar plan gpt2 --mesh "H100: node=2, gpu=8" -o plan.toml
    autopar explain plan.toml
    autopar emit plan.toml -o program
    autopar rules "aten.conv*"
    autopar solve instance.json.gz
    """


for module in (plan, explain, emit, rules, solve):
    main.add_command(module.command)

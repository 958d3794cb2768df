"""The command line: `autopar plan | explain | why | diff | emit | rules | solve`, one a file.

Only here is printed.
"""

from __future__ import annotations

import click

from autopar.cli import diff, emit, explain, plan, rules, solve, why
from autopar.cli.console import Group


@click.group(cls=Group)
def main() -> None:
    """Plan how a model trains in parallel, see why, write the program, and look into the rules.

    \b
    autopar plan gpt2 --mesh "H100: node=2, gpu=8" -o plan.toml
    autopar explain plan.toml
    autopar why plan.toml lm_head.weight
    autopar diff plan.toml other.toml
    autopar emit plan.toml -o program
    autopar rules "aten.conv*"
    autopar solve instance.json.gz
    """


for module in (plan, explain, why, diff, emit, rules, solve):
    main.add_command(module.command)
main.add_command(why.why_not)

"""`autopar prepare`: compiles the planner's loops ahead of the first plan."""

from __future__ import annotations

import contextlib
import io

import click

from autopar.cli.common.console import say, stages

# Plans that run every compiled loop: within little memory, and with stages.
PLANS = (
    ("gpt2", "--layers", "2", "--mesh", "H100: node=2, gpu=2", "--memory", "1.4GiB"),
    ("gpt2", "--layers", "4", "--mesh", "H100: gpu=2", "--global-batch", "8"),
)


@click.command("prepare")
def command() -> None:
    """Compile the planner's loops now, to make the first plan faster.

    Their code is kept beside the package, or in the user's cache folder if the package cannot be
    written; run it once after an installation, or while an image is built.

    \b
    autopar prepare
    """
    from autopar.cli.plan import command as plan

    with stages(quiet=False) as stage:
        for number, words in enumerate(PLANS, 1):
            stage(f"plan {number} of {len(PLANS)}")
            with contextlib.redirect_stdout(io.StringIO()):
                plan.main(list(words), prog_name="autopar plan", standalone_mode=False)
    say("the planner's loops are compiled")

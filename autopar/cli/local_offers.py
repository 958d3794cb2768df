"""Prints what `autopar plan --allow "local updates"` chooses among."""

from __future__ import annotations

from dataclasses import replace

from autopar.capture.capture import Captured
from autopar.cli.common.console import Stages, print_out, stages
from autopar.cli.common.model_options import capture_whole
from autopar.errors import BatchError, OptionError
from autopar.ir.mesh import Mesh
from autopar.ir.replicas.outer_value import Outer
from autopar.plan_entries import ModelSpec
from autopar.planning.local_choice import offers, table
from autopar.planning.options import Options


def fastest(spec: ModelSpec, mesh: Mesh, options: Options, as_json: bool) -> Outer | None:
    """Prints every way to train replicas apart, and returns the fastest; None for one program."""
    if spec.batch is None:
        raise OptionError("--allow 'local updates' divides the batch among replicas",
                          todo="pass --batch")  # fmt: skip
    whole = spec.batch
    with stages(quiet=as_json) as stage:

        def capture(replicas: int, inside: Mesh) -> Captured:
            if whole % replicas:
                raise BatchError(f"{whole} samples do not divide into {replicas} replicas")
            stage(f"{replicas} replicas" if replicas > 1 else "one program")
            return capture_whole(
                replace(spec, batch=whole // replicas), options, Stages(None, stage)
            )

        found = offers(capture, mesh, options)
    if not as_json:
        print_out(table(found), "")
    return found[0].plan.outer

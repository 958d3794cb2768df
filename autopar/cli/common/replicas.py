"""Local updates (independent replicas), as `autopar plan` chooses and prices them."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from autopar.cli.common.console import Stages, print_out, stages
from autopar.cli.common.model_options import capture_whole
from autopar.errors import BatchError, OptionError
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.replicas.outer_value import Outer
from autopar.plan import Plan
from autopar.plan_entries import ModelSpec
from autopar.planning.options import Options

if TYPE_CHECKING:
    from autopar.capture.capture import Captured
    from autopar.planning.local_rounds import Rounds
    from autopar.runtime.outer.method import Method


def fastest(spec: ModelSpec, mesh: Mesh, options: Options, as_json: bool) -> Outer | None:
    """Prints every candidate for local updates, and returns the fastest; None for one program."""
    from autopar.planning import local_choice

    if spec.batch is None:
        raise OptionError("--allow 'local updates' divides the batch among replicas",
                          todo="pass --batch")  # fmt: skip
    whole = spec.batch
    with stages(quiet=as_json) as stage:

        def capture(replicas: int, inside: Mesh) -> Captured:
            if whole % replicas:
                raise BatchError(
                    f"{whole} samples do not divide into {replicas} replicas",
                    todo=f"pass --batch, a multiple of {replicas}",
                )
            stage(f"{replicas} replicas" if replicas > 1 else "one program")
            return capture_whole(
                replace(spec, batch=whole // replicas), options, Stages(None, stage)
            )

        found = local_choice.offers(capture, mesh, options)
    if not as_json:
        print_out(local_choice.table(found), "")
    return found[0].plan.outer


def replica(
    mesh: Mesh, outer: Outer | None, batch: int | None, search: int | None
) -> tuple[Mesh, int | None]:
    """Returns the mesh and the batch of one replica; OptionError if they cannot be."""
    if outer is None:
        return mesh, batch
    outer.check(mesh)
    replicas = outer.count(mesh)
    if search is not None or batch is None or batch % replicas:
        raise OptionError(
            f"--outer needs the batch of {replicas} replicas",
            why=f"--batch is {batch}" if search is None else "stages are searched",
            todo=f"pass --batch, a multiple of {replicas}, without --global-batch or --stages auto",
        )
    return outer.within(mesh), batch // replicas


def method(outer: Outer) -> Method:
    """Returns the outer method of local updates, whose inner update is torch's."""
    from autopar.runtime.outer.methods import method_of

    return method_of(outer)


def with_rounds(
    graph: Graph, plan: Plan, outer: Outer | None, devices: Mesh
) -> tuple[Plan, Rounds | None]:
    """Returns the plan of one replica as that of all devices, and the price of its rounds."""
    if outer is None:
        return plan, None
    from autopar.planning.local_rounds import rounds_of

    rounds = rounds_of((graph,), plan, outer, method(outer), devices)
    return plan.under(outer, devices, method(outer).CHANGES), rounds


def rounds_json(rounds: Rounds | None) -> dict[str, object]:
    """Returns the price of rounds, and what they change, for JSON."""
    if rounds is None:
        return {}
    price = {**asdict(rounds.price), "exposed_seconds": rounds.price.exposed_seconds}
    return {"outer": str(rounds.outer), "rounds": price, "changes": rounds.changes}

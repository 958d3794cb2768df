"""Batches of which every rank passes its own part, as with a distributed data loader.

    "global"            every rank passes the same whole batch
    "local"             every rank passes a different part
    "local over data"   ranks that differ only along axes other than `data` pass the same part

A part is a range of samples: every tensor whose first dimension is the batch is cut along it. In
the graph such an input names its axes, `%x = input('x', over='data')`, and is sharded over them.
Where operators need another layout, the plan reshards the input and pays for it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.capture.capture import Captured
from autopar.errors import BatchError, MeshError, OptionError
from autopar.ir.graph import OVER, Node
from autopar.ir.mesh import Mesh
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import GLOBAL, LOCAL, Options
from autopar.planning.pipelines.schedule_names import groups_for
from autopar.planning.pipelines.stages import equal_parts
from autopar.planning.trace import Trace


def batch_axes(batches: str, mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes over which ranks pass different parts, in the order of the mesh.

    Args:
        batches: one of the texts above.
        mesh: the devices of one copy of the model's stage.

    Raises:
        OptionError: `batches` is not one of those texts.
        MeshError: the mesh has no such axis.
    """
    if batches == GLOBAL:
        return ()
    word, over, rest = batches.partition(" over ")
    if word != LOCAL or bool(over) != bool(rest.strip()):
        raise OptionError(
            f"batches is {batches!r}",
            why='"global", "local" or "local over data" is expected',
        )
    named = {name.strip() for name in rest.split(",")} if rest else set(mesh.names)
    unknown = sorted(named - set(mesh.names))
    if unknown:
        raise MeshError(
            f"there is no axis {unknown[0]!r} to pass parts of a batch over",
            why=f"the mesh has {', '.join(mesh.names)}",
            todo="name axes of the mesh",
        )
    return tuple(name for name in mesh.names if name in named)


def stage_mesh(mesh: Mesh, options: Options) -> Mesh:
    """Returns the devices of one stage of the requested pipeline; all devices without a pipeline.

    Raises:
        MeshError, ScheduleError: there is no such pipeline on the mesh.
    """
    if not options.is_pipeline or options.searches_stages:
        return mesh
    groups = groups_for(options.schedule, int(options.stages), options.microbatches)
    return equal_parts(mesh, groups)[0].mesh


def capture_parts(
    call: Call, part: Mesh, options: Options, trace: Trace, microbatches: int | None
) -> Captured:
    """Captures the call on the whole batch, which the parts of all ranks form.

    Args:
        call: on this rank's part, or on the whole batch if `options.batches` is "global".
        part: the devices of one stage.
        options: options of the plan; `batches` selects the parts.
        trace: writes the graphs to files.
        microbatches: see `capture_call`.

    Raises:
        CaptureError, BatchError: see `capture_call`.
        OptionError, MeshError: see `batch_axes`.
    """
    axes = batch_axes(options.batches, part)
    if not axes:
        return capture_call(call, options, trace, microbatches)
    if microbatches and call.samples % microbatches:
        raise BatchError(
            f"a rank's part of {call.samples} samples does not divide into {microbatches}"
            " microbatches",
            why="every rank passes rows of every microbatch",
            todo="pass parts whose size is a multiple of the number of microbatches",
        )
    world = math.prod(part.axis_size(axis) for axis in axes)
    whole = call.repeated(world)
    captured = capture_call(whole, options, trace, microbatches)
    rows = whole.samples // (microbatches or 1)

    def split(node: Node) -> Node:
        if node.op != "input" or node.type.shape[:1] != (rows,):
            return node
        return replace(node, kwargs=((OVER, ", ".join(axes)),))

    nodes = tuple(split(node) for node in captured.graph.nodes)
    return replace(captured, graph=replace(captured.graph, nodes=nodes))

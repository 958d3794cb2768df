"""Saves a pipeline as a standalone folder: `torchrun --nproc-per-node 4 out/program.py`.

program.py           placement and schedule of the stages, and a training loop to edit
stage_0.py, ...      the generated source of every stage
plan.toml, graph.txt, program.toml, weights.safetensors, batch.safetensors: as in folder.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from autopar.errors import MeshError
from autopar.ir.action import format_row, parse_row
from autopar.ir.pipeline_step import NO_ADJUSTMENT, Adjustment
from autopar.lower.literals import comment, docstring, quoted
from autopar.runtime.folder import (
    MAIN,
    MARKER,
    open_settings,
    processes,
    read,
    read_text,
    training_of,
    unchanged,
)
from autopar.runtime.generated import Generated
from autopar.runtime.module_loader import load
from autopar.runtime.pipeline.pipeline import Pipeline
from autopar.runtime.pipeline.routes import Placement
from autopar.runtime.ranks.agreement import compare_ranks, text_of
from autopar.runtime.ranks.shared import local_device


def stage_files(sources: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the files of the stages, one for equal sources, and the file name of each stage."""
    names: dict[str, str] = {}
    for number, source in enumerate(sources):
        names.setdefault(source, f"stage_{number}.py")
    return {name: source for source, name in names.items()}, [names[s] for s in sources]


def program_source(
    title: str,
    files: Sequence[str],
    placement: Placement,
    inputs: Mapping[str, str],
    picture: Sequence[str],
) -> str:
    """Returns the text of program.py.

    Args:
        title: names the model and the mesh.
        files: file name of each stage.
        placement: ranks and rows of the stages.
        inputs: types of the inputs of one microbatch by name.
        picture: the schedule over time, a line for each row of the placement.
    """
    held = [_span(ranks) for ranks in placement.groups]
    width = max(map(len, held))
    drawn = [
        comment(f"{ranks:<{width}}  {line}") for ranks, line in zip(held, picture, strict=True)
    ]
    stages = [f"    {quoted(name)}," for name in files]
    ranks = [f"    {copy!r}," for copy in placement.ranks]
    rows = [f"    {quoted(format_row(row))}," for row in placement.rows]
    beside, given = _beside(placement)
    types = [f"    {quoted(name)}: {quoted(text)}," for name, text in inputs.items()]
    lines = [
        docstring([f"{title}, written by autopar; edit it freely."]),
        "",
        "from autopar.runtime.pipeline.folder import open_pipeline",
        "",
        "# Ranks, and what they do in a step if all stages take the same time.",
        *drawn,
        "STAGES = (",
        *stages,
        ")",
        "# The global ranks of every stage, for each copy of the model.",
        "RANKS = (",
        *ranks,
        ")",
        "# F2.5 is the forward of stage 2 on microbatch 5; B its backward, I and W its halves.",
        "# SYNC2 adds up gradients over replicas, UPDATE2 is the optimizer's step.",
        *(_STREAMED if not placement.flushes else ()),
        "ROWS = (",
        *rows,
        ")",
        f"MICROBATCHES = {placement.microbatches}",
        "# Of one microbatch.",
        "INPUTS = {",
        *types,
        "}",
        *beside,
    ]
    main = MAIN.replace(
        "open_program(__file__)",
        f"open_pipeline(__file__, STAGES, RANKS, ROWS, MICROBATCHES, INPUTS{given})",
    )
    return "\n".join(lines) + "\n" + main


_STREAMED = (
    "# These rows are one period: B2.-1 is of the period before, @1 means weights that are one",
    "# update older than the newest. A step gives the loss of the step before.",
)


def _beside(placement: Placement) -> tuple[list[str], str]:
    """Returns the lines for optional parts of a schedule, and the arguments that pass them on."""
    lines, given = [], ""
    if placement.first is not None:
        periods, rows = placement.first
        texts = [f"    {quoted(format_row(row))}," for row in rows]
        lines += [
            f"# The first {periods} steps run these rows, which end with an update of all stages.",
            f"FLUSHED_STEPS = {periods}",
            "FLUSHED_ROWS = (",
            *texts,
            ")",
        ]
        given += ", first=(FLUSHED_STEPS, FLUSHED_ROWS)"
    if placement.adjustment != NO_ADJUSTMENT:
        delays, annealed, decay = astuple(placement.adjustment)
        lines += [
            "# By how many updates the weights of each stage are late; in how many updates rates",
            "# of learning, divided by that, come back; the decay of the corrections' velocity.",
            f"ADJUSTMENT = ({delays!r}, {annealed!r}, {decay!r})",
        ]
        given += ", adjustment=ADJUSTMENT"
    return lines, given


def _span(ranks: Sequence[int]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


class OpenPipeline:
    """A saved pipeline, loaded on this device.

    Attributes:
        rank: rank of this process.
        example: the example batch.
        pipeline: runs the stages.
    """

    def __init__(
        self, folder: Path, stages: Sequence[str], placement: Placement, inputs: Mapping[str, str]
    ) -> None:
        with unchanged(folder):
            self._open(folder, stages, placement, inputs)

    def _open(
        self, folder: Path, stages: Sequence[str], placement: Placement, inputs: Mapping[str, str]
    ) -> None:
        settings = open_settings(folder / MARKER)
        sources = {name: read(folder / name, read_text) for name in stages}
        compare_ranks(
            {**sources, "program.py": text_of(placement), "program.toml": text_of(settings)}
        )
        modules = [Generated.of(load(sources[name], str(folder / name))) for name in stages]
        world = dist.get_world_size() if dist.is_initialized() else 1
        wanted = 1 + max(rank for copy in placement.ranks for ranks in copy for rank in ranks)
        if world != wanted:
            raise MeshError(
                f"the pipeline runs on {wanted} devices",
                why=f"there are {world} processes",
                todo=f"start it with `torchrun --nproc-per-node {wanted}`",
            )
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.example = read(folder / "batch.safetensors", load_file)
        self.pipeline = Pipeline(
            modules,
            placement,
            inputs,
            local_device(modules[0].mesh),
            read(folder / "weights.safetensors", load_file),
            training_of(settings, folder),
            tied=settings.get("tied", {}),
        )

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Runs one training step and returns the loss."""
        return self.pipeline.step(batch)

    def close(self) -> None:
        """Releases threads and process groups; no step can run afterwards."""
        self.pipeline.close()


@contextmanager
def open_pipeline(
    file: str,
    stages: Sequence[str],
    ranks: tuple[tuple[tuple[int, ...], ...], ...],
    rows: Sequence[str],
    microbatches: int,
    inputs: Mapping[str, str],
    **beside: Any,
) -> Iterator[OpenPipeline]:
    """Opens the pipeline of a `program.py` in the process group that torchrun describes.

    Args:
        file: path of program.py; the files of the stages are in the same folder.
        stages: file name of every stage.
        ranks: ranks of every stage, for each copy of the model.
        rows: all actions of each group of ranks.
        microbatches: number of microbatches in a step.
        inputs: types of the inputs of one microbatch by name.
        **beside: options of asynchronous schedules: `first`, the number of initial steps with
            other rows, and those rows; `adjustment`, the fields of `Adjustment`.

    Raises:
        ProgramError: a file of the folder is missing or damaged.
        ScheduleError: a row cannot be parsed.
        MeshError: the number of processes differs from the number of ranks of the stages.
    """
    steps, first = beside.get("first", (0, ()))
    placement = Placement(
        ranks,
        tuple(map(parse_row, rows)),
        microbatches,
        Adjustment(*beside.get("adjustment", ())),
        (steps, tuple(map(parse_row, first))) if steps else None,
    )
    folder = Path(file).parent
    with processes(), closing(OpenPipeline(folder, stages, placement, inputs)) as program:
        yield program

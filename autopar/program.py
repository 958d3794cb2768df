"""The story on one page: capture -> plan (see `autopar.planning`) -> emit -> load -> train."""

from __future__ import annotations

import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor, nn

from autopar import pipelined
from autopar.arguments import text_of_graph, text_of_program
from autopar.capture.capture import Captured
from autopar.codegen.emit import emit
from autopar.errors import BatchError, PlanMismatchError, ProgramError
from autopar.intra_op import legal
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint, format_graph
from autopar.ir.mesh import Mesh
from autopar.lower.literals import printable
from autopar.modes import Modes
from autopar.pipeline_plan import PipelinePlan
from autopar.pipelined import Request, values_of
from autopar.plan import Plan
from autopar.planning.single import Options, Trace, capture_graph, cost_model, make_plan
from autopar.runtime import folder, inductor
from autopar.runtime.checkpoint.checkpoints import Checkpoints
from autopar.runtime.checkpoint.methods import Checkpointed
from autopar.runtime.executor import Executor
from autopar.runtime.pipeline.pipeline import Pipeline
from autopar.runtime.profile import profiled
from autopar.runtime.ranks.agreement import compare_ranks
from autopar.runtime.ranks.failure import Watch
from autopar.runtime.ranks.processes import (
    check_processes,
    from_first_rank,
    local_device,
)
from autopar.runtime.ranks.recorder import Recorder
from autopar.runtime.ranks.shared import Peers
from autopar.runtime.runtime import Runtime
from autopar.runtime.trained import Trained
from autopar.runtime.update.update import Training, state_bytes_of

WHOLE = Request()  # one stage, one microbatch


class Program(Trained, Checkpointed):
    """A model that trains in parallel; made by `autopar.compile`.

    Attributes:
        mesh: the devices.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        training: Training,
        plan: Plan | PipelinePlan | None,
        options: Options,
        request: Request = WHOLE,
        backend: str = "eager",
        cuda_graph: bool = False,
    ) -> None:
        check_processes(mesh)
        inductor.check(backend)
        staged = isinstance(plan, PipelinePlan) or request != WHOLE
        if staged and cuda_graph:
            raise ProgramError(
                "the step cannot be a CUDA graph",
                why="the host follows the schedule of a pipeline and waits for its messages",
                todo="leave cuda_graph out",
            )
        self._prices = cost_model(mesh, options)
        self.mesh, self._backend, self._cuda_graph = mesh, backend, cuda_graph
        self._model, self._training, self._options = model, training, options
        self._plan, self._request = plan, request
        self._captured: Captured | None = None
        self._executor: Executor | Pipeline | None = None
        self._saved: Checkpoints | None = None
        self._modes: Modes | None = None
        self._closed = False
        self._source = ""
        self._sources: tuple[str, ...] = ()
        self._example: dict[str, Tensor] = {}

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture, plan, emit and load for batches like this one; the first step does it too."""
        self._refuse_closed()
        if self._executor is not None:
            return
        recorder = Peers.here().recorder
        with closing(Watch.over(range(self.mesh.size))) as watch, watch:
            self._prepare(args, kwargs, recorder)
        recorder.now("")

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], recorder: Recorder) -> None:
        self._modes = Modes(self._model)
        first = not dist.is_initialized() or dist.get_rank() == 0
        trace = Trace(self._options.trace if first else None)
        if isinstance(self._plan, PipelinePlan) or self._request != WHOLE:
            recorder.now("capture and planning of stages")
            self._prepare_pipeline(args, kwargs, trace)
            return
        recorder.now("capture")
        captured = capture_graph(self._model, args, kwargs, self._options, trace)
        graph = captured.graph
        compare_ranks({"the captured graph": text_of_graph(graph)}, BatchError, pipelined.ADVICE)
        recorder.now("planning")
        if self._plan is None:
            state = state_bytes_of(self._training)
            # A solver that runs out of time stops elsewhere on every rank: one plans for all.
            self._plan = from_first_rank(
                lambda: make_plan(graph, self.mesh, self._options, trace, state)
            )
        else:
            wanted = {node.name for node in graph.folded}
            self._plan.check(fingerprint(graph), wanted, self.mesh)
            legal.check(graph, self._plan, self._options.table)
            self._plan = replace(self._plan, mesh=self.mesh)
        self._source = emit(graph, self._plan, self._prices.collective)
        compare_ranks({"the emitted program": text_of_program(self._source)})
        trace("program.py", lambda: self._source)
        recorder.now("loading of the program")
        runtime = Runtime(self.mesh, local_device())
        # Its own name for every source: tracebacks look the lines up by it.
        number = zlib.crc32(self._source.encode())
        name = printable(f"<autopar {graph.name} on {self.mesh}, {number:08x}>")
        self._executor = Executor(
            inductor.loaded(self._source, name, self._backend),
            runtime,
            values_of(self._model, captured),
            self._training,
            tied={k: v for k, v in captured.parameter_names.items() if k != v},
            cuda_graph=self._cuda_graph,
        )
        self._captured = captured
        self._example = captured.inputs.flatten(args, kwargs)

    def _prepare_pipeline(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], trace: Trace
    ) -> None:
        """The same with stages."""
        given = self._plan
        if isinstance(given, Plan):
            raise PlanMismatchError(
                "the plan is for a model in one piece",
                why=f"{self._request.stages} stages and {self._request.microbatches} microbatches "
                "are asked for",
                todo="leave out the plan, or stages and microbatches",
            )
        made = pipelined.make(
            self._model,
            args,
            kwargs,
            self.mesh,
            given,
            self._request,
            self._options,
            trace,
            self._training,
            self._backend,
        )
        self._plan, self._sources = made.plan, made.sources
        self._source = "\n\n".join(made.sources)
        self._captured, self._executor = made.captured, made.pipeline
        self._example = made.captured.inputs.flatten(args, kwargs)

    def step(self, *args: Any, profile: Any = None, **kwargs: Any) -> Tensor:
        """Forward, backward and optimizer step on one batch, the same whole batch on every rank.

        Args:
            *args: positional arguments of the batch.
            **kwargs: keyword arguments of the batch.
            profile: the path of a file for what every rank does in this step and when, for
                ui.perfetto.dev; the first rank writes it. Such a step takes somewhat longer.

        Returns:
            The loss, a scalar, the same on every rank.

        Raises:
            BatchError: the batch does not fit the captured shapes, or differs between ranks.
            NonFiniteError: the loss or gradients are NaN or infinite; nothing is updated.
            RanksDifferError: other ranks make another call, or have other options of the optimizer.
            RankFailedError: another rank failed.
            ProgramError: the profile cannot be written, or the model was switched to another mode
                or parameters of it frozen since it was captured.
        """
        captured, executor = self._running(args, kwargs)
        with profiled(profile):
            return executor.step(captured.inputs.flatten(args, kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for a batch, as whole tensors on every rank; no gradients."""
        captured, executor = self._running(args, kwargs)
        return captured.output.rebuild(executor.forward(captured.inputs.flatten(args, kwargs)))

    def _running(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Captured, Executor | Pipeline]:
        """The program for a batch like this one, for a model in the state that was captured."""
        self.prepare(args, kwargs)
        executor = self._ready()
        captured = self._compiled()
        assert self._modes is not None
        with executor.watch:
            self._modes.check()
        return captured, executor

    def close(self) -> None:
        """Give back memory, threads, descriptors and process groups; every rank calls it.

        It waits for a checkpoint that is being written. The program shows its plan, graph and
        source from then on, and everything else raises ProgramError. What is never closed is given
        back when Python collects it. A program is a context manager, too, that closes itself.

        Raises:
            CheckpointError: a save beside the training failed, and nobody has asked for it.
        """
        self._end(agreed=True)

    def _end(self, agreed: bool) -> None:
        saved, executor = self._saved, self._executor
        self._closed, self._saved, self._executor = True, None, None
        try:
            if saved is not None:
                saved.close(agreed)
        finally:
            if executor is not None:
                executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._executor is not None:
            # The others do not wait for this one then; one that exits may have come to its end.
            self._executor.watch.tell(None if isinstance(error, SystemExit) else error)
        self._end(agreed=error is None)

    def _compiled(self) -> Captured:
        if self._captured is None:
            raise ProgramError(
                "the program is not there yet",
                why="its shapes come from the first batch",
                todo="run a step first, or pass example_inputs to compile",
            )
        return self._captured

    def _ready(self) -> Executor | Pipeline:
        self._refuse_closed()
        self._compiled()
        assert self._executor is not None
        return self._executor

    def _buffers(self) -> dict[str, Tensor]:
        return self._compiled().buffers

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ProgramError("the program is closed", todo="compile the model again")

    @property
    def plan(self) -> Plan | PipelinePlan:
        """The plan; ProgramError before the first batch."""
        self._compiled()
        assert self._plan is not None
        return self._plan

    @property
    def graph(self) -> Graph:
        """The captured graph; ProgramError before the first batch."""
        return self._compiled().graph

    @property
    def source(self) -> str:
        """The generated Python; ProgramError before the first batch."""
        self._compiled()
        return self._source

    def _checkpoints(self) -> Checkpoints:
        executor, captured = self._ready(), self._compiled()
        if self._saved is None:
            self._saved = Checkpoints.of(
                self._model, executor, captured.buffers, captured.parameter_names
            )
        executor.meet("a checkpoint's method")
        return self._saved

    def save(self, path: str | Path) -> Path:
        """Write a folder that runs by itself under torchrun; every rank calls it, one writes.

        Raises:
            ProgramError: before the first batch, or the folder cannot be written.
        """
        executor, captured = self._ready(), self._compiled()
        executor.meet("save")
        full = executor.state_dict()
        tied = {k: v for k, v in captured.parameter_names.items() if k != v}

        def write() -> Path:
            if isinstance(self.plan, PipelinePlan):
                files = pipelined.files_of(captured, self.plan, self._sources)
            else:
                files = {
                    "program.py": folder.standalone(self._source),
                    "plan.toml": self.plan.to_toml(),
                    "graph.txt": format_graph(captured.graph),
                }
            files["program.toml"] = folder.settings(tied, self._training)
            weights = {name: value for name, value in full.items() if name not in tied}
            tensors = {"weights.safetensors": weights, "batch.safetensors": self._example}
            return folder.write(path, files, tensors)

        return from_first_rank(write)

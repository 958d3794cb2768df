"""Session: a model in training. capture -> plan -> emit -> load -> train, on one page."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor, nn

from autopar.capture.capture import Captured
from autopar.compiled import Compiled, Running, refuse_graphs_of_stages, values_of
from autopar.errors import BatchError, ProgramError
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint
from autopar.ir.mesh import Mesh
from autopar.modes import Modes
from autopar.plan import Plan
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.plan_model import plan_captured, plan_model
from autopar.planning.prices import cost_model
from autopar.planning.trace import Trace
from autopar.runtime import folder, inductor
from autopar.runtime.checkpoint.checkpoints import Checkpoints
from autopar.runtime.checkpoint.methods import Checkpointed
from autopar.runtime.executor import Executor
from autopar.runtime.pipeline.pipeline import Pipeline
from autopar.runtime.profile import profiled
from autopar.runtime.ranks.agreement import compare_ranks
from autopar.runtime.ranks.argument_texts import text_of_graph, text_of_program
from autopar.runtime.ranks.failure import Watch
from autopar.runtime.ranks.processes import check_processes, from_first_rank
from autopar.runtime.ranks.recorder import Recorder
from autopar.runtime.ranks.shared import Peers
from autopar.runtime.trained import Trained
from autopar.runtime.update.update import Training

EAGERLY = Running()
ADVICE = "build one model on every rank, and give every rank the same whole batch"


class Session(Trained, Checkpointed):
    """A model that trains in parallel; made by `autopar.compile`.

    Attributes:
        mesh: the devices.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        training: Training,
        plan: Plan | None,
        options: Options,
        running: Running = EAGERLY,
    ) -> None:
        check_processes(mesh)
        inductor.check(running.backend)
        if running.cuda_graph and (options.is_pipeline if plan is None else plan.is_pipeline):
            refuse_graphs_of_stages()
        cost_model(mesh, options)  # refused, if at all, before anything is captured
        self.mesh, self._running_as = mesh, running
        self._model, self._training, self._options = model, training, options
        self._plan = plan
        self._compiled: Compiled | None = None
        self._executor: Executor | Pipeline | None = None
        self._saved: Checkpoints | None = None
        self._modes: Modes | None = None
        self._closed = False
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
        call = Call(self._model, args, kwargs)
        recorder.now("capture and planning")
        captured, plan = self._planned(call, trace)
        compiled = Compiled.of(captured, plan.on(self.mesh), self._options, trace)
        compare_ranks(
            {
                f"the program of stage {n}": text_of_program(s)
                for n, s in enumerate(compiled.sources)
            }
        )
        recorder.now("loading of the program")
        values = values_of(self._model, captured)
        self._executor = compiled.start(values, self._training, self._running_as)
        self._example = captured.inputs.flatten(args, kwargs)
        self._compiled = compiled

    def _planned(self, call: Call, trace: Trace) -> tuple[Captured, Plan]:
        """The captured model and its plan, alike on every rank."""
        plan, options, mesh = self._plan, self._options, self.mesh
        if plan is None and options.searches_stages:
            # A solver that runs out of time stops elsewhere on every rank: one plans for all.
            plan = from_first_rank(lambda: plan_model(call, mesh, options, trace))
        count = options.microbatches if plan is None else plan.microbatches
        staged = options.is_pipeline if plan is None else plan.is_pipeline
        sized = call if options.global_batch is None else call.sized(options.global_batch)
        captured = capture_call(sized, options, trace, count if staged else None)
        compare_ranks({"the captured graph": text_of_graph(captured.graph)}, BatchError, ADVICE)
        if plan is None:
            plan = from_first_rank(lambda: plan_captured(captured, mesh, options, trace))
        else:
            plan.check(fingerprint(captured.graph), mesh)
        return captured, plan

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
        captured, executor = self._ready_for(args, kwargs)
        with profiled(profile):
            return executor.step(captured.inputs.flatten(args, kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for a batch, as whole tensors on every rank; no gradients."""
        captured, executor = self._ready_for(args, kwargs)
        return captured.output.rebuild(executor.forward(captured.inputs.flatten(args, kwargs)))

    def _ready_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Captured, Executor | Pipeline]:
        """The program for a batch like this one, for a model in the state that was captured."""
        self.prepare(args, kwargs)
        executor = self._ready()
        captured = self.compiled.captured
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

    @property
    def compiled(self) -> Compiled:
        """Graph, plan and sources; ProgramError before the first batch."""
        if self._compiled is None:
            raise ProgramError(
                "the program is not there yet",
                why="its shapes come from the first batch",
                todo="run a step first, or pass example_inputs to compile",
            )
        return self._compiled

    def _ready(self) -> Executor | Pipeline:
        self._refuse_closed()
        assert self.compiled
        assert self._executor is not None
        return self._executor

    def _buffers(self) -> dict[str, Tensor]:
        return self.compiled.captured.buffers

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ProgramError("the program is closed", todo="compile the model again")

    @property
    def plan(self) -> Plan:
        """The plan; ProgramError before the first batch."""
        return self.compiled.plan

    @property
    def graph(self) -> Graph:
        """The captured graph; ProgramError before the first batch."""
        return self.compiled.captured.graph

    @property
    def source(self) -> str:
        """The generated Python; ProgramError before the first batch."""
        return self.compiled.source

    def _checkpoints(self) -> Checkpoints:
        executor, captured = self._ready(), self.compiled.captured
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
        executor, compiled = self._ready(), self.compiled
        executor.meet("save")
        full = executor.state_dict()

        def write() -> Path:
            weights = {name: value for name, value in full.items() if name not in compiled.tied}
            tensors = {"weights.safetensors": weights, "batch.safetensors": self._example}
            return folder.write(path, compiled.files(self._training), tensors)

        return from_first_rank(write)

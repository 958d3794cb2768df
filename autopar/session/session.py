"""Session: a model in training, with its weights, optimizer and compiled programs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.capture.generation.calls import Sizes
from autopar.errors import ProgramError
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.planning.capturing import Call
from autopar.runtime import folder, inductor
from autopar.runtime.checkpoint.checkpoints import Checkpoints
from autopar.runtime.checkpoint.methods import Checkpointed
from autopar.runtime.checkpoint.plans import Snapshot
from autopar.runtime.profile import profiled
from autopar.runtime.ranks.agreement import compare_ranks
from autopar.runtime.ranks.failure import Watch
from autopar.runtime.ranks.processes import check_processes, from_first_rank
from autopar.runtime.ranks.recorder import Recorder
from autopar.runtime.ranks.shared import Peers
from autopar.runtime.trained import Program, Trained
from autopar.runtime.update.update import Training
from autopar.session.call_texts import text_of_program
from autopar.session.compiled import Compiled, Running, values_of
from autopar.session.evaluation import Evaluating
from autopar.session.further_programs import Compiles, Runnable, Variants
from autopar.session.generation import pair
from autopar.session.generation.generating import Generating
from autopar.session.modes import Modes, refuse_autocast, refuse_other_parameters
from autopar.session.pretrained import Pretrained
from autopar.session.published_names import PublishedNames
from autopar.session.step_metrics import Metered

EAGERLY = Running()


class Session(Trained, Checkpointed, Evaluating, Generating, Pretrained, Metered):
    """A model that trains in parallel, from `autopar.compile` or `autopar.load`.

    Args:
        model: the user's model.
        mesh: the devices.
        training: how the parameters are updated.
        running: how the program runs.
        compiler: compiles a call of the model.

    Attributes:
        mesh: the devices.
        training: whether steps are allowed; see `eval`.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        training: Training,
        running: Running,
        compiler: Compiles,
    ) -> None:
        super().__init__()
        check_processes(mesh)
        inductor.check(running.backend)
        self.mesh, self._running_as, self._compiler = mesh, running, compiler
        self._model, self._training = model, training
        self._compiled: Compiled | None = None
        self._variants: Variants | None = None
        self.training = True
        self._executor: Program | None = None
        self._saved: Checkpoints | None = None
        self._modes: Modes | None = None
        self._closed = False
        self._example: dict[str, Tensor] = {}
        self._pairs: dict[Sizes, pair.Pair] = {}

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compiles and loads the program for batches like this one, as the first step would."""
        self._refuse_closed()
        refuse_autocast()
        if self._executor is not None:
            return
        args, kwargs = self._padded(args, kwargs)
        recorder = Peers.here().recorder
        with closing(Watch.over(range(self.mesh.size))) as watch, watch:
            self._modes = Modes(self._model)
            recorder.now("capture and planning")
            compiled = self._compiler(Call(self._model, args, kwargs))
            if self._running_as.pad_to is not None:
                self._running_as.pad_to.check(compiled.captured.graph)
            self._start(compiled, recorder)
            self._example = compiled.captured.inputs.flatten(args, kwargs)
        recorder.now("")

    def _start(self, compiled: Compiled, recorder: Recorder) -> None:
        """Loads a compiled program with the model's own weights."""
        recorder.now("comparison of the ranks' programs")
        compare_ranks(
            {
                f"the program of stage {n}": text_of_program(s)
                for n, s in enumerate(compiled.sources)
            }
        )
        recorder.now("loading of the program")
        values = values_of(self._model, compiled.captured)
        self._executor = compiled.start(values, self._training, self._running_as)
        self._variants, self._pairs = None, {}
        self._compiled, self.mesh = compiled, compiled.plan.mesh

    def adopt(self, compiled: Compiled) -> None:
        """Continues training with another compiled program of the same model; every rank calls it.

        Parameters, averages and optimizer state move in memory from the layouts of one plan to
        those of the other, and no step is lost: the following losses equal those of an
        uninterrupted run. Learning-rate schedulers stay valid. Meanwhile, each rank needs host
        memory for a copy of its part of the state.

        Args:
            compiled: from `autopar.emit` or a folder, for the same number of devices.

        Raises:
            ProgramError: it is of another model, or the session is closed.
            MeshError: it is for another number of devices.
            RanksDifferError: the ranks pass different programs.
            CheckpointError: an asynchronous save failed, and its error has not been raised yet.
        """
        self._refuse_closed()
        check_processes(compiled.plan.mesh)
        compare_ranks({"the compiled program": compiled.fingerprint}, todo="adopt one on all ranks")
        recorder = Peers.here().recorder
        before, executor = self._compiled, self._executor
        if before is None or executor is None:
            with closing(Watch.over(range(compiled.plan.mesh.size))) as watch, watch:
                self._modes = Modes(self._model)
                self._start(compiled, recorder)
            recorder.now("")
            return
        refuse_other_parameters(before.captured.graph, compiled.captured.graph)
        snapshot = self._checkpoints().snapshot()
        assert self._saved is not None
        self._saved.close()
        executor.close()
        try:
            self._go_on(compiled, snapshot, executor.optimizer)
        except BaseException:
            self._go_on(before, snapshot, executor.optimizer)
            raise
        recorder.now("")

    def _go_on(self, compiled: Compiled, snapshot: Snapshot, used: Optimizer) -> None:
        """Loads a compiled program with the state of the previous one.

        Args:
            compiled: the new program.
            snapshot: this rank's state.
            used: the previous optimizer, to which schedulers may refer.
        """
        nothing = {
            name: torch.empty_like(value, device="meta")
            for name, value in values_of(self._model, compiled.captured).items()
        }
        self._saved = None
        self._executor = compiled.start(nothing, self._training, self._running_as)
        self._variants, self._pairs = None, {}
        self._compiled, self.mesh = compiled, compiled.plan.mesh
        self._checkpoints().take(snapshot)
        # A scheduler sets the rates of the groups in the list that its optimizer holds.
        optimizer = self._executor.optimizer
        used.param_groups[:] = optimizer.param_groups
        optimizer.param_groups, used.state = used.param_groups, optimizer.state

    def step(self, *args: Any, profile: Any = None, **kwargs: Any) -> Tensor:
        """Runs forward, backward and optimizer step on one batch.

        Every rank passes the same whole batch, or its part of it with `batches="local"`.

        Args:
            *args: positional arguments of the batch.
            **kwargs: keyword arguments of the batch.
            profile: path of a timeline of all ranks in this step, for ui.perfetto.dev; the first
                rank writes it. Such a step takes somewhat longer.

        Returns:
            The loss, a scalar, the same on every rank; with `outer` that of this rank's replica,
            because steps do not wait for other replicas; see `rounds`.

        Raises:
            BatchError: the batch does not fit the captured shapes, or differs between ranks.
            NonFiniteError: the loss or gradients are NaN or infinite; nothing is updated.
            RanksDifferError: other ranks make another call, or have other options of the optimizer.
            RankFailedError: another rank failed.
            ProgramError: the profile cannot be written, or the model changed its mode or its
                frozen parameters since it was captured.
        """
        if not self.training:
            raise ProgramError(
                "step is called in evaluation",
                why="program.eval() was called",
                todo="call program.train() before the step",
            )
        pair.refuse_if_generating(self._compiled, "train", "pass example_inputs to compile")
        program, inputs = self._ready_for(args, kwargs, training=True)
        executor = self._ready()
        with (
            self._metered(executor, program.compiled, inputs) as losses,
            profiled(profile, executor.settle),
        ):
            losses.append(program.step(inputs))
        return losses[0]

    def _ready_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
    ) -> tuple[Runnable, dict[str, Tensor]]:
        """Returns the program for a call, and the batch by name."""
        self.prepare(args, kwargs)
        args, kwargs = self._padded(args, kwargs)
        executor, captured = self._ready(), self.compiled.captured
        assert self._modes is not None
        with executor.watch:
            self._modes.check(training)
        if self._variants is None:
            self._variants = Variants(
                self._model, self.compiled, executor, self._compiler, self._running_as
            )
        if training and self._running_as.shapes == 1:
            program, inputs = self._variants.main, captured.inputs.flatten(args, kwargs)
        else:
            program, inputs = self._program_for(self._variants, args, kwargs, training)
        self._example = self._example or inputs
        return program, inputs

    def _generating(self, sizes: Sizes) -> pair.Pair:
        """Returns the programs of a generation, compiled if new."""
        self._refuse_closed()
        refuse_autocast()
        if found := self._pairs.get(sizes):
            return found
        pair.refuse_more_shapes(len(self._pairs))
        if self._executor is not None:
            self._executor.meet("generate")
        with closing(Watch.over(range(self.mesh.size))) as watch, watch:
            compiled = self._compiler.generating(self._model, sizes, self._compiled)
            if self._compiled is None:  # nothing is trained: the prefill stores the parameters
                self._modes = Modes(self._model)
                self._start(compiled[0], Peers.here().recorder)
            own = self._ready()
            self._pairs[sizes] = pair.load_pair(own, compiled, self._running_as, self.compiled)
        return self._pairs[sizes]

    def _padded(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a batch of one of the lengths of `pad_to`."""
        padding = self._running_as.pad_to
        return (args, kwargs) if padding is None else padding.of_call(self._model, args, kwargs)

    def _program_for(
        self, variants: Variants, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool
    ) -> tuple[Runnable, dict[str, Tensor]]:
        """Returns the program, compiled if it is new, and the batch by name."""
        known = variants.find(args, kwargs, training)
        if known is not None:
            return known
        # Compare calls first: a rank that already has a program would wait in another call.
        executor = self._ready()
        executor.meet(variants.announcement(args, kwargs, training))
        with executor.watch:
            program = variants.add(args, kwargs, training)
        return program, program.captured.inputs.flatten(args, kwargs)

    def close(self) -> None:
        """Releases memory, threads, descriptors and process groups; every rank must call it.

        It waits for a checkpoint that is being written. Afterwards the session still shows its
        plan, graph and source; all other calls raise ProgramError. A session that is not closed is
        released when Python collects it. A session is also a context manager that closes itself.

        Raises:
            CheckpointError: an asynchronous save failed, and its error has not been raised yet.
        """
        self._end(agreed=True)

    def _end(self, agreed: bool) -> None:
        saved, executor = self._saved, self._executor
        self._closed, self._saved, self._executor = True, None, None
        try:
            if saved is not None:
                saved.close(agreed)
        finally:
            self._close_callbacks()
            if executor is not None:
                executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._executor is not None:
            # Tell other ranks not to wait; a rank that exits may have finished normally.
            self._executor.watch.tell(None if isinstance(error, SystemExit) else error)
        self._end(agreed=error is None)

    @property
    def data_rank(self) -> int:
        """The number of the part of a batch that this rank passes, from 0.

        It is 0 unless compiled with `batches="local"`; raises ProgramError before the first batch.
        """
        return self._ready().part.rank

    @property
    def data_world(self) -> int:
        """The number of parts of a batch, 1 if every rank passes all of it; see `data_rank`."""
        return self._ready().part.world

    @property
    def compiled(self) -> Compiled:
        """Graph, plan and sources; ProgramError before the first batch."""
        if self._compiled is None:
            raise ProgramError(
                "the program is not compiled yet",
                why="its shapes come from the first batch",
                todo="run a step first, or pass example_inputs to compile",
            )
        return self._compiled

    def _ready(self) -> Program:
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
                self._model,
                executor,
                captured.buffers,
                captured.parameter_names,
                PublishedNames(self._model),
            )
        executor.meet("a checkpoint's method", drain=False)
        return self._saved

    def save(self, path: str | Path) -> Path:
        """Writes a standalone folder for torchrun; every rank must call it, and one rank writes.

        Raises:
            ProgramError: no batch was passed yet, or the folder cannot be written.
        """
        executor, compiled = self._ready(), self.compiled
        pair.refuse_if_generating(compiled, "be saved", "save a checkpoint, or program.plan")
        if executor.part.world > 1:
            raise ProgramError(
                "a program with local batches cannot be saved to run by itself",
                why="each rank has only its part of a batch",
                todo="save program.compiled, and train with autopar.load",
            )
        if not self._example:
            raise ProgramError("there is no batch yet to save with the program", todo="run a step")
        executor.meet("save")
        full = executor.state_dict()

        def write() -> Path:
            weights = {name: value for name, value in full.items() if name not in compiled.tied}
            tensors = {"weights.safetensors": weights, "batch.safetensors": self._example}
            return folder.write(path, compiled.files(self._training), tensors)

        return from_first_rank(write)

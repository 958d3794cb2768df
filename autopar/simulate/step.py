"""Turns a plan's training step into tasks: forward, backward, optimizer.

The forward (`forward.py`) writes a tape of all operations with a gradient; the backward
(`backward.py`) runs it in reverse, like autograd. The last step's gradients are freed before
the forward begins, because the emitted program sets them to None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.cost.model import CostModel, NodeWork
from autopar.errors import SimulationError
from autopar.ir.collective import Collective
from autopar.ir.crossing import gathered
from autopar.ir.graph import Graph, Node
from autopar.ir.stage_graphs import SENT, is_trained
from autopar.ir.storage import Hop, Storage
from autopar.ir.tensor import TensorType
from autopar.ir.update import Rule, nbytes_in, shared_states
from autopar.lower.lines import Lowered
from autopar.lower.program import lower
from autopar.simulate.backward import backward
from autopar.simulate.buffers import Recorder, Value
from autopar.simulate.forward import Forward
from autopar.simulate.optimizer_step import Updated, update, updated_in
from autopar.simulate.owned_update import Owned, most_states
from autopar.simulate.parameter import Weight, paths_of
from autopar.simulate.parameter_tasks import Weights
from autopar.simulate.settings import OVERLAPS, Settings
from autopar.simulate.task import Task
from autopar.stage_plan import StagePlan


def tasks(
    graph: Graph,
    plan: StagePlan,
    works: Mapping[str, NodeWork],
    model: CostModel,
    settings: Settings | None = None,
) -> tuple[Task, ...]:
    """Returns all tasks of one device in a training step, with repeated blocks unfolded.

    Args:
        graph: the prepared graph with its repeats and a loss, or a stage of a pipeline (see
            `autopar/ir/stage_graphs.py`), whose step is that of one microbatch.
        plan: a layout for every node of the folded graph.
        works: kernels of each node of the folded graph, run once.
        model: prices by which the steps of resharding are chosen, as in code generation.
        settings: optimizer and overlap; None for AdamW, one parameter at a time, without overlap.

    Returns:
        Tasks in program order. The first one, which takes no time, allocates parameters, optimizer
        state and the batch.

    Raises:
        SimulationError: the graph has no loss, or `settings.overlap` is unknown.
        PlanMismatchError: the plan has no layout for a node.
        LayoutError: a layout does not fit its value.
    """
    settings = settings or Settings()
    if not is_trained(graph):
        raise SimulationError(
            "there is no training step to simulate",
            why=f"graph {graph.name} has no loss",
            todo="plan a model that returns a loss, or pass loss_fn",
        )
    if not settings.overlap <= set(OVERLAPS):
        raise SimulationError(
            f"unknown overlap {', '.join(sorted(settings.overlap - set(OVERLAPS)))}",
            why=f"only {', '.join(OVERLAPS)} can overlap",
        )
    graph = graph.trained
    step = _Step(graph, plan, works, settings)
    return step.simulate(lower(graph, plan, model.collective))


@dataclass(frozen=True)
class _Parameter:
    """Properties of a parameter that are the same in all blocks.

    Attributes:
        storage: the layouts of its states.
        hops: its collectives in a step.
        paths: the same by the time of a step, see `paths_of`.
        updated: the part of it that this device updates; its name is that of one block.
        states: bytes of its optimizer state on this device.
    """

    storage: Storage
    hops: tuple[Hop, ...]
    paths: Mapping[str, tuple[Hop, ...]]
    updated: Updated
    states: float


class _Step:
    """Simulates a step once, by `simulate`."""

    def __init__(
        self, graph: Graph, plan: StagePlan, works: Mapping[str, NodeWork], settings: Settings
    ) -> None:
        self.graph, self.plan, self.works, self.settings = graph, plan, works, settings
        self.recorder = Recorder()
        self.weights = Weights(
            plan.mesh,
            self.recorder,
            settings.overlap,
            microbatches=plan.microbatches,
            bucket=plan.bucket,
            accelerator=settings.accelerator,
            casts=settings.update_bytes > 0,
            in_place=settings.in_place,
            adds=settings.adds,
            ahead=settings.ahead,
            copies=settings.copies,
            precision=plan.precision,
            together=plan.fuses_update and not plan.offload.optimizer,
        )
        # The block of each leaf, and the index of its first reader.
        self.blocks = {
            name: f"{run}:{number}"
            for run, repeat in enumerate(graph.repeats)
            for number, names in enumerate(repeat.iterations)
            for name in names
        }
        places = {node.name: place for place, node in enumerate(graph.nodes)}
        self.places = {
            leaf.name: min((places[user] for user in graph.users[leaf.name]), default=0)
            for leaf in graph.leaves("param")
        }
        self.leaves: dict[str, Value] = {}
        self.updated: dict[str, Updated] = {}
        self.owned: list[Owned] = []
        self.parameters: dict[tuple[str, TensorType, bool, Rule], _Parameter] = {}

    def simulate(self, program: Lowered) -> tuple[Task, ...]:
        self._begin()
        if self.weights.ahead:  # after the update of the previous step
            self.weights.gather()
        plan, accelerator = self.plan, self.settings.accelerator
        forward = Forward(
            self.graph, plan, self.works, accelerator, self.recorder, self.weights, self.leaves
        )
        outputs, tape = forward.simulate(program)
        ends = [
            (value, self._gathers(self.graph[node])[1])
            for (user, node), value in zip(self.graph.outputs, outputs, strict=True)
            if node == self.graph.loss or (user.startswith(SENT) and value.grad)
        ]
        kept = [value for value, _ in ends]
        for value in outputs:
            if value not in kept:
                self.recorder.drop(value.buffer)
        backward(tape, ends, self.recorder, self.weights)
        for buffer in (*(value.buffer for value in kept), *forward.written):
            self.recorder.drop(buffer)
        trained = [
            self.updated[node.name]
            for node in self.graph.leaves("param")
            if self.leaves[node.name].gradient is not None
        ]
        self.recorder.phase = "optimizer"
        fused = plan.fuses_update and not plan.offload.optimizer
        if not fused:
            self.weights.settle(chosen=True)
        update(self.recorder, self.settings, trained, plan, plan.offload.optimizer)
        self.weights.settle(chosen=False)  # AdamW's kernel has copied small gradients before
        if not self.weights.ahead:
            self.weights.gather()
        return self.recorder.tasks()

    def _begin(self) -> None:
        """Allocates everything that exists before the forward."""
        recorder = self.recorder
        recorder.compute("begin", "", ())
        for node in self.graph.nodes:
            if not node.is_leaf:
                continue
            layout = self.plan.nodes[self.graph.template[node.name]].results[0][1]
            nbytes = float(layout.local_bytes(node.type, self.plan.mesh))
            kind = "batch" if node.op in ("input", "received") else "parameter"
            buffer = recorder.hold(recorder.allocate(kind, node.name, nbytes))
            self.leaves[node.name] = Value(buffer, node.requires_grad)
            if node.op == "param" and self.graph.users[node.name]:
                self._parameter(node)
        away = self.plan.offload.optimizer
        if nbytes := 0.0 if away else most_states(self.owned, self.plan.mesh.size):
            recorder.hold(recorder.allocate("optimizer", "states of whole parameters", nbytes))
        for kept in shared_states(self.plan.precision):
            recorder.hold(recorder.allocate("optimizer", kept.state.name, kept.nbytes))
        for node in self.graph.leaves("received"):
            recorder.gather(node.name, self._gathers(node)[0])

    def _gathers(self, node: Node) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
        """Returns the collectives that gather a node's value or gradient from another stage."""
        layout = self.plan.nodes[self.graph.template[node.name]].results[0][1]
        return gathered(self.graph, node, layout, self.plan.mesh)

    def _parameter(self, node: Node) -> None:
        """Allocates the states of a parameter."""
        plan, known, value = self.plan, self._known(node), self.leaves[node.name]
        if known.storage.moves or plan.precision.has_master(node.type, node.requires_grad):
            block, place = self.blocks.get(node.name, node.name), self.places[node.name]
            collectives = known.hops, known.paths
            self.weights.add(
                Weight(node.name, node, known.storage, value, *collectives, block, place)
            )
        elif node.requires_grad and plan.microbatches > 1:
            # The accumulated gradient of earlier microbatches, to which the last one adds.
            earlier = self.recorder.allocate("gradient", node.name, value.buffer.nbytes)
            value.gradient = self.recorder.hold(earlier)
            self.weights.plain[id(value)] = node.type.dtype
        owned = known.updated.owned
        if owned is not None:
            owned = replace(owned, name=node.name)
            self.owned.append(owned)
        self.updated[node.name] = replace(known.updated, name=node.name, owned=owned)
        if known.states:
            self.recorder.hold(self.recorder.allocate("optimizer", node.name, known.states))

    def _known(self, node: Node) -> _Parameter:
        """Returns the properties of a parameter, worked out once for all blocks."""
        plan, trained, template = self.plan, node.requires_grad, self.graph.template
        rule = plan.update.rule(node.target, node.type.shape)
        key = template[node.name], node.type, trained, rule
        if key not in self.parameters:
            storage = plan.storage(template[node.name], template[self.graph.users[node.name][0]])
            hops = storage.hops(node.type, plan.mesh, plan.microbatches, trained, plan.precision)
            own = [kept for kept in plan.states(node, storage) if not kept.whole]
            self.parameters[key] = _Parameter(
                storage,
                hops,
                paths_of(hops),
                updated_in(storage, node, plan.mesh, plan.precision, rule),
                nbytes_in(own, "device"),
            )
        return self.parameters[key]

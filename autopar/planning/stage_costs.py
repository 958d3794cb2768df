"""What a stage costs: the frontier of time against memory of a range of layers on a sub-mesh.

A range is planned by the intra-op solver as a graph of its own. Of a run of equal blocks two are
planned for all: a folded problem is linear in their number, so that longer ranges on the same
sub-mesh are priced by scaling it, and take milliseconds.

One microbatch's forward and backward count in full; what a step does once (gradients next to their
parameters, the update) counts as one part in the number of microbatches. A plan's memory with f
microbatches in flight is that of parameters, gradients and optimizer state and f times what
autograd keeps. The problem is solved for one microbatch in flight, for the most that fit, and for
powers of two between where these differ, which gives the frontier. Where not all of them can be
had, blocks may compute their activations again, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.cost.device import device
from autopar.cost.model import CostModel
from autopar.errors import InfeasibleError, StageError
from autopar.inter_op.stage import Candidate
from autopar.inter_op.submeshes import SubMesh
from autopar.intra_op.build import build
from autopar.intra_op.options import Lies, Option
from autopar.intra_op.prices import Prices
from autopar.intra_op.problem import Problem
from autopar.intra_op.solvers import solve
from autopar.ir.fusion import UPDATE
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.passes import FINDING, prepare
from autopar.ir.stages import alike
from autopar.ir.storage import BUCKET
from autopar.ir.verify import verify
from autopar.planning import layered as layers
from autopar.planning.fused import applicable
from autopar.planning.layered import Layered, Signature, runs
from autopar.planning.offloading import told as offloaded
from autopar.planning.recomputation import told
from autopar.planning.repeated import copies
from autopar.planning.single import Options, cost_model
from autopar.planning.stage_pins import pins_of
from autopar.planning.stage_problem import StageProblem
from autopar.simulate.update import update_works, updated_in

Floats = NDArray[np.float64]
_Key = tuple[str, Mesh, int, str]  # graph, devices, microbatches, what is computed again
# Prices are as exact as that: what is taken in the end is planned once more, to the optimum.
_PRICED = {"gap": 0.04, "time_limit": 0.5}
_NEAR = 1.5  # how much more in flight a choice may be made for that is taken for less
_EVEN = 0.01  # ways so close in seconds are as good
_TRIES = 3  # of limits, where what a plan needs for a while exceeds the memory
_AGAIN = 4 / 3  # of a step is what all its forwards are computed again for, at most
_TIMED = ("ilp", "auto", "local_search")  # solvers that take these options


class StageCosts:
    """`stage_cost` of the search for stages, answered by the intra-op solver.

    Args:
        layered: number of microbatches -> the model on one of them; asked for once each.
        mesh: the cluster.
        options: of planning.
        memory: bytes of a device.
        state_bytes: optimizer state in units of a parameter's own bytes.
        most: microbatches that are in flight at most.
        shapes: how many logical shapes of a sub-mesh are tried in any case.
        held: of a rank, its layers times its microbatches in flight, in units of all layers, at
            most.
    """

    def __init__(
        self,
        layered: Callable[[int], Layered],
        mesh: Mesh,
        options: Options,
        memory: float,
        state_bytes: float,
        most: int,
        shapes: int = 1,
        held: float = math.inf,
    ) -> None:
        self.mesh, self.shapes, self.held = mesh, shapes, held
        self.options, self.memory, self.state_bytes = options, memory, state_bytes
        self.most = most
        self._within = _PRICED if options.solver in _TIMED else {}
        self._alone: dict[tuple[Hashable, int], tuple[float, float, float]] = {}
        self._layered = layered
        self._models: dict[int, Layered] = {}
        self._parts: dict[tuple[int, Signature], Graph | None] = {}
        self._planned: dict[_Key, StageProblem] = {}
        # Of each (layers, layers times microbatches in flight, choice).
        self._choices: dict[_Key, list[tuple[int, int, tuple[int, ...]]]] = {}
        self._prices: dict[Mesh, tuple[CostModel, Prices, Lies | None]] = {}

    def layered(self, microbatches: int) -> Layered:
        """The model on one microbatch."""
        if microbatches not in self._models:
            self._models[microbatches] = self._layered(microbatches)
        return self._models[microbatches]

    def know(self, microbatches: int, model: Layered) -> None:
        """Take the model on one microbatch as given, so that it is not asked for."""
        self._models.setdefault(microbatches, model)

    def __call__(
        self, first: int, last: int, submesh: SubMesh, microbatches: int
    ) -> tuple[Candidate, ...]:
        """Ways to run layers `first` to `last`, none where they do not fit; see `Candidate`."""
        meshes = self.meshes(submesh, microbatches)
        return front([way for mesh in meshes for way in self.on(first, last, mesh, microbatches)])

    def on(self, first: int, last: int, mesh: Mesh, microbatches: int) -> list[Candidate]:
        """Ways on one logical mesh."""
        signature = runs(self.layered(microbatches).kinds[first : last + 1])
        graph = self._part(microbatches, signature)
        if graph is None:
            return []
        return self._with_recomputation(graph, mesh, signature, microbatches)

    def _with_recomputation(
        self, graph: Graph, mesh: Mesh, signature: Signature, microbatches: int
    ) -> list[Candidate]:
        """The frontier on one logical mesh; blocks compute again only where memory asks for it."""
        wanted = self.options.recompute
        ways = {"auto": ("none", "full"), "full": ("full",), "selective": ("selective",)}
        # What the first stage of 1F1B keeps: of all its layers one microbatch for each stage.
        size = sum(count for _, count in signature)
        stages = len(self.layered(microbatches).kinds) / size
        usual = min(math.ceil(stages), self._in_flight(signature, microbatches)[-1])
        found: list[Candidate] = []
        for recompute in ways.get(wanted, ("none",)):
            if wanted != "auto" or recompute == "none" or graph.repeats:
                found += self._on(graph, mesh, signature, microbatches, self.memory, recompute)
            if any(way.memory(usual) <= self.memory for way in found):
                break
        return found

    def _in_flight(self, signature: Signature, microbatches: int) -> list[int]:
        """Numbers of microbatches in flight, for each of which there may be a plan."""
        size = sum(count for _, count in signature)
        held = self.held * len(self.layered(microbatches).kinds)
        most = min(self.most, max(held / size, 1), microbatches)
        return [2**k for k in range(int(most).bit_length())]

    def meshes(self, submesh: SubMesh, microbatches: int) -> list[Mesh]:
        """The logical meshes to try: so many as were asked for, and that on which each row of
        devices takes one sample, if what is left of it lies in one host.
        """
        samples = self.layered(microbatches).samples
        found = list(submesh.meshes[: self.shapes])
        rows = min(samples, submesh.size)
        wanted = (rows, submesh.size // rows) if rows else (0, 0)
        rest = wanted[1] if rows and submesh.size % rows == 0 else 0
        if 0 < rest <= submesh.devices:
            shape = tuple(size for size in wanted if size > 1) or (1,)
            found += [m for m in submesh.meshes if m.shape == shape and m not in found][:1]
        return found

    def alone(self, kind: Hashable, microbatches: int) -> tuple[float, float, float]:
        """One layer of a kind on one device.

        Returns:
            seconds of forward and backward of one microbatch, bytes of parameters, gradients and
            optimizer state, and bytes that it keeps.
        """
        key = (kind, microbatches)
        if key not in self._alone:
            graph = self._part(microbatches, ((kind, 1),))
            if graph is None:
                self._alone[key] = (0.0, 0.0, 0.0)
            else:
                single = replace(self.mesh, axes=(replace(self.mesh.axes[-1], size=1),))
                way = self._on(graph, single, ((kind, 1),), microbatches, math.inf)[0]
                self._alone[key] = (way.seconds, way.fixed, way.per_microbatch)
        return self._alone[key]

    def _part(self, microbatches: int, signature: Signature) -> Graph | None:
        short = tuple((kind, min(count, layers.BLOCKS)) for kind, count in signature)
        if (microbatches, short) not in self._parts:
            try:
                part = self.layered(microbatches).part(short)
            except StageError:
                self._parts[microbatches, short] = None
            else:
                self._parts[microbatches, short] = prepare(verify(part), passes=FINDING)
        return self._parts[microbatches, short]

    def _on(
        self,
        graph: Graph,
        mesh: Mesh,
        signature: Signature,
        microbatches: int,
        memory: float,
        recompute: str = "none",
    ) -> list[Candidate]:
        """The frontier on one logical mesh."""
        key = (alike(graph), mesh, microbatches, recompute)
        if key not in self._planned:
            self._planned[key] = self._plan(graph, mesh, microbatches, recompute)
        planned = self._planned[key]
        # A folded run may hold blocks of other layers besides, such as one next to an embedding.
        more = [max(count - layers.BLOCKS, 0) for _, count in signature if count > 1]
        more = more if len(more) == len(planned.counts) else [0] * len(planned.counts)
        ratios = [(has + added) / has for added, has in zip(more, planned.counts, strict=True)]
        size = sum(count for _, count in signature)
        # What takes longer than that is slower than computing everything again.
        again = self.options.recompute == "auto" and recompute == "none" and graph.repeats
        worth = _AGAIN if again else math.inf
        transient = 0.0  # what plans need for a while differs little

        def fastest(in_flight: int) -> Candidate | None:
            nonlocal transient
            near = [
                planned.candidate(ratios, choice, microbatches, str(mesh))
                for choice in self._near(key, size, in_flight)
            ]
            fits = [way for way in near if way.memory(in_flight) <= memory]
            if fits:
                return min(fits, key=lambda way: way.seconds)
            for _ in range(_TRIES):
                limit = memory - 1.01 * transient
                choice = self._solved(planned.scaled(ratios, in_flight, limit))
                if choice is None:
                    break
                way = planned.candidate(ratios, choice, microbatches, str(mesh))
                transient = way.transient
                if way.memory(in_flight) <= memory:
                    self._choices.setdefault(key, []).append((size, size * in_flight, choice))
                    return way
            return None

        return _along(self._in_flight(signature, microbatches), fastest, memory, worth)

    def _solved(self, problem: Problem) -> tuple[int, ...] | None:
        """The best choice within memory, None where nothing fits."""
        if sum(min(node.memory) for node in problem.nodes) > (problem.memory_limit or math.inf):
            return None
        try:
            return solve(problem, solver=self.options.solver, **self._within).choice
        except InfeasibleError:
            return None

    def _near(self, key: _Key, size: int, in_flight: int) -> list[tuple[int, ...]]:
        """Choices that were the best of somewhat longer ranges with as much in flight in all."""
        return [
            choice
            for layers, held, choice in self._choices.get(key, [])
            if size < layers <= 4 * size and 1 <= held / (size * in_flight) <= _NEAR
        ]

    def _plan(self, graph: Graph, mesh: Mesh, microbatches: int, recompute: str) -> StageProblem:
        offload = offloaded(graph, self.options.offload)
        fused = UPDATE in applicable(self.options.fuse, graph, self.options.precision)
        fused = fused and not offload.optimizer
        (model, prices, lies), whole = self._price(mesh), self.layered(microbatches).graph
        built = build(
            graph,
            mesh,
            model,
            self.options.table,
            state_bytes=self.state_bytes,
            unknown_ops=self.options.unknown_ops,
            pins=pins_of(whole, graph, mesh, self.options),
            slowdown=device(mesh).slowdown,
            recompute=told(graph, recompute),
            microbatches=microbatches,
            lies=lies,
            bucket=BUCKET,
            precision=self.options.precision,
            offload=offload,
            fused_update=fused,
            prices=prices,
        )
        run = {n: r for r, repeat in enumerate(graph.repeats) for n in repeat.iterations[0]}
        entries = {
            (entry, node)
            for repeat in graph.repeats
            for entry, _ in repeat.carried
            for node in repeat.iterations[0]
        }
        grows = tuple(run.get(name, -1) for name in built.names)
        edges = tuple(
            -1 if (built.names[edge.a], built.names[edge.b]) in entries else grows[edge.b]
            for edge in built.problem.edges
        )
        updates = []
        for name, options in zip(built.names, built.options, strict=True):
            node, found = graph[name], np.zeros(len(options))
            if options[0].stored is not None and node.requires_grad:
                found += [self._update(model, node, option, mesh, fused) for option in options]
            updates.append(graph.multiplicity[name] * found)
        counts = tuple(repeat.count for repeat in graph.repeats)
        kept = tuple(
            copies(built, graph, mesh, name, options)
            for name, options in zip(built.names, built.options, strict=True)
        )
        return StageProblem(built, grows, edges, counts, tuple(updates), kept, recompute)

    def _update(
        self, model: CostModel, node: Node, option: Option, mesh: Mesh, fused: bool
    ) -> float:
        """Seconds of the update of a parameter under a choice."""
        if option.storage is None:
            return 0.0
        updated = updated_in(option.storage, node, mesh, self.options.precision)
        works = update_works([updated], self.state_bytes, fused)
        return sum(map(model.compute, works))

    def _price(self, mesh: Mesh) -> tuple[CostModel, Prices, Lies | None]:
        if mesh not in self._prices:
            model = cost_model(mesh, replace(self.options, whole=self.mesh))
            self._prices[mesh] = model, Prices(mesh, model), self.options.lies(mesh)
        return self._prices[mesh]


def _along(
    levels: Sequence[int],
    fastest: Callable[[int], Candidate | None],
    memory: float,
    worth: float,
) -> list[Candidate]:
    """The fastest ways for few and for many microbatches in flight, and where these differ between.

    Args:
        levels: microbatches in flight, ascending.
        fastest: how many of them -> the fastest way that fits.
        memory: bytes of a device.
        worth: what takes so many times the seconds of the first is not wanted.
    """
    first = fastest(levels[0])
    if first is None:
        return []
    found = {0: first}

    def at(place: int) -> Candidate | None:
        fits = [way for way in found.values() if way.memory(levels[place]) <= memory]
        way = min(fits, key=lambda way: way.seconds) if fits else fastest(levels[place])
        return way if way and way.seconds <= worth * first.seconds else None

    low, high = 1, len(levels) - 1
    place = high
    while low <= high:  # the most that fits
        way = at(place)
        if way is None:
            high = place - 1
        else:
            found[place], low = way, place + 1
        place = (low + high + 1) // 2
    left = list(pairwise(sorted(found)))
    while left:
        low, high = left.pop()
        if high - low > 1 and found[high].seconds > (1 + _EVEN) * found[low].seconds:
            middle = (low + high) // 2
            found[middle] = at(middle) or found[high]
            left += [(low, middle), (middle, high)]
    return list(found.values())


def front(found: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Candidates that no other is at least as good as in all figures."""

    def figures(way: Candidate) -> tuple[float, ...]:
        return (way.seconds, way.once, way.fixed + way.transient, way.per_microbatch)

    return tuple(
        way
        for at, way in enumerate(found)
        if not any(
            all(a <= b for a, b in zip(figures(other), figures(way), strict=True))
            and (figures(other) != figures(way) or before < at)
            for before, other in enumerate(found)
            if before != at
        )
    )

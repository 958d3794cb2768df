"""What a stage costs: the frontier of time against memory of a range of layers on a sub-mesh.

A range is planned by the intra-op solver as a graph of its own. Of a run of equal blocks two are
planned for all: a folded problem is linear in their number, so that longer ranges on the same
sub-mesh are priced by scaling it, and take milliseconds.

One microbatch's forward and backward count in full; what a step does once (gradients next to their
parameters, the update) counts as one part in the number of microbatches. A plan's memory with f
microbatches in flight is that of parameters, gradients and optimizer state and f times what
autograd keeps. The problem is solved for one microbatch in flight, for the most that fit, and for
numbers between where these differ (powers of two, and what schedules keep), which gives the
frontier. Where not all of them can be had, blocks may compute their activations again, too: all of
them, or as many as must.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.cost.device import device
from autopar.cost.model import CostModel
from autopar.errors import InfeasibleError, StageError
from autopar.inter_op.stage_values import Candidate
from autopar.inter_op.submeshes import SubMesh
from autopar.intra_op.assumptions import Assumptions
from autopar.intra_op.build import build
from autopar.intra_op.node_choices import Lies, Option
from autopar.intra_op.price_cache import Prices
from autopar.intra_op.problem import Problem
from autopar.intra_op.solvers import solve
from autopar.ir.fusion import ASYNC, UPDATE
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.stage_graphs import alike
from autopar.ir.storage import BUCKET, Storage
from autopar.passes.normalise import FINDING, prepare
from autopar.passes.verify import verify
from autopar.planning.kernel_savings import applicable
from autopar.planning.offloading import told as offloaded
from autopar.planning.options import Options
from autopar.planning.pipelines import layered as layers
from autopar.planning.pipelines.layered import Layered, Signature, runs
from autopar.planning.pipelines.repeated import copies
from autopar.planning.pipelines.stage_pins import pins_of
from autopar.planning.pipelines.stage_problem import StageProblem
from autopar.planning.pipelines.variants import AGAIN, Share, along, front, partly
from autopar.planning.prices import cost_model
from autopar.planning.recomputation import told
from autopar.simulate.optimizer_step import update_works, updated_in

Floats = NDArray[np.float64]
_Key = tuple[str, Mesh, int, str]  # graph, devices, microbatches, what is computed again
# Prices are as exact as that: what is taken in the end is planned once more, to the optimum.
_PRICED = {"gap": 0.04, "time_limit": 0.5}
_NEAR = 1.5  # how much more in flight a choice may be made for that is taken for less
_TRIES = 3  # of limits, where what a plan needs for a while exceeds the memory
_TIMED = ("ilp", "auto", "local_search")  # solvers that take these options


@dataclass(frozen=True)
class _Asked:
    """Layers on a logical mesh, on one of so many microbatches; `graph` has a few of them."""

    graph: Graph
    signature: Signature
    mesh: Mesh
    microbatches: int

    @property
    def size(self) -> int:
        """Number of layers."""
        return sum(count for _, count in self.signature)

    def key(self, recompute: str) -> _Key:
        """Of its problem, which ranges of the same layers share."""
        return self._alike, self.mesh, self.microbatches, recompute

    @cached_property
    def _alike(self) -> str:
        return alike(self.graph)


class StageCosts:
    """`stage_cost` of the search for stages, answered by the intra-op solver.

    Args:
        layered: number of microbatches -> the model on one of them; asked for once each.
        mesh: the cluster.
        options: of planning.
        memory: bytes of a device.
        most: microbatches that are in flight at most.
        shapes: how many logical shapes of a sub-mesh are tried in any case.
        held: of a rank, its layers times its microbatches in flight, in units of all layers, at
            most.
        kept: (ranks, parts that the layers are cut into, chunks of a rank) -> what ranks of such an
            even pipeline keep in flight under some schedule, ascending.
    """

    def __init__(
        self,
        layered: Callable[[int], Layered],
        mesh: Mesh,
        options: Options,
        memory: float,
        most: int,
        shapes: int = 1,
        held: float = math.inf,
        kept: Mapping[tuple[int, int, int], Sequence[int]] | None = None,
    ) -> None:
        self.mesh, self.shapes, self.held, self.kept = mesh, shapes, held, kept or {}
        self.options, self.memory = options, memory
        self.most, self._layered = most, layered
        self._solving = _PRICED if options.solver in _TIMED else {}
        self._alone: dict[tuple[Hashable, int], tuple[float, float, float]] = {}
        self._models: dict[int, Layered] = {}
        self._parts: dict[tuple[int, Signature], Graph | None] = {}
        self._planned: dict[_Key, StageProblem] = {}
        # Of each (layers, layers times microbatches in flight, choice).
        self._choices: dict[_Key, list[tuple[int, int, tuple[int, ...]]]] = {}
        self._prices: dict[Mesh, tuple[CostModel, Prices, Lies | None]] = {}
        self._updated: dict[tuple[object, ...], dict[Storage | None, float]] = {}

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
        found = [way for mesh in meshes for way in self.on(first, last, mesh, microbatches)]
        return front(found, microbatches)

    def on(self, first: int, last: int, mesh: Mesh, microbatches: int) -> list[Candidate]:
        """Ways on one logical mesh; blocks compute again only where memory asks for it."""
        signature = runs(self.layered(microbatches).kinds[first : last + 1])
        if (graph := self._part(microbatches, signature)) is None:
            return []
        asked = _Asked(graph, signature, mesh, microbatches)
        found = [way for share in self._shares(asked) for way in self._within(asked, share)]
        return [*found, *self._free(asked)]

    def _free(self, asked: _Asked) -> list[Candidate]:
        """The fastest way if memory had no limit: what fewer layers or more devices may come to."""
        how = self.options.recompute.replace("auto", "none")
        return self._on(asked, how, Share(1, (1,)), math.inf)

    def _within(self, asked: _Asked, share: Share) -> list[Candidate]:
        """The frontier within a share of a device."""
        if self.options.recompute != "auto":
            return self._on(asked, self.options.recompute, share)
        found = self._on(asked, "none", share)
        # What the first stage of 1F1B keeps: of all its layers one microbatch for each stage.
        stages = math.ceil(len(self.layered(asked.microbatches).kinds) / asked.size)
        usual = share.in_flight[-1] if share.chunks > 1 else min(stages, share.in_flight[-1])
        if asked.graph.repeats and not any(share.fits(w, usual, self.memory) for w in found):
            found += self._on(asked, "full", share)
            found += self._partly(asked, share)
        return found

    def _shares(self, asked: _Asked) -> list[Share]:
        """What parts of a device these layers may have, with how many microbatches in flight.

        Those of even pipelines of several chunks a rank, if these layers can be one of the chunks;
        and a whole device.
        """
        total = len(self.layered(asked.microbatches).kinds)
        most = int(min(self.most, max(self.held * total / asked.size, 1), asked.microbatches))
        ranks = self.mesh.size // asked.mesh.size
        chunks = [
            Share(chunks, tuple(level for level in kept if level <= asked.microbatches) or (1,))
            for (on, parts, chunks), kept in self.kept.items()
            if on == ranks and chunks > 1 and total // parts <= asked.size <= -(-total // parts)
        ]
        levels = {1} if chunks else {2**k for k in range(most.bit_length())}
        if not chunks:
            levels |= {n for on, kept in self.kept.items() for n in kept if on[0] == ranks}
        return [Share(1, tuple(sorted(n for n in levels if n <= most))), *chunks]

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
                asked = _Asked(graph, ((kind, 1),), single, microbatches)
                way = self._on(asked, "none", Share(1, (1,)), math.inf)[0]
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
        self, asked: _Asked, recompute: str, share: Share, device: float | None = None
    ) -> list[Candidate]:
        """The frontier of one way to compute again."""
        planned, ratios = self._problem(asked, recompute)
        key, microbatches, label = asked.key(recompute), asked.microbatches, str(asked.mesh)
        memory = self.memory if device is None else device
        size = asked.size * share.chunks  # as if one plan had the device for itself
        # What takes longer than that is slower than computing everything again.
        again = self.options.recompute == "auto" and recompute == "none" and asked.graph.repeats
        worth = 1 + AGAIN if again else math.inf
        spare = 0.0  # what plans need for a while differs little

        def fastest(in_flight: int) -> Candidate | None:
            nonlocal spare
            limited = memory < math.inf  # a choice that was made within memory is no free one
            near = self._near(key, size, in_flight) if limited else []
            ways = [planned.candidate(ratios, choice, microbatches, label) for choice in near]
            fits = [way for way in ways if share.fits(way, in_flight, memory)]
            if fits:
                return min(fits, key=lambda way: way.seconds)
            for _ in range(_TRIES):
                limit = share.limit(memory, spare)
                if limit <= 0:
                    break
                choice = self._solved(planned.scaled(ratios, in_flight, limit))
                if choice is None:
                    break
                way = planned.candidate(ratios, choice, microbatches, label)
                spare = 1.01 * way.transient
                if share.fits(way, in_flight, memory):
                    self._choices.setdefault(key, []).append((size, size * in_flight, choice))
                    return way
            return None

        return along(share, fastest, memory, worth)

    def _partly(self, asked: _Asked, share: Share) -> list[Candidate]:
        """Ways that compute some blocks again, by choices that were best for none or all of them.

        Of all ways for a number of microbatches in flight the fastest.
        """
        (none, ratios), (full, _) = (self._problem(asked, how) for how in ("none", "full"))
        if len(none.counts) != 1:
            return []
        blocks = round(none.counts[0] * ratios[0])
        rows = []
        for one, other, how in ((none, full, "none"), (full, none, "full")):
            for choice in {row[-1] for row in self._choices.get(asked.key(how), [])}:
                same = one.chosen_in(other, choice)
                if same is not None:
                    rows.append((choice, same) if one is none else (same, choice))
        microbatches, label = asked.microbatches, str(asked.mesh)
        pairs = [
            tuple(
                problem.candidate(ratios, choice, microbatches, label)
                for problem, choice in zip((none, full), row, strict=True)
            )
            for row in sorted(set(rows))
        ]
        found = []
        for kept in share.in_flight:
            ways = [w for a, b in pairs for w in partly(a, b, blocks, share, kept, self.memory)]
            if ways:
                found.append(min(ways, key=lambda way: way.seconds))
        return found

    def _problem(self, asked: _Asked, recompute: str) -> tuple[StageProblem, list[float]]:
        """The problem of a few layers, and how many times as long each of its runs is."""
        key = asked.key(recompute)
        if key not in self._planned:
            self._planned[key] = self._plan(asked, recompute)
        planned = self._planned[key]
        # A folded run may hold blocks of other layers besides, such as one next to an embedding.
        more = [max(count - layers.BLOCKS, 0) for _, count in asked.signature if count > 1]
        more = more if len(more) == len(planned.counts) else [0] * len(planned.counts)
        return planned, [
            (has + added) / has for added, has in zip(more, planned.counts, strict=True)
        ]

    def _solved(self, problem: Problem) -> tuple[int, ...] | None:
        """The best choice within memory, None where nothing fits."""
        if sum(min(node.memory) for node in problem.nodes) > (problem.memory_limit or math.inf):
            return None
        try:
            return solve(problem, solver=self.options.solver, **self._solving).choice
        except InfeasibleError:
            return None

    def _near(self, key: _Key, size: int, in_flight: int) -> list[tuple[int, ...]]:
        """Choices that were the best of somewhat longer ranges with as much in flight in all."""
        return [
            choice
            for layers, held, choice in self._choices.get(key, [])
            if size <= layers <= 4 * size
            and 1 <= held / (size * in_flight) <= (_NEAR if size < layers else 1)
        ]

    def _plan(self, asked: _Asked, recompute: str) -> StageProblem:
        graph, mesh, microbatches = asked.graph, asked.mesh, asked.microbatches
        offload = offloaded(graph, self.options.offload)
        fused = UPDATE in applicable(self.options.fuse, graph, self.options.precision)
        fused = fused and not offload.optimizer
        (model, prices, lies), whole = self._price(mesh), self.layered(microbatches).graph
        given = Assumptions(
            update=self.options.update,
            unknown_ops=self.options.unknown_ops,
            slowdown=device(mesh).slowdown,
            recompute=told(graph, recompute),
            microbatches=microbatches,
            lies=lies,
            bucket=BUCKET,
            precision=self.options.precision,
            offload=offload,
            fused_update=fused,
            overlapped=ASYNC in self.options.fuse,
        )
        pins = pins_of(whole, graph, mesh, self.options)
        built = build(graph, mesh, prices, self.options.table, given, pins=pins)
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
                found += self._updates(model, graph[node.inputs[0]], options, mesh, fused)
            updates.append(graph.multiplicity[name] * found)
        counts = tuple(repeat.count for repeat in graph.repeats)
        kept = tuple(
            copies(built, graph, mesh, name, options)
            for name, options in zip(built.names, built.options, strict=True)
        )
        return StageProblem(built, grows, edges, counts, tuple(updates), kept, recompute)

    def _updates(
        self, model: CostModel, node: Node, options: Sequence[Option], mesh: Mesh, fused: bool
    ) -> list[float]:
        """Seconds of the update of a parameter under each of its choices."""
        rule = self.options.update.rule(node.target, node.type.shape)
        key = (mesh, node.type, node.requires_grad, fused, rule)
        known = self._updated.setdefault(key, {None: 0.0})
        for storage in {option.storage for option in options} - known.keys():
            if storage is not None:
                updated = updated_in(storage, node, mesh, self.options.precision, rule)
                known[storage] = sum(map(model.compute, update_works([updated], fused)))
        return [known[option.storage] for option in options]

    def _price(self, mesh: Mesh) -> tuple[CostModel, Prices, Lies | None]:
        if mesh not in self._prices:
            model = cost_model(mesh, replace(self.options, whole=self.mesh))
            self._prices[mesh] = model, Prices(mesh, model), self.options.lies(mesh)
        return self._prices[mesh]

"""Prices stages: the frontier of time against memory of a range of layers on a sub-mesh.

The intra-op solver plans a range of layers as a separate graph, with two blocks for each run of
equal blocks. Costs are linear in the number of blocks, so scaling prices longer ranges. The forward
and backward of one microbatch count in full; what a step does once (gradient synchronisation, the
update) counts as one part in the number of microbatches. With f microbatches in flight, a plan
needs parameters, gradients, optimizer state and f times its saved activations. The problem is
solved for one in flight, for the most that fit, and for numbers between (powers of two, and those
that schedules keep). If not all fit, all blocks recompute, or as many as necessary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.cost.model import CostModel
from autopar.errors import InfeasibleError, StageError
from autopar.inter_op.stage_values import Candidate
from autopar.inter_op.submeshes import SubMesh
from autopar.intra_op.assumptions import Assumptions
from autopar.intra_op.build import build
from autopar.intra_op.node_choices import AllowedStorages, Option
from autopar.intra_op.price_cache import Prices
from autopar.intra_op.problem import Problem
from autopar.ir.fusion import ASYNC, UPDATE
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.resharding import LayoutGraphs
from autopar.ir.stage_graphs import alike
from autopar.ir.storage import BUCKET, Storage
from autopar.passes.alike_stages import finding
from autopar.passes.verify import apply, verify
from autopar.planning.kernel_savings import applicable
from autopar.planning.offloading import parse_offload
from autopar.planning.options import Options
from autopar.planning.pipelines import layered as layers
from autopar.planning.pipelines.issuing import issuing
from autopar.planning.pipelines.layered import Layered, Signature, runs, unlike
from autopar.planning.pipelines.repeated import kept_each
from autopar.planning.pipelines.stage_pins import pins_of
from autopar.planning.pipelines.stage_problem import StageProblem, growing
from autopar.planning.pipelines.streaming import FLUSHED, Streamed
from autopar.planning.pipelines.variants import (
    AGAIN,
    ANY_NUMBER,
    InFlight,
    Share,
    along,
    front,
    partly,
)
from autopar.planning.prices import by_kind, cost_model, host_of, slowdown_of
from autopar.planning.recomputation import parse_recompute
from autopar.planning.within_memory import solve_by_work
from autopar.simulate import settings_on
from autopar.simulate.optimizer_step import update_works, updated_in

Floats = NDArray[np.float64]
_Key = tuple[str, Mesh, int, str]  # graph, devices, microbatches, recomputation
_Alone = tuple[float, float, float]
# Accuracy and work of prices; the stages that are chosen in the end are planned to the optimum.
_GAP, _WORK = 0.04, 0.5
_NEAR = 1.5  # a choice may be reused for up to this factor less in flight
_TRIES = 3  # limits to try if transient memory exceeds the limit


@dataclass(frozen=True)
class _Asked:
    """Layers on a logical mesh, for one of several microbatches; `graph` has a few of them."""

    graph: Graph
    signature: Signature
    mesh: Mesh
    microbatches: int

    @property
    def size(self) -> int:
        """Number of layers."""
        return sum(count for _, count in self.signature)

    def key(self, recompute: str) -> _Key:
        """Returns the key of its problem, which ranges of the same kinds of layers share."""
        return self._alike, self.mesh, self.microbatches, recompute

    @cached_property
    def _alike(self) -> str:
        return alike(self.graph)


class StageCosts:
    """The `stage_cost` of the search for stages, answered by the intra-op solver.

    Args:
        layered: number of microbatches -> the model on one of them; called once for each number.
        mesh: the cluster.
        options: options of planning.
        memory: bytes of a device, of all or by `Mesh.kind`.
        most: largest number of microbatches in flight.
        shapes: number of logical shapes of a sub-mesh to try in any case.
        flight: numbers of microbatches that schedules keep in flight.
        streamed: the schedule, if it is asynchronous.
    """

    def __init__(
        self,
        layered: Callable[[int], Layered],
        mesh: Mesh,
        options: Options,
        memory: float | Mapping[str, float],
        most: int,
        shapes: int = 1,
        flight: InFlight = ANY_NUMBER,
        streamed: Streamed = FLUSHED,
    ) -> None:
        self.mesh, self.shapes, self.flight = mesh, shapes, flight
        self.options, self.memory, self.streamed = options, by_kind(memory, mesh), streamed
        self.most, self._layered, self._graphs = most, layered, LayoutGraphs()
        self._alone: dict[tuple[Hashable, int, int], _Alone] = {}
        self._models: dict[int, Layered] = {}
        self._parts: dict[tuple[int, Signature], Graph | None] = {}
        self._planned: dict[_Key, StageProblem] = {}
        # Key -> (layers, layers times microbatches in flight, choice).
        self._choices: dict[_Key, list[tuple[int, int, tuple[int, ...]]]] = {}
        self._prices: dict[Mesh, tuple[CostModel, Prices, AllowedStorages | None]] = {}
        self._updated: dict[tuple[object, ...], dict[Storage | None, float]] = {}

    def layered(self, microbatches: int) -> Layered:
        """Returns the model on one microbatch."""
        if microbatches not in self._models:
            self._models[microbatches] = self._layered(microbatches)
        return self._models[microbatches]

    def know(self, microbatches: int, model: Layered) -> None:
        """Stores the model on one microbatch, so that it is not captured again."""
        self._models.setdefault(microbatches, model)

    def __call__(
        self, first: int, last: int, submesh: SubMesh, microbatches: int
    ) -> tuple[Candidate, ...]:
        """Returns the candidates for layers `first` to `last`, none if they do not fit."""
        meshes = self.meshes(submesh, microbatches)
        candidates = [one for mesh in meshes for one in self.on(first, last, mesh, microbatches)]
        return front(candidates, microbatches)

    def on(self, first: int, last: int, mesh: Mesh, microbatches: int) -> list[Candidate]:
        """Returns the candidates on a logical mesh; blocks recompute only if memory requires it."""
        kinds = self.layered(microbatches).kinds
        signature = runs(kinds[first : last + 1])
        graph = self._part(microbatches, signature)
        if graph is None or unlike(self.options.recompute, kinds, signature, graph):
            return []
        asked = _Asked(graph, signature, mesh, microbatches)
        candidates = [one for share in self._shares(asked) for one in self._within(asked, share)]
        return [*candidates, *self._free(asked)]

    def _free(self, asked: _Asked) -> list[Candidate]:
        """Returns the fastest candidate without a memory limit: fewer layers may use it."""
        how = self.options.recompute.replace("auto", "none")
        return self._on(asked, how, Share(1, (1,)), math.inf)

    def _within(self, asked: _Asked, share: Share) -> list[Candidate]:
        """Returns the frontier within a share of a device."""
        if self.options.recompute != "auto":
            return self._on(asked, self.options.recompute, share)
        candidates = self._on(asked, "none", share)
        # The first stage of 1F1B keeps one microbatch for each stage of the pipeline.
        stages = math.ceil(len(self.layered(asked.microbatches).kinds) / asked.size)
        usual = share.in_flight[-1] if share.chunks > 1 else min(stages, share.in_flight[-1])
        room = self.memory[asked.mesh.kind]
        if asked.graph.repeats and not any(share.fits(w, usual, room) for w in candidates):
            candidates += self._on(asked, "full", share)
            candidates += self._partly(asked, share)
        return candidates

    def _shares(self, asked: _Asked) -> list[Share]:
        """Returns the shares of a device for these layers, with their microbatches in flight.

        They are those of even pipelines in which these layers are one chunk, and a whole device.
        """
        total = len(self.layered(asked.microbatches).kinds)
        most = int(
            min(self.most, max(self.flight.held * total / asked.size, 1), asked.microbatches)
        )
        ranks = self.mesh.size // asked.mesh.size
        chunks = [
            Share(chunks, tuple(sorted({min(level, asked.microbatches) for level in kept})))
            for (on, parts, chunks), kept in self.flight.kept.items()
            if on == ranks and chunks > 1 and total // parts <= asked.size <= -(-total // parts)
        ]
        levels = {1} if chunks else {asked.microbatches, *(2**k for k in range(most.bit_length()))}
        if not chunks:
            levels |= {n for on, kept in self.flight.kept.items() for n in kept if on[0] == ranks}
        return [Share(1, tuple(sorted(n for n in levels if n <= most))), *chunks]

    def meshes(self, submesh: SubMesh, microbatches: int) -> list[Mesh]:
        """Returns the logical meshes to try.

        They are the first `shapes` meshes, and the mesh on which each row of devices takes one
        sample, if such a row is inside one host.
        """
        samples = self.layered(microbatches).samples
        meshes = list(submesh.meshes[: self.shapes])
        rows = min(samples, submesh.size)
        wanted = (rows, submesh.size // rows) if rows else (0, 0)
        rest = wanted[1] if rows and submesh.size % rows == 0 else 0
        if 0 < rest <= submesh.devices:
            shape = tuple(size for size in wanted if size > 1) or (1,)
            meshes += [m for m in submesh.meshes if m.shape == shape and m not in meshes][:1]
        return meshes

    def alone(self, kind: Hashable, microbatches: int, part: int = 0) -> _Alone:
        """Prices one layer of a kind on one device of a part of the cluster.

        Returns:
            Seconds of forward and backward of one microbatch; bytes of parameters, gradients and
            optimizer state; bytes that a microbatch keeps.
        """
        key = (kind, microbatches, part)
        if key not in self._alone:
            graph, self._alone[key] = self._part(microbatches, ((kind, 1),)), (0.0, 0.0, 0.0)
            if graph is not None:
                own = self.mesh.parts[part]
                single = replace(own, axes=(replace(own.axes[-1], size=1),))
                asked = _Asked(graph, ((kind, 1),), single, microbatches)
                way = self._on(asked, "none", Share(1, (1,)), math.inf)[0]
                self._alone[key] = (way.seconds, way.fixed, way.per_microbatch)
        return self._alone[key]

    def _part(self, microbatches: int, signature: Signature) -> Graph | None:
        short = tuple((kind, min(count, layers.BLOCKS)) for kind, count in signature)
        if (microbatches, short) not in self._parts:
            try:
                part = (model := self.layered(microbatches)).part(short)
            except StageError:
                self._parts[microbatches, short] = None
            else:
                self._parts[microbatches, short] = apply(verify(part), finding(model.observed))
        return self._parts[microbatches, short]

    def _on(
        self, asked: _Asked, recompute: str, share: Share, device: float | None = None
    ) -> list[Candidate]:
        """Returns the frontier under one kind of recomputation."""
        planned, ratios = self._problem(asked, recompute)
        key, microbatches, label = asked.key(recompute), asked.microbatches, str(asked.mesh)
        memory = self.memory[asked.mesh.kind] if device is None else device
        size = asked.size * share.chunks  # scaled to a plan that has the device to itself
        # A slower plan than this loses to recomputing everything.
        again = self.options.recompute == "auto" and recompute == "none" and asked.graph.repeats
        worth = 1 + AGAIN if again else math.inf
        spare = 0.0  # transient memory, which differs little between plans

        def fastest(in_flight: int) -> Candidate | None:
            nonlocal spare
            limited = memory < math.inf  # without a limit, choices within memory are not optimal
            near = self._near(key, size, in_flight) if limited else []
            reused = [planned.candidate(ratios, choice, microbatches, label) for choice in near]
            fits = [way for way in reused if share.fits(way, in_flight, memory)]
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
        """Returns candidates that recompute some blocks, made of choices for none or all of them.

        For each number of microbatches in flight, only the fastest is returned.
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
        room = self.memory[asked.mesh.kind]
        pairs = [
            tuple(
                problem.candidate(ratios, choice, microbatches, label)
                for problem, choice in zip((none, full), row, strict=True)
            )
            for row in sorted(set(rows))
        ]
        every = (
            [w for a, b in pairs for w in partly(a, b, blocks, share, kept, room)]
            for kept in share.in_flight
        )
        return [min(mixed, key=lambda way: way.seconds) for mixed in every if mixed]

    def _problem(self, asked: _Asked, recompute: str) -> tuple[StageProblem, list[float]]:
        """Returns the problem of a few layers, and the factor by which each run is longer."""
        key = asked.key(recompute)
        if key not in self._planned:
            self._planned[key] = self._plan(asked, recompute)
        planned = self._planned[key]
        # A folded run may contain blocks of other layers too, such as one next to an embedding.
        more = [max(count - layers.BLOCKS, 0) for _, count in asked.signature if count > 1]
        more = more if len(more) == len(planned.counts) else [0] * len(planned.counts)
        return planned, [(n + added) / n for added, n in zip(more, planned.counts, strict=True)]

    def _solved(self, problem: Problem) -> tuple[int, ...] | None:
        """Returns the best choice within memory, None if nothing fits."""
        if sum(min(node.memory) for node in problem.nodes) > (problem.memory_limit or math.inf):
            return None
        try:
            return solve_by_work(problem, self.options.solver, _WORK, gap=_GAP).choice
        except InfeasibleError:
            return None

    def _near(self, key: _Key, size: int, in_flight: int) -> list[tuple[int, ...]]:
        """Returns choices that were best for longer ranges with about as much in flight."""
        return [
            choice
            for layers, held, choice in self._choices.get(key, [])
            if size <= layers <= 4 * size
            and 1 <= held / (size * in_flight) <= (_NEAR if size < layers else 1)
        ]

    def _plan(self, asked: _Asked, recompute: str) -> StageProblem:
        graph, mesh, microbatches = asked.graph, asked.mesh, asked.microbatches
        offload = parse_offload(graph, self.options.offload)
        kernels = applicable(self.options.fuse, graph, self.options.precision)
        fused = UPDATE in kernels and not offload.optimizer
        (model, prices, allowed), layered = self._price(mesh), self.layered(microbatches)
        given = Assumptions(
            update=self.options.update,
            unknown_ops=self.options.unknown_ops,
            slowdown=slowdown_of(mesh, self.options.execution),
            recompute=parse_recompute(graph, recompute),
            microbatches=self.streamed.taken(microbatches),
            allowed_storages=allowed,
            bucket=BUCKET,
            precision=self.options.precision,
            offload=offload,
            fused_update=fused,
            overlapped=ASYNC in self.options.fuse,
            execution=self.options.execution,
        )
        table, pins = self.options.table, pins_of(layered.graph, graph, mesh, self.options)
        built = build(graph, mesh, prices, table, given, pins=pins)
        updates, pairs = [], tuple(zip(built.names, built.options, strict=True))
        for name, options in pairs:
            node, seconds = graph[name], np.zeros(len(options))
            if options[0].stored is not None and node.requires_grad:
                seconds += self._updates(model, graph[node.inputs[0]], options, mesh, fused)
            updates.append(graph.multiplicity[name] * seconds)
        counts = tuple(repeat.count for repeat in graph.repeats)
        ranks = min(self.mesh.size // mesh.size, len(layered.kinds))
        once, each = self.streamed.copies(ranks, microbatches)
        held = tuple(kept_each(built, graph, mesh, n, o, each, given.precision) for n, o in pairs)
        further = tuple(once.of_choices(graph, mesh, n, o, given.precision) for n, o in pairs)
        host = settings_on(mesh.device, self.options.execution, host_of(model)).host
        return StageProblem(
            built, *growing(built, graph), counts, tuple(updates), held, recompute, further,
            given.microbatches, self.streamed.late, issuing(graph, mesh, host, table),
        )  # fmt: skip

    def _updates(
        self, model: CostModel, node: Node, options: Sequence[Option], mesh: Mesh, fused: bool
    ) -> list[float]:
        """Returns the seconds of a parameter's update by choice, whatever the backward keeps."""
        rule = self.options.update.rule(node.target, node.type.shape)
        key = mesh, node.type, node.requires_grad, fused, rule
        known = self._updated.setdefault(key, {None: 0.0})
        every = [one.storage and replace(one.storage, kept=one.storage.used) for one in options]
        for storage in filter(None, set(every) - known.keys()):
            updated = updated_in(storage, node, mesh, self.options.precision, rule)
            works = update_works([updated], fused, each=self.options.execution.optimizer)
            known[storage] = sum(map(model.compute, works))
        return [known[storage] for storage in every]

    def _price(self, mesh: Mesh) -> tuple[CostModel, Prices, AllowedStorages | None]:
        if mesh not in self._prices:
            model = cost_model(mesh, replace(self.options, whole=self.mesh))
            prices = Prices(mesh, model, graphs=self._graphs)
            self._prices[mesh] = model, prices, self.options.allowed_storages(mesh)
        return self._prices[mesh]

"""What a stage costs: the frontier of time against memory of a range of layers on a sub-mesh.

A range is planned by the intra-op solver as a graph of its own. Of a run of equal blocks two are
planned for all: a folded problem is linear in their number, so that longer ranges on the same
sub-mesh are priced by scaling it, and take milliseconds.

One microbatch's forward and backward count in full; what a step does once (gradients next to their
parameters, the update) counts as one part in the number of microbatches. A plan's memory with f
microbatches in flight is that of parameters, gradients and optimizer state and f times what
autograd keeps; for every power of two of f that the plan before does not fit, the problem is solved
under that limit, which gives the frontier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from autopar.cost.device import device
from autopar.cost.model import CostModel
from autopar.cost.overlap import side_by_side
from autopar.cost.work import optimizer_work
from autopar.errors import InfeasibleError, StageError
from autopar.inter_op.layers import Layers
from autopar.inter_op.stage import Candidate
from autopar.inter_op.submeshes import SubMesh
from autopar.intra_op.build import build
from autopar.intra_op.built import Built
from autopar.intra_op.problem import Choices, Edge, Problem, evaluate
from autopar.intra_op.solvers import solve
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.passes import FINDING, prepare
from autopar.ir.stages import alike, cut
from autopar.ir.storage import BUCKET
from autopar.ir.verify import verify
from autopar.planning.single import Options, cost_model
from autopar.planning.stage_pins import pins_of

Floats = NDArray[np.float64]
BLOCKS = 2  # of a run of equal ones are planned
# Prices are as exact as that: what is taken in the end is planned once more, to the optimum.
_PRICED = {"gap": 0.005, "time_limit": 5.0}
_NEAR = 1.5  # how much more in flight a choice may be made for that is taken for less
_TIMED = ("ilp", "auto", "local_search")  # solvers that take these options
Signature = tuple[tuple[Hashable, int], ...]  # kinds of the layers, with how many of each follow


@dataclass(frozen=True)
class Layered:
    """A model on one microbatch, as a graph that holds a run of equal layers a few times.

    Attributes:
        graph: normalised, without shares and repeats.
        layers: of the graph.
        more: how many equal layers the whole model has besides, in each run of them.
        samples: of the microbatch, 0 where that is not known.
    """

    graph: Graph
    layers: Layers
    more: int = 0
    samples: int = 0

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """The kinds of all layers of the whole model."""
        return tuple(
            kind
            for kind, count in runs(self.layers.kinds)
            for _ in range(count + self.more * (count > 1))
        )

    def part(self, signature: Signature) -> Graph:
        """The graph of layers of these kinds; of a run that is longer here a few layers.

        Raises:
            StageError: they compute nothing that is needed later.
        """
        have, names = runs(self.layers.kinds), [kind for kind, _ in signature]
        at = next(
            at
            for at in range(len(have))
            if [kind for kind, _ in have[at : at + len(names)]] == names
        )
        starts = np.cumsum([0, *(count for _, count in have)]).tolist()
        last = at + len(names) - 1
        start, stop = starts[at], starts[last] + min(signature[-1][1], have[last][1], BLOCKS)
        if len(names) > 1:  # of the first run its last layers, behind which the next one stands
            start = starts[at + 1] - min(signature[0][1], have[at][1], BLOCKS)
        cuts = [place for place in (start, stop) if 0 < place < len(self.layers)]
        return cut(self.graph, [self.layers.ends[place - 1] for place in cuts])[1 if start else 0]


def runs(kinds: Sequence[Hashable]) -> Signature:
    """Kinds with how many equal ones stand side by side."""
    return tuple((kind, len(list(same))) for kind, same in groupby(kinds))


@dataclass(frozen=True)
class _Planned:
    """A stage's problem of some layers, and which of its figures grow with the number of blocks.

    Attributes:
        built: the problem.
        grows: for each problem node the run whose blocks it stands for, or -1.
        edges: the same of each edge.
        counts: blocks of each run.
        update: seconds of each choice for the optimizer, by problem node.
    """

    built: Built
    grows: tuple[int, ...]
    edges: tuple[int, ...]
    counts: tuple[int, ...]
    update: tuple[Floats, ...]


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
        self._planned: dict[tuple[str, Mesh, int], _Planned] = {}
        # Of each (layers, layers times microbatches in flight, choice).
        self._choices: dict[tuple[str, Mesh, int], list[tuple[int, int, tuple[int, ...]]]] = {}
        self._prices: dict[Mesh, CostModel] = {}

    def layered(self, microbatches: int) -> Layered:
        """The model on one microbatch."""
        if microbatches not in self._models:
            self._models[microbatches] = self._layered(microbatches)
        return self._models[microbatches]

    def __call__(
        self, first: int, last: int, submesh: SubMesh, microbatches: int
    ) -> tuple[Candidate, ...]:
        """Ways to run layers `first` to `last`, none where they do not fit; see `Candidate`."""
        kinds = self.layered(microbatches).kinds
        signature = runs(kinds[first : last + 1])
        graph = self._part(microbatches, signature)
        if graph is None:
            return ()
        found: list[Candidate] = []
        for mesh in self._shapes(submesh, microbatches):
            found += self._on(graph, mesh, signature, microbatches, self.memory)
        return tuple(_front(found))

    def _shapes(self, submesh: SubMesh, microbatches: int) -> list[Mesh]:
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
        short = tuple((kind, min(count, BLOCKS)) for kind, count in signature)
        if (microbatches, short) not in self._parts:
            try:
                part = self.layered(microbatches).part(short)
            except StageError:
                self._parts[microbatches, short] = None
            else:
                self._parts[microbatches, short] = prepare(verify(part), passes=FINDING)
        return self._parts[microbatches, short]

    def _on(
        self, graph: Graph, mesh: Mesh, signature: Signature, microbatches: int, memory: float
    ) -> list[Candidate]:
        """The frontier on one logical mesh."""
        key = (alike(graph), mesh, microbatches)
        if key not in self._planned:
            self._planned[key] = self._plan(graph, mesh, microbatches)
        planned = self._planned[key]
        repeated = [count for _, count in signature if count > 1]
        # A run that the graph does not fold stands in it whole.
        grown = repeated if len(repeated) == len(planned.counts) else list(planned.counts)
        ratios = [count / has for count, has in zip(grown, planned.counts, strict=True)]
        found: list[Candidate] = []
        choices: set[tuple[int, ...]] = set()
        in_flight, size = 1, sum(count for _, count in signature)
        held = self.held * len(self.layered(microbatches).kinds)
        while in_flight <= min(self.most, max(held / size, 1), microbatches):
            if not any(way.memory(in_flight) <= memory for way in found):
                near = self._near(key, size, in_flight)
                ways = (
                    self._candidate(planned, ratios, choice, microbatches, str(mesh))
                    for choice in near
                )
                fits = [way for way in ways if way.memory(in_flight) <= memory]
                if fits:
                    found.append(min(fits, key=lambda way: way.seconds))
                    in_flight *= 2
                    continue
                problem = _scaled(planned, ratios, in_flight, memory)
                if sum(min(node.memory) for node in problem.nodes) > memory:
                    break
                try:
                    choice = solve(problem, solver=self.options.solver, **self._within).choice
                except InfeasibleError:
                    break
                if choice in choices:
                    break
                choices.add(choice)
                self._choices.setdefault(key, []).append((size, size * in_flight, choice))
                found.append(self._candidate(planned, ratios, choice, microbatches, str(mesh)))
            in_flight *= 2
        return found

    def _near(self, key: tuple[str, Mesh, int], size: int, in_flight: int) -> list[tuple[int, ...]]:
        """Choices that were the best of somewhat longer ranges with as much in flight in all."""
        return [
            choice
            for layers, held, choice in self._choices.get(key, [])
            if size < layers <= 4 * size and 1 <= held / (size * in_flight) <= _NEAR
        ]

    def _plan(self, graph: Graph, mesh: Mesh, microbatches: int) -> _Planned:
        model, whole = self._price(mesh), self.layered(microbatches).graph
        built = build(
            graph,
            mesh,
            model,
            self.options.table,
            state_bytes=self.state_bytes,
            unknown_ops=self.options.unknown_ops,
            pins=pins_of(whole, graph, mesh, self.options),
            slowdown=device(mesh).slowdown,
            microbatches=microbatches,
            lies=self.options.lies(mesh),
            bucket=BUCKET,
            precision=self.options.precision,
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
            count, leaf = graph.multiplicity[name], self.options.precision.updated(graph[name].type)
            trained = options[0].stored is not None and graph[name].requires_grad
            updates.append(
                np.array(
                    [
                        count
                        * model.compute(
                            optimizer_work(
                                option.storage.updated.local_bytes(leaf, mesh),
                                self.state_bytes,
                                leaf.dtype,
                            )
                        )
                        if trained and option.storage is not None
                        else 0.0
                        for option in options
                    ]
                )
            )
        counts = tuple(repeat.count for repeat in graph.repeats)
        return _Planned(built, grows, edges, counts, tuple(updates))

    def _price(self, mesh: Mesh) -> CostModel:
        if mesh not in self._prices:
            self._prices[mesh] = cost_model(mesh, replace(self.options, whole=self.mesh))
        return self._prices[mesh]

    def _candidate(
        self,
        planned: _Planned,
        ratios: Sequence[float],
        choice: tuple[int, ...],
        microbatches: int,
        label: str,
    ) -> Candidate:
        """The figures of one choice."""
        built = planned.built
        whole = beside = reduced = gathered = backward = update = fixed = each = 0.0
        rows = zip(built.problem.nodes, built.options, choice, planned.grows, strict=True)
        for at, (node, options, index, run) in enumerate(rows):
            ratio = 1.0 if run < 0 else ratios[run]
            whole += ratio * node.cost[index]
            backward += ratio * _at(built.backward, node.name, index)
            beside += ratio * _at(built.beside, node.name, index)
            if node.name in built.once:
                reduced += ratio * built.once[node.name][index][0]
                gathered += ratio * built.once[node.name][index][1]
            update += ratio * float(planned.update[at][index])
            held = ratio * _at(built.sums, node.name, index)
            if options[index].stored is None:
                each += held
            else:
                fixed += held
        for edge, run in zip(built.problem.edges, planned.edges, strict=True):
            ratio = 1.0 if run < 0 else ratios[run]
            whole += ratio * float(edge.cost[choice[edge.a], choice[edge.b]])
        seconds = whole - (reduced + gathered) / microbatches
        # Communication is about the same in both directions.
        after = min(backward + (seconds - 1.5 * backward) / 2, seconds) if backward else 0.0
        # What a step does once: reductions beside the last backward, then the update.
        inside = min(reduced, microbatches * beside)  # none where the backward waits
        once = side_by_side(backward, inside, built.slowdown) - backward + reduced - inside
        once += gathered + update
        peak = evaluate(built.problem, choice).peak
        small = sum(
            _at(built.sums, n.name, i) for n, i in zip(built.problem.nodes, choice, strict=True)
        )
        return Candidate(
            forward=seconds - max(after, 0.0),
            backward=max(after, 0.0),
            once=max(once, 0.0),
            fixed=fixed,
            per_microbatch=each,
            transient=max(peak - small, 0.0),
            label=label,
        )


def _at(rows: Mapping[str, tuple[float, ...]], name: str, index: int) -> float:
    return rows[name][index] if name in rows else 0.0


def _scaled(
    planned: _Planned,
    ratios: Sequence[float],
    in_flight: int,
    memory: float,
) -> Problem:
    """The problem of longer runs, with what is done once a step counted as its part."""
    built = planned.built
    nodes = []
    for node, options, run in zip(built.problem.nodes, built.options, planned.grows, strict=True):
        ratio = 1.0 if run < 0 else ratios[run]
        copies = ratio * (1.0 if options[0].stored is not None else in_flight)
        cost = tuple(ratio * seconds for seconds in node.cost)
        held = tuple(copies * nbytes for nbytes in built.sums.get(node.name, (0.0,) * len(cost)))
        nodes.append(Choices(node.name, node.labels, cost, held, (0, 1)))
    edges = tuple(
        edge if run < 0 or ratios[run] == 1 else Edge(edge.a, edge.b, ratios[run] * edge.cost)
        for edge, run in zip(built.problem.edges, planned.edges, strict=True)
    )
    return Problem(built.problem.name, tuple(nodes), edges, memory)


def _front(found: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that no other is at least as good as in all figures."""

    def figures(way: Candidate) -> tuple[float, ...]:
        return (way.seconds, way.once, way.fixed + way.transient, way.per_microbatch)

    return [
        way
        for at, way in enumerate(found)
        if not any(
            all(a <= b for a, b in zip(figures(other), figures(way), strict=True))
            and (figures(other) != figures(way) or before < at)
            for before, other in enumerate(found)
            if before != at
        )
    ]

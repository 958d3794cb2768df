"""Among plans of one price, the one that reads best.

A gradient that is owed a sum may be summed at the parameter, or after a transpose of it, or at its
reader: three plans of equal price. `polish` moves the sum towards the parameter, so that its line
in the plan says what becomes of its gradient.

An all_gather of a parameter and a reduce_scatter of its gradient cost what an all_reduce of the
gradient does. Where memory allows to leave every such parameter and its states whole, `polish`
does.
"""

from __future__ import annotations

from autopar.intra_op.built_problem import Built
from autopar.intra_op.node_choices import Option
from autopar.intra_op.problem import Edge, evaluate


def polish(built: Built, choice: tuple[int, ...]) -> tuple[int, ...]:
    """A choice of equal cost within the memory limit that stores and sums as plainly as can be."""
    whole = _stored_whole(built, choice)
    found = _summed_early(built, whole, lighter=False)
    # What a sum holds is counted at a parameter, but not at its reader, where a layout changes.
    fits = evaluate(built.problem, found).feasible
    return found if fits else _summed_early(built, whole, lighter=True)


def _summed_early(built: Built, choice: tuple[int, ...], lighter: bool) -> tuple[int, ...]:
    """The choice with sums moved towards parameters; with `lighter`, where that takes no memory."""
    problem, now = built.problem, list(choice)
    edges: list[list[Edge]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        edges[edge.a].append(edge)
        edges[edge.b].append(edge)

    def cost(node: int, index: int) -> float:
        """Seconds of the node and of what meets it."""
        around = (
            edge.cost[index, now[edge.b]] if edge.a == node else edge.cost[now[edge.a], index]
            for edge in edges[node]
        )
        return problem.nodes[node].cost[index] + float(sum(around))

    for node in reversed(range(len(now))):
        options = built.options[node]
        current = cost(node, now[node])
        for index, option in enumerate(options):
            if (
                _sums_earlier(option, options[now[node]])
                and (not lighter or problem.nodes[node].lighter(index, now[node]))
                and cost(node, index) <= current * (1 + 1e-12)
            ):
                now[node] = index
    return tuple(now)


def _stored_whole(built: Built, choice: tuple[int, ...]) -> tuple[int, ...]:
    """The choice with every parameter stored whole where that costs the same, if all then fit."""
    found = list(choice)
    for node, (options, index) in enumerate(zip(built.options, choice, strict=True)):
        used, cost = options[index].results, built.problem.nodes[node].cost
        for other, option in enumerate(options):
            plain = option.storage is not None and not option.storage.axes("updated")
            if plain and option.results == used and cost[other] <= cost[index] * (1 + 1e-12):
                found[node] = other
    judged = evaluate(built.problem, found)
    return tuple(found) if judged.feasible else choice


def _plainly(new: Option, old: Option) -> bool:
    """Whether both store a parameter alike, where one sums its gradient and the other does not."""
    if new.storage is None or old.storage is None:
        return new.storage is old.storage
    states = ("held", "grads", "updated", "kept")
    return all(getattr(new.storage, state) == getattr(old.storage, state) for state in states)


def _sums_earlier(new: Option, old: Option) -> bool:
    """Whether `new` differs from `old` only in that its result varies along more axes."""
    given, before = new.results[0], old.results[0]
    return (
        _plainly(new, old)
        and new.share == old.share
        and (given.dims, given.partial) == (before.dims, before.partial)
        and set(given.varying) > set(before.varying)
    )

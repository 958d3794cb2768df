"""Chooses the most readable of several plans with the same price.

A partial gradient may be summed at the parameter, after a transpose of it, or at its reader: three
plans of equal price. `polish` moves the sum to the parameter, so that its line in the plan shows
it.

An all_gather of a parameter plus a reduce_scatter of its gradient costs as much as an all_reduce of
the gradient. If memory allows every such parameter and its states to be stored whole, `polish` does
so, unless kernels then hide less of the communication.
"""

from __future__ import annotations

from autopar.intra_op.built_problem import Built
from autopar.intra_op.node_choices import Option
from autopar.intra_op.problem import Edge, evaluate


def polish(built: Built, choice: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the plainest choice of equal cost that fits in memory."""
    whole = _stored_whole(built, choice)
    summed = _summed_early(built, whole, lighter=False)
    # The buffer of a sum is counted at a parameter, but not at a reader with a layout change.
    fits = evaluate(built.problem, summed).feasible
    plainest = summed if fits else _summed_early(built, whole, lighter=True)
    return plainest if built.seconds(plainest) <= built.seconds(choice) * (1 + 1e-9) else choice


def _summed_early(built: Built, choice: tuple[int, ...], lighter: bool) -> tuple[int, ...]:
    """Moves sums to parameters; with `lighter`, only where that adds no memory."""
    problem, now = built.problem, list(choice)
    edges: list[list[Edge]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        edges[edge.a].append(edge)
        edges[edge.b].append(edge)

    def cost(node: int, index: int) -> float:
        """Returns the seconds of the node and its edges."""
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
    """Returns the choice with parameters stored whole where that takes no longer, if all fit."""
    replaced, hidden = choice, built.hidden(choice)
    for node, (options, index) in enumerate(zip(built.options, choice, strict=True)):
        used, cost = options[index].results, built.problem.nodes[node].cost
        for other, option in enumerate(options):
            plain = option.storage is not None and not option.storage.axes("updated")
            if plain and option.results == used and cost[other] <= cost[index] * (1 + 1e-12):
                moved = (*replaced[:node], other, *replaced[node + 1 :])
                saved = built.hidden(moved)
                if cost[other] - saved <= cost[replaced[node]] - hidden + 1e-12 * cost[index]:
                    replaced, hidden = moved, saved
    judged = evaluate(built.problem, replaced)
    return replaced if judged.feasible else choice


def _plainly(new: Option, old: Option) -> bool:
    """Returns whether both store a parameter equally, and only `old` keeps a partial gradient."""
    if new.storage is None or old.storage is None:
        return new.storage is old.storage
    states = ("held", "grads", "updated", "kept")
    return all(getattr(new.storage, state) == getattr(old.storage, state) for state in states)


def _sums_earlier(new: Option, old: Option) -> bool:
    """Returns whether `new` differs from `old` only in that its result varies along more axes."""
    given, before = new.results[0], old.results[0]
    return (
        _plainly(new, old)
        and new.share == old.share
        and (given.dims, given.partial) == (before.dims, before.partial)
        and set(given.varying) > set(before.varying)
    )

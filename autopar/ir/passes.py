"""Graph -> Graph: what capture wrote becomes what the planner reads."""

from __future__ import annotations

from collections.abc import Callable

from autopar.ir.attention import causal_masks, group_heads, simplify_masks
from autopar.ir.bags import lower_bags
from autopar.ir.fused import split_fused
from autopar.ir.graph import Graph
from autopar.ir.interpret import annotate
from autopar.ir.linear import lower_linears
from autopar.ir.losses import lower_means
from autopar.ir.norms import lower_batch_norms
from autopar.ir.repeats import find_repeats
from autopar.ir.rewrite import eliminate_dead
from autopar.ir.simplify import drop_identities, lower_splits
from autopar.ir.verify import verify

PASSES: tuple[Callable[[Graph], Graph], ...] = (
    drop_identities,
    lower_splits,
    lower_linears,
    split_fused,
    lower_means,
    lower_batch_norms,
    lower_bags,
    causal_masks,
    simplify_masks,
    group_heads,
    eliminate_dead,
    find_repeats,
    annotate,
)


def prepare(graph: Graph, trace: Callable[[str, Graph], None] = lambda name, graph: None) -> Graph:
    """The graph that is planned: normalised, with shares, repeats and what autograd keeps.

    The result computes the outputs of `graph` up to rounding. Every pass in `PASSES` is followed
    by `verify` and by `trace(name of the pass, its result)`.

    Raises:
        GraphError: a pass made a graph that breaks an invariant, or torch refuses an operator.
    """
    for step in PASSES:
        graph = verify(step(graph))
        trace(step.__name__, graph)
    return graph

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
from autopar.ir.routing import find_mixtures
from autopar.ir.simplify import drop_identities, lower_splits
from autopar.ir.verify import verify

Pass = Callable[[Graph], Graph]
Trace = Callable[[str, Graph], None]
# What gives every operator one spelling. A graph is cut into stages after these.
NORMALISING: tuple[Pass, ...] = (
    drop_identities,
    lower_splits,
    lower_linears,
    split_fused,
    find_mixtures,
    lower_means,
    lower_batch_norms,
    lower_bags,
    causal_masks,
    simplify_masks,
    group_heads,
    eliminate_dead,
)
# What is found in a whole model, or in a stage of it.
FINDING: tuple[Pass, ...] = (find_repeats, annotate)
PASSES = (*NORMALISING, *FINDING)


def prepare(
    graph: Graph,
    trace: Trace = lambda name, graph: None,
    passes: tuple[Pass, ...] = PASSES,
) -> Graph:
    """The graph that is planned: normalised, with shares, repeats and what autograd keeps.

    The result computes the outputs of `graph` up to rounding. Every one of `passes` is followed
    by `verify` and by `trace(name of the pass, its result)`.

    Raises:
        GraphError: a pass made a graph that breaks an invariant, or torch refuses an operator.
    """
    for step in passes:
        graph = verify(step(graph))
        trace(step.__name__, graph)
    return graph

"""Turns a captured graph into the graph that the planner reads: the list of passes, in order."""

from __future__ import annotations

from autopar.ir.graph import Graph
from autopar.ir.rewrite import eliminate_dead
from autopar.operators.interpret import annotate
from autopar.passes.bags import lower_bags
from autopar.passes.experts.batched_experts import find_batched
from autopar.passes.experts.looped_experts import find_looped
from autopar.passes.experts.repeated_tokens import join_repeated
from autopar.passes.experts.stacked_results import add_stacked
from autopar.passes.kernel_parts import part_kernels
from autopar.passes.known_comparisons import drop_known_comparisons
from autopar.passes.linear import lower_linears
from autopar.passes.loss.means import lower_means
from autopar.passes.masks.attention_masks import (
    causal_masks,
    group_heads,
    note_seen,
    simplify_masks,
)
from autopar.passes.masks.attention_sinks import find_sinks
from autopar.passes.norms import lower_batch_norms
from autopar.passes.projections import split_fused
from autopar.passes.repeats import find_repeats
from autopar.passes.routing import find_mixtures, lower_grouped
from autopar.passes.simplify import drop_identities, lower_splits
from autopar.passes.verify import Pass, Trace, apply

# Passes that give every operator one spelling. A graph is cut into stages after these.
NORMALISING: tuple[Pass, ...] = (
    drop_identities,
    lower_splits,
    lower_linears,
    drop_known_comparisons,
    split_fused,
    find_mixtures,
    add_stacked,
    find_looped,
    join_repeated,
    find_batched,
    lower_grouped,
    lower_means,
    lower_batch_norms,
    lower_bags,
    find_sinks,
    causal_masks,
    simplify_masks,
    group_heads,
    note_seen,
    eliminate_dead,
)
# Passes that analyse a whole model, or one stage.
FINDING: tuple[Pass, ...] = (find_repeats, annotate, part_kernels)
PASSES = (*NORMALISING, *FINDING)


def prepare(
    graph: Graph,
    trace: Trace = lambda name, graph: None,
    passes: tuple[Pass, ...] = PASSES,
) -> Graph:
    """Returns the graph to plan: normalised, with shares, repeats and saved tensors.

    It computes the outputs of `graph` up to rounding. Every one of `passes` is followed by `verify`
    and by `trace(name of the pass, its result)`.

    Raises:
        GraphError: a pass produced a graph that breaks an invariant, or torch refuses an operator.
    """
    return apply(graph, passes, trace)

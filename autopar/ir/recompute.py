"""Recomputation: blocks that recompute their activations in the backward instead of saving them.

In a run of equal blocks the first ones may recompute, as their activations would be kept longest.
"full" keeps only the inputs of a block (Chen et al., "Training Deep Nets with Sublinear Memory
Cost", arXiv:1604.06174). "selective" also keeps the results of matrix products, convolutions and
attention, which are expensive to compute (after Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", arXiv:2205.05198). Both rerun a block only as far as its
backward needs: up to the last operator for which autograd saves a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import PlanError, PlanMismatchError
from autopar.ir.graph import WRITE, Graph, Repeat

KINDS = ("selective", "full")
# Operators whose results "selective" keeps; `runtime/recompute.py` has the same list of kernels.
PRODUCTS = (
    "aten.linear", "aten.matmul", "aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm",
    "aten.scaled_dot_product_attention", "aten.conv1d", "aten.conv2d", "aten.conv3d",
)  # fmt: skip


@dataclass(frozen=True)
class Recompute:
    """The choice to recompute the first `blocks` of a run; prints and parses as "full 8"."""

    kind: str
    blocks: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.blocks < 1:
            raise PlanError(
                f"{self} is not a valid recomputation",
                why=f"a kind, {' or '.join(KINDS)}, and a number of blocks are expected",
                todo='write e.g. "full 8"',
            )

    def __str__(self) -> str:
        return f"{self.kind} {self.blocks}"

    @classmethod
    def parse(cls, text: str) -> Recompute:
        """Parses "full 8"; raises PlanError for anything else."""
        kind, _, blocks = text.partition(" ")
        return cls(kind, int(blocks) if blocks.isdecimal() else 0)


@dataclass(frozen=True)
class Again:
    """The operators that a recomputed block runs a second time.

    Attributes:
        operators: operators that are rerun.
        reached: operators whose operands are resharded again.
        kept: operators whose results are kept instead.
        last: the last operator for which autograd saves a tensor, "" if there is none.
    """

    operators: frozenset[str]
    reached: frozenset[str]
    kept: frozenset[str]
    last: str = ""


def again(graph: Graph, repeat: Repeat, kind: str) -> Again:
    """Returns what a recomputation reruns; torch's checkpoint stops once nothing is missing."""
    nodes = [graph[name] for name in repeat.iterations[0] if not graph[name].is_leaf]
    kept = frozenset(n.name for n in nodes if kind == "selective" and n.op in PRODUCTS)
    savers = [place for place, node in enumerate(nodes) if node.saved or node.saved_types]
    if not savers:
        return Again(frozenset(), frozenset(), kept)
    last = nodes[savers[-1]]
    # Saved operands exist before it runs.
    runs = bool(last.saved_types) or last.name in last.saved
    reached = frozenset(node.name for node in nodes[: savers[-1] + 1])
    once = kept | {node.name for node in nodes if node.op == WRITE}
    once |= frozenset() if runs else {last.name}
    return Again(reached - once, reached, kept, last.name)


def run_names(graph: Graph) -> tuple[str, ...]:
    """Returns the name of each run of blocks: the module that contains them, "transformer.h"."""
    names: list[str] = []
    for repeat in graph.repeats:
        name = wish = ".".join(common_module(graph, repeat)) or "blocks"
        while name in names:
            name = f"{wish}#{sum(other.partition('#')[0] == wish for other in names) + 1}"
        names.append(name)
    return tuple(names)


def common_module(graph: Graph, repeat: Repeat) -> list[str]:
    """Returns the common module path of the first block's parameters, ending in a number."""
    paths = [graph[name].target.split(".") for name in repeat.iterations[0] if graph[name].is_leaf]
    common: list[str] = []
    for words in zip(*paths, strict=False):
        if len(set(words)) > 1:
            break
        common.append(words[0])
    while common and not common[-1].isidentifier():
        common.pop()
    return common


def of_runs(graph: Graph, planned: Mapping[str, Recompute]) -> tuple[Recompute | None, ...]:
    """Returns a plan's recomputation for each run of blocks.

    Raises:
        PlanMismatchError: it names a run that does not exist, or more blocks than there are.
    """
    names = run_names(graph)
    for name, how in planned.items():
        count = graph.repeats[names.index(name)].count if name in names else 0
        if how.blocks > count:
            raise PlanMismatchError(
                f"the plan recomputes {how.blocks} blocks of {name!r}",
                why=f"the model has {count} of them; runs: {', '.join(names) or 'none'}",
            )
    return tuple(planned.get(name) for name in names)


def selective_runs(graph: Graph, planned: Mapping[str, Recompute]) -> frozenset[int]:
    """Returns the numbers of the runs of blocks that recompute selectively."""
    choices = enumerate(of_runs(graph, planned))
    return frozenset(run for run, how in choices if how is not None and how.kind == "selective")


def repetitions(
    graph: Graph, planned: Mapping[str, Recompute]
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the reruns of nodes of the folded graph, and of their operands' reshardings."""
    operators: dict[str, int] = {}
    reached: dict[str, int] = {}
    for repeat, how in zip(graph.repeats, of_runs(graph, planned), strict=True):
        if how is not None:
            what = again(graph, repeat, how.kind)
            operators |= dict.fromkeys(what.operators, how.blocks)
            reached |= dict.fromkeys(what.reached, how.blocks)
    return operators, reached

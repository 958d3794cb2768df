"""Recomputation: blocks that recompute their activations in the backward instead of saving them.

In a run of equal blocks, the first blocks may recompute, since their activations are kept longest.
"full" keeps only the inputs of a block (Chen et al., "Training Deep Nets with Sublinear Memory
Cost", arXiv:1604.06174). "selective" also keeps the results of matrix products, convolutions and
attention, which are expensive to compute (after Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", arXiv:2205.05198). "save linear:2 attention" keeps the
results of these operators only, of linears every second one from the first on, as torchtitan's
policy by operator does. "core" keeps everything that the backward needs except for the values
between the products of attention, or those that fused attention saves (arXiv:2205.05198, section
5). Every policy reruns a block only as far as its backward needs: up to the last operator for which
autograd saves a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import PlanError, PlanMismatchError
from autopar.ir.graph import WRITE, Graph, Node, Repeat
from autopar.ir.units import parse_whole

KINDS = ("selective", "full")
CORE, SAVE = "core", "save"
# Operators whose results "selective" keeps; `runtime/recompute.py` has the same list of kernels.
PRODUCTS = (
    "aten.linear", "aten.matmul", "aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm",
    "aten.scaled_dot_product_attention", "autopar.sink_attention", "aten.conv1d", "aten.conv2d",
    "aten.conv3d",
)  # fmt: skip


# Their names in "save linear:2 attention".
ATTENTION, SINKS = "aten.scaled_dot_product_attention", "autopar.sink_attention"
NAMES = {op.removeprefix("aten."): op for op in PRODUCTS} | {"attention": ATTENTION}


@dataclass(frozen=True)
class Recompute:
    """The choice to recompute the first `blocks` of a run; prints and parses as "full 8"."""

    kind: str
    blocks: int

    def __post_init__(self) -> None:
        if not is_kind(self.kind) or self.blocks < 1:
            raise PlanError(
                f"{self} is not a valid recomputation",
                why=f"a kind and a number of blocks are expected: {', '.join(KINDS)}, {CORE}, or "
                f"{SAVE} and operators",
                todo='write e.g. "full 8" or "save linear:2 attention 8"',
            )

    def __str__(self) -> str:
        return f"{self.kind} {self.blocks}"

    @classmethod
    def parse(cls, text: str) -> Recompute:
        """Parses "full 8"; raises PlanError for anything else."""
        kind, _, blocks = text.rpartition(" ")
        return cls(kind, parse_whole(blocks) or 0)


def is_kind(text: str) -> bool:
    """Returns whether a text names a policy of recomputation."""
    first, *words = text.split(" ")
    return text in (*KINDS, CORE) or (first == SAVE and bool(words) and all(map(_every, words)))


def _every(word: str) -> tuple[str, int] | None:
    """Parses "linear:2" into an operator and 2; None if it is no such word."""
    name, colon, every = word.partition(":")
    number = parse_whole(every) if colon else 1
    return (NAMES[name], number) if name in NAMES and number else None


def kept_products(nodes: Sequence[Node], kind: str) -> dict[str, bool]:
    """Returns for the products of a block, in order, whether their results are kept."""
    words = kind.split(" ")[1:] if kind.startswith(SAVE) else ()
    every = dict.fromkeys(PRODUCTS, 1) if kind == "selective" else {}
    every |= dict(pair for pair in map(_every, words) if pair is not None)
    seen: dict[str, int] = {}
    found = {}
    for node in nodes:
        if node.op in PRODUCTS:
            found[node.name] = node.op in every and not seen.get(node.op, 0) % every[node.op]
            seen[node.op] = seen.get(node.op, 0) + 1
    return found


def _core(nodes: Sequence[Node]) -> list[str]:
    """Returns the operators between the two products of attention, or fused attention itself.

    The first product is one that a softmax reads through operators without products.
    """
    made, inside = {node.name: node for node in nodes}, set[str]()
    for node in nodes:
        if node.op in (ATTENTION, SINKS):
            inside.add(node.name)
        if node.op.startswith("aten.softmax") or node.op.startswith("aten._softmax"):
            ahead = [node.name]
            while ahead:
                name = ahead.pop()
                if name in made and name not in inside:
                    inside.add(name)
                    ahead += made[name].inputs if made[name].op not in PRODUCTS else ()
    for node in nodes:  # and on from the softmax to the product of weights and values
        if any(name in inside for name in node.inputs) and node.op not in PRODUCTS:
            inside.add(node.name)
    return [node.name for node in nodes if node.name in inside]


@dataclass(frozen=True)
class RecomputedOperators:
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


def again(graph: Graph, repeat: Repeat, kind: str) -> RecomputedOperators:
    """Returns the operators of a recomputation, which ends once all saved tensors are available."""
    nodes = [graph[name] for name in repeat.iterations[0] if not graph[name].is_leaf]
    if kind == CORE:
        return _again_core(nodes)
    kept = frozenset(name for name, keeps in kept_products(nodes, kind).items() if keeps)
    savers = [place for place, node in enumerate(nodes) if node.saved or node.saved_types]
    if not savers:
        return RecomputedOperators(frozenset(), frozenset(), kept)
    last = nodes[savers[-1]]
    # Saved operands exist before it runs.
    runs = bool(last.saved_types) or last.name in last.saved
    reached = frozenset(node.name for node in nodes[: savers[-1] + 1])
    once = kept | {node.name for node in nodes if node.op == WRITE}
    once |= frozenset() if runs else {last.name}
    return RecomputedOperators(reached - once, reached, kept, last.name)


def _again_core(nodes: Sequence[Node]) -> RecomputedOperators:
    """Returns the rerun of the core of attention, with all else that is saved kept."""
    core = frozenset(_core(nodes))
    wanted = {name for node in nodes for name in node.saved}
    wanted |= {name for node in nodes if node.name in core for name in node.inputs}
    kept = frozenset(node.name for node in nodes if node.name in wanted and node.name not in core)
    last = next((node.name for node in reversed(nodes) if node.name in core), "")
    return RecomputedOperators(core, core, kept, last)


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
                todo="correct the entry `recompute` of the plan, or plan again",
            )
    return tuple(planned.get(name) for name in names)


def selective_runs(graph: Graph, planned: Mapping[str, Recompute]) -> frozenset[int]:
    """Returns the numbers of the runs of blocks that recompute, but not all."""
    choices = enumerate(of_runs(graph, planned))
    return frozenset(run for run, how in choices if how is not None and how.kind != "full")


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

"""Derives rules of the user's torch.autograd.Functions from the operators that they run.

A Function is split along a dimension only if two checks agree. First, by the rules of the operators
in its forward and its backward, the dimension must run from operands to results and from the
results' gradients to the operands', with no operator that needs it whole or sums over it; only the
gradient of an operand that lacks the dimension may be a sum. This holds for all values, but only
for one set of sizes. Second, `prove` runs the Function itself on parts, which covers the sizes of
parts. The rule becomes the second argument of the operator in the graph:

    %y = autopar.function('models.bloom:GeLUFunction', 'a b -> a b', %x)

A Function without a rule stays `function.models.bloom:GeLUFunction(%x)` and runs whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace

from autopar.errors import RuleError
from autopar.intra_op.node_choices import operand_types
from autopar.intra_op.pins.dims import Dims, find_dims
from autopar.intra_op.proofs.prove import prove
from autopar.intra_op.proofs.terms import Factor, write
from autopar.intra_op.rule import OpRule
from autopar.intra_op.union_find import UnionFind
from autopar.ir.graph import Arg, Graph, Name, Node, Ref
from autopar.ir.tensor import TensorType
from autopar.operators.own_functions import FUNCTION, SPLIT, Joint

_SMALL = (4, 6, 8, 10, 9, 15)  # sizes of split factors in a proof
# Operators through which a partial gradient may pass.
_AS_IT_IS = (
    "aten.view", "aten.reshape", "aten.squeeze.dim", "aten.unsqueeze", "aten.neg", "aten.detach",
    "aten.alias", "aten.clone", "aten.to.dtype", "aten._to_copy",
)  # fmt: skip
_MOST = 1 << 20  # elements of an operand in a proof

Trace = Callable[[Node, tuple[TensorType, ...], tuple[bool, ...], Container[str]], Joint | None]


def split_functions(graph: Graph, rules: Mapping[str, OpRule], joint: Trace) -> Graph:
    """Returns `graph` with a rule attached to each Function that can be split and has no rule yet.

    Args:
        graph: a captured graph.
        rules: rules of the other operators.
        joint: `autopar.capture.joint.joint`, which traces the operators that a Function runs.
    """
    specs: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        if node.op.startswith(FUNCTION) and node.op not in rules:
            types = operand_types(graph, node)
            wants = tuple(node.requires_grad and graph[name].requires_grad for name in node.inputs)
            key = repr((node.op, node.form, types, node.types, wants))
            if key not in specs:
                specs[key] = _spec(node, types, wants, joint(node, types, wants, rules), rules)
            if specs[key]:
                name = node.op.removeprefix(FUNCTION)
                node = replace(node, op=SPLIT, args=(name, specs[key], *node.args))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes)) if any(specs.values()) else graph


def _spec(
    node: Node,
    types: tuple[TensorType, ...],
    wants: tuple[bool, ...],
    both: Joint | None,
    rules: Mapping[str, OpRule],
) -> str:
    """Returns the factor string of a Function on operands of these types; "" if it cannot split."""
    if len(set(node.inputs)) < len(node.inputs):
        return ""  # one value twice: the operand of a gradient would be ambiguous
    if both is None:
        return ""
    try:
        factors = list(_factors(both, find_dims(both.graph, rules)))
    except RuleError:
        return ""
    # Factors are proved separately first, since some may fail only because of sizes.
    factors = [factor for factor in factors if _proved(node, types, wants, [factor])]
    return _proved(node, types, wants, factors)


def _proved(
    node: Node, types: tuple[TensorType, ...], wants: tuple[bool, ...], factors: list[Factor]
) -> str:
    """Returns the factor string of some factors if the Function satisfies it, else ""."""
    terms, _ = write(types, node.types, factors)
    example = _example(node, types, wants, factors) if factors else ""
    try:
        proved = example and prove(OpRule(node.op, str(terms), examples=(example,))).proved
    except RuleError:
        return ""
    return str(terms) if proved else ""


def _factors(both: Joint, dims: Dims) -> Iterator[Factor]:
    """Yields sets of dimensions that run through forward and backward."""
    graph, classes = both.graph, UnionFind[int]()
    values, owed = both.operands + both.results, both.gradients + both.cotangents
    for value, gradient in zip(values, owed, strict=True):
        pairs = zip(dims.of(value), dims.of(gradient), strict=True) if gradient else ()
        for one, other in pairs:
            for a, b in zip(one, other, strict=False):
                classes.union(a, b)
    whole = {classes[one.cls] for one in dims.unsplit} | {classes[c] for c in dims.composite}
    for node in graph.nodes:
        whole |= {classes[cls] for cls in _stopped(both, dims, node)}
    for root in dict.fromkeys(classes[cls] for cls in range(len(dims.sizes))):
        if root in whole:
            continue

        def place(value: str, root: int = root) -> list[int]:
            outer = dims.outer(value)
            return [d for d, cls in enumerate(outer) if cls is not None and classes[cls] == root]

        operands, results = [*map(place, both.operands)], [*map(place, both.results)]
        if max(map(len, (*operands, *results))) == 1 and all(results) and any(operands):
            yield Factor(
                tuple((i, at[0]) for i, at in enumerate(operands) if at),
                tuple(at[0] for at in results),
            )


def _stopped(both: Joint, dims: Dims, node: Node) -> Iterator[int]:
    """Yields classes that do not run through an operator."""
    if node.is_leaf:
        return
    read = {cls for name in node.inputs for dim in dims.of(name) for cls in dim}
    signature = dims.signatures.get(node.name)
    given = {cls for dim in dims.of(node.name) for cls in dim}
    if signature is None or len(node.types) > 1:
        yield from read | given
        return
    yield from (cls for f in signature.exchanged for cls in dims.factors[node.name, f])
    if not _is_gradient(both, node.name):
        yield from read - given


def _is_gradient(both: Joint, name: str) -> bool:
    """Returns whether a value is just the gradient of an operand, up to its shape."""
    readers = both.graph.users[name]
    if name in both.gradients:
        return not readers
    alone = len(readers) == 1 and both.graph[readers[0]].op in _AS_IT_IS
    return alone and _is_gradient(both, readers[0])


def _example(
    node: Node, types: tuple[TensorType, ...], wants: tuple[bool, ...], factors: list[Factor]
) -> str:
    """Returns the arguments of a proof, with split dimensions small and the others unchanged."""
    shapes = [list(kind.shape) for kind in types]
    for number, factor in enumerate(factors):
        for i, dim in factor.operands:
            shapes[i][dim] = _SMALL[number % len(_SMALL)]
    if max(map(math.prod, shapes)) > _MOST:
        return ""
    texts = {}
    for name, kind, shape, wanted in zip(node.inputs, types, shapes, wants, strict=True):
        dtype = "f64" if kind.floating and not kind.dtype.startswith("c") else kind.dtype
        constant = "" if wanted or not kind.floating else "const "
        texts[name] = f"{constant}{TensorType(dtype, tuple(shape))}"

    def write_arg(arg: Arg) -> str:
        if isinstance(arg, Ref):
            return texts[arg.name]
        if isinstance(arg, tuple):
            return f"({', '.join(map(write_arg, arg))}{',' if len(arg) == 1 else ''})"
        return str(arg) if isinstance(arg, Name) else repr(arg)

    return ", ".join(map(write_arg, node.args))

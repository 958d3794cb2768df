"""Sharding rules: one factor string per operator, from which strategies and costs follow.

    rule("aten.linear", "... k, n k, +n -> ... n", flops="2 ... n k")

names the dimensions of every tensor operand and result. A factor that a mesh axis splits is split
wherever it stands. Along that axis an operand that lacks the factor is needed whole and its
gradient is owed a sum; a result that lacks it is itself owed a sum.

    ...      any number of leading dimensions, aligned right, broadcast against one another
    k!       k must stay whole
    (h d)    one dimension that runs over h and, inside it, d; only the outermost can be split
    1        a dimension without a factor, always whole
    +n       an additive operand: under a split contraction it is a partial sum itself

The notation is in the spirit of OpenXLA Shardy's factor rules and nnScaler's annotations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autopar.errors import RuleError
from autopar.ir.graph import Node
from autopar.ir.tensor import TensorType

Spec = str | Callable[[Node, tuple[TensorType, ...]], str]
Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class OpRule:
    """A rule for one operator.

    Attributes:
        op: operator name as in the graph, "aten.linear".
        spec: the factor string, or a function of (node, operand types) that writes it.
        flops: sum of products, "2 m n k + m n"; empty means one per element of the result.
        linear: whether the result is linear in its operands taken together, so that partial sums
            and varying gradients may pass through.
    """

    op: str
    spec: Spec
    flops: str = ""
    linear: bool = False


def rule(op: str, spec: Spec, *, flops: str = "", linear: bool = False) -> OpRule:
    """One rule; a plain value, collected by discovery."""
    return OpRule(op, spec, flops, linear)


@dataclass(frozen=True)
class Signature:
    """A rule applied to one node: what each dimension of each operand runs over.

    Attributes:
        operands, results: per tensor, per dimension, the factors it runs over, outermost first.
        additive: for each operand whether it is added under a contraction.
        sizes: size of each factor.
        whole: factors that no axis may split.
        flops: floating-point operations of the whole operator, forwards.
        linear: see OpRule.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    additive: tuple[bool, ...]
    sizes: dict[str, int]
    whole: frozenset[str]
    flops: float
    linear: bool

    @property
    def splittable(self) -> tuple[str, ...]:
        """Factors that an axis may split, in order of appearance."""
        return tuple(f for f in self.sizes if f not in self.whole and self.sizes[f] > 1)


def resolve(
    rule: OpRule, node: Node, operands: tuple[TensorType, ...], results: tuple[TensorType, ...]
) -> Signature:
    """Apply `rule` to a node with operands and results of these types.

    Raises:
        RuleError: the string cannot be read or does not fit the shapes.
    """
    spec = rule.spec if isinstance(rule.spec, str) else rule.spec(node, operands)
    left, arrow, right = spec.partition("->")
    if not arrow:
        raise RuleError(f"rule {spec!r} of {rule.op} has no '->'")
    terms = [part.strip() for part in left.split(",")][: len(operands)]
    outs = [part.strip() for part in right.split(",")][: len(results)]
    if len(terms) != len(operands) or len(outs) != len(results):
        raise RuleError(
            f"rule {spec!r} of {rule.op} names {len(terms)} operands and {len(outs)} results",
            where=str(node.source),
            why=f"the node has {len(operands)} and {len(results)}",
        )
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    read = [
        _read(term.lstrip("+"), tensor.shape, whole, f"{rule.op}: {spec!r}")
        for term, tensor in zip([*terms, *outs], [*operands, *results], strict=True)
    ]
    _infer(read, [*operands, *results], sizes, f"{rule.op}: {spec!r}")
    for dims in read:
        for dim in dims:
            solid = [f for f in dim if sizes[f] > 1]
            whole.update(solid[1:])
    count = len(operands)
    result_dims = tuple(read[count:])
    return Signature(
        tuple(read[:count]),
        result_dims,
        tuple(term.startswith("+") for term in terms),
        sizes,
        frozenset(whole),
        _flops(rule.flops, sizes, results),
        rule.linear,
    )


def _read(term: str, shape: tuple[int, ...], whole: set[str], where: str) -> Dims:
    """The factors of each dimension of one operand; "..." filled in, size-1 dimensions bare."""
    words = re.findall(r"\([^)]*\)!?|\.\.\.|[A-Za-z_]\w*!?|1", term)
    fixed = [word for word in words if word != "..."]
    leading = len(shape) - len(fixed)
    if leading < 0 or (leading > 0 and "..." not in words):
        raise RuleError(f"{where}: {term!r} does not fit the shape {shape}")
    dims: list[tuple[str, ...]] = []
    for word in words:
        if word == "...":
            names = [(f"...{leading - 1 - i}",) for i in range(leading)]
            at = len(dims)
            dims += [n if shape[at + i] > 1 else () for i, n in enumerate(names)]
            continue
        factors = tuple(f for f in word.rstrip("!").strip("()").split() if f != "1")
        if word.endswith("!"):
            whole.update(factors)
        dims.append(factors)
    return tuple(dims)


def _infer(read: list[Dims], tensors: list[TensorType], sizes: dict[str, int], where: str) -> None:
    """Fill in factor sizes: single-factor dimensions first, then the one unknown of a group."""
    pairs = [
        (dim, size)
        for dims, tensor in zip(read, tensors, strict=True)
        for dim, size in zip(dims, tensor.shape, strict=True)
        if dim
    ]
    for _ in range(len(pairs) + 1):
        for dim, size in pairs:
            unknown = [f for f in dim if f not in sizes]
            known = math.prod(sizes[f] for f in dim if f in sizes)
            if len(unknown) == 1 and size % known == 0:
                sizes[unknown[0]] = size // known
    for dim, size in pairs:
        if any(f not in sizes for f in dim) or math.prod(sizes[f] for f in dim) != size:
            raise RuleError(
                f"{where}: dimension ({' '.join(dim)}) does not fit {size}",
                why=f"factor sizes are {sizes}",
            )


def _flops(text: str, sizes: dict[str, int], results: tuple[TensorType, ...]) -> float:
    if not text:
        return float(results[0].numel)
    total = 0.0
    leading = math.prod(size for name, size in sizes.items() if name.startswith("..."))
    for product in text.split("+"):
        words = product.split()
        total += math.prod(
            leading if w == "..." else sizes[w] if w in sizes else float(w) for w in words
        )
    return total


def collect(rules: Iterable[OpRule]) -> dict[str, OpRule]:
    """Rules by operator name; RuleError if an operator has two."""
    table: dict[str, OpRule] = {}
    for item in rules:
        if item.op in table:
            raise RuleError(f"two rules for {item.op}", why=f"{table[item.op].spec}, {item.spec}")
        table[item.op] = item
    return table

"""Sharding rules: one factor string per operator, from which strategies and costs follow.

    rule("aten.linear", "... k, n k, +n -> ... n", flops="2 ... n k")

names the factor of every dimension of every tensor operand and result. A mesh axis that splits a
factor splits it wherever it occurs. Along that axis, an operand that lacks the factor must be whole
and its gradient is a partial sum; a result that lacks it is itself a partial sum.

    ...      any number of leading dimensions, aligned right, broadcast against one another
    k!       k must stay whole
    k~       k is split inside the operator, which communicates along it with the other devices:
             results that lack k are whole; k~3 needs parts of at least 3 elements
    t=s      t is split wherever s is, along the same axes, though its size may differ
    (h d)    one dimension that runs over h and, within it, d; only the outermost can be split
    1        a dimension without a factor, always whole
    +n       an additive operand: under a split contraction it is a partial sum itself

`linear` names groups of operands in which the operator is jointly linear: True for all of them
(views, neg), ((0,), (1,)) for a product that is linear in each factor alone. Partial sums pass
through such a group; the other operands must then be whole and their gradients are partial sums. If
there is any such group, partial gradients may pass through as well.

The notation follows OpenXLA Shardy's factor rules and nnScaler's annotations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import RuleError
from autopar.ir.graph import Arg, Node
from autopar.ir.tensor import TensorType
from autopar.operators.own_functions import FUNCTION

Spec = str | Callable[[Node, tuple[TensorType, ...]], str]
Dims = tuple[tuple[str, ...], ...]
Groups = tuple[tuple[int, ...], ...]
Linear = bool | Groups | Callable[[Node], bool | Groups]


@dataclass(frozen=True)
class OpRule:
    """A rule for one operator.

    Attributes:
        op: operator name as in the graph, "aten.linear".
        spec: the factor string, or a function of (node, operand types) that returns it.
        flops: a sum of products, "2 m n k + m n", or a function that returns it; `out` stands for
            the number of elements of the first result, and is the default.
        linear: groups of tensor operands, by position, in which the results are jointly linear;
            True means all together, False none. May be a function of the node.
        together: pairs of factors, "e ..." or "k n, k l", that one mesh axis may split at once. No
            operand has both factors of a pair, and the operator itself sends elements to the
            devices that need them. A tensor with neither factor is not split by that axis.
        examples: argument lists in the graph's notation, with a type in the place of each tensor:
            "f64[4, 6], (2, 12)". "f64[4]>0" asks for positive values, "i64[4]<8" for values from 0
            up to 8. The rule is proved on them.
    """

    op: str
    spec: Spec
    flops: Spec = ""
    linear: Linear = False
    examples: tuple[str, ...] = ()
    together: str = ""


def rule(
    op: str | type,
    spec: Spec,
    *,
    flops: Spec = "",
    linear: Linear = False,
    examples: Sequence[str] = (),
    together: str = "",
) -> OpRule:
    """Returns a sharding rule for your own operator, to pass in `rules=` of `autopar.compile`.

    autopar.rule("mylib::gate", "b s h, h -> b s h", examples=["f64[4, 6, 8], f64[8]"])

    Args:
        op: the operator's name, "mylib::gate" or "mylib.gate"; or a torch.autograd.Function.
        spec, flops, linear, examples, together: see `OpRule`.
    """
    op = op if isinstance(op, str) else f"{FUNCTION}{op.__module__}:{op.__qualname__}"
    return OpRule(graph_name(op), spec, flops, linear, tuple(examples), together)


def graph_name(op: str) -> str:
    """Converts torch's name of an operator to the graph's: "mylib::op.default" -> "mylib.op"."""
    return op.replace("::", ".").removesuffix(".default")


def argument(node: Node, position: int, name: str, default: Arg = None) -> Arg:
    """Returns an argument of `node`, passed by position or by name."""
    return node.args[position] if len(node.args) > position else node.keyword(name, default)


def dimensions(arg: Arg, rank: int) -> tuple[int, ...]:
    """Returns dimension numbers from 0; None and the empty tuple mean all of them."""
    numbers = arg if isinstance(arg, tuple) else () if arg is None else (arg,)
    return tuple(int(str(n)) % max(rank, 1) for n in numbers) or tuple(range(rank))


def letters(rank: int) -> list[str]:
    """Returns one factor for each dimension: d0, d1, ..."""
    return [f"d{i}" for i in range(rank)]


def broadcast(names: list[str], tensor: TensorType) -> str:
    """Returns the term of an operand that broadcasts against the last of `names`."""
    own = names[len(names) - len(tensor.shape) :]
    return " ".join(n if size > 1 else "1" for n, size in zip(own, tensor.shape, strict=True))


def whole_along(node: Node, types: tuple[TensorType, ...], dims: tuple[int, ...]) -> str:
    """Returns a rule that splits the first operand and all results alike, except along `dims`."""
    names = letters(len(types[0].shape))
    into = [f"{n}!" if i in dims else n for i, n in enumerate(names)]
    out = [f"r{i}!" if i in dims else n for i, n in enumerate(names)]
    return f"{' '.join(into)} -> {', '.join([' '.join(out)] * len(node.types))}"


def all_whole(node: Node, types: tuple[TensorType, ...]) -> str:
    """Returns a rule that keeps every operand and result whole."""
    terms = [
        " ".join(f"t{k}_{i}!" for i in range(len(tensor.shape)))
        for k, tensor in enumerate((*types, *node.types))
    ]
    return f"{', '.join(terms[: len(types)])} -> {', '.join(terms[len(types) :])}"


@dataclass(frozen=True)
class Signature:
    """A rule applied to one node: the factors of each dimension of each operand.

    Attributes:
        operands, results: per tensor, per dimension, its factors, outermost first.
        additive: for each operand whether it is added under a contraction.
        sizes: size of each factor.
        whole: factors that no axis may split.
        flops: floating-point operations of the whole operator, forwards.
        linear: groups of operands through which partial sums may pass.
        varying: whether partial gradients may pass through the operator.
        merged: factors that share a dimension with others; they split evenly or not at all.
        exchanged: factors marked "~", with the fewest elements that a part of each may have.
        together: pairs of factors that one axis may split at once.
        tied: factors that are split with another, and that other.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    additive: tuple[bool, ...]
    sizes: dict[str, int]
    whole: frozenset[str]
    flops: float
    linear: Groups = ()
    varying: bool = False
    merged: frozenset[str] = frozenset()
    exchanged: Mapping[str, int] = field(default_factory=dict)
    together: tuple[tuple[str, str], ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)

    @property
    def splittable(self) -> tuple[str, ...]:
        """Factors that an axis may split, in order of appearance."""
        held = self.whole | self.tied.keys()
        return tuple(f for f in self.sizes if f not in held and self.sizes[f] > 1)

    @property
    def rows(self) -> tuple[str, ...]:
        """Factors of all dimensions but the last of the largest tensor, such as batch and sequence.

        Results come before operands of as many dimensions.
        """
        tensors = (*self.results, *self.operands)
        dims = max(tensors, key=len, default=())
        return tuple(factor for factors in dims[:-1] for factor in factors)


def written(rule: OpRule, node: Node, operands: tuple[TensorType, ...]) -> str:
    """Returns the factor string of a rule for one node."""
    return rule.spec if isinstance(rule.spec, str) else rule.spec(node, operands)


def resolve(
    rule: OpRule, node: Node, operands: tuple[TensorType, ...], results: tuple[TensorType, ...]
) -> Signature:
    """Applies `rule` to a node with operands and results of these types.

    Raises:
        RuleError: the string cannot be read or does not fit the shapes.
    """
    spec = written(rule, node, operands)
    tied = dict(re.findall(r"(\w+)=(\w+)", spec))
    left, arrow, right = re.sub(r"=\w+", "", spec).partition("->")
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
    exchanged: dict[str, int] = {}
    read = [
        _read(term.lstrip("+"), tensor.shape, whole, exchanged, f"{rule.op}: {spec!r}")
        for term, tensor in zip([*terms, *outs], [*operands, *results], strict=True)
    ]
    _infer(read, [*operands, *results], sizes, f"{rule.op}: {spec!r}")
    merged: set[str] = set()
    for dims in read:
        for dim in dims:
            solid = [f for f in dim if sizes[f] > 1]
            whole.update(solid[1:])
            merged.update(solid if len(solid) > 1 else ())
    count = len(operands)
    groups = _groups(rule, node, operands, results)
    return Signature(
        tuple(read[:count]),
        tuple(read[count:]),
        tuple(term.startswith("+") for term in terms),
        sizes,
        frozenset(whole),
        _flops(rule, node, operands, sizes, results),
        groups,
        bool(groups) and node.requires_grad,
        frozenset(merged),
        exchanged,
        tuple(_together(rule.together, sizes)),
        tied,
    )


def _together(text: str, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yields the pairs of factors, one for each leading dimension behind "..."."""
    for one, other in (pair.split() for pair in text.split(",") if pair):
        for name in sizes:
            alike = name == other or (other == "..." and name.startswith("..."))
            if alike and sizes.get(one, 1) > 1 and sizes[name] > 1:
                yield one, name


def _groups(
    rule: OpRule, node: Node, operands: tuple[TensorType, ...], results: tuple[TensorType, ...]
) -> Groups:
    """Returns the linear groups with floating tensors only; no others have partial sums.

    A group with an absent operand does not count.
    """
    linear = rule.linear(node) if callable(rule.linear) else rule.linear
    if isinstance(linear, bool):
        linear = (tuple(range(len(operands))),) if linear and operands else ()
    if not all(tensor.floating for tensor in results):
        return ()
    floating = {i for i, tensor in enumerate(operands) if tensor.floating}
    return tuple(group for group in linear if floating.issuperset(group))


def _read(
    term: str, shape: tuple[int, ...], whole: set[str], exchanged: dict[str, int], where: str
) -> Dims:
    """Returns the factors of each dimension of an operand, "..." expanded, none for size 1."""
    tokens = re.findall(r"\([^)]*\)!?|\.\.\.|[A-Za-z_]\w*(?:!|~\d*)?|1", term)
    fixed = [word for word in tokens if word != "..."]
    leading = len(shape) - len(fixed)
    if leading < 0 or (leading > 0 and "..." not in tokens):
        raise RuleError(f"{where}: {term!r} does not fit the shape {shape}")
    dims: list[tuple[str, ...]] = []
    for word in tokens:
        if word == "...":
            names = [(f"...{leading - 1 - i}",) for i in range(leading)]
            at = len(dims)
            dims += [n if shape[at + i] > 1 else () for i, n in enumerate(names)]
            continue
        marked = [f.partition("~") for f in word.rstrip("!").strip("()").split() if f != "1"]
        factors = tuple(name for name, _, _ in marked)
        exchanged.update({name: int(least or 1) for name, mark, least in marked if mark})
        if word.endswith("!"):
            whole.update(factors)
        dims.append(factors)
    return tuple(dims)


def _infer(read: list[Dims], tensors: list[TensorType], sizes: dict[str, int], where: str) -> None:
    """Fills in factor sizes: single-factor dimensions first, then the one unknown of a group."""
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


def _flops(
    rule: OpRule,
    node: Node,
    operands: tuple[TensorType, ...],
    sizes: dict[str, int],
    results: tuple[TensorType, ...],
) -> float:
    text = rule.flops if isinstance(rule.flops, str) else rule.flops(node, operands)
    values: dict[str, float] = {**sizes, "out": results[0].numel}
    values["..."] = math.prod(size for name, size in sizes.items() if name.startswith("..."))
    try:
        return math.fsum(
            math.prod(values[w] if w in values else float(w) for w in product.split())
            for product in (text or "out").split("+")
        )
    except ValueError as error:
        raise RuleError(
            f"cannot read the flops {text!r} of {rule.op}", why=f"{error}; factors are {sizes}"
        ) from None


def collect(rules: Iterable[OpRule]) -> dict[str, OpRule]:
    """Returns rules by operator name; raises RuleError if an operator has two."""
    table: dict[str, OpRule] = {}
    for item in rules:
        if item.op in table:
            raise RuleError(f"two rules for {item.op}", why=f"{table[item.op].spec}, {item.spec}")
        table[item.op] = item
    return table

"""Rules and torch agree on the defaults of omitted arguments.

A trace omits arguments that have their default, so a rule that assumes another default misreads the
call. torch's schemas state the defaults.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.errors import RuleError
from autopar.intra_op.proofs.case import Case, read_call, read_example
from autopar.intra_op.rules import rules
from autopar.ir.graph import Node, Ref

# torch does not look at the shape of the second operand, and writes past the end of its gradient if
# the shape belongs to another `dim`.
UNCHECKED = {"aten._weight_norm"}


def schema_of(op: str) -> Any:
    """The schema of an operator of torch, None of one that torch has not."""
    space, _, name = op.partition(".")
    name, _, overload = name.partition(".")
    found = getattr(getattr(torch.ops, space), name, None)
    found = getattr(found, overload or "default", None)
    return None if found is None else found._schema


def has_tensor(value: object) -> bool:
    if isinstance(value, tuple):
        return any(map(has_tensor, value))
    return isinstance(value, Ref)


def with_defaults(node: Node, schema: Any, *, explicit: bool) -> Node:
    """The call with every default written out, or with none; tensors stay."""
    args, keywords = [], {}
    for place, argument in enumerate(schema.arguments):
        given = place < len(node.args)
        value = node.args[place] if given else node.keyword(argument.name, ...)
        optional = argument.has_default_value() and not has_tensor(value)
        if optional:
            if not explicit:
                if not argument.kwarg_only:
                    break  # what follows is optional, too
                continue
            value = argument.default_value
            value = tuple(value) if isinstance(value, list) else value
        if argument.kwarg_only:
            keywords[argument.name] = value
        else:
            args.append(value)
    return replace(node, args=tuple(args), kwargs=tuple(keywords.items()))


def calls() -> Iterator[Any]:
    for op, rule in rules().items():
        schema = schema_of(op) if op.startswith("aten.") and op not in UNCHECKED else None
        for example in rule.examples if schema is not None else ():
            yield pytest.param(rule, example, schema, id=f"{op}({example})")


def run(case: Case, node: Node) -> Case | None:
    """A call on the operands of a case, None where torch refuses it."""
    names = {f"x{number}": tensor for number, tensor in enumerate(case.operands)}
    try:
        return read_call(case.rule, node, [names[name] for name in node.inputs])
    except (RuleError, KeyError):
        return None


@pytest.mark.parametrize(("rule", "example", "schema"), list(calls()))
def test_an_argument_left_out_is_torchs_default(rule: Any, example: str, schema: Any) -> None:
    case = read_example(rule, example)
    short, long = (
        run(case, with_defaults(case.node, schema, explicit=explicit)) for explicit in (False, True)
    )
    if short is None or long is None or short.types != long.types:
        pytest.skip("torch takes this example with other arguments only")
    assert short.node.types == long.node.types
    assert short.signature == long.signature

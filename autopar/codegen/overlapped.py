"""The lines of collectives that run beside linears; see `autopar/ir/fusion/overlapped.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.codegen.literals import comment, names_text
from autopar.ir.collective import Step
from autopar.ir.fusion.overlapped import LINEAR, SHARE
from autopar.ir.graph import Node

if TYPE_CHECKING:
    from autopar.codegen.scope import Scope


def overlapped(scope: Scope, node: Node) -> bool:
    """Write a node with the collective before or behind it, if they run at a time."""
    if node.op not in (LINEAR, SHARE) or not scope.printer.overlaps.near:
        return False
    return _gathered(scope, node) or _scattered(scope, node)


def _gathered(scope: Scope, node: Node) -> bool:
    """What linears read is gathered while they run: `q, k, v = mesh.all_gather_linear(...)`."""
    printer = scope.printer
    held = scope.look_up(node.inputs[0])
    found = printer.overlaps.gather(node, held.layout)
    if found is None:
        return False
    for name in (name for linear in found.linears for name in linear.inputs[1:]):
        scope.ahead(name)
    scope.cite(found.linears[0].source)
    read = iter(scope.operands(printer.overlaps.parameters(found)))
    given = [[next(read) for _ in linear.inputs[1:]] for linear in found.linears]
    weights = [weight for weight, *_ in given]
    biases = [bias[0] if bias else "None" for _, *bias in given]
    scope.read(found.value.name)
    scope.hold(node.name, held.variable, held.layout)
    variables = []
    for linear in found.linears:
        variables.append(scope.fresh(scope.wish(linear)))
        scope.hold(linear.name, variables[-1], printer.result(linear.name))
    operands = [held.variable, f"[{', '.join(weights)}]"]
    operands += [f"[{', '.join(biases)}]"] if set(biases) != {"None"} else []
    scope.lines.append(comment(printer.step_note(found.step, found.value.type)))
    note = "; ".join(
        f"{linear.type.dtype}{printer.result(linear.name).format(linear.type.shape)}"
        for linear in found.linears
    )
    targets = ", ".join(variables) if len(variables) > 1 else f"({variables[0]},)"
    scope.line(f"{targets} = mesh.all_gather_linear({_call(operands, found.step)})", note)
    return True


def _scattered(scope: Scope, node: Node) -> bool:
    """What a linear gives is scattered as it is made: `y = mesh.linear_reduce_scatter(...)`."""
    found = scope.printer.overlaps.scatter(node)
    if found is None:
        return False
    scope.cite(node.source)
    operands = scope.operands(zip(node.inputs, found.operands, strict=True))
    variable = scope.fresh(scope.wish(node))
    scope.hold(node.name, variable, found.step.dst)
    note = scope.printer.step_note(found.step, node.type)
    scope.line(f"{variable} = mesh.linear_reduce_scatter({_call(operands, found.step)})", note)
    return True


def _call(operands: list[str], step: Step) -> str:
    return f"{', '.join(operands)}, dim={step.dim}, axis={names_text(step.axes)}"

"""Recurrent layers: the batch can be split; a step needs the whole state and all weights."""

from __future__ import annotations

from collections.abc import Callable

from autopar.intra_op.rule import all_whole, rule
from autopar.ir.graph import Node
from autopar.ir.tensor import TensorType

Types = tuple[TensorType, ...]


def _layers(states: int) -> Callable[[Node, Types], str]:
    """Returns the rule of a stack of recurrent layers with `states` states per layer.

    Arguments of the operator: input, states, weights, has_biases, layers, dropout, train,
    bidirectional, batch_first. Dropout draws its numbers for the whole batch.
    """

    def spec(node: Node, types: Types) -> str:
        dropped = node.args[5] and node.args[6]
        if len(types[0].shape) != 3 or dropped:
            return all_whole(node, types)
        first = node.args[8]
        sequence = "b {s}! {w}!" if first else "{s}! b {w}!"
        terms = [sequence.format(s="s", w="i"), *(f"l! b h{k}!" for k in range(states))]
        for number, weight in enumerate(types[1 + states :]):
            terms.append(" ".join(f"w{number}_{i}!" for i in range(len(weight.shape))))
        outs = [sequence.format(s="s", w="o"), *(f"l! b h{k}!" for k in range(states))]
        return f"{', '.join(terms)} -> {', '.join(outs)}"

    return spec


def _flops(states: int) -> Callable[[Node, Types], str]:
    """Counts every weight once per element of the sequence."""

    def flops(node: Node, types: Types) -> str:
        steps = types[0].numel // types[0].shape[-1]
        return f"2 {steps * sum(t.numel for t in types[1 + states :] if len(t.shape) == 2)}"

    return flops


def _example(gates: int, states: int, tail: str, batch_first: bool = True) -> str:
    sequence = "f64[4, 2, 6]" if batch_first else "f64[2, 4, 6]"
    hidden = ", ".join(["f64[2, 4, 2]"] * states)
    hidden = f"({hidden})" if states > 1 else hidden
    rows = 2 * gates
    shapes = [f"f64[{rows}, 6]", f"f64[{rows}, 2]", f"f64[{rows}, 2]", f"f64[{rows}, 2]"]
    return f"{sequence}, {hidden}, ({', '.join(shapes)}), {tail}, {batch_first}"


_TAIL, _DROPS = "False, 2, 0.0, True, False", "False, 2, 0.5, True, False"
# Operator -> (gates, states).
_KINDS = {"lstm": (4, 2), "gru": (3, 1), "rnn_tanh": (1, 1), "rnn_relu": (1, 1)}
RULES = tuple(
    rule(
        f"aten.{name}.input",
        _layers(states),
        flops=_flops(states),
        examples=(
            _example(gates, states, _TAIL),
            _example(gates, states, _TAIL, batch_first=False),
            _example(gates, states, _DROPS),
        ),
    )
    for name, (gates, states) in _KINDS.items()
)

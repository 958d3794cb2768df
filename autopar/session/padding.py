"""Pads batches of any length to one of a few lengths, for each of which a program is compiled.

The length of a batch is the second dimension of its tensors. Padding has no effect on the loss:
padded labels have the index that the loss ignores, and the attention mask is zero. If padding would
affect the loss, an error names the input.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import BatchError, OptionError
from autopar.ir.graph import COUNTS, Arg, Graph
from autopar.ir.graph_text import parse_graph
from autopar.ir.rewrite import argument
from autopar.passes.loss.loss_parts import is_linear
from autopar.passes.loss.means import LABELLED

LABELS, MASK = "labels", "attention_mask"
# Inputs of transformers' models whose values do not matter where the attention mask is zero.
_MASKED = ("input_ids", "token_type_ids", "position_ids", "inputs_embeds")
_IGNORED = -100


@dataclass(frozen=True)
class Padding:
    """Lengths to which batches are padded at their end.

    Attributes:
        lengths: increasing; a batch takes the first length that is large enough.
        values: input -> the padding value. The named inputs are padded without checks, so a model
            without an attention mask, such as a causal one, names all of its inputs.

    Raises:
        OptionError: the lengths do not increase.
    """

    lengths: tuple[int, ...]
    values: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))
        positive = bool(self.lengths) and self.lengths[0] > 0
        if not positive or any(a >= b for a, b in pairwise(self.lengths)):
            raise OptionError(
                f"pad_to is {list(self.lengths)}",
                why="increasing lengths are expected, such as [64, 128, 256]",
            )

    def of_call(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a call, padded.

        Raises:
            BatchError: the batch is longer than all lengths, has an input without a padding value,
                or the model takes no attention mask.
        """
        signature = inspect.signature(model.forward).parameters
        names = [*signature][: len(args)]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        length = self._length(given)
        target = next((wanted for wanted in self.lengths if wanted >= length), None)
        if target is None:
            raise BatchError(
                f"the batch has length {length}",
                why=f"pad_to ends at {self.lengths[-1]}",
                todo="cut the batch, or add a length to pad_to",
            )
        wide = {name: value for name, value in given.items() if _is_long(value, length)}
        if not set(wide) <= set(self.values):
            self._add_mask(given, wide, signature, length)
        padded = {name: self._padded(name, value, target) for name, value in wide.items()}
        changed = {**given, **padded}
        return tuple(changed[name] for name in names), {
            name: value for name, value in changed.items() if name not in names
        }

    def _length(self, given: Mapping[str, Any]) -> int:
        """Returns the length of the batch: the second dimension of its first known input."""
        known = (*self.values, *_MASKED, LABELS, MASK)
        for name in known:
            value = given.get(name)
            if isinstance(value, Tensor) and value.dim() > 1:
                return value.shape[1]
        raise BatchError(
            "the length of the batch is unknown",
            why=f"none of its inputs is called {', '.join(known)}",
            todo='say how they are padded: pad_to=autopar.Padding([64, 128], {"words": 0, '
            '"tags": -100})',
        )

    def _add_mask(
        self, given: dict[str, Any], wide: dict[str, Any], signature: Mapping[str, Any], length: int
    ) -> None:
        """Adds the mask of all tokens, which a model with masks assumes where none is passed."""
        if given.get(MASK) is not None:
            return
        if MASK not in signature:
            raise BatchError(
                "the model has no attention mask that could hide padding",
                why=f"its forward takes {', '.join(signature)}",
                todo="say how every input is padded, if that has no effect: "
                'pad_to=autopar.Padding([64, 128], {"words": 0, "tags": -100})',
            )
        like = next(iter(wide.values()))
        wide[MASK] = torch.ones(len(like), length, dtype=torch.int64, device=like.device)

    def _padded(self, name: str, value: Tensor, target: int) -> Tensor:
        """Returns an input of the target length."""
        if name in self.values:
            added = self.values[name]
        elif name in (*_MASKED, MASK):
            added = 0
        elif name == LABELS:
            added = _IGNORED
        else:
            raise BatchError(
                f"the input {name!r} cannot be padded",
                why="its fill value is not known",
                todo=f'pass pad_to=autopar.Padding({list(self.lengths)}, {{"{name}": ...}})',
            )
        more = [0, 0] * (value.dim() - 2) + [0, target - value.shape[1]]
        return F.pad(value, more, value=added)

    def check(self, graph: Graph) -> None:
        """Checks that padding has no effect in a captured call.

        Raises:
            BatchError: the loss counts padded labels, or the model does not read its mask.
        """
        leaves = {leaf.target: leaf for leaf in graph.leaves("input")}
        rows = max((leaf.type.shape[0] for leaf in leaves.values() if leaf.type.shape), default=1)
        why = f"it is a mean over {max(_means(graph), default=0)} elements, padded ones too"
        counted = any(count > rows for count in _means(graph))
        if not counted and LABELS in leaves and LABELS not in self.values:
            why = f"it ignores {sorted(_ignored(graph)) or 'no label'}; labels are padded by -100"
            counted = _IGNORED not in _ignored(graph)
        if counted:
            raise BatchError(
                "the loss counts padding",
                why=why,
                todo="pass ignore_index=-100 to the loss, divide by the sum of a mask, or name the "
                f'value that it ignores: autopar.Padding({list(self.lengths)}, {{"labels": ...}})',
            )
        if MASK in leaves and MASK not in self.values and not graph.users[leaves[MASK].name]:
            raise BatchError(
                "the model does not read its attention mask",
                why="attention would read the padding",
                todo="say how every input is padded, if that has no effect: autopar.Padding",
            )


def _is_long(value: Any, length: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length


def _ignored(graph: Graph) -> set[int]:
    """Returns the labels that losses ignore, or that the graph looks for."""
    graphs = [graph]
    for leaf in graph.leaves("input"):
        text = leaf.keyword(COUNTS)
        graphs += [parse_graph(text)] if isinstance(text, str) else []
    found: set[Arg] = set()
    for node in (node for one in graphs for node in one.nodes):
        if node.op in LABELLED:
            found.add(argument(node, 4, "ignore_index", _IGNORED))
        elif node.op == "aten.ne.Scalar":
            found.add(node.args[1])
        elif node.op == "kernels.linear_cross_entropy":
            found.add(node.args[3])
    return {value for value in found if isinstance(value, int)}


def _means(graph: Graph) -> list[int]:
    """Returns the numbers of elements over which the loss is a plain mean."""
    found, stack, seen = list[int](), [graph.loss or ""], set[str]()
    while stack:
        name = stack.pop()
        if name in seen or name not in graph:
            continue
        seen.add(name)
        node = graph[name]
        if not is_linear(node):
            continue
        total = graph[node.inputs[0]]
        if node.op == "aten.div.Tensor" and total.op.startswith("aten.sum"):
            whole = graph[total.inputs[0]].type.numel
            found += [whole] if node.args[1] == whole else []
        stack += [name for name in node.inputs if graph[name].requires_grad]
    return found


def padding_of(pad_to: Any) -> Padding | None:
    """Returns the option `pad_to` as a value; raises OptionError if lengths do not increase."""
    return pad_to if pad_to is None or isinstance(pad_to, Padding) else Padding(tuple(pad_to))

"""Graph: the model's forward as a flat, frozen list of nodes in execution order.

Leaves come first: `input`, `param` and `buffer` nodes, whose first argument is the user's name
("input_ids", "transformer.wte.weight"), and `received` nodes, which a pipeline stage gets from an
earlier one (see stage_graphs.py). A `param` may be a piece of a parameter, cut along one dimension
(`dim=1, start=0, length=768`), so that the parts of a fused projection can be sharded separately.

All other nodes are ATen operators by name ("aten.linear", "aten.add.Tensor"; the overload "default"
is left out), `getitem` for operators with several results, `autopar.share` (the identity, see
shares.py), `autopar.shard` (the identity in a layout that the user requests, see annotation.py),
`autopar.detach`, the user's own torch.autograd.Functions ("function.models:Gelu", see
own_functions.py), fused kernels ("kernels.rms_norm", see fusion/), and `autopar.write(buffer,
value)`, which gives the buffer this value at the end of the step. Every other reader of a buffer
gets its value before the forward, wherever the read occurs. A `buffer('keys', cache=True)` is an
exception: it outlives a call of a program that generates, and its only reader, an
`aten.index_copy_`, writes rows into it at once and returns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.errors import GraphError
from autopar.ir.executed.execution import AS_WRITTEN, WHOLE, Execution, Part
from autopar.ir.tensor import TensorType

OVER = "over"  # keyword of an input of which every rank holds its part: the axes that split it
COUNTS = "counts"  # keyword of an input that the runtime adds up over microbatches: its graph
LEAVES = ("input", "param", "buffer", "received")
CACHE = "cache"  # keyword of a buffer that a generating program extends in place
WRITE = "autopar.write"
EXTEND = "aten.index_copy_"  # writes rows into a cache, and returns the cache
PREFIX = "kernels."  # of operators in `autopar.operators.kernels`
# Kernels that replace nodes of graph outputs, which are recomputed if they are asked for.
RECOMPUTED = ("kernels.linear_cross_entropy",)


@dataclass(frozen=True)
class Ref:
    """A reference to another node's value."""

    name: str

    def __str__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class Name:
    """A dtype or other symbolic constant in an argument list, such as `f32`."""

    text: str

    def __str__(self) -> str:
        return self.text


Arg = Ref | Name | int | float | bool | str | None | tuple["Arg", ...]


@dataclass(frozen=True)
class Source:
    """Location in the user's code that a node comes from; empty fields where unknown."""

    module: str = ""
    file: str = ""
    line: int = 0
    text: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file else ""
        return " | ".join(part for part in (self.module, place, self.text) if part)


@dataclass(frozen=True)
class Node:
    """One step, which produces a value.

    Attributes:
        name: unique, a Python identifier.
        op: leaf kind or operator name.
        args, kwargs: literals and references.
        types: one TensorType per result (one for nearly all operators).
        source: the user's module path and line.
        requires_grad: whether a gradient flows into its result.
        alias: name of the value whose storage the result shares, None for fresh storage.
        saved: names of the values that autograd saves for this node's backward (inputs, itself).
        saved_types: types of saved tensors that are not graph values (statistics, masks).
        part: its part of the kernel that runs it.
    """

    name: str
    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    types: tuple[TensorType, ...]
    source: Source = Source()
    requires_grad: bool = False
    alias: str | None = None
    saved: tuple[str, ...] = ()
    saved_types: tuple[TensorType, ...] = ()
    part: Part = WHOLE

    @property
    def type(self) -> TensorType:
        """Type of the first result."""
        return self.types[0]

    @property
    def is_leaf(self) -> bool:
        """Returns whether it is an input, parameter or buffer, or received from another stage."""
        return self.op in LEAVES

    @property
    def target(self) -> str:
        """Name of a leaf in the user's model."""
        if not self.is_leaf or not isinstance(self.args[0], str):
            raise GraphError(f"node %{self.name} ({self.op}) is not a leaf")
        return self.args[0]

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads, in argument order, with repeats."""
        values = (*self.args, *(value for _, value in self.kwargs))
        return tuple(ref.name for ref in iterate_refs(values))

    @cached_property
    def form(self) -> str:
        """Arguments as text, with numbers in place of references; a leaf's without its name.

        Text, because True == 1 and nan != nan.
        """
        number = {name: Ref(str(at)) for at, name in enumerate(dict.fromkeys(self.inputs))}
        args = tuple(map_arg(arg, number.__getitem__) for arg in self.args[self.is_leaf :])
        kwargs = tuple((key, map_arg(value, number.__getitem__)) for key, value in self.kwargs)
        return repr((args, kwargs))

    @property
    def is_cache(self) -> bool:
        """Returns whether it is a buffer that a generating program extends in place."""
        return self.op == "buffer" and self.keyword(CACHE) is True

    def keyword(self, name: str, default: Arg = None) -> Arg:
        """Returns the keyword argument `name`."""
        return dict(self.kwargs).get(name, default)

    def map_refs(self, rename: Callable[[str], Arg]) -> Node:
        """Returns the node with every reference replaced by `rename(name)`."""
        args = tuple(map_arg(arg, rename) for arg in self.args)
        kwargs = tuple((key, map_arg(value, rename)) for key, value in self.kwargs)
        return replace(self, args=args, kwargs=kwargs)


def iterate_refs(values: tuple[Arg, ...]) -> Iterator[Ref]:
    """Yields all references in nested arguments, in order."""
    for value in values:
        if isinstance(value, Ref):
            yield value
        elif isinstance(value, tuple):
            yield from iterate_refs(value)


def map_arg(arg: Arg, rename: Callable[[str], Arg]) -> Arg:
    """Returns `arg` with every reference replaced by `rename(name)`."""
    if isinstance(arg, Ref):
        return rename(arg.name)
    if isinstance(arg, tuple):
        return tuple(map_arg(item, rename) for item in arg)
    return arg


@dataclass(frozen=True)
class Repeat:
    """A run of equal blocks, found by structure.

    Attributes:
        iterations: for each block the names of its nodes, including per-block leaves; nodes at the
            same position of two blocks correspond.
        carried: pairs (value that enters the first block, node of the first block whose counterpart
            in block i enters block i + 1 in its place). Within each block a carried value is read
            by one `autopar.share` node only.
    """

    iterations: tuple[tuple[str, ...], ...]
    carried: tuple[tuple[str, str], ...]

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.iterations)


@dataclass(frozen=True)
class Graph:
    """A model's forward.

    Attributes:
        name: the model's class or zoo name.
        nodes: in execution order, leaves first.
        outputs: (user's name, node name), the loss first if there is one.
        loss: node name of the scalar to differentiate, None for an inference-only graph.
        repeats: runs of equal blocks, in execution order, disjoint.
        execution: how a system runs the kernels of its operators.
    """

    name: str
    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, str], ...]
    loss: str | None = None
    repeats: tuple[Repeat, ...] = field(default=())
    execution: Execution = AS_WRITTEN

    def __getitem__(self, name: str) -> Node:
        try:
            return self._by_name[name]
        except KeyError:
            raise GraphError(f"graph {self.name} has no node %{name}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def root(self, name: str) -> Node:
        """Returns the node whose storage a value uses: its own, or that of which it is a view."""
        node = self[name]
        while node.alias is not None:
            node = self[node.alias]
        return node

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def users(self) -> dict[str, tuple[str, ...]]:
        """For each value the nodes that read it, in execution order, without repeats."""
        users: dict[str, list[str]] = {node.name: [] for node in self.nodes}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                users[name].append(node.name)
        return {name: tuple(readers) for name, readers in users.items()}

    @cached_property
    def template(self) -> dict[str, str]:
        """Node name -> its counterpart in the first block of its run (itself outside runs)."""
        names = {node.name: node.name for node in self.nodes}
        for repeat in self.repeats:
            for iteration in repeat.iterations:
                names.update(zip(iteration, repeat.iterations[0], strict=True))
        return names

    @cached_property
    def held_as(self) -> dict[str, str]:
        """Value that leaves the last block of a run -> the share whose layout it has.

        Both sides of a share have the same layout.
        """
        share_of: dict[str, str] = {}
        for repeat in self.repeats:
            last = dict(zip(repeat.iterations[0], repeat.iterations[-1], strict=True))
            for entry, leaves in repeat.carried:
                readers = (n for n in self.users[entry] if n in repeat.iterations[0])
                share_of[last[leaves]] = next(readers)
        return share_of

    @cached_property
    def multiplicity(self) -> dict[str, int]:
        """Node of `folded` -> number of its counterparts in the whole graph."""
        counts: dict[str, int] = {}
        for name in self.template.values():
            counts[name] = counts.get(name, 0) + 1
        return counts

    @cached_property
    def folded(self) -> tuple[Node, ...]:
        """Representative nodes: everything outside runs, and the first block of each run."""
        return tuple(node for node in self.nodes if self.template[node.name] == node.name)

    @cached_property
    def aside(self) -> frozenset[str]:
        """Operators outside blocks that outputs need but the loss does not.

        They run only if these outputs are asked for, so never in a training step. This happens only
        where a kernel has replaced operators on the way to the loss.
        """
        if self.loss is None or not any(node.op in RECOMPUTED for node in self.nodes):
            return frozenset()
        wanted = {self.loss} | {node.name for node in self.nodes if node.op == WRITE}
        for node in reversed(self.nodes):
            wanted.update(node.inputs if node.name in wanted else ())
        wanted.update(name for repeat in self.repeats for it in repeat.iterations for name in it)
        return frozenset(n.name for n in self.nodes if not n.is_leaf and n.name not in wanted)

    @cached_property
    def trained(self) -> Graph:
        """The graph of a training step: all nodes except for those in `aside`."""
        if not self.aside:
            return self
        nodes = tuple(node for node in self.nodes if node.name not in self.aside)
        outputs = tuple((user, name) for user, name in self.outputs if name not in self.aside)
        return replace(self, nodes=nodes, outputs=outputs)

    def leaves(self, kind: str) -> tuple[Node, ...]:
        """Returns all leaves of one kind, in order."""
        return tuple(node for node in self.nodes if node.op == kind)

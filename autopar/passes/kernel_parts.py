"""Assigns every operator to a part of a kernel, under the graph's execution.

A compiler makes one kernel of neighbouring operators if there is no matrix product between them.
Each operator has a level, one above the products that it needs; operators of a level that read
one another form one kernel. A kernel reads each external value once, and writes those of its
values that are read outside. In the backward, it reads the gradients of the values that it wrote,
one for each kernel that read them, and the values that the forward saved. Inner values are
recomputed (PyTorch 2, ASPLOS 2024, section 4.3, calls this rematerialisation in the backward).

Linears that read the same value form one product with concatenated columns, and their input has one
gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.ir.executed.execution import AS_WRITTEN, WHOLE, Part
from autopar.ir.executed.library_kernels import CONVOLUTIONS, base, is_library
from autopar.ir.graph import PREFIX, Graph, Node
from autopar.ir.rewrite import argument

LOSS = "cross_entropy_loss"
CAST_LOSS = ("to", LOSS)  # logits become f32 as a compiled loss reads them
SHARE = "autopar.share"
REREAD = ("softmax", "log_softmax", "layer_norm", LOSS)


def part_kernels(graph: Graph) -> Graph:
    """Returns the graph with the part of every operator, and the tensors that its kernels save."""
    if graph.execution == AS_WRITTEN:
        return graph
    kernels = _Kernels(graph)
    return _Saved(graph, kernels.parts(), kernels.kernel).applied()


class _Kernels:
    """The kernels of the folded graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph, how = graph, graph.execution
        # A stage may be a single block, in which nothing repeats.
        blocks = [name for repeat in graph.repeats for name in repeat.iterations[0]]
        self.inside = set(blocks or (node.name for node in graph.nodes))
        chains = [*how.fused, *([CAST_LOSS] if how.loss == "compiled" else [])]
        groups = [*self._regions(how.compiled), *self._chains(chains)]
        self.kernel: dict[str, object] = {}
        for number, group in enumerate(groups):
            for node in group:
                self.kernel.setdefault(node.name, number)
        self.joined = dict(self._joined()) if how.merged else {}
        self.readers: dict[str, set[object]] = {}
        for node in graph.nodes:
            for name in () if _is_view(node) else node.inputs:
                self.readers.setdefault(behind(graph, name).name, set()).add(self._reader(node))

    def _reader(self, node: Node) -> object:
        """Returns the kernel that an operator of any block is of, or its own name."""
        first = self.graph.template[node.name]
        own = self.joined[first][0] if first in self.joined else self.kernel.get(first, first)
        return own if first == node.name else ("later", own)

    def parts(self) -> dict[str, Part]:
        """Returns the part of every operator of the folded graph."""
        graph, how, seen = self.graph, self.graph.execution, set[tuple[object, str]]()
        results = {name for _, name in graph.outputs}
        found: dict[str, Part] = {}
        for node in graph.folded:
            if node.is_leaf:
                continue
            own, sources = self.kernel.get(node.name), [behind(graph, n).name for n in node.inputs]
            if node.op == SHARE:
                found[node.name] = self._shared(node)
            elif _is_view(node):
                near = {self.kernel.get(name) for name in (*sources, *self._read_by(node))}
                inside = sources[0] in self.kernel and not found[sources[0]].readers
                found[node.name] = Part(fused=near != {None}, readers=int(not inside))
            elif own is not None:
                reads = []
                for place, source in enumerate(sources):
                    if self.kernel.get(source) != own and (own, source) not in seen:
                        reads.append(place)
                    seen.add((own, source))
                outside = self.readers.get(node.name, set()) - {own}
                written = len(outside) or int(node.name in results)
                again = bool(reads) and _over_rows(node)
                found[node.name] = Part(
                    fused=True, reads=tuple(reads), readers=written, rereads=again
                )
            elif base(node.op) == "linear":
                share, source = self.joined.get(node.name, ("", 1.0))[1], sources[0]
                first = ("cast", source) not in seen
                seen.add(("cast", source))
                inside = node.name in self.inside and len(graph[node.inputs[1]].type.shape) == 2
                narrow = how.linears if inside else ""
                # A compiler casts a value once for all its readers.
                casts = bool(narrow) and (first or not how.compiled)
                kept = bool(narrow) and how.primary
                found[node.name] = Part(share=share, narrow=narrow, casts=casts, primary=kept)
            elif base(node.op) == LOSS:
                found[node.name] = Part(loss=how.loss)
            if how.convolutions and base(node.op) in CONVOLUTIONS:
                found[node.name] = replace(found.get(node.name, WHOLE), direct=True)
            if how.deterministic and base(node.op) == "scaled_dot_product_attention":
                found[node.name] = replace(found.get(node.name, WHOLE), ordered=True)
            if how.reductions and base(node.op) in REREAD:
                found[node.name] = replace(found.get(node.name, WHOLE), rereads=True)
        return found

    def _shared(self, node: Node) -> Part:
        """Returns the part of a share: gradients of one kernel are one, and are added in it."""
        if behind(self.graph, node.name).name in self.kernel:
            return Part(fused=True, sums=1)
        readers = [n for n in self._read_by(node) if self.graph[n].requires_grad]
        kernels = {self._reader(self.graph[name]) for name in readers}
        return Part(fused=any(n in self.kernel for n in readers), sums=len(kernels))

    def _read_by(self, node: Node) -> Iterator[str]:
        """Yields the operators that read a value, directly or through views."""
        for name in self.graph.users[node.name]:
            if _is_view(self.graph[name]):
                yield from self._read_by(self.graph[name])
            else:
                yield name

    def _joined(self) -> Iterator[tuple[str, tuple[str, float]]]:
        """Yields linears that are a part of one product: the first of them, and their share."""
        groups: dict[str, list[Node]] = {}
        for node in self.graph.folded:
            if base(node.op) == "linear":
                groups.setdefault(node.inputs[0], []).append(node)
        for group in groups.values():
            columns = sum(node.type.shape[-1] for node in group)
            for node in group if len(group) > 1 else ():
                yield node.name, (group[0].name, node.type.shape[-1] / columns)

    def _regions(self, compiled: str) -> Iterator[Sequence[Node]]:
        """Yields the operators of each kernel of a compiler, in order."""
        nodes = [node for node in self.graph.folded if not node.is_leaf]
        scopes = [[n for n in nodes if n.name in self.inside]] if compiled else []
        scopes += [[n for n in nodes if n.name not in self.inside]] if compiled == "all" else []
        for scope in scopes:
            yield from (group for group in _levelled(self.graph, scope) if len(group) > 1)

    def _chains(self, patterns: Sequence[Sequence[str]]) -> Iterator[Sequence[Node]]:
        """Yields operators in a row as in a pattern, each read by the next alone."""
        for node in self.graph.folded if patterns else ():
            for pattern in patterns:
                row = [node]
                while base(row[-1].op) == pattern[len(row) - 1]:
                    if len(row) == len(pattern):
                        yield row
                        break
                    after = list(self._read_by(row[-1]))
                    if len(after) != 1:
                        break
                    row.append(self.graph[after[0]])


def _levelled(graph: Graph, scope: Sequence[Node]) -> Iterator[Sequence[Node]]:
    level: dict[str, int] = {}
    region: dict[str, int] = {}
    members: dict[int, list[Node]] = {}
    for node in scope:
        reads = [n for n in (behind(graph, name) for name in node.inputs) if n.name in level]
        level[node.name] = max((level[n.name] + _is_product(n) for n in reads), default=0)
        if _is_product(node) or _is_view(node):
            continue
        near = {
            region[n.name] for n in reads if n.name in region and level[n.name] == level[node.name]
        }
        into = min(near, default=len(region) + 1)
        for other in near - {into}:
            for moved in members.pop(other):
                region[moved.name] = into
                members[into].append(moved)
        members.setdefault(into, []).append(node)
        region[node.name] = into
    yield from members.values()


def _is_product(node: Node) -> bool:
    return is_library(base(node.op), len(node.inputs)) or node.op.startswith(PREFIX)


def _over_rows(node: Node) -> bool:
    """Returns whether an operator sums over all rows, as batch statistics do.

    Operators that need the sum begin after all rows have been read, and read them again.
    """
    dims = argument(node, 1, "dim")
    if base(node.op) != "sum" or not isinstance(dims, tuple):
        return False
    rank = len(node.type.shape) if argument(node, 2, "keepdim") is True else 0
    inside = {dim % rank for dim in dims if isinstance(dim, int)} if rank else set()
    return bool(inside) and inside != set(range(rank - len(inside), rank))


def _is_view(node: Node) -> bool:
    return node.op == SHARE or (node.alias is not None and not node.is_leaf)


def behind(graph: Graph, name: str) -> Node:
    """Returns the node that computes a value, without the shares and views between."""
    node = graph[name]
    while _is_view(node):
        node = graph[node.inputs[0] if node.alias is None else node.alias]
    return node


@dataclass(frozen=True)
class _Saved:
    """A graph with the parts of its operators, and the kernels that several operators share."""

    graph: Graph
    parts: dict[str, Part]
    kernel: dict[str, object]

    def applied(self) -> Graph:
        """Returns the graph with parts, and with the tensors that its kernels save."""
        saved = dict(self._saved())
        nodes = []
        for node in self.graph.nodes:
            first = self.graph[self.graph.template[node.name]]
            part = self.parts.get(first.name, WHOLE)
            if first.name in saved:
                names = {**dict(zip(first.inputs, node.inputs, strict=True)), first.name: node.name}
                own = tuple(names[name] for name in saved[first.name])
                # A random mask is not computed again; statistics are.
                types = node.saved_types if base(node.op) == "dropout" else ()
                node = replace(node, part=part, saved=own, saved_types=types)
            else:
                node = replace(node, part=part)
            nodes.append(node)
        return replace(self.graph, nodes=tuple(nodes))

    def _saved(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yields the tensors that each fused operator saves: its own among those of its kernel."""
        for group in self._groups():
            inside = {node.name for node in group if not self.parts[node.name].readers}
            wanted = {behind(self.graph, name).name for node in group for name in node.saved}
            own = {n.name: [n.inputs[at] for at in self.parts[n.name].reads] for n in group}
            if wanted & inside or any(node.saved_types for node in group):
                reads = (name for names in own.values() for name in names)
                wanted |= {behind(self.graph, n).name for n in reads if self.graph[n].requires_grad}
            for node in group:
                kept = [n for n in own[node.name] if behind(self.graph, n).name in wanted]
                kept += [node.name] if node.name in wanted - inside else []
                yield node.name, tuple(dict.fromkeys(kept))

    def _groups(self) -> Iterator[list[Node]]:
        """Yields the operators of each kernel."""
        kernels: dict[object, list[Node]] = {}
        for node in self.graph.folded:
            if node.name in self.kernel:
                kernels.setdefault(self.kernel[node.name], []).append(node)
        yield from kernels.values()

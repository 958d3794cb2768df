"""Graph + Plan -> the source of a program in ordinary PyTorch.

One function for each repeated block, called in a loop, and `forward`, which calls them. Every value
carries its layout as a comment, every collective its size and predicted time in each direction, and
above the lines stands the user's own. The steps printed are those that the planner priced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

from autopar.codegen.allowed import check_source, names_in
from autopar.codegen.draws import draw_function
from autopar.codegen.keys import block_keys, leaf_key
from autopar.codegen.literals import docstring, identifier, quoted
from autopar.codegen.loops import Block, call
from autopar.codegen.ops import draws_random_numbers
from autopar.codegen.printer import Printer
from autopar.codegen.scope import WIDTH, Scope
from autopar.ir.collective import Collective, Resharder
from autopar.ir.functions import called
from autopar.ir.graph import Graph, Node, Repeat
from autopar.ir.offload import offloaded_runs
from autopar.ir.precision import AS_IS
from autopar.ir.recompute import common_module, of_runs
from autopar.ir.rewrite import writes
from autopar.ir.tensor import Layout, TensorType
from autopar.ir.units import format_bytes, format_seconds
from autopar.plan import Plan


def emit(graph: Graph, plan: Plan, price: Callable[[Collective], float]) -> str:
    """The program's source.

    Args:
        graph: prepared, with its repeats.
        plan: a layout for every node of the folded graph.
        price: seconds of one collective, for the comments and the choice of steps.

    Returns:
        Python text that defines MESH, INPUTS and OUTPUTS (name -> type and layout), LOSS, RANDOM,
        WRITTEN (keys of the buffers that it writes, where there are any), `parameters()` and
        `forward(mesh, p, batch)`, where `p` holds the local parameters and buffers by
        `Parameter.key` and `batch` the whole inputs by name. `forward` returns the graph's outputs
        by name in the layouts of OUTPUTS. A stage of a pipeline also defines
        RECEIVED, what it has from other stages; `batch` holds that in the layouts told there. A
        stage, or a program of microbatches, that draws random numbers also defines `draw(mesh)`.

    Raises:
        PlanMismatchError: the plan has no layout for a node.
        LayoutError: a layout does not fit its value.
    """
    resharder = Resharder(plan.mesh, price, plan.precision.widened)
    printer = Printer(graph, plan, resharder, price)
    blocks: list[Block] = []
    for repeat in graph.repeats:
        blocks.append(_block(printer, repeat, {block.function for block in blocks}))
    body = _forward(printer, blocks)
    outputs = "".join(
        f"    {quoted(name)}: {_typed(graph[node].type, _output_layout(printer, node))},\n"
        for name, node in graph.outputs
    )
    inputs = "".join(
        f"    {quoted(leaf.target)}: {quoted(str(leaf.type))},\n" for leaf in graph.leaves("input")
    )
    received = "".join(
        f"    {quoted(leaf.target)}: {_received(printer, leaf)},\n"
        for leaf in graph.leaves("received")
    )
    loss = next((name for name, node in graph.outputs if node == graph.loss), None)
    random = any(draws_random_numbers(node) for node in graph.folded)
    table = _parameters(printer, blocks)
    functions = [block.source for block in blocks] + [body]
    ahead = random and (_is_stage(graph) or plan.microbatches > 1)
    functions += [draw_function(graph)] if ahead else []
    code = "\n\n\n".join([table, *functions])
    used = names_in(code)
    imports, own = _imports(used | ({"received"} if received else set()))
    constants = "aten = torch.ops.aten\n" if "aten" in used else ""
    if calls := sorted({f[0] for node in graph.folded if (f := called(node)) is not None}):
        constants += f"functions = find_all({', '.join(map(quoted, calls))})\n"
    source = (
        f"{_header(graph, plan)}\n\n"
        + "\n".join([*imports, "", *own])
        + f"\n\n{constants}MESH = {quoted(str(plan.mesh))}\nINPUTS = {{\n{inputs}}}\n"
        + (f"RECEIVED = {{\n{received}}}\n" if received else "")
        + f"OUTPUTS = {{\n{outputs}}}\n"
        + (f"LOSS = {quoted(loss)}\n" if loss else "LOSS = None\n")
        + (f"PRECISION = {quoted(str(plan.precision))}\n" if plan.precision != AS_IS else "")
        + (_HOST_STATE if plan.offload.optimizer else "")
        + (_FUSED_UPDATE if plan.fuses_update else "")
        + (_ASIDE if graph.aside else "")
        + _written(graph)
        + f"BUCKET = {plan.bucket}  # bytes of gradients, or of parameters, that go together\n"
        + f"RANDOM = {random}  # whether it draws random numbers\n\n\n{code}\n"
    )
    check_source(source)
    return source


_ASIDE = "ASIDE = True  # whether there are outputs that forward(..., outputs=False) leaves out\n"
_FUSED_UPDATE = "FUSED_UPDATE = True  # AdamW's step is a kernel\n"
_HOST_STATE = "HOST_STATE = True  # optimizer state lies in host memory between updates\n"


def _written(graph: Graph) -> str:
    """The line that names the buffers that `forward` writes, if it writes any."""
    keys: dict[str, None] = {}
    for node in graph.nodes:
        for name in writes(node):
            while not graph[name].is_leaf:  # a view
                name = graph[name].inputs[0]
            keys[leaf_key(graph[name])] = None
    if not keys:
        return ""
    return f"WRITTEN = ({''.join(f'{quoted(key)}, ' for key in keys).rstrip()})  # by forward\n"


def _is_stage(graph: Graph) -> bool:
    """Whether it receives or sends values."""
    sends = any(name.startswith("%") for name, _ in graph.outputs)
    return sends or bool(graph.leaves("received"))


def _imports(used: Collection[str]) -> tuple[list[str], list[str]]:
    """Imports of libraries and of the project that bind the names a program uses."""
    library = {
        "import torch": ("torch", "aten"),
        "import torch.nn.functional as F": ("F",),
        "from torch.utils.checkpoint import checkpoint": ("checkpoint",),
    }
    runtime = [name for name in ("received", "stored", "together") if name in {*used, "stored"}]
    again = [name for name in ("keep_products", "repeatable") if name in used]
    own = {
        f"from autopar.codegen.recompute import {', '.join(again)}": again,
        f"from autopar.codegen.runtime import {', '.join(runtime)}": used,
        "from autopar.codegen.state import Piece": ("Piece",),
        "from autopar.ir import kernels": ("kernels",),
        "from autopar.ir.functions import find_all": ("functions",),
    }
    found = [
        [line for line, names in part.items() if {*names} & {*used}] for part in (library, own)
    ]
    return found[0], found[1]


def _header(graph: Graph, plan: Plan) -> str:
    figures = plan.predicted
    lines = [f"{graph.name} on {plan.mesh}, written by autopar from a plan; edit it freely.", ""]
    if "step_seconds" in figures and "peak_bytes" in figures:
        lines.append(
            f"Predicted: {format_seconds(figures['step_seconds'])} a step, "
            f"{format_bytes(figures['peak_bytes'])} a device at the peak."
        )
    lines += [plan.precision.caution] if plan.precision.caution else []
    return docstring(
        [
            *lines,
            "A comment such as f32[8@data, 64] +sum(tensor) is the value's dtype, global shape and",
            "layout: split over data, and along tensor a part of a sum that is still owed.",
        ]
    )


def _output_layout(printer: Printer, node: str) -> Layout:
    """The loss ends whole on every device, other outputs stay as they are."""
    tensor = printer.graph[node].type
    if node == printer.graph.loss:
        return Layout.replicated(len(tensor.shape))
    carried = _leaving(printer.graph).get(node)
    return printer.result(node) if carried is None else printer.planned(carried).operands[0][1]


def _leaving(graph: Graph) -> dict[str, str]:
    """Value of the last block of a run that leaves it -> the share in whose layout it is held."""
    found = {}
    for repeat in graph.repeats:
        last = dict(zip(repeat.iterations[0], repeat.iterations[-1], strict=True))
        for entry, leaving in repeat.carried:
            inside = set(repeat.iterations[0])
            found[last[leaving]] = next(n for n in graph.users[entry] if n in inside)
    return found


def _read(node: Node) -> str:
    """The expression for a leaf outside of blocks."""
    return f"p[{quoted(leaf_key(node))}]"


def _block(printer: Printer, repeat: Repeat, taken: Collection[str]) -> Block:
    """The function of one run of blocks, not called as any of `taken`.

    It takes the carried values, and returns them for the next block.
    """
    graph, first = printer.graph, repeat.iterations[0]
    inside = set(first)
    nodes = [graph[name] for name in first if not graph[name].is_leaf]
    entries = [entry for entry, _ in repeat.carried]
    leaving = [leaves for _, leaves in repeat.carried]
    shares = {e: next(n for n in graph.users[e] if n in inside) for e in entries}
    reads = dict.fromkeys(name for node in nodes for name in node.inputs)
    outside = tuple(
        name
        for name in reads
        if name not in inside and name not in entries and graph[name].op not in ("param", "buffer")
    )
    module = common_module(graph, repeat)
    function = wish = identifier(f"{module[-1] if module else 'repeated'}_block")
    for number in itertools.count(2):
        if function not in taken:
            break
        function = f"{wish}_{number}"
    keys = block_keys(graph, repeat, function)
    scope = Scope(
        printer,
        nodes,
        lambda name: keys.read(name) if name in inside else _read(graph[name]),
        leaving,
    )
    arguments = []
    for name in entries:
        variable = scope.fresh("hidden")
        scope.hold(name, variable, printer.planned(shares[name]).operands[0][1])
        arguments.append(variable)
    for name in outside:
        variable = scope.fresh(scope.wish(graph[name]))
        scope.hold(name, variable, printer.result(name))
        arguments.append(variable)
    for node in nodes:
        scope.add(node)
    results = scope.operands(
        (leaves, printer.planned(shares[entry]).operands[0][1]) for entry, leaves in repeat.carried
    )
    notes = [
        f"{argument}: {_noted(printer, name, shares)}"
        for argument, name in zip(arguments, [*entries, *outside], strict=True)
    ]
    index = "names" if keys.table else "i"
    head = f"def {function}(mesh, p, {index}, {', '.join(arguments)}):"
    text = docstring([f"One of {repeat.count} equal blocks.", "", *notes]).split("\n")
    lines = [*text, *scope.lines, f"return {', '.join(results)}"]
    source = "\n".join([head, *_indented(lines)])
    written = {name for node in graph.nodes for name in writes(node)}
    leaves = (
        keys.read(name) if name in inside else _read(graph[name])
        for name in reads
        if name in written
    )
    changing = tuple(leaf.removeprefix("p[").removesuffix("]") for leaf in leaves)
    return Block(repeat, function, keys, outside, source, changing)


def _noted(printer: Printer, name: str, shares: dict[str, str]) -> str:
    layout = (
        printer.planned(shares[name]).operands[0][1] if name in shares else printer.result(name)
    )
    tensor = printer.graph[name].type
    return f"{tensor.dtype}{layout.format(tensor.shape)}"


def _forward(printer: Printer, blocks: list[Block]) -> str:
    """The function that computes the outputs from the batch."""
    graph = printer.graph
    inside = {name: block for block in blocks for it in block.repeat.iterations for name in it}
    nodes = [node for node in graph.nodes if node.name not in inside and not node.is_leaf]
    used = [name for block in blocks for name in block.outside]
    used += [entry for block in blocks for entry, _ in block.repeat.carried]
    used += [node for _, node in graph.outputs]
    scope = Scope(printer, nodes, lambda name: _read(graph[name]), used)
    for made in blocks:
        scope.fresh(made.function)  # no variable may hide it
    wanted = {name for node in nodes for name in node.inputs} | set(used)
    for leaf in (*graph.leaves("input"), *graph.leaves("received")):
        if leaf.name in wanted:
            wish = leaf.name if leaf.op == "received" else leaf.target.replace(".", "_")
            variable = scope.fresh(wish)
            scope.hold(leaf.name, variable, printer.result(leaf.name))
            note = f"{leaf.type.dtype}{printer.result(leaf.name).format(leaf.type.shape)}"
            scope.line(f"{variable} = batch[{quoted(leaf.target)}]", note)
    called: set[str] = set()
    recomputed = of_runs(graph, printer.plan.recompute)
    stowed = offloaded_runs(graph, printer.plan.offload, printer.plan.recompute)
    ways = {b.function: (a, s) for b, a, s in zip(blocks, recomputed, stowed, strict=True)}
    for node in graph.nodes:
        if node.is_leaf or node.name in graph.aside:
            continue
        block = inside.get(node.name)
        if block is None:
            scope.add(node)
        elif block.function not in called:
            called.add(block.function)
            call(printer, scope, block, *ways[block.function])
    results: dict[str, str] = {}

    def returned(aside: bool) -> str:
        """Of the outputs so far."""
        ready = [(n, node) for n, node in graph.outputs if (node in graph.aside) == aside]
        reads = ((node, _output_layout(printer, node)) for _, node in ready)
        results.update(zip((n for n, _ in ready), scope.operands(reads), strict=True))
        scope.keep(results.values())
        texts = (f"{quoted(n)}: {results[n]}" for n, _ in graph.outputs if n in results)
        return f"return {{{', '.join(texts)}}}"

    last, more = returned(aside=False), ""
    if graph.aside:
        scope.lines += ["if not outputs:", f"    {last}"]
        for name in (node.name for node in graph.nodes if node.name in graph.aside):
            scope.add(graph[name])
        last, more = returned(aside=True), ", outputs=True"
    lines = ['"""Loss and outputs of one batch, in the layouts of OUTPUTS."""', *scope.lines, last]
    return "\n".join([f"def forward(mesh, p, batch{more}):", *_indented(lines)])


def _parameters(printer: Printer, blocks: list[Block]) -> str:
    """The table of stored parameters and buffers."""
    graph = printer.graph
    inside = {name for block in blocks for it in block.repeat.iterations for name in it}
    lines = ['"""How this mesh stores each parameter and buffer."""', "table = ["]
    for node in graph.nodes:
        if node.op in ("param", "buffer") and node.name not in inside:
            lines += _stored(printer, node, quoted(node.target), "    ")
    lines.append("]")
    for block in blocks:
        iterations = [[graph[n] for n in it if graph[n].is_leaf] for it in block.repeat.iterations]
        leaves = iterations[0]
        if not leaves:
            continue
        if block.keys.table:
            for nodes in iterations:
                entries = (_stored(printer, node, quoted(node.target), "    ") for node in nodes)
                flat = itertools.chain.from_iterable(entries)
                lines += ["table += together([", *flat, "])"]
            continue
        start, stop = block.keys.start, block.keys.start + block.repeat.count
        lines.append(f"for i in range({f'{start}, {stop}' if start else stop}):")
        lines.append("    table += together([")
        for node in leaves:
            lines += _stored(printer, node, block.keys.names[node.name], "        ")
        lines.append("    ])")
    source = "\n".join(["def parameters():", *_indented([*lines, "return table"])])
    tables = [block.keys.table for block in blocks if block.keys.table]
    return "\n\n\n".join([*tables, source])


def _stored(printer: Printer, node: Node, name: str, indent: str) -> list[str]:
    """The lines of one entry of the table."""
    layout, shape = printer.result(node.name), node.type.shape
    text = f"{node.type.dtype}{layout.format(shape)}"
    states: dict[str, Layout] = {}
    if node.op == "param" and printer.graph.users[node.name]:
        storage = printer.storage(node)
        text += f" => {storage.used.format(shape)}" if storage.moves else ""
        states = dict(zip(("grads", "updated", "kept"), storage.layouts[1:], strict=False))
    given = [name, quoted(text)]
    given += [f"{state}={quoted(where.format(shape))}" for state, where in states.items()]
    dim, start, length = (node.keyword(word) for word in ("dim", "start", "length"))
    if length is not None:
        given.append(f"piece=Piece({dim}, {start}, {length})")
    if not node.requires_grad:
        given.append("trainable=False")
    line = f"{indent}stored({', '.join(given)}),"
    if not states or len(line) + 4 <= WIDTH:
        return [line]
    return [f"{indent}stored(", *(f"{indent}    {word}," for word in given), f"{indent}),"]


def _typed(kind: TensorType, layout: Layout) -> str:
    return quoted(f"{kind.dtype}{layout.format(kind.shape)}")


def _received(printer: Printer, leaf: Node) -> str:
    text = f"received({_typed(leaf.type, printer.result(leaf.name))}"
    return text + (")" if leaf.requires_grad else ", gradient=False)")


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]

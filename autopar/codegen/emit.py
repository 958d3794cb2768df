"""Emits the source of a program in ordinary PyTorch for a graph and a plan.

There is one function for each run of repeated blocks, which a loop calls, and `forward`, which
calls them. A comment gives the layout of every value, the size and predicted time of every
collective in each direction, and the user's source line above the lines. The steps are those that
the planner priced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

from autopar.codegen.allowed import check_source, names_in
from autopar.codegen.body import WIDTH, Body, Loop
from autopar.codegen.header import header
from autopar.codegen.ops import draws_random_numbers
from autopar.codegen.parameter_table import parameter_table
from autopar.codegen.printer import Printer
from autopar.codegen.random_draws import draw_function
from autopar.ir.collective import Collective
from autopar.ir.graph import COUNTS, Graph, Node, Repeat
from autopar.ir.offload import offloaded_runs
from autopar.ir.precision import AS_IS
from autopar.ir.recompute import of_runs
from autopar.ir.rewrite import writes
from autopar.ir.tensor import Layout, TensorType
from autopar.lower.lines import Bound, Function, Lowered
from autopar.lower.literals import docstring, quoted
from autopar.lower.parameter_keys import Keys, block_keys, leaf_key
from autopar.lower.program import lower, output_layout
from autopar.operators.own_functions import called
from autopar.stage_plan import StagePlan


def emit(
    graph: Graph,
    plan: StagePlan,
    price: Callable[[Collective], float],
    program: Lowered | None = None,
) -> str:
    """Returns the program's source.

    Args:
        graph: the prepared graph with its repeats.
        plan: a layout for every node of the folded graph.
        price: predicts the seconds of one collective, for comments and the choice of steps.
        program: the lowered program of this plan; None to lower it here.

    Returns:
        Python text that defines MESH, INPUTS and OUTPUTS (name -> type and layout), LOSS, RANDOM,
        WRITTEN (keys of the buffers that it writes, if there are any), COUNTS (inputs that the
        runtime adds up over microbatches, if there are any), `parameters()` and
        `forward(mesh, p, batch)`, where `p` holds the local parameters and buffers by
        `Parameter.key` and `batch` the whole inputs by name. `forward` returns the graph's outputs
        by name in the layouts of OUTPUTS. A stage of a pipeline also defines RECEIVED, the values
        that other stages send it; `batch` holds these in the layouts stated there. A stage, or a
        program of microbatches, that draws random numbers also defines `draw(mesh)`.

    Raises:
        PlanMismatchError: the plan has no layout for a node.
        LayoutError: a layout does not fit its value.
    """
    printer = Printer(graph, plan, price)
    lowered = program or lower(graph, plan, price)
    loops = _loops(printer, lowered.blocks)
    blocks = [
        _block(printer, function, loop, repeat)
        for function, loop, repeat in zip(lowered.blocks, loops, graph.repeats, strict=True)
    ]
    outputs = "".join(
        f"    {quoted(name)}: {_typed(graph[node].type, output_layout(printer, node))},\n"
        for name, node in graph.outputs
    )
    inputs = "".join(
        f"    {quoted(leaf.target)}: {_typed(leaf.type, printer.result(leaf.name))},\n"
        for leaf in graph.leaves("input")
    )
    received = "".join(
        f"    {quoted(leaf.target)}: {_received(printer, leaf)},\n"
        for leaf in graph.leaves("received")
    )
    loss = next((name for name, node in graph.outputs if node == graph.loss), None)
    random = any(draws_random_numbers(node) for node in graph.folded)
    table = _parameters(printer, loops)
    functions = [*blocks, _forward(printer, lowered, loops)]
    ahead = random and (_is_stage(graph) or plan.microbatches > 1)
    functions += [draw_function(graph)] if ahead else []
    code = "\n\n\n".join([table, *functions])
    used = names_in(code)
    imports, own = _imports(used | ({"received"} if received else set()))
    constants = "aten = torch.ops.aten\n" if "aten" in used else ""
    if calls := sorted({f[0] for node in graph.folded if (f := called(node)) is not None}):
        constants += f"functions = find_all({', '.join(map(quoted, calls))})\n"
    source = (
        f"{header(printer)}\n\n"
        + "\n".join([*imports, "", *own])
        + f"\n\n{constants}MESH = {quoted(str(plan.mesh))}\nINPUTS = {{\n{inputs}}}\n"
        + _counts(graph)
        + (f"RECEIVED = {{\n{received}}}\n" if received else "")
        + f"OUTPUTS = {{\n{outputs}}}\n"
        + (f"LOSS = {quoted(loss)}\n" if loss else "LOSS = None\n")
        + (f"PRECISION = {quoted(str(plan.precision))}\n" if plan.precision != AS_IS else "")
        + _collectives(plan)
        + (_HOST_STATE if plan.offload.optimizer else "")
        + (_FUSED_UPDATE if plan.fuses_update else "")
        + (_ASIDE if graph.aside else "")
        + _written(graph)
        + f"BUCKET = {plan.bucket}  # bytes of gradients, or of parameters, in one call\n"
        + f"RANDOM = {random}  # whether the program draws random numbers\n\n\n{code}\n"
    )
    check_source(source)
    return source


_ASIDE = "ASIDE = True  # forward(..., outputs=False) skips outputs that training does not need\n"
_FUSED_UPDATE = "FUSED_UPDATE = True  # a kernel runs the step of AdamW\n"
_HOST_STATE = "HOST_STATE = True  # optimizer state is in host memory between updates\n"


def _counts(graph: Graph) -> str:
    """Returns the definition of COUNTS, the inputs that the runtime adds up, if there are any."""
    tables = []
    for leaf in graph.leaves("input"):
        text = leaf.keyword(COUNTS)
        if isinstance(text, str):
            lines = "".join(f"        {quoted(line)},\n" for line in text.splitlines())
            tables.append(f"    {quoted(leaf.target)}: (\n{lines}    ),\n")
    comment = "# inputs of the whole batch: what to add up over microbatches"
    return f"COUNTS = {{  {comment}\n{''.join(tables)}}}\n" if tables else ""


def _collectives(plan: StagePlan) -> str:
    """Returns the rows of chosen algorithms, if any collective does not use the library's."""
    rows = "".join(f"    {quoted(row)},\n" for row in plan.collectives.texts)
    return (
        f"COLLECTIVES = (  # algorithms of collectives that do not name one\n{rows})\n"
        if rows
        else ""
    )


def _written(graph: Graph) -> str:
    """Returns the definition of WRITTEN, the buffers that `forward` writes, if it writes any."""
    keys: dict[str, None] = {}
    for node in graph.nodes:
        for name in writes(node):
            while not graph[name].is_leaf:  # a view
                name = graph[name].inputs[0]
            if not graph[name].is_cache:
                keys[leaf_key(graph[name])] = None
    if not keys:
        return ""
    lines = "".join(f"    {quoted(key)},\n" for key in keys)
    return f"WRITTEN = (  # buffers that forward writes\n{lines})\n"


def _is_stage(graph: Graph) -> bool:
    """Returns whether a graph receives or sends values."""
    sends = any(name.startswith("%") for name, _ in graph.outputs)
    return sends or bool(graph.leaves("received"))


# Names that programs import from autopar; see `autopar/runtime/api.py`.
_RUNTIME = (
    "Piece",
    "find_all",
    "keep_products",
    "keeping",
    "kernels",
    "received",
    "repeatable",
    "stored",
    "together",
)


def _imports(used: Collection[str]) -> tuple[list[str], list[str]]:
    """Returns the imports of libraries and of autopar that bind the names a program uses."""
    library = {
        "import torch": ("torch", "aten"),
        "import torch.nn.functional as F": ("F",),
        "from torch.utils.checkpoint import checkpoint": ("checkpoint",),
    }
    lines = [line for line, names in library.items() if {*names} & {*used}]
    wanted = {*used, "stored", *(["find_all"] if "functions" in used else [])}
    own = ", ".join(name for name in _RUNTIME if name in wanted)
    return lines, [f"from autopar.runtime.api import {own}"]


def _read(node: Node) -> str:
    """Returns the expression for a leaf outside of blocks."""
    if node.op in ("input", "received"):
        return f"batch[{quoted(node.target)}]"
    return f"p[{quoted(leaf_key(node))}]"


def _block(printer: Printer, function: Function, loop: Loop, repeat: Repeat) -> str:
    """Returns the function of one run of blocks."""
    inside = set(repeat.iterations[0])
    body = Body(
        printer,
        lambda name: loop.keys.read(name) if name in inside else _read(printer.graph[name]),
        priced=True,
    )
    body.lines += parameter_table(printer, function)
    body.print(function.lines)
    notes = [f"{bound.variable}: {_bound(printer, bound)}" for bound in function.arguments]
    index = "names" if loop.keys.table else "i"
    arguments = ["mesh", "p", index, *(bound.variable for bound in function.arguments)]
    text = docstring([f"One of {repeat.count} equal blocks.", "", *notes]).split("\n")
    results = ", ".join(body.read(bound.variable) for bound in function.results)
    lines = _indented([*text, *body.lines, f"return {results}"])
    return "\n".join([f"def {function.name}({', '.join(arguments)}):", *lines])


def _bound(printer: Printer, bound: Bound) -> str:
    """Returns the dtype and layout of an argument."""
    tensor = printer.graph[bound.value].type
    return f"{tensor.dtype}{bound.layout.format(tensor.shape)}"


def _loops(printer: Printer, functions: Sequence[Function]) -> list[Loop]:
    """Returns the loop by which `forward` calls each run of blocks."""
    graph, plan = printer.graph, printer.plan
    runs = zip(
        functions,
        graph.repeats,
        of_runs(graph, plan.recompute),
        offloaded_runs(graph, plan.offload, plan.recompute),
        strict=True,
    )
    loops = []
    for function, repeat, how, stowed in runs:
        keys = block_keys(graph, repeat, function.name)
        changing = _changing(graph, repeat, keys)
        loops.append(Loop(function.name, keys, repeat.count, how, stowed, changing))
    return loops


def _changing(graph: Graph, repeat: Repeat, keys: Keys) -> tuple[str, ...]:
    """Returns expressions of the names of buffers that a block uses and that a step writes."""
    inside = set(repeat.iterations[0])
    nodes = (graph[name] for name in repeat.iterations[0] if not graph[name].is_leaf)
    reads = dict.fromkeys(name for node in nodes for name in node.inputs)
    written = {name for node in graph.nodes for name in writes(node)}
    leaves = (
        keys.read(name) if name in inside else _read(graph[name])
        for name in reads
        if name in written and graph[name].is_leaf
    )
    return tuple(leaf.removeprefix("p[").removesuffix("]") for leaf in leaves)


def _forward(printer: Printer, lowered: Lowered, loops: Sequence[Loop]) -> str:
    """Returns the function that computes the outputs from the batch."""
    graph = printer.graph
    body = Body(printer, lambda name: _read(graph[name]), loops)

    def returned(*functions: Function) -> str:
        """Returns the statement that returns the outputs of these functions by name."""
        results = {b.value: body.read(b.variable) for f in functions for b in f.results}
        texts = (f"{quoted(n)}: {results[node]}" for n, node in graph.outputs if node in results)
        return f"return {{{', '.join(texts)}}}"

    body.print(lowered.forward.lines)
    last, more = returned(lowered.forward), ""
    if lowered.aside is not None:
        body.lines += ["if not outputs:", f"    {last}"]
        body.print(lowered.aside.lines)
        last, more = returned(lowered.forward, lowered.aside), ", outputs=True"
    lines = [
        '"""Returns the loss and outputs of a batch, in the layouts of OUTPUTS."""',
        *body.lines,
        last,
    ]
    return "\n".join([f"def forward(mesh, p, batch{more}):", *_indented(lines)])


def _parameters(printer: Printer, loops: Sequence[Loop]) -> str:
    """Returns the function with the table of stored parameters and buffers."""
    graph = printer.graph
    inside = {name for repeat in graph.repeats for it in repeat.iterations for name in it}
    lines = ['"""Layouts in which this mesh stores parameters and buffers."""', "table = ["]
    for node in graph.nodes:
        if node.op in ("param", "buffer") and node.name not in inside:
            lines += _stored(printer, node, quoted(node.target), "    ")
    lines.append("]")
    for loop, repeat in zip(loops, graph.repeats, strict=True):
        iterations = [[graph[n] for n in it if graph[n].is_leaf] for it in repeat.iterations]
        leaves = iterations[0]
        if not leaves:
            continue
        if loop.keys.table:
            for nodes in iterations:
                entries = (_stored(printer, node, quoted(node.target), "    ") for node in nodes)
                flat = itertools.chain.from_iterable(entries)
                lines += ["table += together([", *flat, "])"]
            continue
        start, stop = loop.keys.start, loop.keys.start + loop.count
        lines.append(f"for i in range({f'{start}, {stop}' if start else stop}):")
        lines.append("    table += together([")
        for node in leaves:
            lines += _stored(printer, node, loop.keys.names[node.name], "        ")
        lines.append("    ])")
    source = "\n".join(["def parameters():", *_indented([*lines, "return table"])])
    tables = [loop.keys.table for loop in loops if loop.keys.table]
    return "\n\n\n".join([*tables, source])


def _stored(printer: Printer, node: Node, name: str, indent: str) -> list[str]:
    """Returns the lines of one entry of the table."""
    layout, shape = printer.result(node.name), node.type.shape
    text = f"{node.type.dtype}{layout.format(shape)}"
    states: dict[str, Layout] = {}
    if node.op == "param" and printer.graph.users[node.name]:
        storage = printer.storage(node)
        text += f" => {storage.used.format(shape)}" if storage.moves else ""
        states = dict(zip(("grads", "updated", "kept"), storage.layouts[1:], strict=False))
    given = [name, quoted(text)]
    given += [f"{state}={quoted(where.format(shape))}" for state, where in states.items()]
    dim, start, length = (node.keyword(key) for key in ("dim", "start", "length"))
    if length is not None:
        given.append(f"piece=Piece({dim}, {start}, {length})")
    if not node.requires_grad:
        given.append("trainable=False")
    if node.is_cache:
        given.append("cache=True")
    line = f"{indent}stored({', '.join(given)}),"
    if len(line) + 4 <= WIDTH:
        return [line]
    return [f"{indent}stored(", *(f"{indent}    {arg}," for arg in given), f"{indent}),"]


def _typed(kind: TensorType, layout: Layout) -> str:
    return quoted(f"{kind.dtype}{layout.format(kind.shape)}")


def _received(printer: Printer, leaf: Node) -> str:
    text = f"received({_typed(leaf.type, printer.result(leaf.name))}"
    return text + (")" if leaf.requires_grad else ", gradient=False)")


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]

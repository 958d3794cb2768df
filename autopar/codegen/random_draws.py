"""Writes the function that draws a stage's random numbers and discards them.

On the CPU, a pipeline reproduces the random numbers of the unsharded run, which sends one
microbatch after the other through all stages. So a rank also draws the numbers of the other stages;
see runtime/pipeline/pipeline.py.
"""

from __future__ import annotations

from autopar.codegen.ops import draws_random_numbers, expression
from autopar.ir.graph import Graph, Node
from autopar.lower.literals import quoted
from autopar.operators.interpret import TORCH_DTYPES


def draw_function(graph: Graph) -> str:
    """Returns the source of `draw(mesh)`, which advances generators as `forward` does, or ""."""
    runs = {name: repeat for repeat in graph.repeats for b in repeat.iterations for name in b}
    lines: list[str] = []
    called: set[int] = set()
    for node in graph.nodes:
        repeat = runs.get(node.name)
        if repeat is None:
            lines += _drawn(graph, node)
        elif id(repeat) not in called:
            called.add(id(repeat))
            body = [line for name in repeat.iterations[0] for line in _drawn(graph, graph[name])]
            if body:
                lines.append(f"for _ in range({repeat.count}):")
                lines += [f"    {line}" for line in body]
    if not lines:
        return ""
    head = ["def draw(mesh):", '    """Advances the generators as forward does."""']
    return "\n".join([*head, *(f"    {line}" for line in lines)])


def _drawn(graph: Graph, node: Node) -> list[str]:
    """Returns the line for one operator; none if it draws nothing."""
    if not draws_random_numbers(node):
        return []
    if node.op == "aten.dropout":
        if node.args[2] is not True:
            return []
        return [f"mesh.draw({node.args[1]!r}, {quoted(str(node.type))})"]
    if node.op == "aten.scaled_dot_product_attention":
        query, keys = (graph[name].type for name in node.inputs[:2])
        exact = "f32" if query.dtype in ("f16", "bf16") else query.dtype
        sizes = ", ".join(map(str, (*query.shape[:-1], keys.shape[-2])))
        return [f"mesh.draw({node.args[4]!r}, {quoted(f'{exact}[{sizes}]')})"]
    operands = [
        f"torch.zeros({graph[name].type.shape}, dtype={TORCH_DTYPES[graph[name].type.dtype]}, "
        "device=mesh.device)"
        for name in node.inputs
    ]
    return [expression(node, operands)]

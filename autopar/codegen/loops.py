"""The loop over a run of blocks: each is a call of their one function."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.codegen.keys import Keys
from autopar.codegen.printer import Printer
from autopar.codegen.scope import Held, Scope
from autopar.ir.graph import Repeat
from autopar.ir.recompute import Recompute


@dataclass(frozen=True)
class Block:
    """The function of a run of blocks.

    Attributes:
        repeat: the run.
        function: what it is called.
        keys: names of a block's parameters.
        outside: values that it takes beside those that are carried.
        source: of the function.
        changing: expressions of the names of buffers that it uses and that a step writes.
    """

    repeat: Repeat
    function: str
    keys: Keys
    outside: tuple[str, ...]
    source: str
    changing: tuple[str, ...] = ()


def call(
    printer: Printer,
    scope: Scope,
    block: Block,
    how: Recompute | None,
    stowed: tuple[int, int],
) -> None:
    """The loop over the blocks of a run.

    The first ones may be run again in the backward, those behind them kept in host memory for it.
    """
    graph, repeat = printer.graph, block.repeat
    inside = set(repeat.iterations[0])
    entries = [entry for entry, _ in repeat.carried]
    shares = [next(n for n in graph.users[entry] if n in inside) for entry in entries]
    layouts = [printer.planned(share).operands[0][1] for share in shares]
    variables = scope.operands(zip(entries, layouts, strict=True))
    targets = [scope.fresh("hidden") for _ in variables]
    for target, variable in zip(targets, variables, strict=True):
        if target != variable:
            scope.line(f"{target} = {variable}")
    outside = scope.operands((name, printer.result(name)) for name in block.outside)
    arguments = ["mesh", "p", "names" if block.keys.table else "i", *targets, *outside]
    split, kept = stowed
    for begin, end in ((0, split), stowed, (kept, repeat.count)):
        if begin == end:
            continue
        called = f"{block.function}({', '.join(arguments)})"
        away = split <= begin < kept
        lines = ["with mesh.stowed():"] if away else []
        if how is not None and end <= split:
            function = block.function
            if block.changing:
                function = scope.fresh("block")
                names = (f"    {name}," for name in block.changing)
                lines += [f"{function} = repeatable({block.function}, p, [", *names, "])"]
            called = _checkpointed(function, arguments, how)
        lines.append(f"{'    ' if away else ''}{', '.join(targets)} = {called}")
        scope.line(_head(block, begin, end))
        for line in lines:
            scope.line(f"    {line}")
    last = dict(zip(repeat.iterations[0], repeat.iterations[-1], strict=True))
    for (_, leaves), target, layout in zip(repeat.carried, targets, layouts, strict=True):
        scope.held[last[leaves]] = Held(target, layout)


def _head(block: Block, begin: int, end: int) -> str:
    """The loop over the blocks from `begin` to before `end`."""
    if block.keys.table:
        part = f"[{begin or ''}:{end}]" if end - begin < block.repeat.count else ""
        return f"for names in {block.function.upper()}_NAMES{part}:"
    start, stop = block.keys.start + begin, block.keys.start + end
    return f"for i in range({f'{start}, {stop}' if start else stop}):"


def _checkpointed(function: str, arguments: list[str], how: Recompute) -> str:
    """The call of a block that is run again in the backward."""
    keep = ", context_fn=keep_products" if how.kind == "selective" else ""
    return f"checkpoint({function}, {', '.join(arguments)}, use_reentrant=False{keep})"

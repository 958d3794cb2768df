"""A lowered program reads back from its text, and has the lines of the emitted program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.codegen.emit import emit
from autopar.errors import GraphError
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.lower.lines import Call, Compute, Lowered, Move, SourceLine, Use
from autopar.lower.lowered_text import format_lowered, parse_lowered
from autopar.lower.program import lower
from autopar.plan import Plan
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.planner import make_plan
from autopar.planning.prices import cost_model
from autopar.planning.trace import Trace
from autopar.session.compiled import Compiled
from autopar.stage_plan import StagePlan
from tests.support.families import FAMILIES, make

GRID = Mesh.parse("toy[1GFLOP/s 64GiB 1GB/s]: data=2 @10GB/s 1us, tensor=2 @10GB/s 1us")
QUICK = ("gpt2", "dlrm")


def lowered(name: str, **options: object) -> tuple[Graph, StagePlan, Lowered]:
    model, batch = make(name)
    given = Options(**options)  # type: ignore[arg-type]
    graph = capture_graph(model, (), batch, given, Trace(None)).graph
    plan = make_plan(graph, GRID, given, Trace(None))
    return graph, plan, lower(graph, plan, cost_model(GRID, given).collective)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name in QUICK])
def test_text_reads_back(name: str) -> None:
    graph, _, program = lowered(name)
    assert parse_lowered(format_lowered(program, graph), graph) == program


def test_a_trace_keeps_the_program_that_is_printed(tmp_path: Path) -> None:
    model, batch = make("gpt2")
    given, trace = Options(state="zero3"), Trace(tmp_path)
    captured = capture_graph(model, (), batch, given, trace)
    plan = Plan.of(make_plan(captured.graph, GRID, given, trace))
    source = Compiled.of(captured, plan, given, trace).source
    (file,) = tmp_path.glob("*_lower.txt")
    program = parse_lowered(file.read_text(encoding="utf-8"), captured.graph)
    price = cost_model(GRID, given).collective
    assert emit(captured.graph, plan.stages[0], price, program) == source
    # What is printed is the program that is given, whoever made it.
    lines = tuple(line for line in program.forward.lines if not isinstance(line, SourceLine))
    silent = replace(program, forward=replace(program.forward, lines=lines))
    assert emit(captured.graph, plan.stages[0], price, silent) != source


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in QUICK])
def test_text_of_every_family_reads_back(name: str) -> None:
    graph, _, program = lowered(name)
    assert parse_lowered(format_lowered(program, graph), graph) == program


def test_every_operator_is_computed_once_and_every_line_reads_what_there_is() -> None:
    graph, _, program = lowered("gpt2", state="zero3")
    computed: list[str] = []
    for function in (program.forward, *program.blocks):
        there = {bound.variable for bound in function.arguments}
        for line in function:
            if isinstance(line, Compute):
                computed.append(line.node.name)
                assert all(name in there or name.startswith("%") for name in line.operands)
                there.add(line.target)
            elif isinstance(line, Move | Use):
                assert line.source in there or line.source.startswith("%")
                there.add(line.target)
            elif isinstance(line, Call):
                assert {*line.targets, *line.outside} <= there
            elif hasattr(line, "target"):
                there.add(line.target)
        assert {bound.variable for bound in function.results} <= there
    identities = ("autopar.share", "autopar.shard")
    folded = [n.name for n in graph.folded if not n.is_leaf and n.op not in identities]
    assert sorted(computed) == sorted(folded)
    assert any(isinstance(line, Use) for line in program.blocks[0])


def test_steps_of_a_move_follow_one_another() -> None:
    _, _, program = lowered("t5")
    for function in (program.forward, *program.blocks):
        for line, after in zip(function.lines, function.lines[1:], strict=False):
            if isinstance(line, Move) and isinstance(after, Move) and line.target == after.source:
                assert line.value != after.value or line.step.dst == after.step.src


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("x = compute %nobody(y) : [8] -> [8]", "nobody"),
        ("what is this", "not a line"),
        ("x = %a : somewhere", "not a variable"),
    ],
)
def test_a_damaged_line_is_named(line: str, word: str) -> None:
    graph, _, program = lowered("dlrm")
    text = format_lowered(program, graph)
    with pytest.raises(GraphError, match="line 2") as caught:
        parse_lowered(text.replace("\n", f"\n    {line}\n", 1), graph)
    assert word in str(caught.value)

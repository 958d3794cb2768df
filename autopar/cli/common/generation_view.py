"""Plans of generations on the command line: their graphs, figures and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from autopar.cli.common.console import print_json, print_out, stages
from autopar.cli.common.model_options import depth_of, is_data
from autopar.errors import GraphError, PlanError
from autopar.explain import Explanation, render, render_summary
from autopar.generation_plan import GenerationPlan
from autopar.intra_op import legal
from autopar.intra_op.rule import OpRule
from autopar.ir.graph import Graph
from autopar.ir.graph_text import fingerprint
from autopar.ir.mesh import Mesh
from autopar.ir.units import format_bytes, format_seconds
from autopar.passes.deepen import LEAST, deepen
from autopar.plan import Plan
from autopar.plan_entries import ModelSpec
from autopar.planning.generation.graphs import Sizes, capture_generation
from autopar.planning.generation.serving import generating_options
from autopar.planning.generation.stage_search import FoundGeneration, fastest_generation
from autopar.planning.options import Options
from autopar.planning.prices import cost_model, limit_of_plan
from autopar.planning.stored import graphs_of as stages_of

Graphs = tuple[Graph, Graph]


def graphs_of(spec: ModelSpec, options: Options, sizes: Sizes) -> Graphs:
    """Returns the graphs of prefill and decode; of a deep model, only a few blocks are traced.

    A graph that is to be cut into stages has no blocks yet, and is traced whole.
    """
    layers = depth_of(spec)
    if layers is not None and layers > 2 * LEAST and not options.is_pipeline:
        few, more = (
            _traced(replace(spec, layers=count), options, sizes) for count in (LEAST - 1, LEAST)
        )
        try:
            before, after = (
                deepen(one, other, layers - LEAST) for one, other in zip(few, more, strict=True)
            )
        except GraphError:
            pass  # its blocks differ
        else:
            return before, after
    return _traced(spec, options, sizes)


def _traced(spec: ModelSpec, options: Options, sizes: Sizes) -> Graphs:
    from autopar.zoo.loading import load

    module, _ = load(spec.source, batch=spec.batch, layers=spec.layers)
    prefill, decode = capture_generation(module, sizes, options)
    return prefill.graph, decode.graph


def planned(
    spec: ModelSpec, mesh: Mesh, options: Options, sizes: Sizes, stage: Callable[[str], None]
) -> FoundGeneration:
    """Plans a model of the command line.

    Args:
        spec: the model; `seq` is ignored.
        mesh: the devices.
        options: options of planning.
        sizes: sizes of the prompts.
        stage: reports what is being done.
    """
    cost_model(mesh, options)  # refuses bad options before a model is traced

    def capture(own: Options) -> Graphs:
        stage("capture")
        graphs = graphs_of(spec, own, sizes)
        stage("strategies")
        return graphs

    found = fastest_generation(capture, mesh, options, sizes)
    plan = found.plan
    prefill, decode = (replace(each, model=spec) for each in (plan.prefill, plan.decode))
    return replace(found, plan=replace(plan, prefill=prefill, decode=decode))


def figures(
    plan: GenerationPlan, decode: Graph, tried: Mapping[int, float | None] | None = None
) -> dict[str, object]:
    """Returns the figures of a plan: seconds, tokens a second and bytes of a device."""
    nbytes, layouts = caches_of(decode, plan.decode)
    return {
        "mesh": str(plan.mesh),
        "batch": plan.batch,
        "prompt": plan.prompt,
        "new_tokens": plan.new_tokens,
        "first_token_seconds": plan.first_token_seconds,
        "token_seconds": plan.token_seconds,
        "seconds": plan.seconds,
        "tokens_per_second": plan.tokens_per_second,
        "peak_bytes": plan.peak_bytes,
        "cache_bytes": nbytes,
        "caches": list(layouts),
        "stages": len(plan.decode.stages),
        **({} if tried is None else {"seconds_by_stages": dict(tried)}),
    }


def render_plan(
    found: FoundGeneration, known: dict[str, OpRule] | None = None
) -> list[RenderableType]:
    """Returns the figures of a generation, and the summaries of its prefill and decode."""
    parts: list[RenderableType] = [_head(found.plan, found.graphs[1], found.tried)]
    for title, explanation in _explanations(found.plan, found.graphs, known):
        parts += [Text(f"\n{title}", style="bold"), render_summary(explanation)]
    return parts


def _head(
    plan: GenerationPlan, decode: Graph, tried: Mapping[int, float | None] | None = None
) -> Text:
    nbytes, layouts = caches_of(decode, plan.decode)
    several = tried is not None and len(tried) > 1
    others = ", ".join(
        f"{count} ({'no plan' if seconds is None else format_seconds(seconds)})"
        for count, seconds in (tried or {}).items()
    )
    rows = {
        "prompts": f"{plan.batch} x {plan.prompt} tokens, then {plan.new_tokens} tokens each",
        **({"stages": f"{len(plan.decode.stages)}, the fastest of {others}"} if several else {}),
        "first token": format_seconds(plan.first_token_seconds),
        "each further token": format_seconds(plan.token_seconds),
        "throughput": f"{plan.tokens_per_second:,.0f} tokens/s",
        "memory a device": format_bytes(plan.peak_bytes),
        "caches a device": f"{format_bytes(nbytes)}, as {', '.join(layouts)}",
    }
    width = max(map(len, rows)) + 2
    lines = (f"{name:<{width}}{value}" for name, value in rows.items())
    return Text(f"generation on {plan.mesh}\n" + "\n".join(lines))


def caches_of(decode: Graph, plan: Plan) -> tuple[int, tuple[str, ...]]:
    """Returns the most bytes of a device's caches, and their layouts."""
    nbytes, layouts = Counter[int](), dict[str, None]()
    for graph, stage in zip(stages_of(decode, plan), plan.stages, strict=True):
        for leaf in graph.leaves("buffer"):
            if leaf.is_cache:
                layout = stage.nodes[graph.template[leaf.name]].results[0][1]
                nbytes[stage.starts[0]] += layout.local_bytes(leaf.type, stage.mesh)
                layouts[f"{leaf.type.dtype}{layout.format(leaf.type.shape)}"] = None
    return max(nbytes.values(), default=0), tuple(layouts)


def _explanations(
    plan: GenerationPlan, graphs: Graphs, known: dict[str, OpRule] | None
) -> list[tuple[str, Explanation]]:
    from autopar.cli.explain import explained

    rows = []
    for name, graph, each in _both(plan, graphs):
        for number, (part, stage) in enumerate(
            zip(stages_of(graph, each), each.stages, strict=True)
        ):
            explanation = explained(part, stage, limit_of_plan(stage), known)
            title = f"{name}, stage {number}" if each.is_pipeline else name
            rows.append((title, replace(explanation, peak=stage.predicted.peak_bytes)))
    return rows


def _both(plan: GenerationPlan, graphs: Graphs) -> list[tuple[str, Graph, Plan]]:
    """Returns the names, graphs and plans of prefill and decode."""
    return [("prefill", graphs[0], plan.prefill), ("decode", graphs[1], plan.decode)]


def show(
    file: Path, model: str | None, known: dict[str, OpRule], by: str | None, as_json: bool
) -> None:
    """Prints where the time and memory of a generation go.

    Args:
        file: the plan.
        model: the model, in place of the plan's.
        known: sharding rules by operator.
        by: one of the tables; None for all.
        as_json: whether to print figures for programs.

    Raises:
        PlanError: the plan names code to run, or has impossible layouts.
        PlanMismatchError: the plan is for another model.
    """
    plan = GenerationPlan.load(file)
    spec = plan.decode.model
    if model is not None:
        spec = replace(spec, source=model)
    elif not is_data(spec.source):
        raise PlanError(
            "the plan's model must be named on the command line",
            where=str(file),
            why="code that a plan names is not run",
            todo="pass --model file.py:function",
        )
    options = generating_options(Options.like(plan.decode.stages[0], table=known), plan.decode)
    with stages(quiet=as_json) as stage:
        stage("capture")
        sizes = Sizes(plan.batch, plan.prompt, plan.new_tokens)
        graphs = graphs_of(spec, options, sizes)
        for _, graph, each in _both(plan, graphs):
            each.check(graph, plan.mesh)
            for part, own in zip(stages_of(graph, each), each.stages, strict=True):
                own.check(fingerprint(part), {node.name for node in part.folded}, own.mesh)
                legal.check(part, own, known)
    if as_json:
        print_json(figures(plan, graphs[1]))
        return
    parts: list[RenderableType] = [_head(plan, graphs[1])]
    for title, explanation in _explanations(plan, graphs, known):
        parts += [Text(f"\n{title}", style="bold"), render(explanation, by=by)]
    print_out(*parts)

"""Collectives of int8 blocks: training against plain torch that rounds alike, bytes, prices."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from autopar.cli.explain import explained
from autopar.codegen.emit import emit
from autopar.cost.compute import kernel_seconds
from autopar.cost.model import AnalyticModel
from autopar.errors import PrecisionError
from autopar.explain import render
from autopar.intra_op.states import StateChoice
from autopar.ir.collective import Collective
from autopar.ir.int8_blocks import BLOCK
from autopar.ir.mesh import Mesh
from autopar.ir.precision import Precision
from autopar.ir.storage import Storage
from autopar.ir.tensor import Layout, TensorType
from autopar.pins import data_parallel
from autopar.plan import Plan
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.pipelines.stages import stage_graphs
from autopar.planning.planner import make_plan
from autopar.planning.trace import Trace
from autopar.runtime.communication.quantised import pack, unpack
from tests.support.ranks import run_ranks
from tests.support.state_sharding import Case, Jobs, Run, Tiny

BOTH = "weights=int8 gradients=int8"
NODES = Mesh.parse("A100-80: node=4, gpu=2")
USED = Layout(((), ()), varying=("node", "gpu"))
SLOW = "toy[1TFLOP/s 64GiB 1TB/s]: node=2 @1MB/s 1us, gpu=2 @10MB/s 1us"
ELEMENT = 8  # bytes, of float64


def wide() -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of whose parameters some are large enough for blocks."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 12, (16, 4))
    return Tiny(width=32).double(), {"tokens": tokens, "labels": (tokens + 1) % 12}


# By hand, in plain torch on one device -----------------------------------------------------------


def smaller(numel: int) -> bool:
    """Whether a part goes as blocks: 256 numbers of one byte, and a float32."""
    return -(-numel // 256) * 260 < numel * ELEMENT


def rounded(part: Tensor) -> Tensor:
    """What arrives of a part of a tensor."""
    if not smaller(part.numel()):
        return part
    found = []
    for block in part.reshape(-1).split(256):
        top = block.abs().max()
        top = top if top else torch.full_like(top, 127.0)
        # A second hop may find numbers just between two steps: they are divided alike, by tensors,
        # since torch divides a number by one in two roundings.
        most = torch.full_like(top, 127.0)
        steps = (block * (most / top) + 0.5).floor()
        found.append(steps.float() * (top / most).float())
    return torch.cat(found).to(part.dtype).view_as(part)


def gathered(x: Tensor, dim: int, cuts: Sequence[int]) -> Tensor:
    """A parameter that is split into so many parts, each of these into so many, as it arrives."""
    if not cuts:
        return x
    return torch.cat([rounded(gathered(p, dim, cuts[1:])) for p in x.chunk(cuts[0], dim)], dim)


def total(parts: Sequence[Tensor]) -> Tensor:
    """The sum of what devices send, in float32 if it arrives in blocks."""
    if not smaller(parts[0].numel()):
        return torch.stack(tuple(parts)).sum(0)
    found = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        found += rounded(part).float()  # which it was
    return found.to(parts[0].dtype)


def reduced(each: Sequence[Tensor], dim: int, cuts: Sequence[int]) -> Tensor:
    """The sum of devices' gradients, cut likewise; inside nodes first if there are two cuts."""
    if len(cuts) == 1:
        parts = zip(*(gradient.chunk(cuts[0], dim) for gradient in each), strict=True)
        return torch.cat([total(part) for part in parts], dim)
    nodes = [each[at : at + cuts[0]] for at in range(0, len(each), cuts[0])]
    inside = [reduced(node, dim, cuts[:1]) for node in nodes]
    whole = zip(*(gradient.chunk(cuts[0], dim) for gradient in inside), strict=True)
    return torch.cat([reduced(part, dim, cuts[1:]) for part in whole], dim)


def judge(case: Case, ways: dict[str, tuple[int, list[int]]]) -> Run:
    """Training on one device, with gradients of parts of the batch, rounded where they go.

    Each of the four devices has a part of every microbatch, or each of a stage's.

    Args:
        case: what is trained.
        ways: of each parameter the dimension that is split, and into how many parts.
    """
    model, batch = case.make()
    used, _ = case.make()
    parameters = dict(model.named_parameters())
    optimizer, losses, norms = case.optimizer(model.parameters()), [], []
    split, blocks = "weights" in case.precision, "gradients" in case.precision
    devices = 4 // case.stages
    for _ in range(case.steps):
        for name, parameter in used.named_parameters():
            held = parameters[name].detach()
            parameter.data = gathered(held, *ways[name]) if split else held.clone()
        optimizer.zero_grad()
        found = []
        for part in zip(*(v.chunk(case.microbatches) for v in batch.values()), strict=True):
            gradients: dict[str, list[Tensor]] = {name: [] for name in parameters}
            for own in zip(*(value.chunk(devices) for value in part), strict=True):
                used.zero_grad()
                loss = used(**dict(zip(batch, own, strict=True))) / case.microbatches
                loss = loss / devices
                loss.backward()
                found.append(loss.item())
                for name, parameter in used.named_parameters():
                    assert parameter.grad is not None
                    gradients[name].append(parameter.grad.clone())
            for name, parameter in parameters.items():
                new = reduced(gradients[name], *ways[name]) if blocks else sum(gradients[name])
                parameter.grad = new if parameter.grad is None else parameter.grad + new
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append(sum(found))
    return Run(losses, norms, dict(model.state_dict()))


# Training -----------------------------------------------------------------------------------------


def storages(jobs: Jobs, number: int) -> list[dict[str, Storage]]:
    """Where the parameters of each stage of a case lie, by their names in the model."""
    case, plan = jobs.cases[number], jobs.plans[number]
    captured = jobs.captured[case.captured(plan.precision)]
    return [
        {
            leaf.target: stage.storage(
                graph.template[leaf.name], graph.template[graph.users[leaf.name][0]]
            )
            for leaf in graph.leaves("param")
        }
        for graph, stage in zip(
            stage_graphs(captured.graph, plan.ends, Trace(None)), plan.stages, strict=True
        )
    ]


def way(storage: Storage) -> tuple[int, list[int]]:
    """Which dimension is split, into four parts, into two and two, or in a stage into two."""
    ((dim, axes),) = [(dim, axes) for dim, axes in enumerate(storage.updated.dims) if axes]
    return dim, {("node", "gpu"): [4], ("gpu", "node"): [2, 2], ("gpu",): [2]}[axes]


def counted(case: Case, ways: dict[str, tuple[int, list[int]]]) -> Counter[tuple[str, str]]:
    """Bytes that a device brings to collectives of parameters and their gradients in a step.

    ZeRO-3 gathers them for the forward and keeps them, ZeRO++ gathers again what a backward needs
    of its copy in a node; ZeRO-1 only gathers what it has updated.
    """
    found: Counter[tuple[str, str]] = Counter()
    times = 1 if case.state.startswith("zero1") else case.microbatches
    rounds = "weights" in case.precision
    for name, parameter in case.make()[0].named_parameters():
        if name not in ways:
            continue
        part, cuts = parameter.numel(), ways[name][1]
        if "++" in case.state and not re.search(r"embed|(up|head)\.bias", name):
            found["all_gather", "gpu"] += times * part // 2 * ELEMENT
        for cut, axes in zip(cuts, ["node gpu"] if cuts == [4] else ["gpu", "node"], strict=False):
            part //= cut
            blocks, plain = -(-part // 256) * 260, part * ELEMENT
            scattered = min(blocks, plain) if "gradients" in case.precision else plain
            kind = "all_to_all" if scattered < plain else "reduce_scatter"
            found[kind, axes] += times * cut * scattered
            found["all_gather", axes] += times * (min(blocks, plain) if rounds else plain)
    return found


def check(cases: dict[Case, set[int]]) -> None:
    """Four ranks train as plain torch that rounds alike, and send the bytes that are counted.

    Args:
        cases: what is trained, and in how many hops its gradients go.
    """
    jobs = Jobs(list(cases))
    ranks = run_ranks(jobs.train)
    for number, (case, hops) in enumerate(cases.items()):
        stages = [
            {name: way(storage) for name, storage in held.items()}
            for held in storages(jobs, number)
        ]
        ways = {name: found for stage in stages for name, found in stage.items()}
        assert {len(cuts) for _, cuts in ways.values()} == hops
        wanted = judge(case, ways)
        for at, rank in enumerate(ranks):
            run, calls = rank[number]
            assert run.error(wanted) < 1e-9, case
            sent: Counter[tuple[str, str]] = Counter()
            for kind, axes, nbytes in calls:
                if kind != "all_reduce":
                    sent[kind, " ".join(axes)] += nbytes
            sent.subtract(counted(case, stages[at * case.stages // len(ranks)]))
            assert min(sent.values()) >= 0, case
            assert sum(sent.values()) < 100, case  # norms


def test_training_rounds_as_plain_torch_does_and_sends_blocks() -> None:
    check({Case("zero3, kept", 2, precision=BOTH, make=wide, steps=2): {2}})


@pytest.mark.slow
def test_training_rounds_as_plain_torch_does_under_other_state_shardings() -> None:
    one_hop = "zero3 over none, kept"
    check(
        {
            Case(one_hop, precision=BOTH, make=wide): {1},
            Case(one_hop, precision="weights=int8", make=wide): {1},
            Case("zero1 over none", precision="gradients=int8", make=wide): {1},
            Case("zero++ over node", 2, precision=BOTH, make=wide, ahead=True): {2},
        }
    )


@pytest.mark.slow
def test_stages_round_as_plain_torch_does_and_send_blocks() -> None:
    """Each on two devices. ZeRO-1 adds microbatches up before it sends: there is one."""
    check(
        {
            Case("zero3, kept", 4, precision=BOTH, make=wide, stages=2): {1},
            Case("zero3, kept", 2, precision="weights=int8", make=wide, stages=2): {1},
            Case("zero1", precision="gradients=int8", make=wide, stages=2): {1},
        }
    )


# Blocks -------------------------------------------------------------------------------------------


def test_blocks_come_back_within_half_a_step() -> None:
    """Whatever goes together with a tensor, and whatever the length."""
    torch.manual_seed(0)
    rows = [torch.randn(3, n) * 10.0 ** torch.randn(3, 1) for n in (1, 255, 256, 700)]
    lengths = [row.shape[1] for row in rows]
    packed = pack(rows)
    assert packed.shape == (3, 260 * (1 + 1 + 1 + 3))
    alone = [unpack(pack([row]), [row.shape[1]], row.dtype)[0] for row in rows]
    for row, found, other in zip(rows, unpack(packed, lengths, rows[0].dtype), alone, strict=True):
        assert torch.equal(found, other)
        for block, came in zip(row.split(BLOCK, 1), found.split(BLOCK, 1), strict=True):
            step = block.abs().amax(1, keepdim=True) / 127
            assert ((block - came).abs() <= step * 0.5001).all()


def test_an_overflow_is_not_lost() -> None:
    row = torch.ones(1, 300)
    row[0, 299] = torch.inf
    (found,) = unpack(pack([row]), [300], row.dtype)
    assert found[0, :256].eq(1).all()
    assert found[0, 256:].isnan().all()


# What is sent, and what it takes ------------------------------------------------------------------


def sends(state: str, precision: str, shape: tuple[int, ...]) -> list[tuple[str, str, int, int]]:
    """When, what, over how many devices and how many bytes, of the storage with most hops."""
    read, tensor = Precision.read(precision), TensorType("bf16", shape)
    storages = StateChoice.read(state, NODES).sending(read).storages(USED, tensor, NODES)
    every = [storage.hops(tensor, NODES, precision=read) for storage in storages]
    return [
        (hop.when, hop.call.title, math.prod(map(NODES.axis_size, hop.call.axes)), hop.call.nbytes)
        for hop in max(every, key=len)
    ]


def test_zero_plus_plus_sends_blocks_of_what_it_holds_and_of_gradients() -> None:
    """Over nodes an eighth; what a node keeps has been rounded, and goes as it is."""
    rows = 2 * 4 * 256
    assert sends("zero++", f"bf16 {BOTH}", (rows, 3)) == [
        ("forward", "int8 all_gather", 4, 3 * 260),
        ("forward", "int8 all_gather", 2, 4 * 3 * 260),
        ("backward", "all_gather", 2, rows // 2 * 3 * 2),
        ("accumulate", "int8 all_to_all", 2, 2 * 12 * 260),
        ("accumulate", "int8 all_to_all", 4, 4 * 3 * 260),
    ]


def test_what_is_updated_is_gathered_as_it_is() -> None:
    found = sends("zero1", "bf16 gradients=int8", (2048, 3))
    assert [title for when, title, *_ in found if when == "update"] == ["all_gather"] * 2
    assert {title for when, title, *_ in found if when == "reduce"} == {"int8 all_to_all"}


def test_what_would_not_get_smaller_goes_as_it_is() -> None:
    """Blocks of 260 bytes against 8 parts of bf16, or of f32 where gradients are sent so."""
    titles = {when: title for when, title, *_ in sends("zero3 over none, kept", BOTH, (8 * 130, 1))}
    assert titles == {"forward": "all_gather", "accumulate": "reduce_scatter"}
    titles = {when: title for when, title, *_ in sends("zero3 over none, kept", BOTH, (8 * 131, 1))}
    assert titles == {"forward": "int8 all_gather", "accumulate": "int8 all_to_all"}


def test_its_price_is_that_of_its_bytes_and_of_two_kernels() -> None:
    model, axes = AnalyticModel(NODES), ("node", "gpu")
    moved = 10 * 2**20
    found = model.collective(Collective("all_gather", axes, 2**20, moved))
    kernel = kernel_seconds(model.device, "quantize", 0.0, moved / 2, "f32")
    assert found == model.collective(Collective("all_gather", axes, 2**20)) + 2 * kernel


def test_plan_program_and_explanation_say_that_numerics_change() -> None:
    """The explanation adds up to the prediction, which blocks make smaller over slow links."""
    options = Options(pins=data_parallel(), state="zero3, gathered again")
    model, batch = wide()
    graph = capture_graph(model, (), batch, options, Trace(None)).graph
    mesh = Mesh.parse(SLOW)
    plain = make_plan(graph, mesh, options, Trace(None))
    plan = make_plan(graph, mesh, replace(options, precision=Precision.read(BOTH)), Trace(None))
    assert Plan.from_toml(Plan.of(plan).to_toml()).stage == plan
    assert plan.predicted.step_seconds < 0.6 * plain.predicted.step_seconds
    found = explained(graph, plan, math.inf)
    assert found.step == pytest.approx(plan.predicted.step_seconds, rel=1e-9)
    console = Console(width=200, record=True, file=StringIO())
    console.print(render(found))
    source = emit(graph, plan, AnalyticModel(mesh).collective)
    for text in (console.export_text(), source):
        assert Precision.read(BOTH).caution in text
        assert "int8 all_to_all" in text
    assert f'PRECISION = "{BOTH}"' in source
    assert not explained(graph, plain, math.inf).caution


@pytest.mark.parametrize(
    ("precision", "state"),
    [("weights=int8", "zero2"), ("weights=int8", "NNG")],
)
def test_a_state_sharding_that_sends_none_of_it_is_refused_by_name(
    precision: str, state: str
) -> None:
    what = precision.partition("=")[0]
    with pytest.raises(PrecisionError, match=f"{what} cannot be sent as int8 blocks under"):
        Options(state=state, precision=Precision.read(precision)).allowed_storages(NODES)


def test_blocks_are_read_and_written_as_a_part_of_a_precision() -> None:
    for said in (BOTH, f"bf16 {BOTH}", "bf16 communication=bf16 sums=f32 gradients=int8"):
        assert str(Precision.read(said)) == said
    assert Precision.read(f"fp32 {BOTH}") == Precision.read(BOTH)
    assert not Precision.read("bf16").caution
    assert "weights and gradients go as int8" in Precision.read(BOTH).caution
    with pytest.raises(PrecisionError, match="weights cannot be sent as 'int4'"):
        Precision.read("weights=int4")
    with pytest.raises(PrecisionError, match="cannot read"):
        Precision.read("communication=bf16")

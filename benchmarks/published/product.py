"""Published cases as plain calls of `autopar.plan`: models, meshes, pins and options, no more.

Each system is a table of options; what they assume of it, and where it is said, stands at the head
of that system's file (megatron.py, megatron_core.py, torchtitan.py, alpa.py). No price is computed
here: seconds and bytes are those of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

import autopar
from autopar import pins
from autopar.cost.device import device
from autopar.cost.uncertainty import error_seconds, step_error
from autopar.plan import Plan
from autopar.planning.capturing import Call, capture_call
from autopar.planning.options import Options
from autopar.planning.pipelines.simulated import simulated
from autopar.planning.pipelines.stages import stage_graphs
from autopar.planning.trace import Trace
from benchmarks.published import alpa, megatron, torchtitan
from benchmarks.published.alpa_models import AlpaSizes, AlpaTransformer, WideResNet, WideSizes
from benchmarks.published.models import GPT, Llama, Sizes
from benchmarks.published.torchtitan import SIZES

NO_LIMIT = 1e16
MEGATRON = "fused=mul+softmax,dropout+add merged loss=inplace optimizer=60"
MEGATRON_CORE = "merged loss=inplace optimizer=44 ahead adds"
# Its functional test: --no-gradient-accumulation-fusion, and --deterministic-mode, in which
# TransformerEngine takes FlashAttention 2 on A100, and cuDNN's attention on H100
# (transformer_engine/pytorch/attention/dot_product_attention/utils.py).
GOLDEN = "merged loss=inplace optimizer=44 ahead"
GOLDEN_ON = {"A100-80": f"{GOLDEN} deterministic", "H100": GOLDEN}
# FSDP2's copies (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py); fused AdamW moves 28
# bytes, and torchtitan clips gradients at every step, which moves 12: a norm and a product.
TORCHTITAN = "copies optimizer=40 reserve=15%"
ALPA = "compiled=all merged waits together loss=compiled reductions=steps"
# Of every parameter, AdamW reads the gradient (2 bytes), both moments, the master (4 each) and the
# old value (2), and writes all but the gradient. Mixtures have Adafactor: means over rows, columns
# and all read the gradient, one mean reads the master, and the update moves 14 bytes.
GPT_UPDATE, MIXTURE_UPDATE = "optimizer=30", "optimizer=24"
# Alpa scatters the gradients of experts along the dimension behind theirs, and those of
# convolutions along their input channels (GetReduceScatterOutput in its auto_sharding_util.cc).
# Around scatters and gathers, XLA moves this dimension to the front in memory, and back
# (AddBackendConstraints in gpu_layout_assignment.cc).
SCATTERED = {"data_parallel": ""}  # what a method adds to the execution, if not copies
# Its benchmark turns XLA's auto-tuning of convolutions off (benchmark/alpa/benchmark_one_case.py).
WIDE_RESNET = "compiled=all convolutions=direct waits together optimizer=28"
ALPA_STATES = {"data_parallel": "ddp", "zero_3": "zero3, gathered again"}
BY_OPERATOR = "save linear:2 attention"


def batch_of(samples: int, seq: int) -> dict[str, torch.Tensor]:
    """Returns tokens and labels [samples, seq] without data."""
    tokens = torch.zeros(samples, seq, dtype=torch.long, device="meta")
    return {"tokens": tokens, "labels": tokens}


def mesh_text(device: str, sizes: Mapping[str, int]) -> str:
    """Returns a mesh of one kind of device as text."""
    return f"{device}: " + ", ".join(f"{name}={size}" for name, size in sizes.items())


@cache
def megatron_plan(run: megatron.Run) -> Plan:
    """The plan of a row of SC21's table."""
    with torch.device("meta"):
        model = GPT(Sizes(run.hidden, run.heads, run.layers, run.vocab, run.seq))
    return _pipeline(
        model, run, pins.megatron("tp"), precision="fp16 communication=fp16",
        recompute="full", state="ddp", execution=MEGATRON,
    )  # fmt: skip


def _core_model(run: megatron.Run) -> GPT:
    sizes = Sizes(
        run.hidden, run.heads, run.layers, run.vocab, run.seq, run.dropout, tied=False,
        flash=True, groups=run.groups,
    )  # fmt: skip
    with torch.device("meta"):
        return GPT(sizes)


def last_rank_bytes(run: megatron.Run) -> float:
    """Predicted peak bytes of the last rank of the functional test, which alone records its own.

    A plan predicts those of the fullest device; the simulation that it is of knows all.
    """
    plan = megatron_core_plan(run, GOLDEN_ON[run.device])
    options = Options.like(plan.stages[0])
    call = Call(_core_model(run), (), batch_of(run.global_batch, run.seq))
    graph = capture_call(call, options, Trace(None), plan.microbatches).graph
    step = simulated(stage_graphs(graph, plan.ends, Trace(None)), plan, options)
    return next(
        m for m, ranks in zip(step.memory, step.ranks, strict=True) if run.gpus - 1 in ranks
    )


@cache
def megatron_core_plan(run: megatron.Run, execution: str = MEGATRON_CORE) -> Plan:
    """The plan of a row of Megatron-Core's README, or of its functional test."""
    return _pipeline(
        _core_model(run), run, pins.megatron_sp("tp"), precision="bf16", recompute="none",
        state="zero1", fuse=["async_tensor_parallel"], execution=execution,
    )  # fmt: skip


def _pipeline(model: torch.nn.Module, run: megatron.Run, tensor: Any, **options: Any) -> Plan:
    schedule = "1f1b" if run.chunks == 1 else f"interleaved_1f1b chunks={run.chunks}"
    # An axis of one device is left out where the system has none.
    sizes = {"pp": run.pp, "dp": run.dp, "tp": run.tp}
    return autopar.plan(
        model,
        mesh_text(run.device, {n: s for n, s in sizes.items() if s > 1 or n == "tp"}),
        example_inputs=batch_of(run.global_batch, run.seq),
        pins=[*([pins.data_parallel("dp")] if run.dp > 1 else []), tensor],
        stages=run.pp * run.chunks,
        microbatches=run.microbatches,
        schedule=schedule,
        memory=NO_LIMIT,
        **options,
    )


@cache
def torchtitan_plan(run: torchtitan.Run) -> Plan:
    """The plan of a row of torchtitan's pages."""
    sizes = replace(SIZES[run.model], seq=run.seq * run.cp)
    with torch.device("meta"):
        model = Llama(sizes)
        turns = torch.zeros(sizes.seq, sizes.hidden // sizes.heads // 2, dtype=torch.complex64)
    # With tensor parallelism it is torch.distributed.tensor.parallel's loss.
    words = ["loss=steps"] if run.tp > 1 else [f"loss={run.loss}"] if run.loss else []
    if run.compiled:
        words.append("compiled=blocks")
    if run.linears:
        words.append(f"linears={run.linears}")
        words += ["joined"] if run.asynchronous else []
    axes = {"dp": run.fsdp // run.cp, "cp": run.cp, "tp": run.tp}
    given: list[pins.PinFunction] = [pins.data_parallel("dp")]
    given += [pins.megatron_sp("tp")] if run.tp > 1 else []
    return autopar.plan(
        model,
        mesh_text(run.device, {name: size for name, size in axes.items() if size > 1}),
        example_inputs={
            **batch_of(run.batch * run.fsdp // run.cp, sizes.seq), "turns": turns
        },
        pins=given,
        state="zero3",
        precision="bf16",
        recompute="full" if run.full else BY_OPERATOR,
        fuse=["async_tensor_parallel"] if run.asynchronous else False,
        execution=" ".join([*words, TORCHTITAN]),
        memory=NO_LIMIT,
    )  # fmt: skip


@cache
def alpa_plan(run: alpa.Run) -> Plan:
    """The plan of a row of Alpa's ablation of GPT."""
    sizes = AlpaSizes(run.hidden, run.heads, alpa.LAYERS, alpa.VOCAB, alpa.SEQ, width=4)
    with torch.device("meta"):
        model = AlpaTransformer(sizes)
    return _ablation(
        model, batch_of(alpa.BATCH, alpa.SEQ), run, searched=False,
        precision="fp16 communication=fp16", recompute="full", execution=f"{ALPA} {GPT_UPDATE}",
    )  # fmt: skip


@cache
def wide_resnet_plan(run: alpa.Run) -> Plan:
    """The plan of a row of Alpa's ablation of Wide-ResNet; `run.hidden` is its channels."""
    sizes = WideSizes(50, run.hidden, 2)
    with torch.device("meta"):
        model = WideResNet(sizes)
        images = torch.zeros(32, 3, sizes.image, sizes.image)
        batch = {"images": images, "labels": torch.zeros(32, dtype=torch.long)}
    return _ablation(
        model, batch, run, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        execution=WIDE_RESNET + SCATTERED.get(run.method, " copies"),
    )  # fmt: skip


@cache
def mixture_plan(run: alpa.Run, experts: int) -> Plan:
    """The plan of a row of Alpa's ablation of a mixture of experts."""
    heads = run.hidden // (64 if run.hidden == 1536 else 32)
    with torch.device("meta"):
        model = AlpaTransformer(AlpaSizes(run.hidden, heads, 8, 51200, 1024, experts))
    execution = f"{ALPA} {MIXTURE_UPDATE}" + SCATTERED.get(run.method, " copies")
    # Adafactor's states of matrices are so small that SGD, which has none, stands for it.
    return _ablation(
        model, batch_of(8, 1024), run, optimizer=partial(torch.optim.SGD, lr=0.1),
        precision="fp16 communication=fp16", recompute="full", execution=execution,
    )  # fmt: skip


def _channels(context: pins.PinContext) -> dict[str, str]:
    """Pins that split every convolution's channels along "tp", but for the stem's three."""
    shapes = {context.key(node): node.type.shape for node in context.parameters()}
    return {
        name: f"not [{', '.join(map(str, shape))}] along tp"
        for name, shape in shapes.items()
        if len(shape) == 4 and shape[1] > 3
    }


def _ablation(
    model: torch.nn.Module,
    batch: dict[str, torch.Tensor],
    run: alpa.Run,
    searched: bool = True,
    **options: Any,
) -> Plan:
    """The plan of a row of Alpa's: on one axis, it is `searched` for where Alpa did.

    On two axes, its plans are taken to split the batch along the first, and layers or channels
    along the second.
    """
    data, tensor = run.logical
    given: list[pins.PinFunction] = [pins.data_parallel("dp")] if data > 1 else []
    if tensor > 1:
        given.append(_channels if isinstance(model, WideResNet) else pins.megatron("tp"))
    free = searched and run.method == "auto_sharding" and tensor == 1
    return autopar.plan(
        model,
        mesh_text("V100", {n: s for n, s in (("dp", data), ("tp", tensor)) if s > 1 or n == "dp"}),
        example_inputs=batch,
        pins=[] if free else given,
        state=ALPA_STATES.get(run.method, "zero2"),
        memory=alpa.MEMORY if free else NO_LIMIT,
        **options,
    )


def printed_range(plan: Plan) -> float:
    """The share of a step by which the command line says that it may be off."""
    predicted = plan.predicted
    if plan.is_pipeline:
        error = step_error(plan.mesh, predicted.step_seconds)
    else:
        sent = predicted.exchange_seconds + predicted.parameter_seconds + predicted.reshard_seconds
        error = error_seconds(device(plan.mesh), predicted.compute_seconds, sent)
    return error / predicted.seconds


def torchtitan_tokens_per_second(run: torchtitan.Run) -> float:
    """Predicted tokens a second and device."""
    return run.tokens / torchtitan_plan(run).predicted.seconds / run.tp


def megatron_tflops(plan: Plan, run: megatron.Run, flops: float) -> float:
    """Predicted TFLOP/s of each device, given the FLOPs of an iteration."""
    return flops / plan.predicted.seconds / run.gpus / 1e12

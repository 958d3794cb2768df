"""Training steps written by hand with torch, the baselines of `benchmarks/end_to_end.py`.

Each is a `Rival`: it takes a model on the CPU, shards it over all processes of the default group,
and trains it with AdamW. A step takes the whole batch, of which every process uses its part, and
returns the mean loss on every process. Tensor parallelism and pipelines support decoders whose
modules have Llama's names (Llama, Mistral, Qwen), and refuse other models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

Batch = dict[str, Tensor]
Optimizer = Callable[[Any], torch.optim.Optimizer]


class Rival(Protocol):
    """Something that trains."""

    def step(self, batch: Batch) -> Tensor:
        """One step on a whole batch; the mean loss, on every process."""
        ...


class RefusedError(Exception):
    """A baseline that does not apply; says why."""


@dataclass(frozen=True)
class Setting:
    """What all rivals are made for.

    Attributes:
        device: of this process.
        optimizer: makes one of the parameters.
        hosts: number of hosts; tensor parallelism stays inside one.
        microbatches: of pipelines.
    """

    device: torch.device
    optimizer: Optimizer
    hosts: int
    microbatches: int

    @property
    def world(self) -> int:
        """Number of processes."""
        return dist.get_world_size()

    def mesh(self, *shape: int, names: tuple[str, ...]) -> DeviceMesh:
        """A grid of all processes."""
        return init_device_mesh(self.device.type, shape, mesh_dim_names=names)


class Decoder(nn.Module):
    """The decoder's layers `first` to `last`, with the embedding if first and the head if last.

    It runs the modules of a transformers model itself, so that a mask, a cache and positions, which
    that model works out from shapes, do not depend on how activations are split.
    """

    def __init__(self, model: Any, layers: range | None = None) -> None:
        super().__init__()
        if not all(hasattr(getattr(model, "model", None), name)
                   for name in ("embed_tokens", "layers", "norm", "rotary_emb")):  # fmt: skip
            raise RefusedError(f"{type(model).__name__} is not built like Llama")
        count = len(model.model.layers)
        layers = layers or range(count)
        self.embed_tokens = model.model.embed_tokens if layers.start == 0 else None
        self.layers = nn.ModuleList(model.model.layers[number] for number in layers)
        last = layers.stop == count
        self.norm = model.model.norm if last else None
        self.lm_head = model.lm_head if last else None
        self.rotary_emb = model.model.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [batch, seq] or activations, to activations or logits."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        rotary = self.rotary_emb(x, position_ids=positions)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_embeddings=rotary, position_ids=positions)
        if self.norm is None or self.lm_head is None:
            return x
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Each token's loss is that of the next one, as transformers has it."""
    following = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1).float(), following.flatten(), ignore_index=-100)


def _mean(loss: Tensor) -> Tensor:
    """Over all processes, each of which has as many tokens."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _own(batch: Batch, place: int, count: int) -> Batch:
    """One of `count` equal slices."""
    return {name: value.chunk(count)[place] for name, value in batch.items()}


class _OwnSamples:
    """Each process trains on its own part of the batch; torch brings gradients together."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self.setting, self.model = setting, model
        self.optimizer = setting.optimizer(model.parameters())

    def step(self, batch: Batch) -> Tensor:
        """See `Rival`."""
        self.optimizer.zero_grad()
        loss = self.model(**_own(batch, dist.get_rank(), self.setting.world))["loss"]
        loss.backward()
        self.optimizer.step()
        return _mean(loss)


class Replicated(_OwnSamples):
    """DistributedDataParallel."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        super().__init__(DistributedDataParallel(model.to(setting.device)), setting)


class FullySharded(_OwnSamples):
    """fully_shard (FSDP2) of every block and of the rest.

    Args:
        model: on the CPU.
        setting: see there.
        reshard: whether parameters are gathered again for the backward; None is torch's own choice.
        replicas: of what is split, hybrid sharding.
    """

    def __init__(
        self, model: nn.Module, setting: Setting, reshard: bool | None = None, replicas: int = 1
    ) -> None:
        mesh = setting.mesh(setting.world, names=("data",))
        if replicas > 1:
            parts = setting.world // replicas
            mesh = setting.mesh(replicas, parts, names=("replica", "part"))
        model.to(setting.device)
        for block in _blocks(model):
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        super().__init__(model, setting)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The model's repeated blocks: its longest list of modules."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


class TensorParallel:
    """Megatron's tensor and sequence parallelism by DTensor; with `data`, FSDP2 around it."""

    def __init__(self, model: nn.Module, setting: Setting, data: int = 1) -> None:
        self.setting, self.data = setting, data
        decoder = Decoder(model).to(setting.device)
        mesh = setting.mesh(data, setting.world // data, names=("data", "tensor"))
        self.place = mesh.get_local_rank("data")
        self.model = _tensor_parallel(decoder, mesh["tensor"])
        if data > 1:
            for block in decoder.layers:
                fully_shard(block, mesh=mesh["data"])
            fully_shard(decoder, mesh=mesh["data"])
        self.optimizer = setting.optimizer(decoder.parameters())

    def step(self, batch: Batch) -> Tensor:
        """See `Rival`."""
        self.optimizer.zero_grad()
        own = _own(batch, self.place, self.data)
        with loss_parallel():
            loss = loss_of(self.model(own["input_ids"]), own["labels"])
            loss.backward()
        self.optimizer.step()
        return _mean(loss.to_local() if isinstance(loss, DTensor) else loss)


def _tensor_parallel(decoder: Decoder, mesh: DeviceMesh) -> nn.Module:
    """The plan of torch's own tutorials: sequence parallel norms, sharded loss."""
    first: Any = decoder.layers[0]
    heads = first.self_attn.config.num_key_value_heads
    if heads % mesh.size():
        raise RefusedError(f"{heads} heads of keys do not divide among {mesh.size()} devices")
    parallelize_module(
        decoder,
        mesh,
        {
            "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "lm_head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    for layer in decoder.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "input_layernorm": SequenceParallel(),
                "self_attn": PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": Shard(1)},
                    desired_input_kwarg_layouts={"hidden_states": Replicate()},
                ),
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
                "post_attention_layernorm": SequenceParallel(),
                "mlp": PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                ),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    return decoder


class Pipelined:
    """torch.distributed.pipelining: equal numbers of layers by 1F1B."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        rank, world = dist.get_rank(), setting.world
        count = len(_blocks(model))
        if count < world:
            raise RefusedError(f"{count} layers do not make {world} stages")
        layers = range(count * rank // world, count * (rank + 1) // world)
        part = Decoder(model, layers).to(setting.device)
        self.first, self.last = rank == 0, rank == world - 1
        stage = PipelineStage(part, rank, world, setting.device)
        self.schedule = Schedule1F1B(stage, setting.microbatches, loss_fn=loss_of)
        self.optimizer = setting.optimizer(part.parameters())
        self.world = world

    def step(self, batch: Batch) -> Tensor:
        """See `Rival`."""
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        given = (batch["input_ids"],) if self.first else ()
        if self.last:
            target = batch["labels"]
            self.schedule.step(*given, target=target, losses=losses, return_outputs=False)
        else:
            self.schedule.step(*given, return_outputs=False)
        self.optimizer.step()
        device = batch["input_ids"].device
        mean = torch.stack(losses).mean().detach() if losses else torch.zeros((), device=device)
        mean = mean.float()
        dist.all_reduce(mean)
        return mean


def tensor_and_data(model: nn.Module, setting: Setting) -> Rival:
    """Tensor parallelism inside a host, FSDP2 between hosts; on one host two by the rest."""
    return TensorParallel(model, setting, setting.hosts if setting.hosts > 1 else 2)


BASELINES: dict[str, Callable[[nn.Module, Setting], Rival]] = {
    "ddp": Replicated,
    "fsdp2": FullySharded,
    "tp": TensorParallel,
    "tp+fsdp2": tensor_and_data,
    "pp": Pipelined,
}

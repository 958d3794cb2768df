"""Random settings of a training: a model, its data, and options, which train as in one process.

`Settings.of(seed)` is the same at every call. Everything is in float64, and every setting either is
refused by name or gives the losses and weights of a plain loop on one process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.mesh import Mesh
from tests.support.stale_weights import METHODS

WIDTH, WORDS, LENGTH = 8, 12, 6
IGNORED = -100
STEPS, LOCAL_STEPS = 4, 6

MESHES = {"cpu: x=2": (2,), "cpu: x=4": (2, 4), "cpu: x=3": (3,), "cpu: x=2, y=2": (2,)}
# Devices of a replica, and numbers of stages that they can be.
REPLICATED = {
    "cpu: node=2, x=1": (), "cpu: node=3, x=1": (), "cpu: node=2, x=2": (2,),
    "cpu: x=2, node=2": (2,),
}  # fmt: skip
OUTER = (
    "local over node, tau={}",
    "slowmo over node, tau={}, beta=0.6, rate=0.9",
    "overlap over node, tau={}, alpha=0.5, beta=0.3",
    "co2 over node, tau={}, beta=0.4, clip=0.002, penalty=rate",
    "co2 over node, tau={}, beta=0.4, clip=off, penalty=off",
    "co2 over node, tau={}, beta=0.4, clip=0.002, penalty=rate, origin=round",
    "diloco over node, tau={}, rate=0.8, beta=0.7",
)
SCHEDULES = (
    "1f1b", "1f1b", "gpipe", "naive", "eager_1f1b", "interleaved_1f1b chunks=2", "zb_h1", "zb_h2",
    "zb_v", "chimera", "dualpipe_v",
)  # fmt: skip
STALE = ("pipedream", "few", "vertical", "2bw", "bounded")  # whose backward runs as its forward
TWICE = ("interleaved_1f1b", "zb_v", "dualpipe_v")  # two stages on every part of the mesh
STATES = (None, None, "ddp", "zero1", "zero2", "zero3", "zero3, kept")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3),
    "amsgrad": partial(torch.optim.Adam, lr=1e-2, eps=1e-3, amsgrad=True, weight_decay=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, eps=1e-3, centered=True, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, eps=1e-3),
    "nadam": partial(torch.optim.NAdam, lr=1e-2, eps=1e-3),
    "radam": partial(torch.optim.RAdam, lr=1e-2, eps=1e-3),
    "adamax": partial(torch.optim.Adamax, lr=1e-2, eps=1e-3),
    "adadelta": partial(torch.optim.Adadelta, lr=1e-1, eps=1e-3),
    "maximize": partial(torch.optim.SGD, lr=1e-3, maximize=True),
}


class Attention(nn.Module):
    """Causal self-attention of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A residual block of attention or none, and two linears."""

    def __init__(self, attention: bool, norm: str, dropout: float) -> None:
        super().__init__()
        self.attention = Attention() if attention else nn.Identity()
        self.norm = nn.LayerNorm(WIDTH) if norm == "layer" else nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Words(nn.Module):
    """Predicts a class for each word, with one of several losses."""

    def __init__(self, blocks: int, attention: bool, norm: str, dropout: float, tied: bool,
                 frozen: str, loss: str) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) / 4)
        self.blocks = nn.ModuleList(Block(attention, norm, dropout) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("seen", torch.zeros(()))
        if tied:
            self.head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            if frozen and frozen in name:
                parameter.requires_grad_(False)
        self.loss = loss
        self.weight = nn.Buffer(torch.rand(WORDS) + 0.5)

    def forward(self, words: Tensor, labels: Tensor, scale: Tensor) -> Any:
        x = self.embed(words) + self.position[: words.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return self.losses(logits, labels, scale, x)

    def losses(self, logits: Tensor, labels: Tensor, scale: Tensor, x: Tensor) -> Any:
        """Returns the loss of this model's kind."""
        flat, targets = logits.flatten(0, 1), labels.flatten()
        known = (labels != IGNORED).to(logits.dtype)
        kind = self.loss
        if kind == "mean":
            return F.cross_entropy(flat, targets)
        if kind == "smoothed":
            return F.cross_entropy(flat, targets, label_smoothing=0.1)
        if kind == "weighted":
            return F.cross_entropy(flat, targets, weight=self.weight)
        if kind == "sum":
            return F.cross_entropy(flat, targets, reduction="sum") / 100
        if kind == "regularised":
            return F.cross_entropy(flat, targets) + 1e-2 * x.square().mean()
        each = F.cross_entropy(flat, targets, reduction="none").view_as(known)
        if kind == "masked":
            return (each * known).sum() / known.sum()
        if kind == "of rows":  # a mean over rows of means over their words
            return ((each * known).sum(1) / known.sum(1)).mean()
        if kind == "scaled":
            return (each * known).mul(scale[:, None]).sum() / scale.sum()
        if kind == "named":
            return {"logits": logits, "loss": F.cross_entropy(flat, targets)}
        if kind == "shifted":
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        if kind == "two":
            squares = F.mse_loss(x.mean(1), self.position.mean(0).expand(len(x), -1))
            return F.cross_entropy(flat, targets) + 0.1 * squares
        raise ValueError(kind)


MEANS = ("mean", "smoothed", "regularised", "named", "two")  # every microbatch has its own
LOSSES = ("mean", "smoothed", "weighted", "sum", "regularised", "masked", "of rows", "scaled",
          "named", "shifted", "two")  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """One training.

    Attributes:
        model: arguments of `Words`.
        rows: numbers of rows of the batches, one for each step.
        options: of `autopar.compile`.
        clip, ema, scheduled: of the update.
        saved: the step before which the session is saved and replaced by a new one; 0 for never.
        again: options of the second session.
        evaluated: whether an evaluation runs between the steps.
        method: of `METHODS`, by which a pipeline does not wait for its updates.
    """

    seed: int
    mesh: str
    model: dict[str, Any]
    rows: tuple[int, ...]
    optimizer: str
    options: dict[str, Any] = field(default_factory=dict)
    grouped: bool = False
    scheduled: bool = False
    saved: int = 0
    again: dict[str, Any] = field(default_factory=dict)
    evaluated: bool = False
    method: str = ""

    @classmethod
    def of(cls, seed: int) -> Settings:
        """Returns the settings of a seed."""
        draw = random.Random(seed)
        model = described(draw)
        mesh = draw.choice(list(MESHES))
        rows = draw.choice((12, 12, 24))
        many = [rows] * STEPS
        options = dict(divided(draw, MESHES[mesh]))
        if draw.random() < 0.25:
            local = "batches" in options
            many[2] = 36 if local else draw.choice((rows // 2, rows - 3, 1, rows + 5, 2))
            options["shapes"] = 3
        options |= dict(updated(draw))
        return cls._resumed(draw, seed, mesh, model, many, options, MESHES[mesh])

    @classmethod
    def apart(cls, seed: int) -> Settings:
        """Returns settings of a seed in which replicas train apart."""
        draw = random.Random(seed)
        model, mesh = described(draw), draw.choice(list(REPLICATED))
        count = Mesh.parse(mesh).axis_size("node")
        rows = count * draw.choice((4, 6, 12))
        many = [rows] * LOCAL_STEPS
        options = dict(divided(draw, REPLICATED[mesh])) | dict(updated(draw))
        options["outer"] = draw.choice(OUTER).format(draw.choice((1, 2, 2, 3)))
        if draw.random() < 0.25:
            local = "batches" in options
            many[2] = 2 * rows if local else count * draw.choice((1, 2, 5, 7))
            options["shapes"] = 3
        return cls._resumed(draw, seed, mesh, model, many, options, REPLICATED[mesh])

    @classmethod
    def _resumed(
        cls,
        draw: random.Random,
        seed: int,
        mesh: str,
        model: dict[str, Any],
        rows: list[int],
        options: dict[str, Any],
        parts: tuple[int, ...],
    ) -> Settings:
        """Returns settings with an optimizer, and perhaps with a second session and its plan."""
        saved = draw.choice((0, 0, 2, 3))
        again = dict(divided(draw, parts)) if saved and draw.random() < 0.6 else {}
        if any({"stages", "accumulate"} & given.keys() for given in (options, again)):
            model["dropout"] = 0.0  # every microbatch draws by itself
        return cls(
            seed, mesh, model, tuple(rows), draw.choice(list(OPTIMIZERS)), options,
            draw.random() < 0.3, draw.random() < 0.3, saved, again, draw.random() < 0.3,
        )  # fmt: skip

    @classmethod
    def stale(cls, seed: int) -> Settings:
        """Returns settings of a seed in which stages do not wait for each other."""
        draw = random.Random(seed)
        model = {**described(draw), "dropout": 0.0, "loss": draw.choice(MEANS)}
        mesh = draw.choice(list(MESHES))
        method = draw.choice(STALE)
        model["tied"] = model["tied"] and method not in ("pipedream", "few")
        options = {
            "stages": draw.choice(MESHES[mesh]),
            "schedule": METHODS[method].schedule,
            "microbatches": METHODS[method].microbatches,
            "allow": "stale gradients",
        }
        if draw.random() < 0.6:
            options["state"] = draw.choice(("ddp", "zero1", "zero2"))
        if draw.random() < 0.3:
            options["recompute"] = draw.choice(("full", "selective", "full 1", "none"))
        options |= dict(updated(draw))
        if model["tied"]:  # each stage would clip its copy by a norm of its own
            options.pop("clip_norm", None)
        return cls(
            seed, mesh, model, (draw.choice((8, 16)),) * LOCAL_STEPS,
            draw.choice(list(OPTIMIZERS)), options, draw.random() < 0.3, draw.random() < 0.3,
            draw.choice((0, 0, 2, 3)), {}, draw.random() < 0.3, method,
        )  # fmt: skip

    @property
    def replicas(self) -> int:
        """Returns the number of replicas that train apart, 1 if none do."""
        return Mesh.parse(self.mesh).axis_size("node") if "outer" in self.options else 1

    def replica_of(self, rank: int) -> int:
        """Returns the replica of a rank."""
        return Mesh.parse(self.mesh).coordinate(rank)["node"] if self.replicas > 1 else 0

    def made(self) -> Words:
        """Returns the model."""
        torch.manual_seed(self.seed)
        return Words(**self.model).double()

    def parts(self, options: Mapping[str, Any]) -> int:
        """Returns the number of parts of a batch, if ranks pass their own."""
        stages = options.get("stages", 1)
        twice = any(name in options.get("schedule", "") for name in TWICE)
        return Mesh.parse(self.mesh).size // (stages // 2 if twice else stages)

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Yields the batch of every step; labels are ragged."""
        draw = torch.Generator().manual_seed(self.seed)
        for rows in self.rows:
            words = torch.randint(WORDS, (rows, LENGTH), generator=draw)
            labels = torch.randint(WORDS, (rows, LENGTH), generator=draw)
            lengths = torch.randint(2, LENGTH + 1, (rows, 1), generator=draw)
            if not self.method:  # every microbatch of one that does not wait has a mean of its own
                labels[torch.arange(LENGTH) >= lengths] = IGNORED
            scale = torch.rand(rows, generator=draw).double() + 0.1
            yield {"words": words, "labels": labels, "scale": scale}


def described(draw: random.Random) -> dict[str, Any]:
    """Returns arguments of a model."""
    return {
        "blocks": draw.choice((2, 2, 4)),
        "attention": draw.random() < 0.5,
        "norm": draw.choice(("layer", "rms")),
        "dropout": draw.choice((0.0, 0.0, 0.0, 0.2)),
        "tied": draw.random() < 0.3,
        "frozen": draw.choice(("", "", "", "position", "up", "embed", "blocks.0.")),
        "loss": draw.choice(LOSSES),
    }


def divided(draw: random.Random, parts: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yields options of the plan."""
    kind = draw.choice(("plain", "plain", "stages", "stages", "auto", "accumulate"))
    if kind == "stages" and parts:
        stages, schedule = draw.choice(parts), draw.choice(SCHEDULES)
        twice = any(name in schedule for name in TWICE)
        yield "stages", stages * 2 if twice else stages
        yield "microbatches", draw.choice((2, 4, 6, 12)) if twice else draw.choice((1, 2, 3, 4, 6))
        yield "schedule", schedule
    elif kind == "auto":
        yield "stages", "auto"
    elif kind == "accumulate":
        yield "accumulate", draw.choice((2, 3, 4))
    if draw.random() < 0.6:
        yield "state", draw.choice(STATES)
    if draw.random() < 0.3:
        yield "recompute", draw.choice(("full", "selective", "full 1", "none"))
    if draw.random() < 0.15:
        yield "offload", draw.choice(("optimizer", "activations", "optimizer+activations"))
    if draw.random() < 0.2:
        yield "collectives", "auto"
    if kind != "auto" and draw.random() < 0.2:
        yield "batches", "local"


def updated(draw: random.Random) -> Iterator[tuple[str, Any]]:
    """Yields options of the update."""
    if draw.random() < 0.4:
        yield "clip_norm", draw.choice((0.05, 0.5, 100.0))
    if draw.random() < 0.2:
        yield "ema", 0.7
    if draw.random() < 0.15:
        yield "fuse", True
    if draw.random() < 0.1:
        yield "backend", "aot_eager"

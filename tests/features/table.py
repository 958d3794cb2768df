"""The features by name. A new feature is one entry, which meets all others in pairs."""

from __future__ import annotations

import itertools
import random

from autopar.pins import data_parallel, megatron
from tests.features.feature import Case, Feature
from tests.features.zoo import FAMILIES, OTHERS

FEATURES: dict[str, Feature] = {
    "tied": Feature({"tied": True}),
    "stages": Feature({"microbatches": 2}, {"stages": 2}, seen=r"\[\[stages\]\]"),
    "zero3": Feature(options={"state": "zero3"}, seen='state = "zero3"'),
    "clipping": Feature({"clip": 0.1}),
    "dropout": Feature({"dropout": 0.2}, seen=r"\b0\.2\b"),
    "accumulation": Feature({"microbatches": 4}, seen=r"microbatches = 4"),
    "ema": Feature({"ema": 0.9}),
    "groups": Feature({"grouped": True}),
    "offload": Feature(
        options={"offload": "optimizer+activations"}, seen=r"offload\.activations\]"
    ),
    "recompute": Feature(options={"recompute": "full 1"}, seen=r"recompute\]"),
    "resume": Feature(run={"resumed": True}),
    "scheduler": Feature({"scheduled": True}),
    "megatron": Feature(
        options={"pins": [data_parallel("data"), megatron("tensor")]}, seen=r"pins\]"
    ),
    "fuse": Feature(options={"fuse": True}, seen=r"\bkernels\b"),
    "frozen": Feature({"frozen": True}),
}

# In half precision, and in blocks of integers, two runs that add in another order differ by as much
# as their rounding; Adam would make more of it where gradients are small.
_LOW = {"optimizer": "momentum"}

PROGRAMS = [
    f"{kind} over {axes} from 0: flat_ring"
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
    for axes in ("data", "tensor", "data, tensor")
]

FURTHER: dict[str, Feature] = {
    "bf16": Feature({"compute": "bf16", **_LOW}, {"precision": "bf16"}, {"within": 0.05}),
    "fp16": Feature(
        {"compute": "f16", "scaled": True, **_LOW}, {"precision": "fp16"}, {"within": 0.02}
    ),
    "int8": Feature(
        {"compute": "f32", **_LOW},
        {"precision": "weights=int8 gradients=int8", "state": "zero3"},
        {"within": 0.1},
    ),
    "asynchronous": Feature(run={"resumed": True, "asynchronous": True}),
    "compiled": Feature(options={"backend": "aot_eager"}),
    "uneven": Feature({"uneven": True}),
    "momentum": Feature({"optimizer": "momentum"}),
    "adafactor": Feature({"optimizer": "adafactor"}),
    "second": Feature({"second": True}),
    "zero_bubble": Feature({"microbatches": 4}, {"stages": 2, "schedule": "zb_h1"}),
    "interleaved": Feature(
        {"microbatches": 4}, {"stages": 4, "schedule": "interleaved_1f1b chunks=2"}
    ),
    "two_directions": Feature({"microbatches": 4}, {"stages": 2, "schedule": "chimera"}),
    "vee": Feature({"microbatches": 4}, {"stages": 4, "schedule": "zb_v"}),
    "zero1": Feature(options={"state": "zero1"}),
    "replicated": Feature(options={"state": "ddp", "pins": [data_parallel()]}),
    "selective": Feature(options={"recompute": "selective"}),
    "muon": Feature({"optimizer": "muon"}),
    "collectives": Feature(options={"collectives": PROGRAMS}, seen=r'by="flat_ring"'),
    # Averages of parameters and of their momenta follow the mean gradient, since SGD is linear.
    "replicas": Feature(
        {"optimizer": "momentum"},
        {"outer": "local over data, tau=1"},
        {"replicas": True},
        seen="local over data",
        alters=frozenset({"clipping", "dropout"}),
    ),
}

# What does not compose, and why: the type of the error and what it says.
REFUSED: dict[frozenset[str], tuple[str, str]] = {}


def combinations(model: str, count: int) -> list[Case]:
    """All cases of `count` features of the first table."""
    return [Case.of(model, names, FEATURES) for names in itertools.combinations(_of(model), count)]


def drawn(model: str, count: int, cases: int, seed: int = 0) -> list[Case]:
    """Cases of `count` features of the first table, drawn at random."""
    chance = random.Random(seed)
    chosen = [set(chance.sample(_of(model), count)) for _ in range(cases)]
    return [Case.of(model, tuple(n for n in FEATURES if n in names), FEATURES) for names in chosen]


def further(model: str, beside: int, seed: int = 0) -> list[Case]:
    """Every further feature alone, and beside some of the first table, drawn at random."""
    chance, both = random.Random(seed), {**FURTHER, **FEATURES}
    return [
        Case.of(model, (name, *chance.sample(_beside(model, feature), count)), both)
        for name, feature in FURTHER.items()
        for count in (0, beside)
    ]


def _of(model: str) -> list[str]:
    """The first features that a model can have."""
    return [name for name in FEATURES if name not in {**FAMILIES, **OTHERS}[model].lacks]


def _beside(model: str, feature: Feature) -> list[str]:
    """Returns the first features that a model can have beside a further one."""
    return [name for name in _of(model) if name not in feature.alters]

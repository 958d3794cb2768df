"""Attention of unusual shapes and masks under every form, on 3, 4 and 2x2 ranks.

Heads that are fewer than the devices, grouped or odd, cross attention of unequal lengths, values of
another width (MLA), lengths that the devices do not divide, windows beside padding, documents. Each
model trains as it does on one device, where the scores are computed explicitly.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture.capture import Captured
from autopar.errors import PinError
from autopar.planning.capturing import capture_graph
from autopar.planning.options import Options
from autopar.planning.trace import Trace
from tests.support.parity import train_plainly
from tests.support.ranks import run_ranks
from tests.training.test_families import TOLERANCE, Run, sgd

WIDTH, STEPS = 16, 2
DEVICE = "cpu[1TFLOP/s 64GiB 1TB/s]: "
ALL = ("plain", "gathered", "ring", "ring zigzag", "balanced", "ulysses")
MESHES = {  # the mesh, the axes that split the sequence, the devices, and the forms
    "three": (DEVICE + "cp=3 @10GB/s 1us", "cp", 3, ALL),
    "four": (DEVICE + "cp=4 @10GB/s 1us", "cp", 4, ALL),
    "grid": (
        DEVICE + "ring=2 @10GB/s 1us, heads=2 @10GB/s 1us",
        "ring@heads",
        4,
        (*ALL, "ulysses ring"),
    ),
}


@dataclass(frozen=True)
class Case:
    """Sizes and the mask of one attention."""

    heads: int = 4
    grouped: int = 4
    rows: int = 13
    keys: int = 13
    batch: int = 2
    width: int = 4
    values: int = 4
    mask: str = "causal"


CASES = {
    "grouped": Case(heads=6, grouped=2),
    "one head of keys": Case(grouped=1, rows=11, keys=11, batch=1),
    "one head of keys, no mask": Case(grouped=1, rows=11, keys=11, batch=1, mask=""),
    "odd heads": Case(heads=5, grouped=5, batch=1),
    "few heads": Case(heads=2, grouped=1, batch=1),
    "cross": Case(grouped=2, rows=7, mask=""),
    "cross, few keys": Case(keys=5, batch=1, mask=""),
    "cross, padded": Case(keys=7, mask="padding"),
    "window, padded": Case(grouped=2, mask="causal window padding"),
    "window of one": Case(batch=1, mask="self"),
    "documents": Case(grouped=2, rows=17, keys=17, mask="causal documents"),
    "documents both ways": Case(rows=17, keys=17, batch=1, mask="documents"),
    "MLA": Case(width=6, values=3),
    "MLA, window": Case(width=6, values=3, batch=1, mask="causal window"),
    "wide values, padded": Case(width=3, values=6, mask="causal padding"),
    "added mask": Case(mask="causal padding added"),
    "added biases": Case(batch=1, mask="causal slopes"),
    "as many positions as devices": Case(rows=4, keys=4, batch=1),
}
# Bool masks of all queries and keys.
BALANCED = (
    "causal window",
    "causal window padding",
    "causal padding",
    "causal documents",
    "documents",
    "self",
)
Key = tuple[str, str]  # case, form


class Attention(nn.Module):
    """Attention, and the same by its definition."""

    def __init__(self, case: Case, explicit: bool) -> None:
        super().__init__()
        self.case, self.explicit = case, explicit
        self.query = nn.Linear(WIDTH, case.heads * case.width)
        self.key = nn.Linear(WIDTH, case.grouped * case.width)
        self.value = nn.Linear(WIDTH, case.grouped * case.values)
        self.out = nn.Linear(case.heads * case.values, WIDTH)
        self.slopes = nn.Parameter(torch.linspace(0.1, 0.6, case.heads))

    def mask(self, padding: Tensor, documents: Tensor) -> Tensor | None:
        """Returns a bool mask, or a tensor to add to the scores; None for no mask."""
        kinds, case = self.case.mask.split(), self.case
        row, key = torch.arange(case.rows)[:, None], torch.arange(case.keys)[None]
        masks = {
            "causal": row >= key,
            "window": row - key < 4,
            "self": row == key,
            "padding": (key < padding[:, None])[:, None, None],
        }
        if "documents" in kinds:
            masks["documents"] = documents[:, None, :, None] == documents[:, None, None]
        found: Tensor | None = None
        for mask in (masks[kind] for kind in kinds if kind in masks):
            found = mask if found is None else found & mask
        if found is not None and "added" in kinds:
            lowest = torch.finfo(self.slopes.dtype).min
            return torch.zeros(found.shape, dtype=self.slopes.dtype).masked_fill(~found, lowest)
        if found is not None and "slopes" in kinds:
            return (self.slopes.view(1, -1, 1, 1) * (key - row)).masked_fill(~found, -torch.inf)
        return found

    def forward(self, x: Tensor, y: Tensor, padding: Tensor, documents: Tensor) -> Tensor:
        case, mask = self.case, self.mask(padding, documents)
        query = self.query(x).unflatten(-1, (case.heads, -1)).transpose(1, 2)
        key, value = (
            linear(y).unflatten(-1, (case.grouped, -1)).transpose(1, 2)
            for linear in (self.key, self.value)
        )
        if self.explicit:
            key, value = (
                part.repeat_interleave(case.heads // case.grouped, 1) for part in (key, value)
            )
            scores = query @ key.mT * case.width**-0.5
            if mask is not None and mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, -torch.inf)
            elif mask is not None:
                scores = scores + mask
            result = scores.softmax(-1) @ value
        else:
            causal = case.mask == "causal"
            result = F.scaled_dot_product_attention(
                query,
                key,
                value,
                None if causal else mask,
                is_causal=causal,
                enable_gqa=case.heads != case.grouped,
            )
        given: Tensor = self.out(result.transpose(1, 2).flatten(2))
        return given


class Block(nn.Module):
    """Attention with norms and a residual; its keys come from `y` if there are more or fewer."""

    def __init__(self, case: Case, explicit: bool) -> None:
        super().__init__()
        self.cross = case.rows != case.keys
        self.norm, self.other = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(case, explicit)

    def forward(self, x: Tensor, y: Tensor, padding: Tensor, documents: Tensor) -> Tensor:
        keys = self.other(y if self.cross else x)
        given: Tensor = self.attention(self.norm(x), keys, padding, documents)
        return (x + given).square().mean()


def make(name: str, explicit: bool = False) -> tuple[nn.Module, dict[str, Tensor]]:
    case = CASES[name]
    torch.manual_seed(0)
    model = Block(case, explicit).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    key = torch.arange(case.keys)
    documents = torch.stack([key * 3 // case.keys, (key + 6) * 2 // case.keys])
    batch = {
        "x": torch.randn(case.batch, case.rows, WIDTH, dtype=torch.float64),
        "y": torch.randn(case.batch, case.keys, WIDTH, dtype=torch.float64),
        "padding": torch.tensor([case.keys - 3, case.keys])[: case.batch],
        "documents": documents[: case.batch],
    }
    return model, batch


def train_whole(name: str) -> Run:
    model, batch = make(name, explicit=True)
    losses = train_plainly(lambda: model(**batch), sgd(model.parameters()), STEPS)
    return Run(losses, dict(model.state_dict()))


def train(name_of_mesh: str, graphs: dict[str, Captured]) -> dict[Key, Run | str]:
    """The runs of this rank; instead of a run, why a pin was refused."""
    compiler = importlib.import_module("autopar.session.compiler")
    runs: dict[Key, Run | str] = {}
    mesh, axes, _, forms = MESHES[name_of_mesh]
    for name, captured in graphs.items():
        case = CASES[name]
        split = f"[{case.batch}, {case.heads}, {case.rows}@{axes}, {case.values}] "
        for form in forms:
            model, batch = make(name)
            layout = "" if form == "plain" else split
            pins = {"%scaled_dot_product_attention": f"{layout}by {form}"}
            with patch.object(compiler, "capture_parts", lambda *_, c=captured: c):
                try:
                    program = autopar.compile(
                        model, mesh, optimizer=sgd, example_inputs=batch, pins=pins
                    )
                except PinError as error:
                    runs[name, form] = error.why
                    continue
            losses = [program.step(**batch).item() for _ in range(STEPS)]
            runs[name, form] = Run(losses, program.state_dict(), program.source)
            program.close()
    return runs


def applies(case: Case, form: str, count: int) -> bool:
    """Returns whether a form should apply, by what its documentation says that it needs."""
    if form == "ring zigzag":
        return case.mask == "causal" and min(case.rows, case.keys) >= 2 * count
    if form == "balanced":
        return case.mask in BALANCED
    return form != "ulysses" or case.heads >= count


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_every_form_trains_as_one_device_or_is_refused(mesh: str) -> None:
    _, _, count, forms = MESHES[mesh]
    graphs = {}
    for name in CASES:
        model, batch = make(name)
        graphs[name] = capture_graph(model, (), batch, Options(), Trace(None))
    ranks = run_ranks(train, mesh, graphs, count=count)
    for name, case in CASES.items():
        whole = train_whole(name)
        for form in forms:
            for run in (rank[name, form] for rank in ranks):
                if not applies(case, form, count):
                    assert isinstance(run, str), (name, form)
                    assert re.search(f"{form},? (which )?needs", run), (name, form, run)
                    continue
                assert isinstance(run, Run), (name, form, run)
                assert max(run.errors(whole)) <= TOLERANCE, (name, form)
                method = form.replace("ring zigzag", "zigzag").replace(" ", "_")
                assert form == "plain" or f"mesh.{method}_attention(" in run.source, (name, form)

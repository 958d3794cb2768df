"""A Llama whose sequence is split trains like one process, whatever form its attention takes.

Rotary positions, the causal mask and labels shifted by one all depend on positions. In packed rows
positions restart in the middle of a device's part, and no document sees or predicts another.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM

import autopar
from tests.support.parity import Batch, Run, make, optimizer, train_plainly
from tests.support.ranks import run_ranks

LINE = "cpu[1TFLOP/s 64GiB 1TB/s]: cp=2 @10GB/s 1us"
GRID = "cpu[1TFLOP/s 64GiB 1TB/s]: ring=2 @10GB/s 1us, heads=2 @10GB/s 1us"
FORMS = {
    LINE: ("gathered", "ring", "ring zigzag", "ulysses"),
    GRID: ("ulysses ring", "ring zigzag"),
}
PACKED = {LINE: ("balanced", "flex ring"), GRID: ("ulysses ring",)}
# Those that are trained at once; on four devices only among the slow tests.
QUICK = {LINE: ("ring zigzag", "balanced", "flex ring"), GRID: ("ulysses ring",)}
STARTS = ((0, 5, 11), (0, 7, 13))  # of the documents of each row
STEPS = 3


class Documents(nn.Module):
    """A Llama on packed rows, as transformers is told of them: positions that restart.

    The first token of a document has no label.
    """

    def __init__(self, model: nn.Module, attention: str) -> None:
        super().__init__()
        self.model = model
        model.config._attn_implementation = attention

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=input_ids, position_ids=position_ids).logits
        found = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return found


class Alone(nn.Module):
    """The same loss, of documents that a Llama gets one by one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        losses = []
        for row, starts in enumerate(STARTS):
            for start, end in zip(starts, (*starts[1:], labels.shape[1]), strict=True):
                logits = self.model(input_ids=input_ids[row : row + 1, start:end]).logits[0]
                known = labels[row, start + 1 : end]
                losses.append(F.cross_entropy(logits[:-1], known, reduction="none"))
        return torch.cat(losses).mean()


def llama() -> tuple[torch.nn.Module, Batch]:
    model, batch = make("llama", torch.float64, 0.0)
    return model, {name: tensor[:2] for name, tensor in batch.items()}


def packed(attention: str) -> tuple[torch.nn.Module, Batch]:
    whole, batch = llama()
    positions = torch.arange(16).expand(2, 16).clone()
    labels = batch["labels"].clone()
    for row, starts in enumerate(STARTS):
        for start in starts:
            positions[row, start:] = torch.arange(16 - start)
            labels[row, start] = -100
    given = {"input_ids": batch["input_ids"], "position_ids": positions, "labels": labels}
    return Documents(whole.model, attention), given


def chosen(mesh: str, quick: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Forms on whole rows, and forms on packed rows."""
    if not quick:
        return FORMS[mesh], PACKED[mesh]
    forms, packs = (
        tuple(form for form in forms if form in QUICK[mesh])
        for forms in (FORMS[mesh], PACKED[mesh])
    )
    return forms, packs


def trained(mesh: str, quick: bool) -> list[Run]:
    """The runs of this rank, one for each form, then those on packed rows."""
    forms, packs = chosen(mesh, quick)
    return [
        *(train(mesh, form, *llama()) for form in forms),
        *(
            train(
                mesh,
                form.removeprefix("flex "),
                *packed("flex_attention" if "flex" in form else "sdpa"),
            )
            for form in packs
        ),
    ]


def train(mesh: str, form: str, model: nn.Module, batch: Batch, recompute: str = "auto") -> Run:
    found: Any = autopar.compile(
        model,
        mesh,
        optimizer=optimizer,
        example_inputs=batch,
        pins=autopar.pins.form("*.self_attn", form),
        recompute=recompute,
    )
    losses = [found.step(**batch).item() for _ in range(STEPS)]
    return Run(losses, found.state_dict(), 0, found.source)


def plainly(model: nn.Module, batch: Batch) -> Run:
    losses = train_plainly(lambda: model(**batch), optimizer(model.parameters()), STEPS)
    return Run(losses, model.state_dict(), 0)


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("mesh", "count"), [(LINE, 2), pytest.param(GRID, 4, marks=pytest.mark.slow)]
)
def test_training_is_that_of_one_device(mesh: str, count: int, quick: bool) -> None:
    forms, packs = chosen(mesh, quick)
    model, batch = llama()
    whole = plainly(model, batch)
    model, batch = llama()
    alone = plainly(Alone(model.model), batch)
    for rank in run_ranks(trained, mesh, quick, count=count):
        for form, run in zip((*forms, *packs), rank, strict=True):
            method = form.removeprefix("flex ").replace("ring zigzag", "zigzag").replace(" ", "_")
            assert f"mesh.{method}_attention(" in run.source, form
        runs = rank[: len(forms)]
        for form, run in zip(forms, runs, strict=True):
            assert run.error(whole) <= 1e-9, form
        for form, run in zip(packs, rank[len(runs) :], strict=True):
            assert run.error(alone) <= 1e-9, f"packed, {form}"


KINDS = ("selective", "save linear:2 attention")


def recomputed(form: str) -> list[Run]:
    return [train(LINE, form, *llama(), recompute=kind) for kind in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ring", "ring zigzag"])
def test_recomputed_blocks(form: str) -> None:
    """The forms merge parts in place, into results that a recomputed block may keep."""
    whole = plainly(*llama())
    for rank in run_ranks(recomputed, form, count=2):
        for kind, run in zip(KINDS, rank, strict=True):
            assert "context_fn=keep" in run.source, kind
            assert run.error(whole) <= 1e-9, kind


class Loss(nn.Module):
    """The loss alone of a language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


def gpt_oss(experts: str) -> tuple[torch.nn.Module, Batch]:
    """Attention with sinks: a layer with a sliding window, and one with a causal mask.

    Only transformers' "eager" experts compute in float64, and only "grouped_mm" ones are traced.
    """
    torch.manual_seed(0)
    config = GptOssConfig(
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=16,
        head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        vocab_size=32,
        sliding_window=5,
        experts_implementation=experts,
    )
    ids = torch.randint(32, (2, 16))
    return Loss(GptOssForCausalLM(config).double()), {"input_ids": ids, "labels": ids}


def trained_with_sinks(mesh: str, forms: tuple[str, ...]) -> list[Run]:
    return [train(mesh, form, *gpt_oss("grouped_mm")) for form in forms]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "forms"),
    [
        (LINE, ("gathered", "ring", "ulysses")),
        (LINE.replace("cp=2", "cp=4"), ("ring", "gathered")),
        (GRID, ("ulysses ring",)),
    ],
)
def test_sinks(mesh: str, forms: tuple[str, ...]) -> None:
    whole = plainly(*gpt_oss("eager"))
    count = 2 if "cp=2" in mesh else 4
    for rank in run_ranks(trained_with_sinks, mesh, forms, count=count):
        for form, run in zip(forms, rank, strict=True):
            method = form.replace(" ", "_")
            assert run.source.count(f"mesh.sink_{method}_attention(") == 2, form
            assert run.error(whole) <= 1e-9, form

"""Batches padded to a few lengths: losses are those of the plain model on them as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import BatchError, OptionError
from tests.support.one_process import compare_step, compare_weights
from tests.support.ranks import run_ranks

LINE = "cpu: data=2 @1TB/s 1ns"
WORDS = 9


class Encoder(nn.Module):
    """Every word attends to all words that the mask shows."""

    def __init__(self, ignored: int = -100, plain_mean: bool = False) -> None:
        super().__init__()
        self.ignored, self.plain_mean = ignored, plain_mean
        self.table, self.qkv = nn.Embedding(WORDS, 8), nn.Linear(8, 24)
        self.head = nn.Linear(8, WORDS)

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        q, k, v = self.qkv(self.table(input_ids)).chunk(3, 2)
        mask = None if attention_mask is None else attention_mask[:, None].bool()
        logits = self.head(F.scaled_dot_product_attention(q, k, v, mask))
        losses = F.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            ignore_index=self.ignored,
            reduction="none" if self.plain_mean else "mean",
        )
        return {"loss": losses.mean(), "logits": logits}


class Causal(nn.Module):
    """Reads words one after the other, by their running sum; takes no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.table(words).cumsum(1)))
        return F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-1)


def encoder(**options: Any) -> Encoder:
    torch.manual_seed(0)
    return Encoder(**options).double()


def causal() -> Causal:
    torch.manual_seed(0)
    return Causal().double()


def batch(length: int, rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    words = torch.randint(WORDS, (rows, length), generator=generator)
    labels = torch.randint(WORDS, (rows, length), generator=generator)
    labels[0, length // 2 :] = -100
    return {"input_ids": words, "labels": labels}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(model: nn.Module, alone: nn.Module, names: tuple[str, str], **options: Any) -> None:
    program = autopar.compile(model, LINE, optimizer=adam, **options)
    optimizer = adam(alone.parameters())
    for length in (5, 8, 3, 6, 7):
        whole = dict(zip(names, batch(length).values(), strict=True))
        if "tags" in whole:
            whole["tags"] = whole["tags"].clamp(min=-1)
        own = {name: value.chunk(2)[dist.get_rank()] for name, value in whole.items()}
        given = own if options.get("batches") == "local" else whole
        results = alone(**whole)
        expected = results["loss"] if isinstance(results, dict) else results
        torch.testing.assert_close(
            program.eval_step(**given).loss, expected.detach(), rtol=1e-9, atol=1e-12
        )
        loss = program.step(*given.values())
        expected.backward()
        compare_step(loss, expected, optimizer)
    compare_weights(program, alone)
    with pytest.raises(BatchError, match="ends at 8"):
        program.step(**dict(zip(names, batch(9).values(), strict=True)))
    program.close()


def on_two() -> None:
    train(encoder(), encoder(), ("input_ids", "labels"), pad_to=[4, 8])
    given = {"batches": "local", "accumulate": 2}
    train(encoder(), encoder(), ("input_ids", "labels"), pad_to=[6, 8], **given)
    padding = autopar.Padding((4, 8), {"words": 0, "tags": -1})
    train(causal(), causal(), ("words", "tags"), pad_to=padding)


def test_two_ranks() -> None:
    run_ranks(on_two, count=2)


def test_padding_that_would_count_is_refused() -> None:
    cases: list[tuple[nn.Module, dict[str, Tensor], Any, str]] = [
        (encoder(ignored=-1), batch(5), [8], "ignores .-1."),
        (encoder(plain_mean=True), batch(5), [8], "mean over 32 elements, padded ones too"),
        (causal(), {"words": batch(5)["input_ids"], "tags": batch(5)["labels"]}, [8], "unknown"),
        (causal(), batch(5), [8], "no attention mask"),
        (encoder(), {**batch(5), "mood": torch.ones(4, 5)}, [8], "'mood' cannot be padded"),
        (encoder(), batch(9), [8], "ends at 8"),
    ]
    for model, given, lengths, why in cases:
        program = autopar.compile(model, "cpu: data=1", pad_to=lengths)
        with pytest.raises(BatchError, match=why):
            program.step(**given)
    with pytest.raises(OptionError, match="increasing"):
        autopar.compile(encoder(), "cpu: data=1", pad_to=[8, 4])

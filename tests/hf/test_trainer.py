"""Trainer on a session, compared with `transformers.Trainer` on one process and equal batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler

from autopar.errors import BatchError, OptionError
from autopar.hf import Trainer
from autopar.hf.losses import ignores_items
from tests.support.ranks import environment_of_launcher, run_ranks

LINE = "cpu: gpu=2 @1TB/s 1ns"


class Texts(Dataset[dict[str, Tensor]]):
    """Rows of random tokens, of which some at the end count for nothing."""

    def __init__(self, rows: int) -> None:
        draw = torch.Generator().manual_seed(7)
        self.tokens = torch.randint(0, 96, (rows, 16), generator=draw)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        labels = self.tokens[row].clone()
        labels[16 - row % 11 :] = -100
        return {"input_ids": self.tokens[row], "labels": labels}


class Plain(transformers.Trainer):
    """Trainer on one process, with the order of the data that sessions have."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        if self.args.train_sampling_strategy == "sequential":
            return super()._get_train_sampler(dataset)
        sampler = DistributedSampler(
            self.train_dataset, num_replicas=1, rank=0, seed=self.args.seed
        )

        class Epoch(transformers.TrainerCallback):
            def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                sampler.set_epoch(round(state.epoch or 0))

        self.add_callback(Epoch())
        return sampler


def model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=96, n_positions=16, n_embd=32, n_layer=1, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


def arguments(folder: Path, batch: int, **more: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        **{
            "output_dir": str(folder), "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": 3,
            "per_device_eval_batch_size": batch, "max_steps": 6, "logging_steps": 1,
            "learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2, "use_cpu": True,
            "report_to": [], "disable_tqdm": True, "eval_strategy": "steps", "eval_steps": 3,
            "save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0.5,
            "lr_scheduler_type": "linear", **more,
        }
    )  # fmt: skip


def losses(trainer: transformers.Trainer) -> list[float]:
    return [
        float(row[name])
        for row in trainer.state.log_history
        for name in ("loss", "eval_loss", "grad_norm", "num_input_tokens_seen")
        if name in row
    ]


def trained(kind: type, folder: Path, batch: int, **more: Any) -> transformers.Trainer:
    made = model()
    options = more.pop("options", {})
    mesh = {"mesh": LINE, "options": options} if kind is Trainer else {}
    trainer = kind(
        model=made,
        args=arguments(folder, batch, **more),
        train_dataset=Texts(18),
        eval_dataset=Texts(7),
        **mesh,
    )
    return trainer


class Tagger(nn.Module):
    """Takes a mask, but no number of items, so that losses of batches are averaged."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(96, 16), nn.Linear(16, 96)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Any]:
        logits = self.head(self.words(input_ids) * attention_mask[..., None])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def longest(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Cuts rows after the last label that counts in any of them."""
    whole = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    counted = whole["labels"] >= 0
    whole["attention_mask"] = counted.long()
    most = int(counted.sum(1).max())
    return {name: value[:, :most] for name, value in whole.items()}


def of_lengths(kind: type, folder: Path, batch: int, rows: int = 20) -> transformers.Trainer:
    """A Trainer whose accumulated batches have different lengths and numbers of labels.

    Each epoch ends with a step of fewer batches, or of a smaller one if the rows do not divide.
    """
    return kind(
        model=Tagger().double(),
        args=arguments(
            folder,
            batch,
            max_steps=3,  # the second of which ends an epoch
            save_strategy="no",
            optim="rmsprop",
            train_sampling_strategy="sequential",
            include_num_input_tokens_seen=True,
        ),
        train_dataset=Texts(rows),
        eval_dataset=Texts(7),
        data_collator=longest,
        **({"mesh": LINE} if kind is Trainer else {}),
    )


class Accepting(Tagger):
    """Accepts the number of items, as every model of transformers with keywords, and ignores it."""

    config = transformers.PreTrainedConfig()  # which Trainer reads where it smooths labels

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        logits = self.head(self.words(input_ids))
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def by_items(output: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits, wanted = output["logits"].flatten(0, 1), labels.flatten()
    return nn.functional.cross_entropy(logits, wanted, reduction="sum") / num_items_in_batch


LOSSES: dict[str, dict[str, Any]] = {
    "sum": {}, "smoothed": {"label_smoothing_factor": 0.2}, "own": {"compute_loss_func": by_items},
}  # fmt: skip


def of_loss(kind: type, folder: Path, loss: str, rows: int = 20) -> transformers.Trainer:
    """A Trainer whose epochs end with a step of fewer batches."""
    given = dict(LOSSES[loss])
    function = given.pop("compute_loss_func", None)
    return kind(
        model=Accepting().double(),
        args=arguments(folder, 4, save_strategy="no", max_steps=2, eval_steps=2, **given),
        train_dataset=Texts(rows),
        eval_dataset=Texts(7),
        compute_loss_func=function,
        **({"mesh": "cpu: gpu=1"} if kind is Trainer else {}),
    )


def on_ranks(folder: str) -> dict[str, Any]:
    os.environ |= environment_of_launcher()
    whole = trained(Trainer, Path(folder) / "run", 2)
    whole.train()
    kept = {k: v.clone() for k, v in whole.model.state_dict().items()}
    resumed = trained(Trainer, Path(folder) / "run", 2)
    resumed.train(resume_from_checkpoint=str(Path(folder) / "run" / "checkpoint-3"))
    ragged = of_lengths(Trainer, Path(folder) / "ragged", 2)
    ragged.train()
    unequal = of_lengths(Trainer, Path(folder) / "unequal", 2, rows=11)
    with pytest.raises(BatchError, match=r"4, 4, 3 rows(?s:.*)whole_loss"):
        unequal.train()
    return {
        "losses": losses(whole), "weights": kept, "resumed": losses(resumed),
        "ragged": losses(ragged),
        "slices": [each.session.plan.microbatches for each in (whole, ragged)],
        "files": {file.name for file in (Path(folder) / "run" / "checkpoint-6").iterdir()},
        "predicted": whole.predict(Texts(7)).predictions,
    }  # fmt: skip


def test_it_trains_as_on_one_process(tmp_path: Path) -> None:
    first, *_ = run_ranks(on_ranks, str(tmp_path), count=2)
    plain = trained(Plain, tmp_path / "plain", 4)
    plain.train()
    # Trainer logs sums in float32; the weights are float64.
    torch.testing.assert_close(first["losses"], losses(plain), rtol=1e-6, atol=1e-6)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(first["weights"][name], value, rtol=1e-9, atol=1e-12)
    assert first["resumed"] == first["losses"]
    ragged = of_lengths(Plain, tmp_path / "ragged", 4)
    ragged.train()
    torch.testing.assert_close(first["ragged"], losses(ragged), rtol=1e-6, atol=1e-6)
    assert not ragged.model_accepts_loss_kwargs
    assert first["slices"] == [3, 3]
    assert {"autopar", "config.json", "model.safetensors", "trainer_state.json"} <= first["files"]
    wanted = plain.predict(Texts(7)).predictions
    torch.testing.assert_close(first["predicted"], wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_accumulated_batches_are_those_of_transformers(tmp_path: Path, loss: str) -> None:
    own, plain = (of_loss(kind, tmp_path, loss) for kind in (Trainer, Plain))
    own.train()
    plain.train()
    torch.testing.assert_close(losses(own), losses(plain), rtol=1e-6, atol=1e-6)
    tolerance = 1e-6 if loss == "smoothed" else 1e-9  # transformers smooths in float32
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(own.model.state_dict()[name], value, rtol=tolerance, atol=1e-9)


def test_it_is_seen_whether_a_model_uses_the_number_of_items() -> None:
    class Using(Accepting):
        def forward(
            self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any
        ) -> dict[str, Any]:
            output = super().forward(input_ids, labels)
            return {**output, "loss": output["loss"] / kwargs["num_items_in_batch"]}

    tokens = Texts(2)[0]["input_ids"][None]
    batch = {"input_ids": tokens, "labels": tokens, "num_items_in_batch": torch.tensor(16.0)}
    assert ignores_items(Accepting(), batch)
    assert not ignores_items(Using(), batch)


def test_a_sum_of_unequal_batches_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match=r"4, 4, 3 rows(?s:.*)whole_loss"):
        of_loss(Trainer, tmp_path, "sum", rows=23).train()


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"fp16": True, "use_cpu": False}, '"precision": "fp16"'),
        (
            {"label_smoothing_factor": 0.1, "options": {"loss_fn": by_items}},
            "leave one of them out",
        ),
        ({"auto_find_batch_size": True}, "leave it out"),
    ],
)
def test_what_a_session_does_itself_is_refused(
    tmp_path: Path, given: dict[str, Any], answer: str
) -> None:
    with pytest.raises(OptionError, match=answer):
        trained(Trainer, tmp_path, 2, **given)

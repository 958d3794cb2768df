"""Fine-tunes BERT: torchrun --nproc-per-node 2 examples/finetuning/train.py

It learns which of two modules of Python a line comes from.
"""

import inspect
import json.decoder
import textwrap
from functools import partial

import torch
import torch.distributed as dist
import transformers
from torch.utils.data import DataLoader, DistributedSampler

import autopar

LENGTH, BATCH, STEPS = 32, 8, 12
Rows = list[dict[str, torch.Tensor]]


def lines() -> Rows:
    """The bytes of every line, padded, with the number of its module."""
    rows = []
    for label, module in enumerate((textwrap, json.decoder)):
        for line in inspect.getsource(module).splitlines():
            if text := line.strip().encode()[:LENGTH]:
                tokens = torch.tensor([*text, *[0] * (LENGTH - len(text))])
                mask = (tokens > 0).long()
                rows.append(
                    {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor(label)}
                )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return [rows[row] for row in order]


def bert() -> transformers.PreTrainedModel:
    config = transformers.BertConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=LENGTH, num_labels=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def train() -> list[float]:
    torch.manual_seed(0)
    data = lines()
    model = bert()
    first = DataLoader(data, BATCH).collate_fn(data[:BATCH])
    adam = partial(torch.optim.AdamW, lr=5e-3)
    session = autopar.compile(
        model, "cpu: data=2", optimizer=adam, example_inputs=first, batches="local", clip_norm=1.0
    )
    schedule = transformers.get_linear_schedule_with_warmup(session.optimizer, 2, STEPS)
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data))
    losses = []
    for _, batch in zip(range(STEPS), loader, strict=False):
        loss = session.step(**batch)
        schedule.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print("\n".join(f"step {number}: {loss:.4f}" for number, loss in enumerate(train(), 1)))
    dist.destroy_process_group()

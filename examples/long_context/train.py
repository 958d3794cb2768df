"""Trains on long texts: torchrun --nproc-per-node 2 examples/long_context/train.py"""

import inspect
import textwrap
from functools import partial

import torch
import torch.distributed as dist
import transformers
from torch.utils.data import DataLoader, DistributedSampler

import autopar

LENGTH, STEPS = 512, 8


def llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def train() -> list[float]:
    torch.manual_seed(0)
    model = llama()
    text = torch.tensor(list(inspect.getsource(textwrap).encode()))
    tokens = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    adam = partial(torch.optim.AdamW, lr=1e-2)
    ring = autopar.pins.form("*.self_attn*", "ring zigzag")
    session = autopar.compile(model, "cpu: sequence=2", optimizer=adam, pins=ring, batches="local")
    loader = DataLoader(tokens, batch_size=1, sampler=DistributedSampler(tokens))
    losses = []
    for _, rows in zip(range(STEPS), loader, strict=False):
        loss = session.step(input_ids=rows, labels=rows)
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print("\n".join(f"step {number}: {loss:.4f}" for number, loss in enumerate(train(), 1)))
    dist.destroy_process_group()

"""Trains on long texts with DDP: torchrun --nproc-per-node 2 examples/long_context/train_ddp.py"""

import inspect
import textwrap

import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

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
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(tokens, batch_size=1, sampler=DistributedSampler(tokens))
    losses = []
    for _, rows in zip(range(STEPS), loader, strict=False):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print("\n".join(f"step {number}: {loss:.4f}" for number, loss in enumerate(train(), 1)))
    dist.destroy_process_group()

"""Trains Mixtral: torchrun --nproc-per-node 2 examples/mixture/train.py"""

from functools import partial

import torch
import torch.distributed as dist
import transformers
from torch.utils.data import DataLoader, DistributedSampler

import autopar

LENGTH, BATCH, STEPS = 16, 4, 8


def mixtral() -> torch.nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH,
        num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager",
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def train() -> list[float]:
    torch.manual_seed(0)
    model = mixtral()
    tokens = (torch.randint(64, (64, 1)) + 3 * torch.arange(LENGTH)) % 64
    adam = partial(torch.optim.AdamW, lr=1e-2)
    pins = {"model.layers.*.mlp.experts.down_proj": "[4@expert, 32, 64]"}
    session = autopar.compile(model, "cpu: expert=2", optimizer=adam, pins=pins, batches="local")
    loader = DataLoader(tokens, BATCH, sampler=DistributedSampler(tokens))
    losses = []
    for _, rows in zip(range(STEPS), loader, strict=False):
        loss = session.step(input_ids=rows, labels=rows)
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print("\n".join(f"step {number}: {loss:.4f}" for number, loss in enumerate(train(), 1)))
    dist.destroy_process_group()

"""Trains Mixtral with DDP: torchrun --nproc-per-node 2 examples/mixture/train_ddp.py"""

import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

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
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(tokens, BATCH, sampler=DistributedSampler(tokens))
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

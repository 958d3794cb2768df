"""Trains an adapter of PEFT with DDP: torchrun --nproc-per-node 2 examples/lora/train_ddp.py"""

import peft
import torch
import torch.distributed as dist
import transformers
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

LENGTH, BATCH, STEPS = 16, 4, 6


def adapted() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH,
    )  # fmt: skip
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)


def train(folder: str = "build/adapter") -> list[float]:
    torch.manual_seed(0)
    model = adapted()
    tokens = torch.randint(64, (64, LENGTH))
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
    if dist.get_rank() == 0:
        model.module.save_pretrained(folder)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print("\n".join(f"step {number}: {loss:.4f}" for number, loss in enumerate(train(), 1)))
    dist.destroy_process_group()

"""Trains a GPT on characters: torchrun --nproc-per-node 2 examples/gpt/train.py"""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from model import GPT
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import autopar

LENGTH, BATCH, STEPS = 32, 8, 10
MESH = "cpu: data=2"


class Characters(Dataset):
    def __init__(self, text: str) -> None:
        letters = sorted(set(text))
        self.words = len(letters)
        self.tokens = torch.tensor([letters.index(letter) for letter in text])

    def __len__(self) -> int:
        return len(self.tokens) // LENGTH - 1

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = row * LENGTH
        return tuple(self.tokens[start + n : start + n + LENGTH] for n in (0, 1))


def train() -> list[float]:
    torch.manual_seed(0)
    data = Characters(Path(__file__).with_name("model.py").read_text())
    model = GPT(data.words, LENGTH, width=32, heads=4, layers=2)
    adam = partial(torch.optim.AdamW, lr=1e-2)
    first = (torch.zeros(BATCH, LENGTH, dtype=torch.int64),) * 2
    session = autopar.compile(
        model, MESH, optimizer=adam, example_inputs=first, batches="local", clip_norm=1.0
    )
    schedule = LambdaLR(session.optimizer, lambda step: min(1.0, (step + 1) / 4))
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data), drop_last=True)
    losses = []
    while len(losses) < STEPS:
        for x, y in loader:
            loss = session.step(x, y)
            schedule.step()
            losses.append(loss.item())
    return losses[:STEPS]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print("\n".join(f"step {number}: {loss:.4f}" for number, loss in enumerate(train(), 1)))
    dist.destroy_process_group()

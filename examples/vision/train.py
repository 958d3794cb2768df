"""Trains a ResNet on digits: torchrun --nproc-per-node 2 examples/vision/train.py"""

from functools import partial

import torch
import torch.distributed as dist
from model import ResNet
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autopar

BATCH, STEPS = 16, 12


def train() -> list[float]:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.get_default_dtype()).unsqueeze(1)
    data = TensorDataset(images, torch.tensor(digits.target))
    model = ResNet(classes=10, width=8)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4)
    first = {"images": images[:BATCH], "target": torch.zeros(BATCH, dtype=torch.int64)}
    session = autopar.compile(
        model, "cpu: data=2", optimizer=sgd, loss_fn=cross_entropy, example_inputs=first,
        batches="local",
    )  # fmt: skip
    schedule = CosineAnnealingLR(session.optimizer, STEPS)
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data))
    losses = []
    for _, (x, y) in zip(range(STEPS), loader, strict=False):
        loss = session.step(x, target=y)
        schedule.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print("\n".join(f"step {number}: {loss:.4f}" for number, loss in enumerate(train(), 1)))
    dist.destroy_process_group()

"""Trains a ResNet on digits with DDP: torchrun --nproc-per-node 2 examples/vision/train_ddp.py"""

import torch
import torch.distributed as dist
from model import ResNet
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, STEPS = 16, 12


def train() -> list[float]:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.get_default_dtype()).unsqueeze(1)
    data = TensorDataset(images, torch.tensor(digits.target))
    model = ResNet(classes=10, width=8)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = CosineAnnealingLR(optimizer, STEPS)
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data))
    losses = []
    for _, (x, y) in zip(range(STEPS), loader, strict=False):
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print("\n".join(f"step {number}: {loss:.4f}" for number, loss in enumerate(train(), 1)))
    dist.destroy_process_group()

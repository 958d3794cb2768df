"""A small ResNet with group norms, which see one sample at a time."""

import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.two = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = nn.GroupNorm(4, outside), nn.GroupNorm(4, outside)
        self.short = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.one(x)))
        return F.relu(self.norm_2(self.two(y)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(
            Residual(width, width, 1),
            Residual(width, 2 * width, 2),
            Residual(2 * width, 4 * width, 2),
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))

"""Wide-ResNet as Alpa trained it (OSDI 2022, table 7): bottleneck blocks of a wider middle."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


@dataclass(frozen=True)
class WideSizes:
    """Layers (50 or 101), channels of the first block, and by what its middle is wider."""

    layers: int
    channels: int
    width: int
    image: int = 224
    classes: int = 1024


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with batch norms beside a shortcut."""

    def __init__(self, inner: int, width: int, outer: int, stride: int, before: int) -> None:
        super().__init__()
        middle = inner * width
        self.reduce = nn.Conv2d(before, middle, 1, bias=False)
        self.mix = nn.Conv2d(middle, middle, 3, stride, 1, bias=False)
        self.expand = nn.Conv2d(middle, outer, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (middle, middle, outer))
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Of x [batch, channels, height, width]."""
        y = F.relu(self.norms[0](self.reduce(x)))
        y = F.relu(self.norms[1](self.mix(y)))
        return F.relu(self.norms[2](self.expand(y)) + self.shortcut(x))


class WideResNet(nn.Module):
    """A stem, four groups of blocks, logits."""

    def __init__(self, sizes: WideSizes) -> None:
        super().__init__()
        c = sizes.channels
        self.stem = nn.Conv2d(3, c, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(c)
        blocks, before = [], c
        for group, count in enumerate(BLOCKS[sizes.layers]):
            inner = c * 2**group
            for number in range(count):
                stride = 2 if group and not number else 1
                blocks.append(Bottleneck(inner, sizes.width, 4 * inner, stride, before))
                before = 4 * inner
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(before, sizes.classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of images [batch, 3, size, size]."""
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)

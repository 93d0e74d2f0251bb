"""ResNet-50 as torchvision has it (stride in the 3 x 3 convolutions), for machines without torchvision."""

from __future__ import annotations

import torch
from torch import nn

# Of each stage: its blocks, the channels inside of a block, and the stride of its first block.
_STAGES = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))
_EXPANSION = 4


class Bottleneck(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = channels * _EXPANSION
        self.residual = nn.Sequential(
            *_convolution(channels_in, channels, 1),
            nn.ReLU(inplace=True),
            *_convolution(channels, channels, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(channels, channels_out, 1),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(*_convolution(channels_in, channels_out, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.residual(x) + self.shortcut(x))


def _convolution(channels_in: int, channels_out: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(channels_in, channels_out, size, stride, size // 2, bias=False)
    return convolution, nn.BatchNorm2d(channels_out)


def resnet50(num_classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels_in = 64
    for num_blocks, channels, stride in _STAGES:
        for block in range(num_blocks):
            layers.append(Bottleneck(channels_in, channels, stride if block == 0 else 1))
            channels_in = channels * _EXPANSION
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, num_classes))

"""ResNet-50 and a small one of its kind, with torchvision's structure and names, so that weights go both ways."""

from __future__ import annotations

import torch
from torch import nn

_EXPANSION = 4


class Bottleneck(nn.Module):
    """The stride is in the 3 x 3 convolution."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = channels * _EXPANSION
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential()
        if stride != 1 or channels_in != channels_out:
            shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(channels_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = self.relu(self.bn1(self.conv1(x)))
        residual = self.relu(self.bn2(self.conv2(residual)))
        residual = self.bn3(self.conv3(residual))
        joined: torch.Tensor = self.relu(residual + self.downsample(x))
        return joined


class ResNet(nn.Module):
    """`num_blocks` of each stage, `width` channels inside of the blocks of the first one, twice as many in each next.

    Images are of a floating point type, (B, 3, H, W), normalized; the results are logits, (B, num_classes).
    """

    def __init__(self, num_blocks: tuple[int, int, int, int], width: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        stages, channels_in = [], width
        for stage, count in enumerate(num_blocks):
            channels = width << stage
            blocks = [Bottleneck(channels_in, channels, 1 if stage == 0 else 2)]
            channels_in = channels * _EXPANSION
            blocks += [Bottleneck(channels_in, channels, 1) for _ in range(count - 1)]
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels_in, num_classes)
        self._initialize()

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if isinstance(module, Bottleneck):
                # Blocks begin as identities: Goyal et al., "Accurate, large minibatch SGD", 2017, section 5.1.
                nn.init.zeros_(module.bn3.weight)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: torch.Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def resnet50(num_classes: int = 1000) -> ResNet:
    return ResNet((3, 4, 6, 3), 64, num_classes)


def small(num_classes: int = 1000) -> ResNet:
    """For a CPU, and pictures of 32 to 128 pixels: 14 layers, a sixteenth of the channels' products of ResNet-50."""
    return ResNet((1, 1, 1, 1), 16, num_classes)


MODELS = {"resnet50": resnet50, "small": small}

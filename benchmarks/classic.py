"""The usual transforms without shardio: torchvision's, by their definition, of one picture at a time, in Pillow."""

from __future__ import annotations

import math

import numpy as np
import torch
from PIL import Image

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
# ImageNet's statistics of red, green and blue from 0 to 1.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MEAN, _STD = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))


def random_box(
    rng: np.random.Generator, width: int, height: int, scale: tuple[float, float] = SCALE
) -> tuple[int, int, int, int]:
    """Returns left, top, width and height, as RandomResizedCrop.get_params does."""
    for _ in range(10):
        area = width * height * rng.uniform(*scale)
        ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1)), w, h
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    return (width - w) // 2, (height - h) // 2, w, h


def augmented(
    image: Image.Image, size: int, rng: np.random.Generator, scale: tuple[float, float] = SCALE
) -> Image.Image:
    """Does RandomResizedCrop and RandomHorizontalFlip."""
    left, top, width, height = random_box(rng, *image.size, scale)
    part = image.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BILINEAR)
    return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else part


def centered(image: Image.Image, short: int, size: int) -> Image.Image:
    """Resizes until the short side has so many pixels, and does CenterCrop."""
    width, height = (short * side // min(image.size) for side in image.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + size, top + size))


def as_tensor(image: Image.Image) -> torch.Tensor:
    """Returns uint8 (3, H, W), a view of pixels that lie as in Pillow."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def normalized(pixels: torch.Tensor) -> torch.Tensor:
    """Normalizes uint8 (..., 3, H, W) to float32."""
    return (pixels.float() / 255 - _MEAN) / _STD

"""torchcodec, which replaces torchvision's decoders: ImageFolder under DataLoader, with tensors in place of PIL images.

torchvision resizes them as uint8, and each epoch decodes and resizes again, in worker processes. FFmpeg is not needed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from images_with_torchvision import MEAN, STD, first_pictures, opened, prepare
from torchcodec.decoders import decode_image
from torchvision.transforms import v2

__all__ = ["PACKAGES", "WAYS", "evaluated", "prepare"]

PACKAGES = ("torchcodec", "torchvision", "torch")
PICTURE = [v2.Resize(256), v2.CenterCrop(224)]
FLOAT = v2.ToDtype(torch.float32, scale=True)


def evaluated(out: Path, count: int) -> np.ndarray:
    """Returns the first pictures of an evaluation, float32 (count, 3, 224, 224) from 0 to 1."""
    return first_pictures(out, count, [*PICTURE, FLOAT], decode_image)


WAYS = {
    "torchcodec + DataLoader: evaluation": opened([*PICTURE, FLOAT, v2.Normalize(MEAN, STD)], decode=decode_image),
    "torchcodec + DataLoader: evaluation, not normalized": opened(PICTURE, decode=decode_image),
    "torchcodec + DataLoader: decode and resize alone": opened(PICTURE, batched=False, decode=decode_image),
}

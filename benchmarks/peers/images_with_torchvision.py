"""torchvision's ImageFolder under torch's DataLoader: each epoch decodes and resizes again, in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader

PACKAGES = ("torchvision", "torch", "pillow")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PICTURE = [transforms.Resize(256), transforms.CenterCrop(224)]
NORMALIZED = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
CROPPED = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip()]


def prepare(images: Path, out: Path) -> None:
    (out / "images").symlink_to(images.resolve())


def first_pictures(
    out: Path, count: int, chain: list[Callable[..., Any]], decode: Callable[[str], Any] = default_loader
) -> np.ndarray:
    pictures = ImageFolder(out / "images", transforms.Compose(chain), loader=decode)
    return torch.stack([pictures[number][0] for number in range(count)]).numpy()


def evaluated(out: Path, count: int) -> np.ndarray:
    """Returns the first pictures of an evaluation, float32 (count, 3, 224, 224) from 0 to 1."""
    return first_pictures(out, count, [*PICTURE, transforms.ToTensor()])


def opened(
    chain: list[Callable[..., Any]], batched: bool = True, decode: Callable[[str], Any] = default_loader
) -> Callable[[Path, int, int, int], Any]:
    def way(out: Path, batch_size: int, workers: int, repeats: int) -> Any:
        pictures: Any = ImageFolder(out / "images", transforms.Compose(chain), loader=decode)
        order = RandomSampler(pictures, num_samples=repeats * len(pictures))
        size = batch_size if batched else None
        batches = DataLoader(pictures, size, sampler=order, num_workers=workers, persistent_workers=True)

        def epoch(number: int) -> Iterator[tuple[Any, Any]]:
            torch.manual_seed(number)
            for images, labels in batches:
                yield (images, labels) if batched else ([images], [labels])

        return epoch

    return way


WAYS = {
    "ImageFolder + DataLoader: crop, flip, normalize": opened([*CROPPED, *NORMALIZED]),
    "ImageFolder + DataLoader: evaluation": opened([*PICTURE, *NORMALIZED]),
    "ImageFolder + DataLoader: evaluation, not normalized": opened([*PICTURE, transforms.PILToTensor()]),
    "ImageFolder + DataLoader: decode and resize alone": opened([*PICTURE, transforms.PILToTensor()], batched=False),
}

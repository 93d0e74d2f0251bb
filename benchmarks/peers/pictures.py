"""Pictures of a folder of classes, as torchvision's Resize(256) and CenterCrop(256) make them of PIL images.

The writers of libraries that resize nothing themselves are given these, and so each does the same work.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 256
Source = tuple[Path, int]


def sources(images: Path) -> list[Source]:
    """Returns each file with its label."""
    folders = sorted(folder for folder in images.iterdir() if folder.is_dir())
    return [(file, label) for label, folder in enumerate(folders) for file in sorted(folder.iterdir())]


def picture(file: Path) -> np.ndarray:
    """Returns (256, 256, 3) uint8."""
    image = Image.open(file).convert("RGB")
    scale = SIDE / min(image.size)
    width, height = (max(SIDE, int(side * scale)) for side in image.size)
    left, top = round((width - SIDE) / 2), round((height - SIDE) / 2)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((left, top, left + SIDE, top + SIDE)))


class Indexed:
    """(pixels, label) of each file, in their order."""

    def __init__(self, images: Path) -> None:
        self.sources = sources(images)

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        file, label = self.sources[number]
        return picture(file), label


def in_processes(write: Callable[[list[Source], Path, int], None], images: Path, out: Path, workers: int) -> None:
    """Calls write(part of the sources, out, number of the part) in so many processes at once."""
    parts = np.array_split(np.arange(len(all_of := sources(images))), workers)
    with get_context("spawn").Pool(workers) as pool:
        pool.starmap(write, [([all_of[i] for i in part], out, number) for number, part in enumerate(parts)])

"""tensordict's MemoryMappedTensor: a batch is one indexing of the mapped tensor, by threads of torch and no process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

PACKAGES = ("tensordict", "torch")


def prepare(samples: np.ndarray, out: Path) -> None:
    from tensordict import MemoryMappedTensor

    mapped = MemoryMappedTensor.empty(samples.shape, dtype=torch.uint8, filename=str(out / "pixels.memmap"))
    for first in range(0, len(samples), 1000):
        mapped[first : first + 1000] = torch.from_numpy(np.array(samples[first : first + 1000]))
    torch.save(samples.shape, out / "shape.pt")


def mapped(out: Path, batch_size: int, workers: int, repeats: int) -> Any:
    from tensordict import MemoryMappedTensor

    torch.set_num_threads(workers)
    shape = torch.load(out / "shape.pt")
    pixels = MemoryMappedTensor.from_filename(out / "pixels.memmap", torch.uint8, torch.Size(shape))

    def epoch(number: int) -> Iterator[tuple[Any, Any]]:
        for _ in range(repeats):
            for numbers in torch.randperm(len(pixels)).split(batch_size):
                yield pixels[numbers], numbers

    return epoch


WAYS = {"tensordict MemoryMappedTensor": mapped}

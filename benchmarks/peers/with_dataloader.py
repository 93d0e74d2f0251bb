"""torch's DataLoader over one file of pixels: mapped by numpy or by torch, sample by sample or batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

PACKAGES = ("torch", "numpy")


def prepare(samples: np.ndarray, out: Path) -> None:
    np.save(out / "pixels.npy", samples)


class Mapped(Dataset):
    """Samples by number, or several of them by a list of numbers. The number of a sample is its label."""

    def __init__(self, path: Path) -> None:
        self.pixels: Any = np.load(path, mmap_mode="r+")

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, which: Any) -> tuple[Any, Any]:
        if isinstance(which, list):
            return torch.from_numpy(self.pixels[which]), torch.tensor(which)
        return torch.from_numpy(self.pixels[which]), which


class Stored(Mapped):
    """The same by torch.from_file, which maps the file, too."""

    def __init__(self, path: Path) -> None:
        shape = np.load(path, mmap_mode="r").shape
        # The pixels are the file's last bytes: what is before them is its header.
        nbytes, header = int(np.prod(shape)), path.stat().st_size - int(np.prod(shape))
        stored = torch.from_file(str(path), shared=False, size=header + nbytes, dtype=torch.uint8)
        self.pixels = stored[header:].view(shape)

    def __getitem__(self, which: Any) -> tuple[Any, Any]:
        return self.pixels[which], torch.tensor(which)


def opened(
    dataset: Callable[[Path], Dataset], by_batch: bool, pinned: bool = False
) -> Callable[[Path, int, int, int], Any]:
    def way(out: Path, batch_size: int, workers: int, repeats: int) -> Any:
        samples: Any = dataset(out / "pixels.npy")
        order: Any = RandomSampler(samples, num_samples=repeats * len(samples))
        if by_batch:
            order = BatchSampler(order, batch_size, drop_last=False)
        size = None if by_batch else batch_size
        options: Any = {"num_workers": workers, "persistent_workers": True, "pin_memory": pinned}
        batches = DataLoader(samples, size, sampler=order, **options)

        def epoch(number: int) -> Iterator[tuple[Any, Any]]:
            yield from batches

        return epoch

    return way


WAYS = {
    "DataLoader, numpy.memmap": opened(Mapped, by_batch=False),
    "DataLoader, numpy.memmap by batch": opened(Mapped, by_batch=True),
    "DataLoader, torch.from_file": opened(Stored, by_batch=False),
    "DataLoader, torch.from_file by batch": opened(Stored, by_batch=True),
}

"""Loaders of a few lines, as tutorials write them: one picture after the other; and threads that fill a queue.

The second has the form of the loader in ALCF's tutorial on data pipelines in PyTorch: threads put pictures into one
queue, and another thread makes batches of them for a second queue. There, each thread walks through all pictures of its
rank, from the first on. So each picture comes as often in turn as there are threads, and an epoch's number of them has
a part of the pictures. This is kept here, since it is counted.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import tutorial_training
from images_with_torchvision import NORMALIZED, PACKAGES, PICTURE, prepare  # noqa: F401
from torchvision import transforms
from torchvision.datasets import ImageFolder
from tutorial_training import Batch


class Pictures:
    """The pictures of one rank, with their numbers in the folder."""

    def __init__(self, out: Path, rank: int, ranks: int) -> None:
        self.pictures = ImageFolder(out / "images", transforms.Compose([*PICTURE, *NORMALIZED]))
        self.numbers = range(rank, len(self.pictures), ranks)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int, int]:
        return *self.pictures[self.numbers[i]], self.numbers[i]


def batch_of(samples: list[Any]) -> Batch:
    images, labels, numbers = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels), numbers


def serial(out: Path, batch_size: int, workers: int, rank: int, ranks: int, repeats: int) -> Iterator[Batch]:
    samples = Pictures(out, rank, ranks)
    for _ in range(repeats):
        for first in range(0, len(samples), batch_size):
            yield batch_of([samples[i] for i in range(first, min(first + batch_size, len(samples)))])


def threaded(out: Path, batch_size: int, workers: int, rank: int, ranks: int, repeats: int) -> Iterator[Batch]:
    samples = Pictures(out, rank, ranks)
    loaded: queue.Queue[Any] = queue.Queue(2 * batch_size * workers)
    batches: queue.Queue[Batch] = queue.Queue(4)

    def load() -> None:
        while True:
            for i in range(len(samples)):
                loaded.put(samples[i])

    def collect() -> None:
        while True:
            batches.put(batch_of([loaded.get() for _ in range(batch_size)]))

    for work in (*[load] * workers, collect):
        threading.Thread(target=work, daemon=True).start()
    # It has no epochs. One ends here once as many samples as the rank has were taken, or more.
    for _ in range(-(-repeats * len(samples) // batch_size)):
        yield batches.get()


LOADERS: dict[str, tutorial_training.Load] = {"serial": serial, "threads and queues": threaded}
WAYS = tutorial_training.ways(__name__, LOADERS)

"""shardio: the pictures are converted once, and each rank's part of the set is read by threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tutorial_training
from images_with_shardio import PACKAGES, centered, prepare  # noqa: F401
from tutorial_training import Batch

from shardio import ShardLoader, open_shards
from shardio.augment import Compose


def batches(out: Path, batch_size: int, workers: int, rank: int, ranks: int, repeats: int) -> Iterator[Batch]:
    with ShardLoader(
        out / "set",
        batch_size,
        num_threads=workers,
        indices=np.tile(np.arange(len(open_shards(out / "set"))), repeats),
        tail="short",
        device="cpu",
        rank=rank,
        world_size=ranks,
        transform=Compose(centered()),
        return_indices=True,
    ) as loader:
        yield from loader


def first_batch(out: Path, batch_size: int, workers: int, rank: int, ranks: int, repeats: int) -> Iterator[Batch]:
    """Yields the first batch again and again, which costs nothing: the training's own pace."""
    images, labels, numbers = next(batches(out, batch_size, workers, rank, ranks, 1))
    for _ in range(repeats * len(open_shards(out / "set")) // ranks // batch_size):
        yield images, labels, numbers


LOADERS: dict[str, tutorial_training.Load] = {"ShardLoader": batches, "the first batch again": first_batch}
WAYS = tutorial_training.ways(__name__, LOADERS)
del WAYS[f"the first batch again: {tutorial_training.LOADING}"]

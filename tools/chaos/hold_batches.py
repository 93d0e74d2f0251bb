"""A slow consumer keeps some batches and drops others, while every slot is spoiled when it is taken again.

    python tools/chaos/hold_batches.py [--batches 100000] [--seed 0]

Every batch is compared with what was written when it comes, while it is kept, and when it is dropped; views of it are
kept after it. Then 100 iterators are abandoned in mid-epoch. Exit code 1 if a byte was wrong, or a thread, a descriptor
or an entry of /dev/shm is left.
"""

from __future__ import annotations

import gc
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path

import numpy as np
import torch
from attack import make_parser, write_set
from leaks import num_descriptors, shared_names, shared_names_left
from numpy.typing import NDArray
from tqdm import tqdm

import shardio
from shardio.loading.loader import ShardLoader
from shardio.loading.ring import Ring, Slot
from shardio.reading.choose import Io

NUM_SAMPLES = 997
SHAPE = (12, 10, 3)
MOST_KEPT = 40
POISON = 0xEE

Batch = tuple[torch.Tensor, ...]


class SpoilingRing(Ring):
    """Spoils each slot that is handed out, so that a reader of its old batch notices."""

    def acquire(self) -> Slot:
        slot = super().acquire()
        slot.images.fill(POISON)
        slot.labels.fill(-POISON)
        slot.indices.fill(-POISON)
        return slot


def is_right(batch: Batch, pixels: NDArray[np.uint8]) -> bool:
    images, labels, indices = batch
    expected = pixels[indices.numpy()]
    return np.array_equal(images.permute(0, 2, 3, 1).numpy(), expected) and bool((labels == indices).all())


def endless(loader: ShardLoader) -> Iterator[Batch]:
    while True:
        yield from loader


def hold(loader: ShardLoader, pixels: NDArray[np.uint8], count: int, seed: int) -> int:
    """Reads `count` batches, and keeps some for a while. Returns how many comparisons failed."""
    rng = random.Random(seed)
    kept: list[tuple[Batch, NDArray[np.uint8]]] = []
    views: list[tuple[torch.Tensor, NDArray[np.uint8]]] = []
    wrong = 0
    for batch in tqdm(islice(endless(loader), count), total=count, unit=" batches", disable=None):
        wrong += not is_right(batch, pixels)
        if rng.random() < 0.3:
            kept.append((batch, pixels[batch[2].numpy()]))
        while len(kept) > rng.randrange(1, MOST_KEPT):
            old, _ = kept.pop(rng.randrange(len(kept)))
            wrong += not is_right(old, pixels)
            if rng.random() < 0.2:  # one image of it lives on, and with it the memory of all
                views.append((old[0][0], pixels[int(old[2][0])]))
        while len(views) > 5:
            view, expected = views.pop(rng.randrange(len(views)))
            wrong += not np.array_equal(view.permute(1, 2, 0).numpy(), expected)
        if rng.random() < 0.001:
            time.sleep(0.002)
    return wrong


def threads_and_descriptors() -> tuple[set[str], int]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("shardio")}, num_descriptors()


def hold_batches(count: int, seed: int) -> list[str]:
    """Returns what went wrong, in words."""
    before, shared = threads_and_descriptors(), shared_names()
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        out, halved = Path(folder) / "set", Path(folder) / "halved"
        pixels = np.random.default_rng(0).integers(0, 256, (NUM_SAMPLES, *SHAPE), dtype=np.uint8)
        write_set(out, pixels, NUM_SAMPLES, samples_per_shard=100)
        items = [(picture, label) for label, picture in enumerate(pixels)]
        shardio.convert(items, halved, size=SHAPE[:2], order="source", pixels="yuv420")
        seen = np.stack([sample.image for sample in shardio.open_shards(halved)])
        ios: list[Io] = ["mmap", "pread"]
        for path, io in product((out, halved), ios):
            pixels = pixels if path == out else seen
            with ShardLoader(path, 7, seed=seed, num_threads=2, device="cpu", return_indices=True, io=io) as loader:
                loader._pipeline._ring = SpoilingRing(loader._pipeline._ring.capacity, loader._pipeline._ring._make)
                wrong = hold(loader, pixels, count // 4, seed)
                if wrong:
                    problems.append(f"{path.name}, io={io}: {wrong} comparisons failed")
        for number in range(min(100, count // 5)):
            abandoned = ShardLoader(out, 7, device="cpu", num_threads=2)
            for _ in islice(abandoned, number % 5):
                pass
            del abandoned
    gc.collect()
    after = threads_and_descriptors()
    if after != before:
        problems.append(f"left behind: threads and descriptors were {before}, are {after}")
    if left := shared_names_left(shared):
        problems.append(f"left behind in /dev/shm: {left}")
    return problems


def main() -> int:
    parser = make_parser(__doc__, "the order, and of the batches that are kept", folder=False)
    parser.add_argument("--batches", type=int, default=100_000, help="default %(default)s")
    options = parser.parse_args()
    problems = hold_batches(options.batches, options.seed)
    for problem in problems:
        print(problem)
    print(f"{options.batches:,} batches, seed {options.seed}: {len(problems) or 'no'} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

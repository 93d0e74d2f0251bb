#!/usr/bin/env python
"""Truncates shards at random moments, while batches are made of them: no wrong pixel, and never the end of the process.

    python tools/chaos/truncate_shards.py [--rounds 500] [--seed 0]

Each round reads an epoch of a mapped set with one of six transforms, or none, and cuts one of its shards meanwhile, to
nothing or to some pages. Batches that come must be right. Otherwise an error must name the shard. Linux only: the set
is in /dev/shm, where a page that was cut off is lost at once.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from attack import Counts, Rounds, Say, make_parser, verdict, write_set
from tqdm import tqdm

import shardio.system.pour
from shardio.augment import (
    ColorJitter,
    Compose,
    HorizontalFlip,
    Normalize,
    RandAugment,
    RandomCrop,
    RandomResizedCrop,
    Views,
)
from shardio.loading.loader import ShardLoader

NUM_SAMPLES = 400
SHAPE = (64, 64, 3)
TRANSFORMS = [
    None,
    HorizontalFlip(),
    RandomCrop(60, padding=4),
    Compose([RandomResizedCrop(48), HorizontalFlip(), Normalize("imagenet")]),
    Compose([RandomResizedCrop(48), RandAugment()]),
    Compose([ColorJitter(0.4), Normalize()]),
    Views([RandomResizedCrop(30), RandomResizedCrop(20)]),
]
MOST_DELAY_SECONDS = 0.03
PAGE_NBYTES = 4096


@dataclass
class Truncations(Counts):
    whole: int = 0
    """Epochs that were over before, or whose samples were still there."""
    errors: int = 0
    batches: int = 0
    """Batches that came, all in all."""


class Truncating(Rounds[Truncations]):
    def __init__(self, folder: Path, seed: int, say: Say) -> None:
        super().__init__(folder, seed, say, Truncations())
        self._out = folder / "set"
        self._images = np.random.default_rng(0).integers(0, 256, (NUM_SAMPLES, *SHAPE), dtype=np.uint8)
        self._make_set()
        self._files = {path: path.read_bytes() for path in sorted(self._out.glob("train-0*.npy"))}
        self._expected = [[*self._epoch(number, 1)] for number in range(len(TRANSFORMS))]

    def _make_set(self) -> None:
        write_set(self._out, self._images, NUM_SAMPLES, samples_per_shard=100)

    def _loader(self, number: int, num_threads: int) -> ShardLoader:
        return ShardLoader(
            self._out, 16, transform=TRANSFORMS[number], device="cpu", io="mmap", num_threads=num_threads
        )

    def _epoch(self, number: int, num_threads: int) -> list[list[torch.Tensor]]:
        with self._loader(number, num_threads) as loader:
            return [[view.clone() for view in views_of(images)] for images, _ in loader]

    def run(self) -> None:
        """Runs one round."""
        self.counts.rounds += 1
        number = self._random.randrange(len(TRANSFORMS))
        file = self._random.choice([*self._files])
        nbytes = self._random.choice([0, PAGE_NBYTES * self._random.randrange(len(self._files[file]) // PAGE_NBYTES)])
        with self._loader(number, self._random.choice([1, 2, 4])) as loader:
            cut = threading.Timer(self._random.uniform(0, MOST_DELAY_SECONDS), lambda: truncate(file, nbytes))
            cut.start()
            try:
                for (images, _), expected in zip(loader, self._expected[number], strict=True):
                    self.counts.batches += 1
                    if not all(map(torch.equal, views_of(images), expected)):
                        self._violation(f"a wrong pixel of {TRANSFORMS[number]!r}, {file.name} cut to {nbytes} bytes")
                self.counts.whole += 1
            except (OSError, ValueError) as error:
                self.counts.errors += 1
                if file.name not in str(error):
                    self._violation(f"an error that does not name {file.name}: {error}")
            cut.join()
        file.write_bytes(self._files[file])  # into the same file: a loader's mapping of it is closed by now


def views_of(images: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return images if isinstance(images, tuple) else (images,)


def truncate(file: Path, nbytes: int) -> None:
    with file.open("r+b") as opened:
        opened.truncate(nbytes)


def truncate_shards(folder: Path, rounds: int, seed: int, say: Say) -> Truncations:
    """Runs `rounds` rounds."""
    attack = Truncating(folder, seed, say)
    for _ in tqdm(range(rounds), unit=" rounds", disable=None):
        attack.run()
    return attack.counts


def main() -> int:
    parser = make_parser(__doc__, "the moments, and of what is cut", folder=False)
    parser.add_argument("--rounds", type=int, default=500, help="default %(default)s")
    options = parser.parse_args()
    shardio.system.pour.RETRY_SECONDS = (0.0, 0.0, 0.0)  # what was cut off does not come back meanwhile
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        return verdict(truncate_shards(Path(folder), options.rounds, options.seed, tqdm.write))


if __name__ == "__main__":
    sys.exit(main())

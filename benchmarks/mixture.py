"""A mixture of four sets beside one set merged of them: images per second of loaders on the CPU, in turn.

The sets must be in the page cache, or this measures the disk.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from common import describe_machine, print_ratios

from shardio import ShardLoader, ShardWriter, merge
from shardio.augment import Compose, HorizontalFlip, RandomResizedCrop

SHARES = (10, 5, 4, 1)


def write(out: Path, count: int, side: int) -> Path:
    rng = np.random.default_rng(count)
    block = rng.integers(0, 256, (16, side, side, 3), dtype=np.uint8)
    with ShardWriter(out, (side, side, 3), classes=["a", "b"], shard_nbytes=1 << 28) as writer:
        for number in range(count):
            writer.append(np.roll(block[number % 16], number, axis=0), number % 2, key=f"{out.name}/{number}")
    return out


def rate_of(sets: Any, options: argparse.Namespace, **more: Any) -> float:
    with ShardLoader(sets, 256, epoch_batches=options.batches, io=options.io, device="cpu", **more) as loader:
        for _ in loader:  # brings samples into the page cache, and the page tables
            pass
        start, images = time.perf_counter(), 0
        for batch in islice(loader, options.batches):
            images += len(batch[1])
        return images / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=6000, help="of all sets together")
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--io", choices=["mmap", "pread"], default="mmap")
    parser.add_argument("--batches", type=int, default=60, help="per way and round")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(describe_machine())
    with TemporaryDirectory() as folder:
        counts = [options.samples * share // sum(SHARES) + number for number, share in enumerate(SHARES)]
        parts = [write(Path(folder, f"set{number}"), count, options.side) for number, count in enumerate(counts)]
        whole = Path(folder, "whole")
        merge(parts, whole)
        sets = {str(part): share for part, share in zip(parts, SHARES, strict=True)}
        cropped = {"transform": Compose([RandomResizedCrop(options.side * 7 // 8), HorizontalFlip()])}
        for name, more in (("whole pictures", {}), ("cropped and flipped", cropped)):
            print(f"{name}, io={options.io}")
            rates: dict[str, list[float]] = {"one set": [], "four sets": []}
            for _ in range(options.rounds):
                rates["one set"].append(rate_of(whole, options, **more))
                rates["four sets"].append(rate_of(sets, options, **more))
            print_ratios(rates, "one set", "images/s")


if __name__ == "__main__":
    main()

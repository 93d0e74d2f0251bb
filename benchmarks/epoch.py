"""A whole epoch of a set that is larger than the memory, from the disk, with and without the standard transform.

    python benchmarks/epoch.py [--samples 250000] [--size 256] [--pixels rgb] [--rounds 5]

The set is written first, and removed at the end. Before each epoch it leaves the page cache. Beside
each epoch stand plain O_DIRECT reads of random samples, the limit of the disk, and torch's DataLoader over
numpy.memmap, both for a part of an epoch. "disk" is what came from the disk, in bytes that were delivered: the
transform does not need all, and the kernel reads some in vain. "waited" is the share of the time for which the loop
waited for a batch; memory is the most that a process had, with what it has mapped.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cold import plain_direct
from common import bytes_from_disk, describe_machine, generated_set, leave_the_page_cache, ratios, spread

from shardio.augment import Compose, HorizontalFlip, Normalize, RandomResizedCrop
from shardio.format.manifest_file import load_manifest
from shardio.loading.loader import ShardLoader
from shardio.reading.shardset import open_shards

BATCH_SIZE = 256
WAYS = ("plain O_DIRECT", "ShardLoader", "with the transform", "DataLoader, numpy.memmap")


class Memmaps(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """The shards of a set as numpy.memmap, one after the other."""

    def __init__(self, path: Path) -> None:
        shards = open_shards(path)
        self._labels = shards.labels
        self._files = [np.load(file, mmap_mode="r") for file in sorted(path.glob("train-0*.npy"))]
        self._starts = np.cumsum([0, *map(len, self._files)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = np.array(self._files[number][index - self._starts[number]])
        return torch.from_numpy(row), int(self._labels[index])


def measure(way: str, path: Path, seed: int, part: int, crop: int) -> None:
    """Prints what is measured of one way, as JSON."""
    waited, before, start = 0.0, bytes_from_disk(), time.perf_counter()
    if way == WAYS[0]:
        count = plain_direct(path, part, seed) // open_shards(path).row_nbytes
    elif way == WAYS[3]:
        torch.manual_seed(seed)
        loader = torch.utils.data.DataLoader(Memmaps(path), BATCH_SIZE, shuffle=True, num_workers=2)
        count = sum(len(labels) for _, labels in islice(loader, part // BATCH_SIZE))
    else:
        transform = Compose([RandomResizedCrop(crop), HorizontalFlip(), Normalize("imagenet")])
        options: dict[str, Any] = {"transform": transform} if way == WAYS[2] else {}
        with ShardLoader(path, BATCH_SIZE, seed=seed, device="cpu", tail="short", **options) as ours:
            count = sum(len(labels) for _, labels in ours)
            waited = ours.stats()["waited"]
    seconds = time.perf_counter() - start
    nbytes = count * open_shards(path).row_nbytes
    # RUSAGE_SELF would begin with what the process had that started this one.
    own = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    memory = [int(own.split()[1]) / 1e3, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3]
    found = {"images/s": count / seconds, "GB/s": nbytes / seconds / 1e9, "seconds": seconds, "count": count}
    disk = (bytes_from_disk() - before) / nbytes
    print(json.dumps(found | {"waited": waited, "disk": disk, "MB": max(memory)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=250_000)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--pixels", default="rgb", help="of the set (%(default)s); DataLoader reads rgb alone")
    parser.add_argument("--crop", type=int, help="of the transform; default: 7/8 of the size")
    parser.add_argument("--part", type=int, default=25_600, help="samples that the other ways read (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    crop = options.crop or options.size * 7 // 8
    if options.measure:
        way, path, seed = options.measure
        measure(way, Path(path), int(seed), options.part, crop)
        return
    print(describe_machine())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    start = time.perf_counter()
    path = generated_set(options.samples, options.size, pixels=options.pixels)
    nbytes = load_manifest(path).nbytes
    print(
        f"{options.samples:,} samples of {options.size} x {options.size} x 3, {options.pixels}, {nbytes / 1e9:.1f} GB, "
        f"on a machine with {memory / 1e9:.1f} GB of memory; written in {time.perf_counter() - start:.0f} s"
    )
    ways = WAYS if options.pixels == "rgb" else WAYS[:3]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    try:
        for number in range(options.rounds):
            for way in ways:
                leave_the_page_cache(path)
                words = [sys.executable, __file__, "--measure", way, path, number, "--part", options.part]
                words += ["--crop", crop]
                result = subprocess.run([*map(str, words)], check=True, stdout=subprocess.PIPE)
                found[way].append(json.loads(result.stdout))
    finally:
        shutil.rmtree(path)
    columns = {"images/s": 0, "GB/s": 2, "seconds": 1, "waited": 2, "disk": 2, "MB": 0}  # with digits
    for way, results in found.items():
        print(f"{way}, {results[0]['count']:,} samples")
        values = {name: [one[name] for one in results] for name in columns}
        for name, digits in columns.items():
            print(f"    {name:<16}{spread(values[name], digits)}")
        print(f"    {'of O_DIRECT':<16}{ratios(values['GB/s'], [one['GB/s'] for one in found[WAYS[0]]], 2)}")


if __name__ == "__main__":
    main()

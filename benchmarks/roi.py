"""Reading only what the transform sees, beside reading whole pictures: rates and bytes read, for equal pixels.

Two loaders with the same transform take turns, in pairs, one with `roi` and one without. A turn is a number of batches,
with nothing done to them. "warm" reads from the page cache; for "cold" the set's files leave it before each turn; with
`--limit` both turns run in a cgroup with so much memory, page cache included: a larger set is read from storage there.
That needs root, and cgroups of version 1 or 2 that are mounted. "read" are the bytes that the loader asked for, "disk"
those that came from the disk (read_bytes of /proc/self/io), for each image. The ratio is the median of the pairs.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from common import bytes_from_disk, cgroup, describe_machine, generated_set, leave_the_page_cache, ratios, spread

from shardio.augment import CenterCrop, Compose, HorizontalFlip, Normalize, RandomResizedCrop, Resize, recipe
from shardio.augment.chain import Transform
from shardio.cli.options import parse_nbytes
from shardio.loading.loader import ShardLoader

CHAINS: dict[str, Transform] = {
    "crop and flip": Compose([RandomResizedCrop(224), HorizontalFlip()]),
    "normalised": Compose([RandomResizedCrop(224), HorizontalFlip(), Normalize("imagenet")]),
    "evaluation": Compose([Resize(256), CenterCrop(224), Normalize("imagenet")]),
    "torchvision-v2": recipe("torchvision-v2", 224),
}


@dataclass
class Turn:
    """Of each image: microseconds of the clock and of all cores, bytes asked for and from the disk."""

    wall: float
    cpu: float
    read: float
    disk: float


def turn(loader: ShardLoader, batches: int) -> Turn:
    iterator = iter(loader)
    next(iterator)  # threads are at work
    read, disk = loader.stats()["read_nbytes"], bytes_from_disk()
    cpu, start = time.process_time(), time.perf_counter()
    images = sum(len(labels) for _, labels in islice(iterator, batches))
    if loader.device.type == "cuda":
        torch.cuda.synchronize(loader.device)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    read, disk = loader.stats()["read_nbytes"] - read, bytes_from_disk() - disk
    return Turn(wall / images * 1e6, cpu / images * 1e6, read / images, disk / images)


def measure(path: Path, transform: Transform, cold: bool, options: argparse.Namespace) -> dict[bool, list[Turn]]:
    def make(roi: bool) -> ShardLoader:
        how = {"io": options.io, "device": options.device}
        loader = ShardLoader(path, options.batch_size, transform=transform, roi=roi, **how)
        if loader.stats()["roi"] != roi:
            raise SystemExit(
                "roi: expected kernels in C, and as many threads as torch has; on CUDA, Triton and --io pread or direct"
            )
        return loader

    turns: dict[bool, list[Turn]] = {False: [], True: []}
    # Pages that are mapped do not leave the page cache: for a cold set, the loaders are made anew.
    loaders = {} if cold else {roi: make(roi) for roi in turns}
    for number in range(options.rounds + 1):
        for roi in (False, True) if number % 2 else (True, False):
            if cold:
                leave_the_page_cache(path)
            with make(roi) if cold else nullcontext(loaders[roi]) as loader:
                loader.set_epoch(number)
                turns[roi].append(turn(loader, options.batches))
            del loader  # and with it the mapping
    for some in turns.values():
        del some[0]  # the first turn makes slots
    for loader in loaders.values():
        loader.close()
    return turns


def report(name: str, chain: str, turns: dict[bool, list[Turn]]) -> None:
    for roi, some in turns.items():
        ratio = ratios([one.wall for one in turns[False]], [one.wall for one in some], 2)
        rate, cpu = spread([1e6 / one.wall for one in some], 0), spread([one.cpu for one in some], 0)
        read, disk = (spread([getattr(one, field) / 1e3 for one in some], 0) for field in ("read", "disk"))
        way = "roi" if roi else "whole"
        print(f"{name:<8}{chain:<16}{way:<7}{rate:>26}{cpu:>18}{read:>18}{disk:>18}{ratio:>22}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", type=Path, nargs="?", help="a set; 20,000 pictures are generated if none is given")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--batches", type=int, default=16, help="of each turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--io", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=parse_nbytes, help="memory of a cgroup, such as 1GB, in place of warm and cold")
    parser.add_argument("--only", choices=["warm", "cold"])
    parser.add_argument("--chains", nargs="+", choices=list(CHAINS), default=["crop and flip", "normalised"])
    options = parser.parse_args()
    path = options.shards or generated_set(20_000, 256)
    print(f"{describe_machine()}, {torch.get_num_threads()} threads of torch")
    print(f"{'':<31}{'images/s':>26}{'CPU us':>18}{'read KB':>18}{'disk KB':>18}{'ratio':>22}")
    with cgroup(options.limit) if options.limit else nullcontext() as procs:
        if procs is not None:
            home = procs.parent.parent / procs.name
            procs.write_text(str(os.getpid()))
        try:
            for name in ["limit"] if options.limit else [options.only] if options.only else ["warm", "cold"]:
                for chain in options.chains:
                    report(name, chain, measure(path, CHAINS[chain], name == "cold", options))
        finally:
            if procs is not None:
                home.write_text(str(os.getpid()))


if __name__ == "__main__":
    main()

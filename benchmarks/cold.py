"""The speed of reading a set that is not in the page cache, with each `io`, beside a plain loop of O_DIRECT reads.

Before each measurement the set's files leave the page cache. The reference is the limit of the disk: threads that read
whole random samples by preadv with O_DIRECT into buffers of their own, without loader, order or labels, as in `shardio
bench`. "read/wanted" is the bytes that came from the disk (read_bytes of /proc/self/io) over those that were delivered:
more than 1.0 is read in vain.
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from itertools import islice
from pathlib import Path

from common import bytes_from_disk, describe_machine, leave_the_page_cache, ratios, spread

from shardio.loading.loader import ShardLoader
from shardio.measure.limits import direct_reads, why_no_direct_reads
from shardio.reading.shardset import open_shards


def plain_direct(path: Path, count: int, seed: int) -> int:
    """Reads at least `count` random samples by O_DIRECT. Returns the number of bytes."""
    shards = open_shards(path)
    done = 0
    with closing(direct_reads(shards, seed)) as steps:
        while done < count:
            done += next(steps)
    return done * shards.row_nbytes


def engine(path: Path, io: str, batch_size: int, count: int, seed: int) -> int:
    total = 0
    with ShardLoader(path, batch_size, seed=seed, io=io, device="cpu") as loader:  # type: ignore[arg-type]
        for images, _ in islice(loader, count // batch_size):
            total += images.nbytes
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "shards", type=Path, help="a set, such as benchmarks/loader.py generates; it leaves the page cache"
    )
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--batches", type=int, default=20, help="per way and round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(describe_machine())
    path = options.shards
    shards = open_shards(path)
    if why_not := why_no_direct_reads(shards):
        parser.error(f"the reference cannot be read: {why_not}")
    count = min(options.batches * options.batch_size, len(shards) // options.batch_size * options.batch_size)
    names = ["plain O_DIRECT", "direct", "pread", "mmap"]
    rates: dict[str, list[float]] = {name: [] for name in names}
    waste: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.rounds):
        for name in names:
            leave_the_page_cache(path)
            disk, used, start = bytes_from_disk(), time.process_time(), time.perf_counter()
            if name == names[0]:
                wanted = plain_direct(path, count, number)
            else:
                wanted = engine(path, name, options.batch_size, count, number)
            rates[name].append(wanted / (time.perf_counter() - start) / 1e9)
            cpu[name].append((time.process_time() - used) / (wanted / 1e9))
            waste[name].append((bytes_from_disk() - disk) / wanted)
    print(f"{'':<16}{'GB/s':>24}{'of plain':>24}{'read/wanted':>24}{'CPU s/GB':>24}")
    for name in names:
        cells = [spread(rates[name], 3), ratios(rates[name], rates[names[0]], 2)]
        cells += [spread(waste[name], 2), spread(cpu[name], 2)]
        print(f"{name:<16}" + "".join(f"{cell:>24}" for cell in cells))


if __name__ == "__main__":
    main()

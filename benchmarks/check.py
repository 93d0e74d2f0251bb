"""The cost of check="sample": the loader with and without it, on the same set, in turn.

The set must be in the page cache, or this measures the disk. CPU seconds are those of the whole process.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from pathlib import Path

from common import describe_machine, generated_set, print_ratios, spread

from shardio.format.layout import crc32
from shardio.loading.loader import ShardLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", type=Path, nargs="?", help="a set; by default one of 5,000 samples is generated")
    parser.add_argument("--io", choices=["mmap", "pread", "direct"], default="mmap")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--threads", type=int, help="gather threads")
    parser.add_argument("--batches", type=int, default=60, help="per way and round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    path = options.shards or generated_set(5000, 256)
    print(describe_machine())
    print(f"crc32 by {crc32.__module__}; io={options.io}, batches of {options.batch_size}")
    rates: dict[str, list[float]] = {"off": [], "sample": []}
    cpu: dict[str, list[float]] = {"off": [], "sample": []}
    for _ in range(options.rounds):
        for check in rates:
            with ShardLoader(
                path,
                options.batch_size,
                io=options.io,
                num_threads=options.threads,
                device="cpu",
                check=check,  # type: ignore[arg-type]
            ) as loader:
                for _ in loader:  # brings samples into the page cache, and the page tables
                    pass
                used, start, images = time.process_time(), time.perf_counter(), 0
                left = options.batches
                while left:
                    for _, labels in islice(loader, left):
                        images += len(labels)
                        left -= 1
                rates[check].append(images / (time.perf_counter() - start))
                cpu[check].append((time.process_time() - used) / images * 1e6)
    print_ratios(rates, "off", "images/s")
    for check, values in cpu.items():
        print(f"{check:<8}{spread(values, 1)} us of CPU time for an image")


if __name__ == "__main__":
    main()

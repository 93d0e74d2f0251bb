"""`stage` beside `cp` of the same bytes, with and without bringing them to the disk, in the same rounds.

    python benchmarks/stage.py [--samples 20000] [--cache FOLDER]

A copy that is staged is verified (sha256) and durable, file by file. `cp` is neither; `cp` and `sync` is durable. The
source is in the page cache, or with --cold is dropped from it before each turn; the copies are removed, and the
removal brought to the disk, before the next turn begins.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common import BUILD, describe_machine, generated_set, print_ratios

from shardio.cache.stage import stage
from shardio.format.manifest_file import load_manifest


def sync_filesystem(folder: Path) -> None:
    subprocess.run(["sync", "--file-system", folder], check=True)


def drop_from_the_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--samples", type=int, default=20000, help="samples of 256 x 256 x 3 pixels; default %(default)s"
    )
    parser.add_argument("--set", type=Path, help="a set of one's own to copy, in place of a generated one")
    parser.add_argument("--cache", type=Path, default=BUILD, help="where copies are made; default %(default)s")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--cold", action="store_true", help="drop the source from the page cache before each turn")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(describe_machine())
    source = options.set or generated_set(options.samples, 256, 512 << 20)
    nbytes = load_manifest(source).nbytes
    options.cache.mkdir(parents=True, exist_ok=True)
    target = options.cache / "staged"

    def cp() -> None:
        subprocess.run(["cp", "-r", source, target], check=True)

    def cp_and_sync() -> None:
        cp()
        sync_filesystem(target)

    ways: dict[str, Callable[[], object]] = {"cp": cp, "cp and sync": cp_and_sync}
    for workers in options.workers:
        ways[f"stage, {workers} workers"] = partial(stage, source, target, workers=workers)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds):
        # The order is another one each time: what the disk still does after a turn slows the next one down.
        for name in random.Random(turn).sample(list(ways), len(ways)):
            shutil.rmtree(target, ignore_errors=True)
            sync_filesystem(options.cache)
            if options.cold:
                drop_from_the_page_cache(source)
            rates[name].append(nbytes / timed(ways[name]) / 1e6)
    shutil.rmtree(target, ignore_errors=True)
    print(f"{nbytes / 1e9:.2f} GB, {'from the disk' if options.cold else 'from the page cache'}; ratios to cp and sync")
    print_ratios(rates, "cp and sync", "MB/s")
    print("ratios to cp")
    print_ratios(rates, "cp", "MB/s")


def timed(way: Callable[[], object]) -> float:
    """Returns the seconds of a turn."""
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

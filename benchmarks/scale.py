"""The loader's costs from 10^4 to 10^7 samples, and from 1 to 4,096 shards, which should be the same.

Sets are sparse files: they have every size and no content, and reading them costs what reading any cached file does.
Each measurement is a process of its own that may open 64 files: it opens a set, waits for the first batch, and then
reads the same few batches again and again, so that only what depends on the size of the set can differ. Private memory
is what opening and reading added to the process, the loader's slots left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

from common import BUILD, describe_machine, spread

from shardio.format.entries import IndexEntry, ShardEntry, SplitEntry
from shardio.format.layout import (
    HEADER_NBYTES,
    index_dtype,
    index_header,
    index_name,
    key_field_nbytes,
    pixels_row,
    shard_name,
)
from shardio.format.manifest import Manifest
from shardio.format.manifest_file import commit_manifest

SHAPE = (64, 64, 3)
ROW = pixels_row(SHAPE)
KEY_NBYTES = key_field_nbytes(30)
BATCH_SIZE = 256
BATCHES = 39  # 10^4 samples give so many
CASES = [(10**4, 32), (10**5, 32), (10**6, 32), (10**7, 32), (10**6, 1), (10**6, 64), (10**6, 1024), (10**6, 4096)]
UNKNOWN = "0" * 64  # checksums are for `shardio verify`


def make_sparse_set(path: Path, num_samples: int, num_shards: int) -> None:
    path.mkdir(parents=True)
    bounds = [num_samples * i // num_shards for i in range(num_shards + 1)]
    shards = []
    for number in range(num_shards):
        count = bounds[number + 1] - bounds[number]
        shards.append(ShardEntry(shard_name("train", number), ROW.file_nbytes(count), UNKNOWN, count, ROW))
        (path / shards[-1].file).write_bytes(ROW.file_header(count))
        os.truncate(path / shards[-1].file, shards[-1].nbytes)
    file = path / index_name("train")
    file.write_bytes(index_header(num_samples, index_dtype(KEY_NBYTES)))
    os.truncate(file, HEADER_NBYTES + num_samples * index_dtype(KEY_NBYTES).itemsize)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()  # it is checked when the set is opened
    index = IndexEntry(file.name, file.stat().st_size, sha256, KEY_NBYTES)
    split = SplitEntry(num_samples, index, tuple(shards))
    commit_manifest(path, Manifest(SHAPE, (), {"train": split}))


def private_nbytes() -> int:
    """Returns the memory of this process alone. Pages of the set belong to the page cache, not to it."""
    lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
    return next(int(words[1]) << 10 for words in lines if words[0] == "Private_Dirty:")


def measure(path: str, io: str) -> dict[str, float]:
    """Measures in a process of its own."""
    from shardio.loading.loader import ShardLoader

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    before = private_nbytes()
    start = time.perf_counter()
    loader = ShardLoader(path, BATCH_SIZE, io=io, num_threads=1, device="cpu")  # type: ignore[arg-type]
    next(iter(loader))
    first = time.perf_counter() - start

    def read() -> None:
        loader.set_epoch(0)
        for _ in islice(loader, BATCHES):
            pass

    read()  # brings pages into the page cache, and the page tables
    used, repeats = time.process_time(), 5
    for _ in range(repeats):
        read()
    cpu = (time.process_time() - used) / (repeats * BATCHES * BATCH_SIZE)
    slots = loader.stats()["slots"] * BATCH_SIZE * SHAPE[0] * SHAPE[1] * SHAPE[2]
    return {
        "first batch, ms": first * 1e3,
        "CPU, us per image": cpu * 1e6,
        "private, MB": (private_nbytes() - before - slots) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--io", choices=["mmap", "pread"], default="mmap")
    parser.add_argument("--most", type=int, default=10**7, help="leave out sets of more samples (%(default)s)")
    parser.add_argument("--measure", metavar="SET", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.io)))
        return
    print(describe_machine())
    folder = BUILD / "scale"
    shutil.rmtree(folder, ignore_errors=True)
    results: dict[tuple[int, int], list[dict[str, float]]] = {case: [] for case in CASES if case[0] <= options.most}
    for samples, shards in results:
        make_sparse_set(folder / f"{samples}-{shards}", samples, shards)
    for number in range(options.rounds + 1):
        for samples, shards in results:
            path = folder / f"{samples}-{shards}"
            command = [sys.executable, __file__, "--io", options.io, "--measure", str(path)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            if number:  # the first round fills the page cache
                results[samples, shards].append(found)
    names = list(results[CASES[0]][0])
    print(
        f"io={options.io}, batches of {BATCH_SIZE}, medians of {options.rounds} processes, each allowed 64 open files"
    )
    print(f"{'samples':>10} {'shards':>7}" + "".join(f"{name:>30}" for name in names))
    for (samples, shards), rounds in results.items():
        columns = ([found[name] for found in rounds] for name in names)
        cells = (spread(one, 1) for one in columns)
        print(f"{samples:>10,} {shards:>7,}" + "".join(f"{cell:>30}" for cell in cells))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

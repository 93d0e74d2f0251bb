"""Training through a cache while the copy is made, beside training from the source alone.

The source is a folder that gives so many bytes a second in all, as a shared filesystem gives a node: samples and copied
files share it. Each round reads two epochs without a cache, two through an empty one, and one of a copy that is there.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from common import BUILD, describe_machine, generated_set, ratios, spread

from shardio.cache.folder import Cache
from shardio.format.entries import FileEntry
from shardio.loading.loader import ShardLoader
from shardio.sets.storage import FolderStorage

CACHE = BUILD / "cache"


class Line:
    """A source that gives all threads of the process so many bytes a second together."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait_for(self, nbytes: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._rate
            free_at = self._free_at
        time.sleep(max(0.0, free_at - time.monotonic()))


@contextlib.contextmanager
def slow_source(path: Path, rate: float) -> Iterator[None]:
    line, real = Line(rate), FolderStorage.read_into

    def read_into(storage: FolderStorage, entry: FileEntry, offset: int, buffer: memoryview) -> None:
        if storage.name == str(path):
            line.wait_for(len(buffer))
        real(storage, entry, offset, buffer)

    FolderStorage.read_into = read_into  # type: ignore[method-assign]
    yield
    FolderStorage.read_into = real  # type: ignore[method-assign]


def epochs(path: Path, batch_size: int, count: int) -> list[float]:
    """Returns images per second of each of so many epochs through the cache, whatever is in it."""
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is no room, which makes the loader read the source alone
        with ShardLoader(path, batch_size, device="cpu", cache=CACHE) as loader:
            for _ in range(count):
                start = time.perf_counter()
                images = sum(len(labels) for _, labels in loader)
                rates.append(images / (time.perf_counter() - start))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=5_000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--shard-size", type=int, default=64 << 20)
    parser.add_argument("--rate", type=float, default=200.0, help="speed of the source in MB/s; default %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(describe_machine())
    path = generated_set(options.samples, 256, options.shard_size)
    names = ["source alone, 1st epoch", "source alone, 2nd epoch"]
    names += ["through the cache, 1st epoch", "through the cache, 2nd epoch", "copy that is there"]
    rates: dict[str, list[float]] = {name: [] for name in names}
    free_nbytes = Cache.free_nbytes
    with slow_source(path, options.rate * 1e6):
        for _ in range(options.rounds):
            shutil.rmtree(CACHE, ignore_errors=True)
            Cache.free_nbytes = lambda cache: 0  # type: ignore[method-assign]
            found = epochs(path, options.batch_size, 2)
            Cache.free_nbytes = free_nbytes  # type: ignore[method-assign]
            shutil.rmtree(CACHE)
            found += epochs(path, options.batch_size, 2) + epochs(path, options.batch_size, 1)
            for name, rate in zip(names, found, strict=True):
                rates[name].append(rate)
    shutil.rmtree(CACHE)
    print(f"{'':<32}{'images/s':>28}{'to the source alone':>24}")
    for name in names:
        alone = rates[names[1] if "2nd" in name else names[0]]
        print(f"{name:<32}{spread(rates[name], 0):>28}{ratios(rates[name], alone, 2):>24}")


if __name__ == "__main__":
    main()

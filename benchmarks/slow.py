"""The loader on a filesystem that answers late, as over a network, beside plain threads that read the same way.

    python benchmarks/slow.py --latencies 1,10 --stalls 5

The set lies behind FUSE, served by a process that sleeps for the latency before it answers a read, any number of reads
at a time. "plain" is as many threads, each of which reads one whole random sample after the other with pread; nothing
is in the page cache when a way begins. With `--stalls`, the server does not answer at all for so many seconds, three
times while a fixed number of batches is read, as a file server does that fails over. "lost" is how much longer these
took than in the same round without stalls, as a share of the time of the stalls.

Needs libfuse3 with fusermount3, the package mfusepy, and the right to mount.
"""

from __future__ import annotations

import argparse
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from common import describe_machine, generated_set, leave_the_page_cache, ratios, spread

from shardio import ShardLoader, open_shards
from shardio.format.layout import HEADER_NBYTES
from shardio.reading.choose import make_reader
from shardio.system.machine import filesystem_kind

BATCH_SIZE = 256
NUM_STALLS = 3
# The server holds its answers back while this file is there, in the folder beside the mount point.
GATE = "stalled"


def serve(root: str, mount_point: str, gate: str, latency_seconds: float) -> None:
    """Serves the files of one folder until it is unmounted."""
    import mfusepy

    class Late(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def init_with_config(self, connection: Any, config: Any) -> None:
            connection.max_background = connection.congestion_threshold = 256

        def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
            try:
                found = os.lstat(root + path)
            except OSError as error:
                raise mfusepy.FuseOSError(error.errno or errno.EIO) from None
            names = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_ino")
            times = {f"st_{when}time": getattr(found, f"st_{when}time_ns") for when in "amc"}
            return {**{name: getattr(found, name) for name in names}, **times}

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(root + path)]

        def open(self, path: str, flags: int) -> int:
            return os.open(root + path, flags)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            time.sleep(latency_seconds)
            while os.path.exists(gate):
                time.sleep(0.01)
            return os.pread(fh, size, offset)

        def release(self, path: str, fh: int) -> None:
            os.close(fh)

    mfusepy.FUSE(
        *(Late(), mount_point),
        foreground=True,
        ro=True,
        subtype="late",
        max_threads=256,
        max_idle_threads=256,
    )


@contextmanager
def mounted(source: Path, latency_ms: float) -> Iterator[tuple[Path, Path]]:
    """Yields the folder behind the late filesystem, and the gate that stalls it."""
    with TemporaryDirectory() as beside:
        mount_point, gate = Path(beside, "mount"), Path(beside, GATE)
        mount_point.mkdir()
        words = [sys.executable, __file__, "--serve", source, mount_point, gate, latency_ms / 1e3]
        server = subprocess.Popen(list(map(str, words)))
        try:
            while not filesystem_kind(mount_point).startswith("fuse"):
                if server.poll() is not None:
                    sys.exit("nothing could be mounted: is mfusepy installed, and libfuse3?")
                time.sleep(0.05)
            yield mount_point, gate
        finally:
            gate.unlink(missing_ok=True)
            # It would serve on while a file is open, such as those of a set that is about to be forgotten.
            subprocess.run(["fusermount3", "-u", "-z", mount_point], check=False)
            server.kill()
            server.wait()


def plain(path: Path, num_threads: int, seconds: float) -> float:
    """Returns samples per second."""
    shards = open_shards(path)
    nbytes = shards.row_nbytes
    files = [os.open(path / entry.file, os.O_RDONLY) for entry in shards.manifest.splits["train"].shards]
    for file in files:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    starts = np.cumsum([0, *map(len, shards.mapped().file_rows)])
    order = iter(np.random.default_rng(0).permutation(len(shards)).tolist())
    counts, end = [0] * num_threads, time.perf_counter() + seconds

    def work(thread: int) -> None:
        buffer = bytearray(nbytes)
        while time.perf_counter() < end and (index := next(order, None)) is not None:
            shard = int(np.searchsorted(starts, index, side="right")) - 1
            os.preadv(files[shard], [buffer], HEADER_NBYTES + int(index - starts[shard]) * nbytes)
            counts[thread] += 1

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(num_threads)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = sum(counts) / (time.perf_counter() - start)
    for file in files:
        os.close(file)
    return rate


def loaded(path: Path, num_threads: int | None, seconds: float) -> float:
    """Returns samples per second, from the first batch on."""
    with ShardLoader(path, BATCH_SIZE, num_threads=num_threads, device="cpu") as loader:
        batches = iter(loader)
        next(batches)
        start, count = time.perf_counter(), 0
        while time.perf_counter() < start + seconds and next(batches, None) is not None:
            count += BATCH_SIZE
        return count / (time.perf_counter() - start)


def seconds_of(path: Path, num_batches: int) -> float:
    with ShardLoader(path, BATCH_SIZE, device="cpu") as loader:
        start = time.perf_counter()
        for _ in islice(loader, num_batches):
            pass
        return time.perf_counter() - start


def stalled_seconds_of(path: Path, num_batches: int, gate: Path, expected: float, stall_seconds: float) -> float:
    """Returns what `seconds_of` does, with stalls at a quarter, a half and three quarters of the `expected` time."""

    def stall() -> None:
        for _ in range(NUM_STALLS):
            if over.wait(expected / (NUM_STALLS + 1)):
                return
            gate.touch()
            over.wait(stall_seconds)
            gate.unlink()

    over = threading.Event()
    thread = threading.Thread(target=stall)
    thread.start()
    try:
        return seconds_of(path, num_batches)
    finally:
        over.set()
        thread.join()


def measure(options: argparse.Namespace, latency_ms: float, source: Path) -> Iterator[str]:
    with mounted(source, latency_ms) as (path, gate):
        rates: dict[tuple[str, int | None], list[float]] = {}
        lost: list[float] = []
        for _ in range(options.rounds):
            for num_threads in (None, *options.threads):
                shown = num_threads or make_reader(open_shards(path), "auto", options.samples)[0].num_threads
                for name, way, count in (("plain", plain, shown), ("ShardLoader", loaded, num_threads)):
                    leave_the_page_cache(path)
                    leave_the_page_cache(source)
                    rate = way(path, count, options.seconds)  # type: ignore[operator]
                    rates.setdefault((name, num_threads), []).append(rate)
            if options.stalls:
                leave_the_page_cache(path)
                expected = seconds_of(path, options.batches)
                leave_the_page_cache(path)
                found = stalled_seconds_of(path, options.batches, gate, expected, options.stalls)
                lost.append((found - expected) / (NUM_STALLS * options.stalls))
        for num_threads in (None, *options.threads):
            ours, theirs = rates["ShardLoader", num_threads], rates["plain", num_threads]
            yield (
                f"| {latency_ms:g} | {num_threads or f'{shown_default(path)} (its own choice)'} | {spread(theirs, 0)} "
                f"| {spread(ours, 0)} | {ratios(ours, theirs, 2)} |"
            )
        if lost:
            stalls = f"{NUM_STALLS} stalls of {options.stalls:g} s at {latency_ms:g} ms"
            yield f"{stalls}: lost {spread(lost, 2)} of their time"


def shown_default(path: Path) -> int:
    return make_reader(open_shards(path), "auto", 1)[0].num_threads


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        root, mount_point, gate, latency_seconds = sys.argv[2:]
        with suppress(KeyboardInterrupt):
            serve(root, mount_point, gate, float(latency_seconds))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latencies", type=numbers, default=[1, 10], metavar="MS,MS,...")
    parser.add_argument("--threads", type=numbers, default=[8, 128], metavar="N,N,...", help="beside the default")
    parser.add_argument("--samples", type=int, default=20_000, help="of 256 x 256 x 3: 3.9 GB")
    parser.add_argument("--seconds", type=float, default=2.0, help="per way and round")
    parser.add_argument("--stalls", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--batches", type=int, default=30, help="that are read while the server stalls")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(describe_machine())
    source = generated_set(options.samples, 256)
    print("| latency, ms | threads | plain, samples/s | ShardLoader | ratio |\n|---|---|---|---|---|")
    for latency_ms in options.latencies:
        for line in measure(options, latency_ms, source):
            print(line, flush=True)


if __name__ == "__main__":
    main()

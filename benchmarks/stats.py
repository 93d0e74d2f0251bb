"""The cost of the loader's counting and of its ranges for torch.profiler, beside reading a batch.

On samples of one byte a batch costs nothing but its handling. The cost of `stats()` and of the ranges is the difference
to a loader in which both are taken out, as a share of the cost of a batch of 256 samples of 256 x 256 x 3 on
the same machine.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from common import BUILD, describe_machine

from shardio.conversion.writing.set_writer import ShardWriter
from shardio.loading import pipeline
from shardio.loading.loader import ShardLoader

ROUNDS = 9
BATCH_SIZE = 256


def make_set(folder: Path, shape: tuple[int, int, int], num_samples: int) -> Path:
    with ShardWriter(folder, shape) as writer:
        for i in range(num_samples):
            writer.append(np.full(shape, i % 251, np.uint8), 0)
    return folder


def seconds_per_batch(path: Path, batches: int) -> float:
    """Returns CPU seconds of the whole process."""
    with ShardLoader(path, BATCH_SIZE, num_threads=1, io="mmap", device="cpu") as loader:
        next(iter(loader))
        used, done = time.process_time(), 0
        while done < batches:
            done += sum(1 for _ in islice(loader, batches - done))
        return (time.process_time() - used) / batches


class _Blind:
    """Takes every count, and keeps none."""

    def __getattr__(self, name: str) -> float:
        return 0.0

    def __setattr__(self, name: str, value: float) -> None:
        pass


@contextlib.contextmanager
def nothing_seen() -> Iterator[None]:
    seen = pipeline.record_function, pipeline.Counts
    pipeline.record_function = lambda name: contextlib.nullcontext()
    pipeline.Counts = _Blind
    try:
        yield
    finally:
        pipeline.record_function, pipeline.Counts = seen


def main() -> None:
    print(describe_machine())
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        tiny = make_set(Path(folder, "tiny"), (1, 1, 1), 256 * 200)
        real = make_set(Path(folder, "real"), (256, 256, 3), 256 * 8)
        added, whole = [], []
        for _ in range(ROUNDS):
            with nothing_seen():
                blind = seconds_per_batch(tiny, 2000)
            added.append(seconds_per_batch(tiny, 2000) - blind)
            whole.append(seconds_per_batch(real, 40))
    shares = [a / b for a, b in zip(added, whole, strict=True)]
    print(f"counting and ranges: {statistics.median(added) * 1e6:.1f} us per batch")
    print(f"a batch of {BATCH_SIZE} samples of 256 x 256 x 3: {statistics.median(whole) * 1e6:,.0f} us")
    print(f"share: {statistics.median(shares):.2%} ({min(shares):.2%} to {max(shares):.2%}), {ROUNDS} rounds")


if __name__ == "__main__":
    main()

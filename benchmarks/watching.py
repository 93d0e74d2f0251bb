"""What it costs to watch a loader: `report_every`, and `stats()` after each batch, beside a loader that nobody asks.

Three loaders of the same samples take turns, in pairs with the first one: plain, with reports ten times a second, and
with a call of `stats()` for each batch. A turn is some epochs from memory, with nothing done to the batches, where any
cost is seen most. The figures are medians of the ratios of pairs, of seconds and of seconds of all cores for an image:
above 1.0 is slower than the plain loader. As a machine's noise is larger than these costs, each call is timed by
itself, too, beside the time of one batch.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from common import describe_machine, spread

from shardio import ShardLoader, ShardWriter
from shardio.loading.report import Meter


def cost(path: Path, batch_size: int, with_stats: bool, **options: Any) -> tuple[float, float]:
    """Returns seconds of the clock, and of all cores, for an image."""
    with ShardLoader(path, batch_size, device="cpu", **options) as loader:
        for _ in loader:  # touches all pages and slots
            pass
        start, cpu, images = time.perf_counter(), time.process_time(), 0
        for _ in range(3):
            for _, labels in loader:
                images += len(labels)
                if with_stats:
                    loader.stats()
        return (time.perf_counter() - start) / images, (time.process_time() - cpu) / images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=5_120, help="of 256 x 256 x 3")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    print(describe_machine())
    with TemporaryDirectory() as folder:
        path = Path(folder, "set")
        pixels = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
        with ShardWriter(path, pixels.shape) as writer:
            for number in range(options.samples):
                writer.append(pixels, number % 10)
        ratios: dict[str, list[tuple[float, float]]] = {"report_every=0.1": [], "stats() for each batch": []}
        ways: dict[str, dict[str, Any]] = {
            "report_every=0.1": {"report_every": 0.1, "with_stats": False},
            "stats() for each batch": {"with_stats": True},
        }
        for number in range(options.rounds):
            for name, how in ways.items():
                pair = [("plain", {"with_stats": False}), (name, how)]
                found = {key: cost(path, options.batch_size, **some) for key, some in pair[:: 1 - 2 * (number % 2)]}
                wall, cpu = (found[name][kind] / found["plain"][kind] for kind in (0, 1))
                ratios[name].append((wall, cpu))
        for name, some in ratios.items():
            for kind, of in enumerate(("seconds", "CPU seconds")):
                values = [pair[kind] for pair in some]
                print(f"{name:<24} {spread(values, 3)} of plain in {of}")
        tell_calls(path, options.batch_size)


def tell_calls(path: Path, batch_size: int) -> None:
    batch = batch_size * cost(path, batch_size, with_stats=False)[0]
    with ShardLoader(path, batch_size, device="cpu") as loader:
        next(iter(loader))
        meter = Meter(lambda: 0.0)

        def count() -> None:
            meter.begin_wait()
            meter.end_wait()
            meter.received(256, 1)

        for name, call in {"counting a batch": count, "report()": loader.report, "stats()": loader.stats}.items():
            times = []
            for _ in range(200):
                start = time.perf_counter()
                for _ in range(10):
                    call()
                times.append((time.perf_counter() - start) / 10)
            microseconds = spread([1e6 * each for each in times], 1)
            print(f"{name:<24} {microseconds} microseconds, where a batch takes {batch * 1e6:,.0f}")


if __name__ == "__main__":
    main()

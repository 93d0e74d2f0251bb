"""Why shards are mapped as one matrix, and why slots are aligned: ways to copy the same batches.

One np.take per batch needs the GIL once; a loop over rows needs it for every row. The destination is aligned to 64
bytes, or as numpy allocates large arrays: 16 bytes past a page, where stores collide modulo 4096 with loads from the
page-aligned samples. In a "busy" process another thread computes in pure Python, as a training loop does between its
calls into torch.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from common import describe_machine, in_turn, print_ratios
from numpy.typing import NDArray

from shardio.reading.shardset import ShardSet, open_shards
from shardio.system.pour import aligned_empty

Copy = Callable[[ShardSet, NDArray[np.int64], NDArray[np.uint8]], None]


def take(shards: ShardSet, indices: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    shards.gather(indices, out)


def rows(shards: ShardSet, indices: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    arrays = shards.mapped().file_rows
    starts = np.cumsum([0, *map(len, arrays)])
    numbers = np.searchsorted(starts, indices, side="right") - 1
    positions = indices - starts[numbers]
    flat = out.reshape(len(out), -1)
    for i, (number, position) in enumerate(zip(numbers.tolist(), positions.tolist(), strict=True)):
        flat[i] = arrays[number][position]


# Two threads use two buffers each, in turn.
_BUFFERS = 4

COPIES: dict[str, Copy] = {"np.take": take, "rows": rows}


def spin(done: threading.Event) -> None:
    while not done.is_set():
        sum(range(100))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", type=Path, help="a set, such as benchmarks/loader.py generates")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--batches", type=int, default=40, help="per way and round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(describe_machine())
    shards = open_shards(options.shards)
    rng = np.random.default_rng(0)
    shape = (options.batch_size, *shards.sample_shape)
    aligned = [aligned_empty(shape) for _ in range(_BUFFERS)]
    unaligned = [np.empty(shape, np.uint8) for _ in range(_BUFFERS)]

    def run(copy: Copy, outs: list[NDArray[np.uint8]], threads: int, busy: bool = False) -> int:
        def work(thread: int) -> None:
            for batch in range(thread, options.batches, threads):
                copy(shards, chosen[batch], outs[thread * 2 + (batch // threads) % 2])

        chosen = rng.integers(0, len(shards), (options.batches, options.batch_size))
        done = threading.Event()
        spinner = threading.Thread(target=spin, args=(done,))
        if busy:
            spinner.start()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
        done.set()
        if busy:
            spinner.join()
        return chosen.size

    ways = {
        f"{name}, {place}, {threads} thread{'s' * (threads > 1)}": partial(run, copy, outs, threads)
        for name, copy in COPIES.items()
        for place, outs in (("aligned", aligned), ("unaligned", unaligned))
        for threads in (1, 2)
    }
    ways |= {f"{name}, busy process": partial(run, copy, aligned, 1, True) for name, copy in COPIES.items()}
    in_turn(ways, 1)
    print_ratios(in_turn(ways, options.rounds), "np.take, aligned, 1 thread", "images/s")


if __name__ == "__main__":
    main()

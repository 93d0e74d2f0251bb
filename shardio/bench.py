"""How fast this machine reads a set: the loader beside plain np.take, in turn, in the same run.

np.take(out=, mode="clip") into a reused buffer is the least that copying a batch costs without native code. A ratio to
it holds on a noisy machine, where an absolute figure does not. It is measured twice: into one buffer as numpy allocates
it, and into buffers like the loader's slots, aligned and as many in turn. Some processors copy to aligned memory twice
as fast, and one small buffer may stay in the cache, where nobody could use it. Ratios are to the second, and to copying
one large block with memcpy, which has no scattered samples to find.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle, repeat

import numpy as np
from numpy.typing import NDArray

from shardio.loader import LoaderIterator, ShardLoader
from shardio.ring import aligned_empty
from shardio.shardset import ShardSet, open_shards

# As many as a loader with its default prefetch has: two ahead, one being filled, two in the consumer's hands.
_SLOTS_IN_TURN = 5
_BLOCK_NBYTES = 256 << 20


@dataclass
class Result:
    """One way of reading. Rates are medians over the rounds, of batches delivered to the caller."""

    name: str
    batch_size: int
    sample_nbytes: int
    seconds: list[float] = field(default_factory=list)
    """Wall seconds per image, one per round."""
    cpu_seconds: list[float] = field(default_factory=list)
    """CPU seconds per image of the whole process, one per round."""
    ratios: list[float] = field(default_factory=list)
    """Images per second over those of np.take into slots in the same round."""
    memcpy_ratios: list[float] = field(default_factory=list)
    """Images per second over those of memcpy in the same round."""

    @property
    def images_per_second(self) -> float:
        return 1 / statistics.median(self.seconds)

    @property
    def gigabytes_per_second(self) -> float:
        return self.images_per_second * self.sample_nbytes / 1e9

    @property
    def cpu_microseconds_per_image(self) -> float:
        return statistics.median(self.cpu_seconds) * 1e6

    @property
    def ratio_to_take(self) -> float:
        return statistics.median(self.ratios)

    @property
    def ratio_to_memcpy(self) -> float:
        return statistics.median(self.memcpy_ratios)

    def to_dict(self) -> dict[str, float | int | str]:
        return {
            "name": self.name,
            "batch_size": self.batch_size,
            "images_per_second": round(self.images_per_second, 1),
            "gigabytes_per_second": round(self.gigabytes_per_second, 3),
            "cpu_microseconds_per_image": round(self.cpu_microseconds_per_image, 2),
            "ratio_to_take": round(self.ratio_to_take, 3),
            "ratio_to_memcpy": round(self.ratio_to_memcpy, 3),
        }


def bench(
    path: str | os.PathLike[str],
    *,
    split: str = "train",
    batch_size: int = 256,
    threads: Sequence[int] = (1, 2),
    rounds: int = 7,
    seconds: float = 0.5,
    on_round: Callable[[int], None] | None = None,
) -> list[Result]:
    """np.take and memcpy first, then the loader with each number of threads: in turn, `rounds` times, for `seconds`."""
    shards = open_shards(path, split)
    batch_size = min(batch_size, len(shards))
    nbytes = int(np.prod(shards.sample_shape))
    loaders = [ShardLoader(path, batch_size, split=split, num_threads=count, device="cpu") for count in threads]
    limits = ("np.take, slots", "np.take, one buffer", "memcpy, one block")
    results = [Result(name, batch_size, nbytes) for name in limits]
    results += [Result(f"loader, {count} thread{'s' * (count > 1)}", batch_size, nbytes) for count in threads]
    shape = (batch_size, nbytes)
    slots = [aligned_empty(shape) for _ in range(_SLOTS_IN_TURN)]
    steps: list[Callable[[], int]] = [
        _Take(shards, slots).step,
        _Take(shards, [np.empty(shape, np.uint8)]).step,
        _Memcpy(nbytes).step,
    ]
    steps += [_LoaderSteps(loader).step for loader in loaders]
    for step in steps:
        for _ in range(2 * _SLOTS_IN_TURN):  # first touch of every buffer, and of many pages
            step()
    for number in range(rounds):
        for result, step in zip(results, steps, strict=True):
            wall, cpu = _measure(step, seconds)
            result.seconds.append(wall)
            result.cpu_seconds.append(cpu)
        take, _, memcpy = results[: len(limits)]
        for result in results:
            result.ratios.append(take.seconds[-1] / result.seconds[-1])
            result.memcpy_ratios.append(memcpy.seconds[-1] / result.seconds[-1])
        if on_round is not None:
            on_round(number + 1)
    for loader in loaders:
        loader.close()
    return results


def first_batch_seconds(path: str | os.PathLike[str], split: str, batch_size: int) -> float:
    """From opening the set to holding its first batch."""
    start = time.perf_counter()
    with ShardLoader(path, batch_size, split=split, tail="pad", device="cpu") as loader:
        next(iter(loader))
        return time.perf_counter() - start


def _measure(step: Callable[[], int], seconds: float) -> tuple[float, float]:
    """(wall, CPU) seconds per image of repeating `step`, which returns how many images it gave."""
    images = 0
    cpu = time.process_time()
    start = time.perf_counter()
    while (wall := time.perf_counter() - start) < seconds or not images:
        images += step()
    return wall / images, (time.process_time() - cpu) / images


class _Take:
    """np.take of random samples of one random shard into buffers in turn."""

    def __init__(self, shards: ShardSet, buffers: Sequence[NDArray[np.uint8]]) -> None:
        self._rng = np.random.default_rng(0)
        self._arrays = shards.shard_arrays
        sizes = np.array([len(array) for array in self._arrays])
        self._share = sizes / sizes.sum()
        self._buffers = cycle(buffers)

    def step(self) -> int:
        array = self._arrays[self._rng.choice(len(self._arrays), p=self._share)]
        out = next(self._buffers)
        indices = self._rng.integers(0, len(array), len(out))
        np.take(array, indices, axis=0, out=out, mode="clip")
        return len(indices)


class _Memcpy:
    """One block after another, large enough that the C library bypasses the caches."""

    def __init__(self, sample_nbytes: int) -> None:
        self._images = max(1, _BLOCK_NBYTES // sample_nbytes)
        self._source, self._target = (aligned_empty((self._images, sample_nbytes)) for _ in range(2))
        self._source.fill(1)

    def step(self) -> int:
        np.copyto(self._target, self._source)
        return self._images


class _LoaderSteps:
    """Batch after batch, epoch after epoch. The consumer holds one batch at a time, as a training loop does."""

    def __init__(self, loader: ShardLoader) -> None:
        epochs: chain[LoaderIterator] = chain(iter(loader) for loader in repeat(loader))
        self._batches = chain.from_iterable(epochs)

    def step(self) -> int:
        _, labels = next(self._batches)
        return len(labels)

"""Finds options of ShardLoader that are the fastest for one set on this machine.

Ways of reading race, as `race` does it. With a `transform`, the consumer's thread calls it, as in training, so that
gather threads compete with it for cores. A set that the page cache can hold is measured as every epoch but the first
reads it: from memory. All trials read the same samples then, a part of the set that each way goes through once before.
A larger set is measured as every epoch reads it: in each trial, other random samples of all of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, Literal

import numpy as np
import torch

from shardio.loading.loader import ShardLoader
from shardio.loading.transform import Function
from shardio.measure.limits import synchronize
from shardio.measure.race import choose, race, ratio
from shardio.measure.report import Combination
from shardio.reading.choose import Facts, Io, fits_in_memory, look_at
from shardio.reading.choose import choose as choose_reader
from shardio.reading.shardset import ShardSet, open_shards
from shardio.system.machine import usable_cores

Situation = Literal["memory", "storage"]

_TRIAL_SECONDS = 0.25
# Batches that the trials of a set in memory read again and again.
_BATCHES_AGAIN = 16
_LEAST_BATCHES = 4
_PREFETCHES = (1, 2, 4)
# Slots beyond those that wait: one being filled, and one or two in the consumer's hands.
_SLOTS_BEYOND = 3
_SHARE_FOR_BATCHES = 0.25
DEFAULT_PREFETCH = 2


@dataclass(frozen=True)
class Tuning:
    """What came of it. The rates are images per second, one for each trial; the first way is the default."""

    path: str
    split: str
    situation: Situation
    reason: str
    """Why the set is read in this situation."""
    is_resident: bool
    """Whether all of it is in the page cache now, so that also the next epoch is read from memory."""
    rates: dict[Combination, list[float]]
    chosen: Combination

    @property
    def default(self) -> Combination:
        return next(iter(self.rates))

    @property
    def gain(self) -> float:
        """How much faster the chosen way is than the default: 1.0 is equal."""
        return ratio(self.rates[self.chosen], self.rates[self.default])

    @property
    def line(self) -> str:
        """The line of Python to paste."""
        chosen, default = self.chosen, self.default
        words = [repr(self.path), f"batch_size={chosen.batch_size}"]
        if self.split != "train":
            words.append(f"split={self.split!r}")
        for name in ("crop", "num_threads", "prefetch", "io"):
            value = getattr(chosen, name)
            if value is not None and (name == "crop" or value != getattr(default, name)):
                words.append(f"{name}={value!r}")
        return f"ShardLoader({', '.join(words)})"


def tune(
    path: str | os.PathLike[str],
    *,
    split: str = "train",
    batch_sizes: Sequence[int] = (256,),
    crop: tuple[int, int] | None = None,
    device: str | None = None,
    transform: Function | None = None,
    seconds: float = 60.0,
    on_turn: Callable[[Combination], None] = lambda way: None,
) -> Tuning:
    """Tries gather threads, prefetch and engines for about `seconds`, with each of the batch sizes. The default way has
    the first of them.

    `on_turn` is called after each trial. A KeyboardInterrupt ends the trials, if each way has had one. Raises
    ValueError before anything is measured if a loader cannot be made so.
    """
    shards = open_shards(path, split)
    facts = look_at(shards, len(shards))
    situation, reason = situation_of(facts)
    for batch_size in batch_sizes[::-1]:
        with ShardLoader(path, batch_size, split=split, crop=crop, device=device) as loader:
            chosen_device, default_io, default_threads = str(loader.device), loader.stats()["io"], loader.num_threads
    room = None if facts.memory_left is None else facts.memory_left * _SHARE_FOR_BATCHES
    ways = []
    for batch_size in batch_sizes:
        default = Combination(chosen_device, crop, batch_size, "auto", None, DEFAULT_PREFETCH)
        same = replace(default, num_threads=default_threads)
        others = ways_of(default, default_io, situation, facts.direct_alignment is not None, usable_cores())
        nbytes = batch_size * shards.pixels.row_nbytes
        ways += [default, *(way for way in others if way != same and has_room(way, nbytes, room))]
    trial = Trial(shards, split, situation, transform)
    trial.measure(ways[0], 0)  # what happens once in a process, such as starting torch's threads, counts for no way
    trial.rates.clear()
    deadline = time.monotonic() + seconds
    rates: dict[Combination, list[float]] = {}
    try:
        rates = race(ways, trial.measure, lambda: time.monotonic() >= deadline, on_turn)
    except KeyboardInterrupt:
        rates = trial.rates
        if set(rates) != set(ways):
            raise
    chosen = choose(rates, lambda way: cost_of(way, ways[0]))
    return Tuning(os.fspath(path), split, situation, reason, facts.resident_share == 1.0, rates, chosen)


def situation_of(facts: Facts) -> tuple[Situation, str]:
    """Returns how training reads most of its epochs, and why."""
    situation: Situation = "memory" if facts.resident_share == 1.0 or fits_in_memory(facts) else "storage"
    return situation, choose_reader(facts).reason


def ways_of(
    default: Combination, default_io: str, situation: Situation, has_direct: bool, cores: int
) -> Iterator[Combination]:
    """Yields the ways to try beside the default: powers of two of threads, up to twice the cores for storage."""
    most = cores if situation == "memory" else max(8, 2 * cores)
    threads = [1 << power for power in range(7) if 1 << power <= min(most, 64)]
    if cores <= most and cores not in threads:
        threads.append(cores)
    ios: list[Io] = ["mmap", "pread"]
    if has_direct and situation == "storage":
        ios.append("direct")
    for io, count, prefetch in product(ios, sorted(threads), _PREFETCHES):
        yield Combination(
            default.device,
            default.crop,
            default.batch_size,
            "auto" if io == default_io else io,
            count,
            prefetch,
        )


def has_room(way: Combination, batch_nbytes: int, room: float | None) -> bool:
    """Tells whether the memory for batches does: a job in a cgroup is killed where they take too much. No way is left
    out that takes less than the default does."""
    return way.prefetch <= DEFAULT_PREFETCH or room is None or (way.prefetch + _SLOTS_BEYOND) * batch_nbytes <= room


def cost_of(way: Combination, default: Combination) -> tuple[bool, int, int, bool]:
    """Orders ways that are about as fast: the default first, then by threads, memory, and what has to be said."""
    return way != default, way.num_threads or 0, way.prefetch, way.io != "auto"


class Trial:
    """Measures ways of reading one set. To be used by one thread."""

    def __init__(self, shards: ShardSet, split: str, situation: Situation, transform: Function | None = None) -> None:
        self._shards = shards
        self._split = split
        self._situation = situation
        self._transform = transform
        self.rates: dict[Combination, list[float]] = {}

    def measure(self, way: Combination, number: int) -> float:
        """Returns images per second. `number` is the seed of the samples that are read from storage."""
        options: dict[str, Any] = {**vars(way), "transform": self._transform}
        if self._situation == "memory":
            count = min(len(self._shards), _BATCHES_AGAIN * way.batch_size)
            options["indices"] = np.linspace(0, len(self._shards) - 1, count, dtype=np.int64)
        with ShardLoader(self._shards.path, split=self._split, seed=number, **options) as loader:
            batches = _endless(loader)
            if self._situation == "memory":  # each page of it is touched once
                _skip(batches, len(loader))
            else:
                _skip(batches, way.prefetch + 1)
            rate = _rate(batches, loader.device)
        self.rates.setdefault(way, []).append(rate)
        return rate


def _endless(loader: ShardLoader) -> Iterator[int]:
    while True:
        for _, labels in loader:
            yield len(labels)


def _skip(batches: Iterator[int], count: int) -> None:
    start = time.perf_counter()
    for _ in islice(batches, count):
        if time.perf_counter() - start > 2 * _TRIAL_SECONDS:
            return


def _rate(batches: Iterator[int], device: torch.device) -> float:
    synchronize(device)
    images = count = 0
    start = time.perf_counter()
    while count < _LEAST_BATCHES or time.perf_counter() - start < _TRIAL_SECONDS:
        images += next(batches)
        count += 1
    synchronize(device)
    return images / (time.perf_counter() - start)


def sorted_rates(tuning: Tuning) -> Sequence[tuple[Combination, list[float]]]:
    """Returns the ways with their rates: those that went on longest first, and of these the fastest."""
    rates = tuning.rates
    return sorted(rates.items(), key=lambda item: (-len(item[1]), -ratio(item[1], rates[tuning.default])))

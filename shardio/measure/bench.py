"""Measures how fast this machine reads a set: a loader, and the limits of the machine.

A ratio compares two measurements of the same round, so it holds on a noisy machine where an absolute figure does not.
A measurement makes two passes and times the second, because only the first epoch of a job pays for touching memory for
the first time. The second pass reads the batches of the first pass again, except for "direct" and its limit, which
read other batches that no disk or hypervisor has cached. Nothing is dropped from the page cache here.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import islice, product
from typing import Any, Literal

import numpy as np
import torch

from shardio.format.layout import SampleShape
from shardio.loading.loader import ShardLoader
from shardio.measure import limits
from shardio.reading.choose import resident_share_of
from shardio.reading.shardset import ShardSet, open_shards
from shardio.system.machine import filesystem_kind, usable_cores
from shardio.version import __version__

LimitKind = Literal["memcpy", "take", "direct", "pinned_copy"]

_BATCH_SIZE = 256
# A loader has one slot being filled, and one or two in the consumer's hands.
_SLOTS_BEYOND_PREFETCH = 3


@dataclass
class Speed:
    """The speed of the loader or of a limit. `seconds` has the seconds per image of each round."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """The CPU seconds of the whole process per image, of each round."""

    @property
    def images_per_second(self) -> float:
        """The median of the rounds, in images per second."""
        return 1 / statistics.median(self.seconds)

    @property
    def cpu_microseconds_per_image(self) -> float:
        return statistics.median(self.cpu_seconds) * 1e6

    def ratio_to(self, other: Speed) -> float:
        """Returns this speed divided by the speed `other` in the same round: the median of all rounds."""
        return statistics.median(theirs / ours for ours, theirs in zip(self.seconds, other.seconds, strict=True))


@dataclass(frozen=True)
class BenchResult:
    """The speeds of a loader and of the limits, with facts about the measured set and machine."""

    path: str
    split: str
    digest: str
    num_samples: int
    sample_shape: SampleShape | tuple[int]
    """(height, width, channels); of samples without pixels, (bytes of a sample,)."""
    sample_nbytes: int
    """The size of a stored sample in bytes: of its pixels, or of all its arrays if it has no pixels."""
    resident_share: float | None
    """The share of the split that was in the page cache before the benchmark; None if unknown."""
    machine: dict[str, Any]
    rounds: int
    seconds: float
    options: dict[str, Any]
    """The options of the loader, given or chosen: batch_size, prefetch, device, num_threads, io and io_reason."""
    mix: Mapping[str, str]
    """The shares of the other sets that the loader mixes with this set, whose share is 1."""
    limits: dict[LimitKind, Speed]
    left_out: dict[LimitKind, str]
    """The limits that cannot be measured here, with the reason."""
    loader: Speed = field(default_factory=Speed)
    first_batch_seconds: list[float] = field(default_factory=list)
    """Seconds from opening the set to receiving the first batch, measured once per round."""

    def gigabytes_per_second(self, speed: Speed) -> float:
        """Returns the speed in gigabytes per second, counting the stored bytes of the samples."""
        return speed.images_per_second * self.sample_nbytes / 1e9

    def to_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "limits": {
                kind: {**self._figures(speed), "ratio": _rounded(self.loader.ratio_to(speed))}
                for kind, speed in self.limits.items()
            },
            "loader": self._figures(self.loader),
            "first_batch_seconds": _rounded(statistics.median(self.first_batch_seconds)),
        }

    def _figures(self, speed: Speed) -> dict[str, Any]:
        return {
            "images_per_second": _rounded(speed.images_per_second),
            "images_per_second_range": [_rounded(1 / bound(speed.seconds)) for bound in (max, min)],
            "gigabytes_per_second": _rounded(self.gigabytes_per_second(speed)),
            "cpu_microseconds_per_image": _rounded(speed.cpu_microseconds_per_image),
        }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def bench(
    path: str | os.PathLike[str],
    *,
    split: str = "train",
    batch_size: int | None = None,
    mix: Mapping[str, str] | None = None,
    rounds: int = 7,
    seconds: float = 0.5,
    on_turn: Callable[[int, int], object] = lambda done, total: None,
    **options: Any,
) -> BenchResult:
    """Returns the speeds of a loader and of the limits, each measured `rounds` times for `seconds` after a warm-up.

    - `batch_size`: by default 256, or all samples if there are fewer
    - `mix`: the shares of other sets to mix with this set, whose share is 1. The limits are measured on this set only
    - `on_turn`: called with (finished measurements, measurements in total)
    - `options`: other arguments of ShardLoader. A `transform` competes with its threads; figures count stored bytes

    Raises ValueError before the first measurement if the options cannot work.
    """
    shards = open_shards(path, split)
    size = min(_BATCH_SIZE, len(shards)) if batch_size is None else batch_size
    source: Any = path
    if mix:
        source = {os.fspath(path): Fraction(1), **{name: Fraction(share) for name, share in mix.items()}}
        options["epoch_batches"] = max(1, len(shards) // size)
    open_loader = partial(ShardLoader, source, size, split=split, **options)
    with open_loader() as loader:
        stats, device = loader.stats(), loader.device
    why_not = limits.why_no_direct_reads(shards)
    nbytes = sum(shards.table_of(name).row_nbytes for name in shards.main_tables)
    shape = shards.sample_shape if shards.has_pixels else (nbytes,)
    # Each function takes a seed, and returns the steps of a limit.
    ways: dict[LimitKind, Callable[[int], limits.Steps]] = {
        "memcpy": lambda seed: limits.memcpy(nbytes),
        "take": lambda seed: limits.take(shards, size, seed),
    }
    if why_not is None:
        ways["direct"] = lambda seed: limits.direct_reads(shards, seed)
    if device.type != "cpu":
        ways["pinned_copy"] = lambda seed: limits.pinned_copies(device, size, math.prod(shape))
    result = BenchResult(
        path=os.fspath(path),
        split=split,
        digest=shards.digest,
        num_samples=len(shards),
        sample_shape=shape,
        sample_nbytes=nbytes,
        resident_share=resident_share_of(shards, shards.main_tables),
        machine=_machine(shards, device),
        rounds=rounds,
        seconds=seconds,
        options={"batch_size": size, "prefetch": loader.prefetch}
        | {name: stats[name] for name in ("device", "num_threads", "io", "io_reason")},
        mix=mix or {},
        limits={kind: Speed() for kind in ways},
        left_out={"direct": why_not} if why_not else {},
    )
    turns: list[Callable[[int], None]] = []
    for kind, steps in ways.items():
        # One step of memcpy and of a pinned copy touches all of their memory, and leaves nothing under way.
        lead = 1 if kind in ("memcpy", "pinned_copy") else 2 * limits.SLOTS_IN_TURN
        again = kind != "direct"
        speed = result.limits[kind]
        turns.append(partial(_measure, speed, steps, seconds=seconds, again=again, lead=lead, device=device))
    turns.append(partial(_loader_turn, open_loader, result))
    for done, (number, turn) in enumerate(product(range(rounds), turns), 1):
        turn(number)
        on_turn(done, rounds * len(turns))
    return result


def _loader_turn(open_loader: Callable[[], ShardLoader], result: BenchResult, number: int) -> None:
    start = time.perf_counter()
    with open_loader() as loader:
        next(iter(loader))
        limits.synchronize(loader.device)
        result.first_batch_seconds.append(time.perf_counter() - start)
        again = result.options["io"] != "direct"
        lead, steps = 2 * (loader.prefetch + _SLOTS_BEYOND_PREFETCH), partial(_batches, loader)
        _measure(result.loader, steps, number, seconds=result.seconds, again=again, lead=lead, device=loader.device)


def _batches(loader: ShardLoader, epoch: int) -> limits.Steps:
    """Yields the batch size after each batch, from the start of `epoch` on, endlessly. Holds one batch."""
    loader.set_epoch(epoch)
    while True:
        for _ in loader:
            yield loader.batch_size


def _measure(
    speed: Speed,
    steps: Callable[[int], limits.Steps],
    number: int,
    *,
    seconds: float,
    again: bool,
    lead: int,
    device: torch.device,
) -> None:
    """Measures the steps that `steps` returns for a seed in the round `number`, and appends the results to `speed`.

    A first pass counts the steps that fit in `seconds`; a second pass measures the same number of steps. With `again`,
    both passes have the same seed, so they read the same samples. The first `lead` steps of a pass touch the buffers
    and fill the pipeline, and do not count. The work of `device` is waited for before the clock is read.
    """
    count = 0
    with closing(steps(2 * number)) as first:
        sum(islice(first, lead))
        start = time.perf_counter()
        while not count or time.perf_counter() - start < seconds:
            next(first)
            count += 1
    with closing(steps(2 * number if again else 2 * number + 1)) as second:
        sum(islice(second, lead))
        limits.synchronize(device)
        cpu, start = time.process_time(), time.perf_counter()
        images = sum(islice(second, count))
        limits.synchronize(device)
        speed.seconds.append((time.perf_counter() - start) / images)
        speed.cpu_seconds.append((time.process_time() - cpu) / images)


def _machine(shards: ShardSet, device: torch.device) -> dict[str, Any]:
    """Returns the facts about the machine and the libraries that are needed to interpret the figures later."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "cores": usable_cores(),
        "filesystem": filesystem_kind(shards.path),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "shardio": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
    }

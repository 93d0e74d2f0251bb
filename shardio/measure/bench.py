"""How fast this machine reads a set: loaders with swept options beside the limits of the machine, in the same run.

All ways of moving images take turns, round after round, and a ratio is of two turns of one round: it holds on a noisy
machine, where an absolute figure does not. It is a ratio of bytes, those delivered over those that the limit moves. Of
a crop the window's bytes are delivered; np.take and O_DIRECT know no windows and move whole samples.

Which limit counts depends on how samples are read. "mmap" and "pread" copy from the page cache, so memcpy and np.take
are their limits. "direct" goes past the page cache, so its limit is the disk's, told by O_DIRECT reads. How a set is
read that is not in the page cache yet is another question: it takes dropping the set from there, which this module
never does (benchmarks/cold.py does).

A turn opens what it needs and gives all of it back, so that the slots, threads and descriptors of one way are there at
a time: those of ten loaders with five slots of 50 MB would take 2.5 GB from the page cache that they read. (Only pinned
memory stays with torch, for the next that asks for as much.) What is touched for the first time in each turn, and in a
job once, is kept out of the figures: a turn goes through its batches twice, and the second pass is measured, from when
the pipeline is full. It reads the same batches again, whose pages are in the page cache and in the process's page
tables by then. But "direct" and its limit read others, which no disk or hypervisor remembers.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, product
from typing import Any, Literal

import numpy as np
import torch

from shardio.format.layout import SampleShape, sample_nbytes
from shardio.loading.loader import ShardLoader
from shardio.measure import limits
from shardio.measure.limits import Steps
from shardio.reading.choose import Io
from shardio.reading.shardset import ShardSet, open_shards
from shardio.system.filesystems import filesystem_kind
from shardio.system.kernels import DEFAULT_KERNEL
from shardio.system.machine import usable_cores
from shardio.version import __version__

LimitKind = Literal["memcpy", "take", "take_one_buffer", "direct", "pinned_copy"]

_BATCH_SIZE = 256
# Of a loader: one being filled, one or two in the consumer's hands.
_SLOTS_BEYOND_PREFETCH = 3
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Combination:
    """What is swept: arguments of ShardLoader, by their names there. A crop's windows are in the centre."""

    device: str
    crop: tuple[int, int] | None
    batch_size: int
    io: Io
    num_threads: int | None
    prefetch: int


@dataclass
class Speed:
    """Of one way to move images. Figures are medians over the rounds."""

    image_nbytes: int
    seconds: list[float] = field(default_factory=list)
    """Wall seconds per image, one per round."""
    cpu_seconds: list[float] = field(default_factory=list)
    """CPU seconds per image of the whole process, one per round."""

    @property
    def images_per_second(self) -> float:
        return 1 / statistics.median(self.seconds)

    @property
    def gigabytes_per_second(self) -> float:
        return self.images_per_second * self.image_nbytes / 1e9

    @property
    def cpu_microseconds_per_image(self) -> float:
        return statistics.median(self.cpu_seconds) * 1e6

    def ratio_to(self, other: Speed) -> float:
        """Bytes per second over those of the other way in the same round."""
        rounds = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(theirs / ours for ours, theirs in rounds) * self.image_nbytes / other.image_nbytes

    def to_dict(self) -> dict[str, float]:
        return {
            "images_per_second": _rounded(self.images_per_second),
            "gigabytes_per_second": _rounded(self.gigabytes_per_second),
            "cpu_microseconds_per_image": _rounded(self.cpu_microseconds_per_image),
        }


@dataclass(frozen=True)
class LoaderResult:
    """Of one combination, with the number of threads and the device that the loader itself found."""

    combination: Combination
    engine: str
    io_reason: str
    image_shape: SampleShape
    """Of what is delivered: (height, width, channels)."""
    speed: Speed
    first_batch_seconds: list[float] = field(default_factory=list)
    """From opening the set to holding the first batch, one per round."""


@dataclass(frozen=True)
class LimitResult:
    """A limit of those loaders that agree with it in what is not None."""

    kind: LimitKind
    speed: Speed
    batch_size: int | None = None
    image_shape: SampleShape | None = None
    device: str | None = None

    def bounds(self, loader: LoaderResult) -> bool:
        return (
            self.batch_size in (None, loader.combination.batch_size)
            and self.image_shape in (None, loader.image_shape)
            and self.device in (None, loader.combination.device)
        )

    def to_dict(self) -> dict[str, Any]:
        which = {"batch_size": self.batch_size, "image_shape": self.image_shape, "device": self.device}
        return {"kind": self.kind, **which, **self.speed.to_dict()}


@dataclass(frozen=True)
class Report:
    """What was measured, and on what."""

    path: str
    split: str
    digest: str
    num_samples: int
    sample_shape: SampleShape
    resident_share: float | None
    """Which share of the split was in the page cache before; None if that is unknown."""
    machine: dict[str, Any]
    rounds: int
    seconds: float
    limits: list[LimitResult]
    left_out: dict[LimitKind, str]
    """Limits that cannot be measured here, and why."""
    loaders: list[LoaderResult]

    def ratios(self, loader: LoaderResult) -> dict[LimitKind, float]:
        """To each limit of this loader that was measured."""
        return {limit.kind: loader.speed.ratio_to(limit.speed) for limit in self.limits if limit.bounds(loader)}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        loaders = [
            {
                **vars(loader.combination),
                "engine": loader.engine,
                "io_reason": loader.io_reason,
                "image_shape": loader.image_shape,
                **loader.speed.to_dict(),
                "first_batch_seconds": _rounded(statistics.median(loader.first_batch_seconds)),
                "ratios": {kind: _rounded(ratio) for kind, ratio in self.ratios(loader).items()},
            }
            for loader in self.loaders
        ]
        return {**vars(self), "limits": [limit.to_dict() for limit in self.limits], "loaders": loaders}


def bench(
    path: str | os.PathLike[str],
    *,
    split: str = "train",
    devices: Sequence[str] = ("cpu",),
    crops: Sequence[tuple[int, int] | None] = (None,),
    batch_sizes: Sequence[int | None] = (None,),
    ios: Sequence[Io] = ("auto",),
    num_threads: Sequence[int | None] = (1, None),
    prefetches: Sequence[int] = (2,),
    rounds: int = 7,
    seconds: float = 0.5,
    on_turn: Callable[[int, int], None] | None = None,
) -> Report:
    """Measure the limits and every combination in turn, `rounds` times: for about `seconds`, after as long a warm-up.

    A batch size of None is 256, or all samples if they are fewer. `on_turn` is called with how many turns are
    done, and how many there are. ValueError before anything is measured if a combination cannot work.
    """
    shards = open_shards(path, split)
    sizes = [min(_BATCH_SIZE, len(shards)) if size is None else size for size in batch_sizes]
    options = product(devices, crops, sizes, ios, num_threads, prefetches)
    found = [_look_at(path, split, Combination(*values)) for values in options]
    loaders = list({loader.combination: loader for loader in found}.values())
    why_not = limits.why_no_direct_reads(shards)
    ways = list(_limits(shards, loaders, direct=why_not is None))
    report = Report(
        path=os.fspath(path),
        split=split,
        digest=shards.digest,
        num_samples=len(shards),
        sample_shape=shards.sample_shape,
        resident_share=shards.resident_share(),
        machine=_machine(shards, loaders),
        rounds=rounds,
        seconds=seconds,
        limits=[limit for limit, _ in ways],
        left_out={"direct": why_not} if why_not else {},
        loaders=loaders,
    )
    turns: list[Callable[[int], None]] = [partial(_limit_turn, limit, steps, seconds) for limit, steps in ways]
    turns += [partial(_loader_turn, path, split, loader, seconds) for loader in loaders]
    for done, (number, turn) in enumerate(product(range(rounds), turns), 1):
        turn(number)
        if on_turn is not None:
            on_turn(done, rounds * len(turns))
    return report


def _look_at(path: str | os.PathLike[str], split: str, asked: Combination) -> LoaderResult:
    """A loader as it will be measured, opened and closed: it knows best what cannot work."""
    with _open(path, split, asked) as loader:
        stats = loader.stats()
        height, width, channels = loader.shards.sample_shape
    shape = (*(asked.crop or (height, width)), channels)
    return LoaderResult(
        replace(asked, num_threads=stats["num_threads"], device=stats["device"]),
        engine=stats["io"],
        io_reason=stats["io_reason"],
        image_shape=shape,
        speed=Speed(sample_nbytes(shape)),
    )


def _open(path: str | os.PathLike[str], split: str, options: Combination) -> ShardLoader:
    return ShardLoader(path, split=split, **vars(options))


def _limits(
    shards: ShardSet, loaders: Sequence[LoaderResult], direct: bool
) -> Iterator[tuple[LimitResult, Callable[[int], Steps]]]:
    """Each limit once, with its steps for a seed."""
    whole = sample_nbytes(shards.sample_shape)
    yield LimitResult("memcpy", Speed(whole)), _without_seed(partial(limits.memcpy, whole))
    for size in dict.fromkeys(loader.combination.batch_size for loader in loaders):
        yield LimitResult("take", Speed(whole), size), partial(limits.take, shards, size, limits.slots)
        yield LimitResult("take_one_buffer", Speed(whole), size), partial(limits.take, shards, size, limits.one_buffer)
    if direct:
        yield LimitResult("direct", Speed(whole)), partial(limits.direct_reads, shards)
    batches = [(loader.combination.device, loader.combination.batch_size, loader.image_shape) for loader in loaders]
    for device, size, shape in dict.fromkeys(batches):
        if device != "cpu":
            nbytes = sample_nbytes(shape)
            copies = partial(limits.pinned_copies, torch.device(device), size, nbytes)
            yield LimitResult("pinned_copy", Speed(nbytes), size, shape, device), _without_seed(copies)


def _without_seed(steps: Callable[[], Steps]) -> Callable[[int], Steps]:
    return lambda seed: steps()


def _limit_turn(limit: LimitResult, steps: Callable[[int], Steps], seconds: float, number: int) -> None:
    # A step of these touches all of their memory, and leaves nothing under way.
    lead = 1 if limit.kind in ("memcpy", "pinned_copy") else 2 * limits.SLOTS_IN_TURN
    _measure(limit.speed, steps, number, seconds, again=limit.kind != "direct", lead=lead)


def _loader_turn(path: str | os.PathLike[str], split: str, result: LoaderResult, seconds: float, number: int) -> None:
    start = time.perf_counter()
    with _open(path, split, result.combination) as loader:
        next(iter(loader))
        limits.synchronize(loader.device)
        result.first_batch_seconds.append(time.perf_counter() - start)
        _measure(
            result.speed,
            partial(_batches, loader),
            number,
            seconds,
            again=result.engine != "direct",
            lead=2 * (loader.prefetch + _SLOTS_BEYOND_PREFETCH),
            device=loader.device,
        )


def _batches(loader: ShardLoader, epoch: int) -> Steps:
    """The sizes of batches, from the beginning of an epoch on, without an end. Holds one batch, as a training loop."""
    loader.set_epoch(epoch)
    while True:
        for _, labels in loader:
            yield len(labels)


def _measure(
    speed: Speed,
    steps: Callable[[int], Steps],
    number: int,
    seconds: float,
    *,
    again: bool,
    lead: int,
    device: torch.device = _CPU,
) -> None:
    """Add a round: as many steps as come in `seconds` are done twice, and measured then: the same, `again`, or others.

    The first `lead` steps of a pass touch its buffers and fill its pipeline, and do not count.
    """
    count = 0
    with closing(steps(2 * number)) as first:
        _skip(first, lead)
        start = time.perf_counter()
        while not count or time.perf_counter() - start < seconds:
            _skip(first, 1)
            count += 1
    with closing(steps(2 * number if again else 2 * number + 1)) as second:
        _skip(second, lead)
        limits.synchronize(device)
        cpu, start = time.process_time(), time.perf_counter()
        images = sum(islice(second, count))
        limits.synchronize(device)
        speed.seconds.append((time.perf_counter() - start) / images)
        speed.cpu_seconds.append((time.process_time() - cpu) / images)


def _skip(steps: Steps, count: int) -> None:
    for _ in islice(steps, count):
        pass


def _machine(shards: ShardSet, loaders: Sequence[LoaderResult]) -> dict[str, Any]:
    """What a reader of the figures will want to know later."""
    devices = dict.fromkeys(loader.combination.device for loader in loaders)
    return {
        "system": f"{platform.system()} {platform.release()}",
        "cores": usable_cores(),
        "filesystem": filesystem_kind(shards.path),
        "kernel": DEFAULT_KERNEL,
        "devices": {name: torch.cuda.get_device_name(name) for name in devices if name != "cpu"},
        "shardio": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
    }


def _rounded(value: float) -> float:
    """To the digits that may mean something."""
    return float(f"{value:.4g}")

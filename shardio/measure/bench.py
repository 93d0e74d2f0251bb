"""Measures how fast this machine reads a set: loaders with every combination of options, and the machine's limits.

Loaders and limits take turns, round after round. A ratio compares two turns of the same round, so it holds on a noisy
machine where an absolute figure does not. The limit depends on how samples are read: "mmap" and "pread" copy from the
page cache, limited by memcpy and np.take; "direct" reads from the disk, limited by plain O_DIRECT reads. Nothing is
dropped from the page cache here: benchmarks/cold.py measures the first epoch of a set that is not cached.

A turn opens its loader and closes it again, so only one loader has slots at a time: ten loaders with five slots of
50 MB would take 2.5 GB from the page cache that they read. A turn makes two passes and measures the second, from when
the pipeline is full, because only the first epoch of a job pays for touching memory for the first time. The second pass
reads the batches of the first again, except for "direct" and its limit, which read other batches that no disk or
hypervisor has cached.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import islice, product
from typing import Any

import numpy as np
import torch

from shardio.kernels.built import DEFAULT_KERNEL
from shardio.loading.loader import ShardLoader
from shardio.loading.options import Function
from shardio.measure import limits
from shardio.measure.limits import Steps
from shardio.measure.result import BenchResult, Combination, LimitSpeed, LoaderSpeed, Speed
from shardio.reading.choose import Io, choose, fits_in_memory, look_at
from shardio.reading.shardset import ShardSet, open_shards
from shardio.system.machine import filesystem_kind, usable_cores
from shardio.version import __version__

_BATCH_SIZE = 256
# A loader has one slot being filled, and one or two in the consumer's hands.
_SLOTS_BEYOND_PREFETCH = 3
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sweep:
    """Values of options of ShardLoader to measure, in every combination.

    A batch size of None is 256, or all samples if there are fewer.
    """

    devices: Sequence[str] = ("cpu",)
    batch_sizes: Sequence[int | None] = (None,)
    ios: Sequence[Io] = ("auto",)
    num_threads: Sequence[int | None] = (1, None)
    prefetches: Sequence[int] = (2,)
    fresh: bool = False
    """Measure other samples than the warm-up read, as those are in the page cache. For sets larger than memory."""

    def combinations(self, num_samples: int) -> Iterator[Combination]:
        sizes = [min(_BATCH_SIZE, num_samples) if size is None else size for size in self.batch_sizes]
        options = product(self.devices, sizes, self.ios, self.num_threads, self.prefetches)
        return (Combination(*values) for values in options)


def candidates(shards: ShardSet) -> Sweep:
    """Returns the sweep of `--tune`, whose first combination is the loader's default.

    A set that fits in memory is read from the page cache, where the readers hardly differ.
    """
    facts = look_at(shards, len(shards), shards.main_tables)
    in_memory = facts.resident_share == 1.0 or fits_in_memory(facts)
    cores = usable_cores()
    most = min(64, cores if in_memory else max(8, 2 * cores))
    ios: list[Io] = [] if in_memory else ["mmap", "pread"]
    if not in_memory and facts.direct_alignment is not None:
        ios.append("direct")
    return Sweep(
        ios=("auto", *(io for io in ios if io != choose(facts).engine)),
        num_threads=(None, *(1 << power for power in range(7) if 1 << power <= most)),
        prefetches=(2, 4),
        fresh=not in_memory,
    )


def bench(
    path: str | os.PathLike[str],
    sweep: Sweep,
    *,
    split: str = "train",
    rounds: int = 7,
    seconds: float = 0.5,
    transform: Function | None = None,
    mix: Mapping[str, str] | None = None,
    on_turn: Callable[[int, int], None] | None = None,
) -> BenchResult:
    """Measures the limits and every combination in turn, `rounds` times, each for about `seconds` after a warm-up.

    Loaders also run the `transform`, which competes with their threads for cores; figures still count stored bytes.
    `mix` has the shares of other sets to mix with this one, whose share is 1; the limits are those of this set.
    `on_turn` is called with (finished turns, all turns). Raises ValueError before the first turn if a combination
    cannot work.
    """
    shards = open_shards(path, split)
    shape = shards.sample_shape if shards.has_pixels else (limits.nbytes_of(shards),)
    open_loader = partial(_open, path, split, transform, mix or {}, len(shards))
    found = [_look_at(open_loader, combination) for combination in sweep.combinations(len(shards))]
    loaders = list({loader.combination: loader for loader in found}.values())
    why_not = limits.why_no_direct_reads(shards)
    ways = list(_limits(shards, loaders, direct=why_not is None))
    result = BenchResult(
        path=os.fspath(path),
        split=split,
        digest=shards.digest,
        num_samples=len(shards),
        sample_shape=shape,
        resident_share=_resident_share(shards),
        machine=_machine(shards, loaders),
        rounds=rounds,
        seconds=seconds,
        limits=[limit for limit, _ in ways],
        left_out={"direct": why_not} if why_not else {},
        loaders=loaders,
        mix=mix or {},
    )
    turns: list[Callable[[int], None]] = [partial(_limit_turn, limit, steps, seconds) for limit, steps in ways]
    turns += [partial(_loader_turn, open_loader, loader, seconds, sweep.fresh) for loader in loaders]
    for done, (number, turn) in enumerate(product(range(rounds), turns), 1):
        turn(number)
        if on_turn is not None:
            on_turn(done, rounds * len(turns))
    return result


def _resident_share(shards: ShardSet) -> float | None:
    """Returns the smallest share of a table of samples that is in the page cache; None if it is unknown."""
    shares = [shards.resident_share(name=name) for name in shards.main_tables]
    return min((share for share in shares if share is not None), default=None)


def _look_at(open_loader: Callable[[Combination], ShardLoader], asked: Combination) -> LoaderSpeed:
    """Returns a LoaderSpeed without figures, with the settings that the loader chose for `asked`.

    Opens the loader as it will be measured, and closes it. Raises ValueError if the combination cannot work.
    """
    with open_loader(asked) as loader:
        stats = loader.stats()
    combination = replace(asked, num_threads=stats["num_threads"], device=stats["device"])
    return LoaderSpeed(combination, engine=stats["io"], io_reason=stats["io_reason"])


def _open(
    path: str | os.PathLike[str],
    split: str,
    transform: Function | None,
    mix: Mapping[str, str],
    num_samples: int,
    options: Combination,
) -> ShardLoader:
    if not mix:
        return ShardLoader(path, split=split, transform=transform, **vars(options))
    shares = {os.fspath(path): Fraction(1), **{name: Fraction(share) for name, share in mix.items()}}
    length = max(1, num_samples // (options.batch_size or 1))
    return ShardLoader(shares, split=split, transform=transform, epoch_batches=length, **vars(options))


def _limits(
    shards: ShardSet, loaders: Sequence[LoaderSpeed], direct: bool
) -> Iterator[tuple[LimitSpeed, Callable[[int], Steps]]]:
    """Yields each limit once, with a function that returns its steps for a seed."""
    nbytes = limits.nbytes_of(shards)
    yield LimitSpeed("memcpy"), _without_seed(partial(limits.memcpy, nbytes))
    for size in dict.fromkeys(loader.combination.batch_size for loader in loaders):
        yield LimitSpeed("take", size), partial(limits.take, shards, size)
    if direct:
        yield LimitSpeed("direct"), partial(limits.direct_reads, shards)
    for device, size in dict.fromkeys((loader.combination.device, loader.combination.batch_size) for loader in loaders):
        if device != "cpu":
            copies = partial(limits.pinned_copies, torch.device(device), size, nbytes)
            yield LimitSpeed("pinned_copy", size, device), _without_seed(copies)


def _without_seed(steps: Callable[[], Steps]) -> Callable[[int], Steps]:
    return lambda seed: steps()


def _limit_turn(limit: LimitSpeed, steps: Callable[[int], Steps], seconds: float, number: int) -> None:
    # One step of memcpy and of a pinned copy touches all of their memory, and leaves nothing under way.
    lead = 1 if limit.kind in ("memcpy", "pinned_copy") else 2 * limits.SLOTS_IN_TURN
    _measure(limit.speed, steps, number, seconds, again=limit.kind != "direct", lead=lead)


def _loader_turn(
    open_loader: Callable[[Combination], ShardLoader], result: LoaderSpeed, seconds: float, fresh: bool, number: int
) -> None:
    start = time.perf_counter()
    with open_loader(result.combination) as loader:
        next(iter(loader))
        limits.synchronize(loader.device)
        result.first_batch_seconds.append(time.perf_counter() - start)
        _measure(
            result.speed,
            partial(_batches, loader),
            number,
            seconds,
            again=result.engine != "direct" and not fresh,
            lead=2 * (loader.prefetch + _SLOTS_BEYOND_PREFETCH),
            device=loader.device,
        )


def _batches(loader: ShardLoader, epoch: int) -> Steps:
    """Yields the sizes of batches from the start of `epoch` on, endlessly. Holds one batch, like a training loop."""
    loader.set_epoch(epoch)
    while True:
        for _ in loader:
            yield loader.batch_size


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
    """Adds the figures of one round to `speed`.

    A first pass counts the steps that fit in `seconds`; a second pass measures the same number of steps. With `again`,
    these are the steps of the first pass, otherwise others. The first `lead` steps of a pass touch the buffers and fill
    the pipeline, and do not count.
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


def _machine(shards: ShardSet, loaders: Sequence[LoaderSpeed]) -> dict[str, Any]:
    """Returns the facts about machine, versions and set that are needed to interpret the figures later."""
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

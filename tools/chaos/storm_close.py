#!/usr/bin/env python
"""Raises exceptions from signal handlers while loaders are made, read, closed and forgotten, and sets published by the
threads that also copy for a loader: nothing may be left behind.

    python tools/chaos/storm_close.py --rounds 500 [--seed 0]   at random moments, once or every 2 ms
    python tools/chaos/storm_close.py --points [--step 1]       once, at every point where handlers are called

Both if neither is named. After each exception, or storm of them, the loader is closed in peace, or its last reference
is dropped. Then processes, threads, descriptors, address space and leases on the cache are counted. Exit code 1 if
anything was left. Linux only: it looks into /proc.

The interpreter calls handlers when it enters a Python function, when a C function has returned to one, and at the end
of a loop's pass. A profile function is called at the first two, and raises there.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice, product
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from attack import Say, make_parser, write_set

import shardio
from shardio.cache.folder import Cache
from shardio.errors import CacheError
from shardio.loading.loader import ShardLoader
from shardio.sets.new_folder import sweep_beside
from shardio.sets.publish import publish

NUM_SAMPLES = 60
# An odd number of bytes: the place of a shard in address space is then 4096 samples long, and most of it is unused.
SHAPE = (7, 7, 3)
# The first exception comes within so many seconds, about what a round takes. The next one comes so much later.
MOST_DELAY_SECONDS = 0.02
STORM_SECONDS = 0.002
MOST_EXCEPTIONS = 30
# A thread or process that is about to end has ended by then.
PATIENCE_SECONDS = 2.0
BATCHES = 3

_PLACE_NBYTES = mmap.PAGESIZE * int(np.prod(SHAPE))
_MOST_RESERVED = 32 * _PLACE_NBYTES

ENDINGS = ("close", "with", "forget", "collect")
IOS = ("mmap", "pread", "direct", "cache", "full cache")


class InterruptedHere(BaseException):
    """An exception as a handler of a launcher's signal might raise it."""


@dataclass
class Counts:
    """Counts of what happened. `left` should stay empty."""

    rounds: int = 0
    raised: int = 0
    unraisable: int = 0
    """Exceptions that were raised in finalizers, where no code can catch them."""
    left: Counter[str] = field(default_factory=Counter)
    rounds_that_left: int = 0
    printed: list[str] = field(default_factory=list)
    """The first of what was left, with the round."""

    def __str__(self) -> str:
        what = ", ".join(f"{number} {name}" for name, number in sorted(self.left.items())) or "nothing"
        return (
            f"rounds {self.rounds}, exceptions {self.raised}, of them in finalizers {self.unraisable}; "
            f"rounds that left something {self.rounds_that_left}: {what}"
        )


@dataclass(frozen=True)
class Case:
    io: str
    ending: str
    num_threads: int = 2
    prefetch: int = 2
    check: bool = False


@dataclass(frozen=True)
class Work:
    """A call whose threads, those that also copy for a running loader, end before it returns."""

    kind: str
    workers: int = 2


WORKS = (Work("publish"),)


def write(folder: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (NUM_SAMPLES, *SHAPE), dtype=np.uint8)
    write_set(folder, images, NUM_SAMPLES, samples_per_shard=20)


class Storms:
    """`folder` holds everything it makes."""

    def __init__(self, folder: Path, say: Say) -> None:
        self.counts = Counts()
        self._say = say
        self._folder = folder
        self._set = folder / "set"
        write(self._set)
        self._new = count()
        (folder / "root").mkdir()
        self._full_cache = folder / "cache"
        with ShardLoader(self._set, 4, cache=self._full_cache, device="cpu") as loader:
            while loader.stats()["staging"]["state"] != "complete":
                time.sleep(0.01)

    def use(self, case: Case, held: list[Any]) -> None:
        """Makes, reads and ends a loader. `held` takes the objects that a caller still has after an exception."""
        options: dict[str, Any] = {"io": case.io}
        if "cache" in case.io:
            options = {"cache": self._full_cache if "full" in case.io else self._folder / f"cache-{next(self._new)}"}
        if case.check:
            options["check"] = "sample"
        loader = ShardLoader(
            self._set, 4, device="cpu", num_threads=case.num_threads, prefetch=case.prefetch, **options
        )
        held.append(loader)
        if case.ending == "with":
            with loader:
                for _ in islice(loader, BATCHES):
                    pass
            return
        iterator = iter(loader)
        for _ in islice(iterator, BATCHES):
            pass
        held.clear()
        if case.ending == "close":
            held.append(loader)
            loader.close()
        elif case.ending == "collect":
            cycle = [loader, iterator]
            cycle.append(cycle)
            del loader, iterator, cycle
            gc.collect()

    def work(self, work: Work) -> None:
        publish(self._set, self._folder / "root" / f"set-{next(self._new)}", workers=work.workers)

    def check(self, case: Case | Work, disturb: Callable[[Callable[[], None]], None], name: str) -> None:
        """Does one round: `disturb` calls what it is given, and raises exceptions meanwhile."""
        counts, held = self.counts, list[Any]()
        before = self._in_use()
        with contextlib.suppress(InterruptedHere):
            disturb(lambda: self.work(case) if isinstance(case, Work) else self.use(case, held))
        while held:
            held.pop().close()
        gc.collect()
        sweep_beside(self._folder / "root" / "next")  # as the next publisher does: then no temporary file may be there
        counts.rounds += 1
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (left := self._in_use() - before) and time.monotonic() < deadline:
            time.sleep(0.001)
            gc.collect()  # what a thread held until now, in a cycle with the exception, is garbage only now
        if left:
            counts.left += Counter(what.partition(" ")[0] for what in left.elements())
            counts.rounds_that_left += 1
            counts.printed.append(f"{name}, {case}: left {dict(left)}")
            self._say(counts.printed[-1])
        # Otherwise each round would look at all that the rounds before it have made.
        for folder in (*self._folder.glob("cache-*"), *self._folder.glob("root/set-*")):
            shutil.rmtree(folder)

    def _in_use(self) -> Counter[str]:
        """Counts processes, threads, descriptors and mappings of this process, and copies that are held."""
        names = [thread.name for thread in threading.enumerate()]
        found = Counter(f"thread {name}" for name in names if name.startswith("shardio"))
        # Python takes some threads for ended that are not.
        found["task"] = len(os.listdir("/proc/self/task"))
        for path in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
                found["process"] += len(path.read_text().split())
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the one that listed the folder
                found[f"descriptor {os.readlink(f'/proc/self/fd/{name}')}"] += 1
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, protection, _, device, *_ = line.split()
            first, end = (int(address, 16) for address in addresses.split("-"))
            if f" {self._folder}/" in line:
                found[f"mapping {line[line.index('/') :]}"] += 1
            elif protection == "---p" and device == "00:00" and end - first < _MOST_RESERVED:
                # Neighbors are one line. Reservations of the C library are either smaller or larger.
                found["reservation"] += (end - first) // (_PLACE_NBYTES - 2 * mmap.PAGESIZE)
        found.update(f"file {path}" for path in self._folder.glob("root/**/.*.tmp"))
        for path in self._folder.glob("cache*"):
            with contextlib.suppress(CacheError):  # its making was interrupted
                found.update(f"lease {copy.path}" for copy in Cache(path).copies() if copy.in_use)
        return found


@contextlib.contextmanager
def counting_unraisable(counts: Counts) -> Iterator[None]:
    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is InterruptedHere:
            counts.unraisable += 1
        else:
            sys.__unraisablehook__(unraisable)

    before, sys.unraisablehook = sys.unraisablehook, hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def collecting_new_objects() -> Iterator[None]:
    """Makes garbage collections look only at what the block has made. The rest takes 20 times as long as a round."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# --- at random moments -----------------------------------------------------------------------------------------------


class Storm:
    """Exceptions from a signal handler: the first after `delay` seconds, others every `interval` seconds."""

    def __init__(self, counts: Counts, delay: float, interval: float) -> None:
        self._counts, self._delay, self._interval = counts, delay, interval
        self._left = MOST_EXCEPTIONS if interval else 1

    def __call__(self, call: Callable[[], None]) -> None:
        before = signal.signal(signal.SIGALRM, self._on_signal)
        try:
            signal.setitimer(signal.ITIMER_REAL, self._delay, self._interval)
            call()
        finally:
            self._left = 0
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._left:
            self._left -= 1
            self._counts.raised += 1
            raise InterruptedHere


def _random_case(chosen: random.Random) -> Case:
    return Case(
        chosen.choice(IOS),
        chosen.choice(ENDINGS),
        chosen.randint(1, 6),
        chosen.randint(0, 4),
        chosen.random() < 0.3,
    )


def storm_loaders(
    rounds: int, seed: int = 0, folder: Path | None = None, say: Say = print, works: Sequence[Work] = ()
) -> Counts:
    """Does so many rounds, half of them with one exception, half with a storm: with loaders, or with `works`."""
    with tempfile.TemporaryDirectory(prefix="storm-close-", dir=folder) as made:
        storms = Storms(Path(made), say)
        with counting_unraisable(storms.counts), collecting_new_objects():
            for number in range(rounds):
                chosen = random.Random(f"{seed} {number}")
                case = works[number // 2 % len(works)] if works else _random_case(chosen)
                interval = STORM_SECONDS if number % 2 else 0.0
                storm = Storm(storms.counts, chosen.uniform(1e-5, MOST_DELAY_SECONDS), interval)
                storms.check(case, storm, f"seed {seed}, round {number}{', storm' if interval else ''}")
        return storms.counts


# --- at every point --------------------------------------------------------------------------------------------------


class Point:
    """Raises once, at event number `number` in code of shardio, or of what it calls to start and end things."""

    files = (os.path.dirname(shardio.__file__), threading.__file__, contextlib.__file__, weakref.__file__)

    def __init__(self, number: int) -> None:
        self.number = number
        self.fired = False
        self.where = ""

    def __call__(self, call: Callable[[], None]) -> None:
        sys.setprofile(self._on_event)
        try:
            call()
        finally:
            sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_return") or self.fired or not frame.f_code.co_filename.startswith(self.files):
            return
        if self.number == 0:
            self.fired = True
            self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {event} {argument or ''}"
            raise InterruptedHere
        self.number -= 1


def raise_everywhere(
    step: int = 1, folder: Path | None = None, say: Say = print, cases: Sequence[Case | Work] | None = None
) -> Counts:
    """Does each case with an exception at every `step`-th point, until it has none left."""
    with tempfile.TemporaryDirectory(prefix="storm-close-", dir=folder) as made:
        storms = Storms(Path(made), say)
        with counting_unraisable(storms.counts), collecting_new_objects():
            for case in cases or [*(Case(io, ending) for io, ending in product(IOS, ENDINGS)), *WORKS]:
                storms.check(case, Point(-1), "undisturbed")
                for number in count(0, step):
                    point = Point(number)
                    storms.check(case, point, f"point {number}")
                    if storms.counts.printed and storms.counts.printed[-1].startswith(f"point {number},"):
                        say(f"    {point.where}")
                    storms.counts.raised += point.fired
                    if not point.fired:
                        break
        return storms.counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "the moments and the loaders' options")
    parser.add_argument("--rounds", type=int, help="at random moments")
    parser.add_argument("--points", action="store_true", help="at every point")
    parser.add_argument("--step", type=int, default=1, help="at every so many points only; default %(default)s")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    left = 0
    both = chosen.rounds is None and not chosen.points
    if chosen.rounds or both:
        rounds = chosen.rounds or 500
        for what, number, works in (
            ("loaders", rounds, ()),
            ("calls", rounds, WORKS),
        ):
            counts = storm_loaders(number, chosen.seed, chosen.folder, works=works)
            print(f"seed {chosen.seed}, {what}: {counts}", flush=True)
            left += counts.rounds_that_left
    if chosen.points or both:
        counts = raise_everywhere(chosen.step, chosen.folder)
        print(f"every point, step {chosen.step}: {counts}", flush=True)
        left += counts.rounds_that_left
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
"""Lets processes stage one set at once and kills some of them, and lets readers of copies meet evictors.

    python tools/chaos/race_stage.py [--rounds 500] [--processes 32] [--seed 0]

Rounds of staging: all processes ask for a set at about the same time, and some are killed with SIGKILL while they copy,
wait or read. No file may be copied that was there, the copy may be completed once, and the survivors must be served the
right bytes. If no process survives, the next start completes the copy; and after it nothing temporary may be left.

Rounds of eviction: some of the processes stage one of three sets, read it, let go and take another, while the others
evict whatever they can, and some are killed. No process may lose what it reads. When all have ended, everything can be
evicted, and nothing is left but the mark of the cache.

The sources lie on a mount that is read-only, where this process may make one. Exit code 1 if anything was otherwise.
Linux only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import attack
import numpy as np
from attack import Child, Rounds, Say, Tell, hash_files, make_parser, never_sync, verdict, write_set

from shardio.cache import filler as filling
from shardio.cache import partial_copy
from shardio.cache import stage as staging
from shardio.cache.folder import Cache
from shardio.cache.partial_copy import PartialCopy
from shardio.cache.stage import stage
from shardio.format.entries import FileEntry
from shardio.format.layout import MARKER_NAME
from shardio.format.manifest_file import load_manifest
from shardio.sets.storage import FolderStorage
from shardio.system.files import AtomicFile

PATCHED_STAGING: Any = staging
PATCHED_FILLING: Any = filling
PATCHED_PARTIAL: Any = partial_copy

NUM_SETS = 3
SAMPLE_SHAPE = (16, 16, 3)
SAMPLES_PER_SHARD = 16
# A set is copied in some dozens of pieces, so that a kill finds files half copied.
PIECE_NBYTES = 4096
# Each piece takes as long as from a source on a network, so that processes overlap though there are few cores.
PIECE_SECONDS = 0.0005
# A round takes a fraction of a second. A process that takes so long hangs.
PATIENCE_SECONDS = 120

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
CLONE_NEWNS = 0x20000

# The exit codes of a process that no signal ends.
DONE, FAILED = 0, 4


@dataclass
class Counts(attack.Counts):
    staging_rounds: int = 0
    eviction_rounds: int = 0
    killed: int = 0
    fillers: int = 0
    """Killed processes that had the right to fill a copy."""
    served: int = 0
    copied: int = 0
    """Files."""
    finished_by_next: int = 0
    """Rounds in which all processes that could complete the copy were killed."""
    temporary: int = 0
    """Files and folders that kills left behind, for the next start to sweep."""
    evicted: int = 0
    reads: int = 0
    """Reads of whole copies, while others evict."""
    read_only: bool = False
    """True if the sources were on a mount that no process could write to."""

    def __str__(self) -> str:
        return (
            f"{self.copied} files copied, {self.served} processes served, {self.killed} killed ({self.fillers} as they "
            f"copied), {self.finished_by_next} copies completed by the next start, {self.temporary} left-overs swept; "
            f"{self.evicted} copies evicted, {self.reads} reads of whole copies; sources "
            f"{'on a read-only mount' if self.read_only else 'write-protected'}\n"
            f"{self.staging_rounds} rounds of staging, {self.eviction_rounds} of eviction, "
            f"{len(self.violations)} violations"
        )


class Board:
    """Numbers that each process writes to its own place, and that outlive it."""

    NAMES = ("completed", "evicted", "reads", "copied")

    def __init__(self, processes: int) -> None:
        self._memory = mmap.mmap(-1, processes * len(self.NAMES) * 8)
        self._numbers = np.frombuffer(self._memory, np.int64).reshape(processes, len(self.NAMES))

    def clear(self) -> None:
        self._numbers[:] = 0

    def add(self, process: int, name: str, count: int = 1) -> None:
        self._numbers[process, self.NAMES.index(name)] += count

    def total(self, name: str) -> int:
        return int(self._numbers[:, self.NAMES.index(name)].sum())


class SlowFolder(FolderStorage):
    def read_into(self, entry: FileEntry, offset: int, buffer: memoryview) -> None:
        time.sleep(PIECE_SECONDS)
        super().read_into(entry, offset, buffer)


def stamp(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns inode and time of each finished file, which tell it from another one of the same name."""
    found = {}
    if folder.exists():
        for path in folder.glob("[!.]*"):
            status = path.stat()
            found[path.name] = (status.st_ino, status.st_mtime_ns)
    return found


def temporary_in(cache: Path) -> list[str]:
    """Returns the files that must not be in a cache that no process uses."""
    return sorted(str(path.relative_to(cache)) for path in cache.rglob(".*"))


def protect(folder: Path) -> bool:
    """Protects the folder from writers. Returns whether it is by a mount, to which even root cannot write."""
    libc = ctypes.CDLL(None, use_errno=True)
    path = os.fsencode(folder)
    try:
        for failed in (
            libc.unshare(CLONE_NEWNS),
            libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),  # or others would see the mount
            libc.mount(path, path, None, MS_BIND, None),
            libc.mount(b"none", path, None, MS_REMOUNT | MS_BIND | MS_RDONLY, None),
        ):
            if failed:
                raise OSError(ctypes.get_errno(), "no mount")
    except OSError:
        for one in (folder, *folder.iterdir()):
            one.chmod(0o555)
        return False
    return True


def unprotect(folder: Path) -> None:
    """Makes the folder removable."""
    if ctypes.CDLL(None).umount2(os.fsencode(folder), 2):
        for one in (folder, *folder.iterdir()):
            one.chmod(0o755)


class Race(Rounds[Counts]):
    """Rounds of staging and of eviction, with so many processes each."""

    def __init__(self, folder: Path, processes: int, seed: int, say: Say) -> None:
        super().__init__(folder, seed, say, Counts())
        self._processes = processes
        self._board = Board(processes)
        self.sources = folder / "sources"
        self._sets = [self.sources / f"set-{number}" for number in range(NUM_SETS)]
        for number, path in enumerate(self._sets):
            images = np.random.default_rng(number).integers(0, 256, (64, *SAMPLE_SHAPE), dtype=np.uint8)
            write_set(path, images, 5, SAMPLES_PER_SHARD)
        self._expected = [hash_files(path) for path in self._sets]
        self._digests = [load_manifest(path).digest for path in self._sets]
        self._before = self._look_at_sources()
        self.counts.read_only = protect(self.sources)
        start = time.monotonic()
        self._end_all(self._start([lambda: self._serve(0, folder / "first", 0)]))
        self._span = time.monotonic() - start

    def _look_at_sources(self) -> list[tuple[dict[str, str], dict[str, tuple[int, int]], int]]:
        return [(hash_files(path), stamp(path), path.stat().st_mtime_ns) for path in self._sets]

    # --- processes -------------------------------------------------------------------------------------------------

    def _start(self, jobs: Sequence[Callable[[], None]]) -> list[Child]:
        """Starts a process for each job. All begin when the last one is there."""
        gate, opener = os.pipe()

        def work(process: int, job: Callable[[], None], tell: Tell) -> int:
            try:
                os.close(opener)
                self._prepare(process)
                os.read(gate, 1)  # the file ends when no process has the other end open any more
                job()
            except BaseException:
                tell(traceback.format_exc())
                return FAILED
            return DONE

        children = [Child(partial(work, number, job), PATIENCE_SECONDS) for number, job in enumerate(jobs)]
        for end in (gate, opener):
            os.close(end)
        return children

    def _prepare(self, process: int) -> None:
        never_sync()
        PATCHED_STAGING.open_storage = SlowFolder
        PATCHED_FILLING._REQUESTS, PATCHED_PARTIAL._LEAST_NBYTES = (1, PIECE_NBYTES), 1
        PATCHED_FILLING._POLL_SECONDS = 0.01
        commit, finish = AtomicFile.commit, PartialCopy.finish

        def completed(self: AtomicFile, *, replace: bool = True) -> None:
            commit(self, replace=replace)
            board.add(process, "completed")

        def copied(self: PartialCopy, entry: FileEntry) -> str:
            found = finish(self, entry)
            board.add(process, "copied")
            return found

        board = self._board
        AtomicFile.commit = completed  # type: ignore[method-assign]
        PartialCopy.finish = copied  # type: ignore[method-assign]

    def _end_all(self, children: Sequence[Child]) -> int:
        """Waits for processes that were started together. Returns how many did their job."""
        done = 0
        for child in children:
            told, code = child.finish()
            if code not in (DONE, -signal.SIGKILL):
                self._violation(f"a process ended with {code}: {''.join(told) or 'no word'}")
            self.counts.killed += code == -signal.SIGKILL
            done += code == DONE
        self.counts.served += done
        return done

    def _kill_some(self, children: Sequence[Child], span: float, filler: Callable[[], int | None]) -> None:
        """Kills some at random moments, and now and then all: random ones, or the one that copies just then."""
        rng = self._random
        count = round(len(children) * rng.choice((0, 0.1, 0.3, 0.6, 1, 1)))
        if count == len(children):
            span /= 2
        moments = sorted(rng.random() * span for _ in range(count))
        alive = [child.pid for child in children]
        start = time.monotonic()
        for moment in moments:
            time.sleep(max(0.0, start + moment - time.monotonic()))
            child = filler() if rng.random() < 0.5 else None
            if child in alive:
                self.counts.fillers += 1
            else:
                child = rng.choice(alive)
            alive.remove(child)
            os.kill(child, signal.SIGKILL)  # it has not been waited for, so that the number is still its own

    # --- what a process does ---------------------------------------------------------------------------------------

    def _serve(self, number: int, cache: Path, delay: float) -> None:
        time.sleep(delay)
        with Cache(cache).lease(self._digests[number]) as lease:
            stage(self._sets[number], cache)
            assert lease.is_complete(), "the copy is not complete"
            assert hash_files(lease.path) == self._expected[number], "the copy has other bytes than the source"

    def _read(self, process: int, cache: Path, seconds: float, seed: float) -> None:
        rng = random.Random(seed)
        deadline = time.monotonic() + seconds
        while True:
            number = rng.randrange(NUM_SETS)
            with Cache(cache).lease(self._digests[number]) as lease:
                stage(self._sets[number], cache)
                for _ in range(rng.randint(1, 3)):
                    # Files are opened anew each time: what is mapped would stay whatever becomes of its name.
                    assert hash_files(lease.path) == self._expected[number], "the copy has other bytes than the source"
                    self._board.add(process, "reads")
            if time.monotonic() >= deadline:
                return
            time.sleep(rng.random() * seconds)  # so that some copies are unused for a while

    def _evict(self, process: int, cache: Path, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        Cache(cache).lease(self._digests[0]).close()  # so that there is a cache
        while time.monotonic() < deadline:
            self._board.add(process, "evicted", len(Cache(cache).evict(keep=0).removed))
            time.sleep(0.001)

    # --- rounds ----------------------------------------------------------------------------------------------------

    def staging_round(self) -> None:
        counts, rng = self.counts, self._random
        counts.staging_rounds += 1
        number = rng.randrange(NUM_SETS)
        cache = self.folder / f"cache-{counts.staging_rounds}"
        copy = cache / self._digests[number]
        self._board.clear()

        def filler() -> int | None:
            with Cache(cache).lease(self._digests[number]) as lease:
                return lease.filler()

        spread = rng.choice((0, 0, 0.3, 1)) * self._span
        delays = [rng.random() * spread for _ in range(self._processes)]
        children = self._start([partial(self._serve, number, cache, delay) for delay in delays])
        self._kill_some(children, rng.choice((0.5, 1, 3)) * self._span, filler)
        seen = stamp(copy)
        survivors = self._end_all(children)
        complete = (copy / "manifest.json").exists()
        if survivors and not complete:
            self._violation("processes were served from a copy that is not complete")
        counts.temporary += len(temporary_in(cache))
        counts.finished_by_next += not complete
        self._end_all(self._start([partial(self._serve, number, cache, 0)]))
        now = stamp(copy)
        if again := [name for name in seen if seen[name] != now.get(name)]:
            self._violation(f"files that were there were copied again: {again}")
        # A process that was killed may have copied a file and not counted it, but none counts what it did not do.
        completed, copied = self._board.total("completed"), self._board.total("copied")
        if completed > 1 or copied > len(now) - 1:
            self._violation(f"the copy was completed {completed} times, and {copied} files copied of {len(now) - 1}")
        counts.copied += copied
        self._check_whole(cache, number)
        self._check_evicted(cache)

    def _check_whole(self, cache: Path, number: int) -> None:
        if left := temporary_in(cache):
            self._violation(f"left after the next start: {left}")
        if found := [copy.digest for copy in Cache(cache).copies() if not copy.complete or copy.in_use]:
            self._violation(f"not complete, or still in use: {found}")
        digests = {copy.digest for copy in Cache(cache).copies()}
        if digests != {self._digests[number]}:
            self._violation(f"expected one copy, found {digests}")
        elif hash_files(cache / self._digests[number]) != self._expected[number]:
            self._violation("the copy has other bytes than the source")

    def _check_evicted(self, cache: Path) -> None:
        """Checks that everything can be evicted when no process is there any more."""
        if not cache.exists():  # all were killed before they had made it
            return
        if not os.listdir(cache):  # or before they had marked it
            cache.rmdir()
            return
        Cache(cache).evict(keep=-1)
        if left := sorted(set(os.listdir(cache)) - {MARKER_NAME}):
            self._violation(f"left when all could be evicted: {left}")
        (cache / MARKER_NAME).unlink(missing_ok=True)
        if not left:
            cache.rmdir()

    def eviction_round(self) -> None:
        counts, rng = self.counts, self._random
        counts.eviction_rounds += 1
        cache = self.folder / f"cache-{counts.staging_rounds}-{counts.eviction_rounds}"
        self._board.clear()
        span = self._span * rng.choice((2, 4))
        # With many readers there is always one that holds a set, so that nothing is evicted.
        readers = round(self._processes * rng.choice((0.1, 0.2, 0.4, 0.8)))
        jobs: list[Callable[[], None]] = []
        for process in range(self._processes):
            if process < readers:
                jobs.append(partial(self._read, process, cache, span, rng.random()))
            else:
                jobs.append(partial(self._evict, process, cache, span))
        children = self._start(jobs)
        self._kill_some(children, span, lambda: None)
        self._end_all(children)
        counts.copied += self._board.total("copied")
        counts.evicted += self._board.total("evicted")
        counts.reads += self._board.total("reads")
        self._check_evicted(cache)

    def run(self, rounds: int, until_noticed: str = "") -> None:
        for number in range(1, rounds + 1):
            self.counts.rounds = number
            self.staging_round()
            self.eviction_round()
            if until_noticed and re.search(until_noticed, "\n".join(self.counts.violations)):
                break
            if number % 50 == 0:
                self.say(f"{number} of {rounds} rounds of each kind: {len(self.counts.violations)} violations")
        if self._look_at_sources() != self._before:
            self._violation("a source was touched")


def race_stagings(
    rounds: int,
    processes: int = 32,
    seed: int = 0,
    folder: Path | None = None,
    say: Say = print,
    until_noticed: str = "",
) -> Counts:
    """Does so many rounds of each kind in `folder`, by default a temporary one, or stops when a violation matches the
    expression `until_noticed`. The process must have no other threads."""
    with tempfile.TemporaryDirectory(prefix="race-stage-", dir=folder) as made:
        race = Race(Path(made), processes, seed, say)
        try:
            race.run(rounds, until_noticed)
        finally:
            unprotect(race.sources)
    return race.counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "the moments")
    parser.add_argument("--rounds", type=int, default=500, help="of each kind; default %(default)s")
    parser.add_argument("--processes", type=int, default=32, help="in each round; default %(default)s")
    chosen = parser.parse_args(arguments)
    return verdict(race_stagings(chosen.rounds, chosen.processes, chosen.seed, chosen.folder))


if __name__ == "__main__":
    sys.exit(main())

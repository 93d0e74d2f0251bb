"""Exceptions from signal handlers at any moment leave nothing behind: a short form of storm_close.py."""

from __future__ import annotations

import _thread
import concurrent.futures
import contextlib
import multiprocessing
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import storm_close as tool
import torch
from disks import raising
from leaks import num_descriptors

from shardio.augment import Resize
from shardio.cache.folder import Cache, _remove_trash
from shardio.loading.gather import GatherThreads
from shardio.loading.loader import ShardLoader
from shardio.reading.mapping import RowMapping, will_need
from shardio.reading.shardset import open_shards
from shardio.sets import catalogue
from shardio.system.files import AtomicFile, fsync_folder, sweep_temporaries, write_all
from shardio.system.opening import open_nameless
from shardio.system.threads import DaemonThread, ThreadPool

CONCURRENT = tuple(package.__path__[0] for package in (concurrent.futures, multiprocessing))
IMAGES = torch.zeros((16, 3, 8, 8), dtype=torch.uint8)
# A prime, so that other points come in each case.
STEP = 397
CASES = [
    tool.Case("mmap", "close"),
    tool.Case("pread", "collect"),
    tool.Case("direct", "forget", check=True),
    tool.Case("full cache", "with"),
    tool.Case("cache", "collect"),
]


@pytest.mark.parametrize("case", [*CASES, *tool.WORKS], ids=repr)
def test_one_exception_at_any_point_leaves_nothing(case: tool.Case | tool.Work, tmp_path: Path) -> None:
    counts = tool.raise_everywhere(STEP, tmp_path, cases=[case])
    assert not counts.printed, "\n".join(counts.printed)
    assert counts.raised > (5 if case in CASES else 2)


def test_one_exception_at_any_point_leaves_no_descriptor_of_a_file_that_is_written(tmp_path: Path) -> None:
    path, open_files = tmp_path / "x", num_descriptors()

    def write() -> None:
        with AtomicFile(path) as file:
            write_all(file.descriptor, b"abc")
            file.commit()

    for number in count():
        point = tool.Point(number)
        with contextlib.suppress(tool.InterruptedHere):
            point(write)
        assert num_descriptors() == open_files, point.where
        sweep_temporaries(tmp_path)
        assert set(os.listdir(tmp_path)) <= {"x"}, point.where
        if not point.fired:
            break
    assert number > 50
    assert path.read_bytes() == b"abc"


def in_use() -> tuple[int, int, int]:
    """Threads, descriptors, and TiB of address space."""
    (size,) = re.findall(r"VmSize:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), int(size) >> 30


def remove_trash(folder: Path) -> None:
    (folder / "trash").mkdir(exist_ok=True)
    _remove_trash(folder / "trash")


CALLS: dict[str, Callable[[Path], object]] = {
    "address space": lambda folder: RowMapping([1 << 28], 4096),
    "advice": lambda folder: will_need(np.ones((2, 4096), np.uint8), np.arange(2)),
    "folder that is synced": fsync_folder,
    "folder that is locked": remove_trash,
    "file without a name": lambda folder: open_nameless(),
    "resampling": lambda folder: Resize(4)(IMAGES),
    "listing": lambda folder: catalogue._map(str, range(5)),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_exception_at_any_point_loses_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS[name]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tool.Point, "files", (*tool.Point.files, *CONCURRENT))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(catalogue, "_NUM_THREADS", 3)  # each is begun and waited for at the same points
    call(tmp_path)
    time.sleep(0.1)  # a thread that was waited for is still there for a moment
    before = in_use()
    for number in count():
        point = tool.Point(number)
        with contextlib.suppress(tool.InterruptedHere):
            point(lambda: call(tmp_path))
        deadline = time.monotonic() + 10
        while (left := in_use()) != before and time.monotonic() < deadline:
            time.sleep(0.001)
        assert left == before, point.where
        assert set(os.listdir(tmp_path)) <= {"trash"}, point.where
        if not point.fired:
            break
    assert number > 0


def test_exceptions_at_random_moments_leave_nothing(tmp_path: Path) -> None:
    counts = tool.storm_loaders(20, seed=1, folder=tmp_path)
    assert not counts.printed, "\n".join(counts.printed)
    assert counts.rounds == 20
    assert counts.raised > 0


def test_threads_descriptors_and_address_space_that_are_left_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Any] = []

    def use(storms: tool.Storms, case: tool.Case, held: list[Any]) -> None:
        if not left:
            nbytes = int(np.prod(tool.SHAPE))
            left.extend([GatherThreads(1), os.open(os.devnull, os.O_RDONLY), RowMapping([20] * 3, nbytes)])
            left.append(open_shards(storms._set))

    monkeypatch.setattr(tool.Storms, "use", use)
    monkeypatch.setattr(tool, "PATIENCE_SECONDS", 0.0)
    try:
        counts = tool.raise_everywhere(1, tmp_path, lambda line: None, CASES[:1])
        assert counts.rounds_that_left == 1
        assert counts.left["thread"] == counts.left["descriptor"] == 1
        assert counts.left["mapping"] == 4  # three shards, and the index
        assert counts.left["reservation"] == 3 + 3  # three of a region without files, and three behind files
    finally:
        left[0].close()
        os.close(left[1])


def test_a_loader_that_cannot_be_made_holds_no_lease_while_its_error_is_kept(
    make_set: Callable[..., Path], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with ShardLoader(make_set(20), 4, device="cpu", cache=cache):
        pass
    with pytest.raises(ValueError, match="at least one batch") as kept:
        ShardLoader(make_set(20), 21, device="cpu", cache=cache)
    assert not any(copy.in_use for copy in Cache(cache).copies())
    assert kept.tb is not None


def test_a_thread_that_was_not_begun_before_it_was_waited_for_never_starts() -> None:
    started: list[None] = []
    thread = DaemonThread(lambda: started.append(None), "shardio-test")
    thread.wait()
    thread.begin()
    thread.wait()
    assert not started
    assert not thread.is_alive()


@pytest.mark.parametrize(("owner", "name"), [(threading.Thread, "start"), (_thread, "start_new_thread")])
def test_a_thread_that_cannot_be_started_says_so_and_is_over(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    monkeypatch.setattr(owner, name, raising(RuntimeError("can't start new thread")))
    thread = DaemonThread(lambda: None, "shardio-test")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"can't start new thread: .*ulimit -u"):
            thread.begin()
    thread.wait()


def test_a_pool_makes_every_call_and_gives_results_in_order() -> None:
    release = threading.Event()
    with ThreadPool(3, "shardio-test") as pool:
        results = pool.map(lambda number: (number == 0 and release.wait(10)) or number, range(20))
        release.set()
        assert list(results) == [True, *range(1, 20)]
    pool.close()
    with pytest.raises(RuntimeError, match="this thread pool was closed"):
        pool.submit(int)


@pytest.mark.parametrize("fails", [False, True])
def test_a_block_that_fails_waits_for_calls_under_way_alone_and_one_that_ends_for_all(fails: bool) -> None:
    made: list[int] = []
    begun = threading.Event()

    def make(number: int) -> None:
        begun.set()
        while fails and not pool._cancelled.is_set():  # which ends the first call only when the block has failed
            time.sleep(0.001)
        made.append(number)

    with contextlib.suppress(ZeroDivisionError), ThreadPool(1, "shardio-test") as pool:
        for number in range(3):
            pool.submit(make, number)
        assert begun.wait(10)
        if fails:
            raise ZeroDivisionError
    assert made == ([0] if fails else [0, 1, 2])


def test_the_threads_of_a_pool_end_when_it_is_forgotten_and_calls_that_wait_are_refused() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def first() -> bool:
        begun.set()
        return go_on.wait(10)

    pool = ThreadPool(1, "shardio-test")
    threads, calls = pool._threads, [pool.submit(first), pool.submit(int)]
    assert begun.wait(10)
    del pool
    go_on.set()
    assert calls[0].result()
    with pytest.raises(RuntimeError, match="closed before"):
        calls[1].result()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_wait_that_was_interrupted_leaves_the_others_their_signal() -> None:
    thread = DaemonThread(lambda: None, "shardio-test")
    thread.begin()
    thread.join()
    thread._call._over_signal.get()  # a wait took it, and an exception ended that wait
    thread.wait()
    other = threading.Thread(target=thread._call._over_signal.get, daemon=True)  # one that looked at the flag before
    other.start()
    other.join(10)
    assert not other.is_alive()


def test_gather_threads_end_when_they_are_forgotten_and_never_closed() -> None:
    threads = GatherThreads(3)
    workers = list(threads._threads)
    del threads
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive()

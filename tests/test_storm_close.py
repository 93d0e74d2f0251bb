"""Exceptions from signal handlers at any moment leave nothing behind: a short form of tools/storm_close.py."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import storm_close as tool

from shardio.cache import Cache
from shardio.files import AtomicFile, sweep_temporaries, write_all
from shardio.gather import GatherThreads
from shardio.loader import ShardLoader
from shardio.threads import DaemonThread

# A prime, so that other points come in each case.
STEP = 127
CASES = [
    tool.Case("mmap", "close"),
    tool.Case("pread", "collect"),
    tool.Case("direct", "forget", check=True),
    tool.Case("full cache", "with"),
    tool.Case("cache", "collect"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.io} {case.ending}")
def test_one_exception_at_any_point_leaves_nothing(case: tool.Case, tmp_path: Path) -> None:
    counts = tool.raise_everywhere(STEP, tmp_path, cases=[case])
    assert not counts.printed, "\n".join(counts.printed)
    assert counts.raised > 10


@pytest.mark.parametrize("take_over", [False, True])
def test_one_exception_at_any_point_leaves_no_descriptor_of_a_file_that_is_written(
    take_over: bool, tmp_path: Path
) -> None:
    path, open_files = tmp_path / "x", len(os.listdir("/proc/self/fd"))

    def write() -> None:
        if take_over:
            with AtomicFile(path) as left:
                left.leave()
                file = AtomicFile.take_over(path, left.temporary)
            assert file is not None
        else:
            file = AtomicFile(path)
        with file:
            write_all(file.descriptor, b"abc")
            file.commit()

    for number in count():
        point = tool.Point(number)
        with contextlib.suppress(tool.InterruptedHere):
            point(write)
        assert len(os.listdir("/proc/self/fd")) == open_files, point.where
        sweep_temporaries(tmp_path)
        assert set(os.listdir(tmp_path)) <= {"x"}, point.where
        if not point.fired:
            break
    assert number > 50
    assert path.read_bytes() == b"abc"


def test_exceptions_at_random_moments_leave_nothing(tmp_path: Path) -> None:
    counts = tool.storm_loaders(20, seed=1, folder=tmp_path)
    assert not counts.printed, "\n".join(counts.printed)
    assert counts.rounds == 20
    assert counts.raised > 0


def test_a_thread_and_a_descriptor_that_are_left_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Any] = []

    def use(storms: tool.Storms, case: tool.Case, held: list[Any]) -> None:
        if not left:
            left.extend([GatherThreads(1), os.open(os.devnull, os.O_RDONLY)])

    monkeypatch.setattr(tool.Storms, "use", use)
    monkeypatch.setattr(tool, "PATIENCE_SECONDS", 0.0)
    try:
        counts = tool.raise_everywhere(1, tmp_path, lambda line: None, CASES[:1])
        assert counts.rounds_that_left == 1
        assert counts.left["thread"] == counts.left["descriptor"] == 1
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


def test_a_thread_that_cannot_be_started_says_so_and_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    thread = DaemonThread(lambda: None, "shardio-test")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            thread.begin()
    thread.wait()


def test_several_threads_may_wait_for_the_end_of_one() -> None:
    go_on = threading.Event()
    thread = DaemonThread(go_on.wait, "shardio-test")
    thread.begin()
    waiting = [threading.Thread(target=thread.wait) for _ in range(3)]
    for one in waiting:
        one.start()
    go_on.set()
    for one in waiting:
        one.join(10)
        assert not one.is_alive()


def test_a_wait_that_was_interrupted_leaves_the_others_their_signal() -> None:
    thread = DaemonThread(lambda: None, "shardio-test")
    thread.begin()
    thread.join()
    thread._over_signal.get()  # by a wait that an exception ended in the next moment
    thread.wait()
    other = threading.Thread(target=thread._over_signal.get, daemon=True)  # one that looked at the flag before
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

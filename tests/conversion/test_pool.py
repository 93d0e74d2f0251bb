"""Conversions on a pool: the same set, whatever the executor beneath does with the tasks."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run_python
from conversions import OPTIONS as PLAIN
from conversions import run_on
from deadlines import must_not_block
from disks import failing
from folders import hashes, stamps
from pictures import random_picture, write_jpeg
from storages import scan_tree

from shardio.conversion import engine as executors
from shardio.conversion import task as shardtask
from shardio.conversion.convert import convert
from shardio.conversion.engine import Engine, Pool, TaskLine, Terms, run_on_pool
from shardio.conversion.options import ConvertOptions, Progress
from shardio.conversion.plan import ShardTask, library_versions, make_plan
from shardio.conversion.records import ShardRecord, load_record, refused_so_far
from shardio.conversion.task import do_task
from shardio.errors import ConvertError, FormatError, SpaceError
from shardio.system.files import sweep_temporaries
from shardio.system.threads import Stop

OPTIONS: dict[str, Any] = {**PLAIN, "order": "source"}
"""For `image_tree`: four shards of three samples in train, two in val."""


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks look at every picture whether to stop, and the conversion looks all the time how far they are."""
    monkeypatch.setattr(executors, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(executors, "_PROGRESS_SECONDS", 0.001)


class Here(Executor):
    """Does at once what it is given. `before` is called first, with the number of the submission."""

    def __init__(self, before: Callable[[int], None] = lambda number: None) -> None:
        self.before = before
        self.submitted = 0

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        number, self.submitted = self.submitted, self.submitted + 1
        try:
            self.before(number)
            # Another machine would get and give pickles, too.
            call, arguments = pickle.loads(pickle.dumps((call, arguments)))
            future.set_result(pickle.loads(pickle.dumps(call(*arguments, **options))))
        except Exception as error:
            future.set_exception(error)
        return future


def tasks_of(src: Path, out: Path) -> tuple[ShardTask, ...]:
    options = ConvertOptions(size=16, shard_size=OPTIONS["shard_size"], order="source")
    (out / ".convert").mkdir(parents=True, exist_ok=True)
    return make_plan(out, scan_tree(src), options).tasks


# --- the same set -----------------------------------------------------------------------------------------------------


def test_a_pool_makes_the_same_set(
    image_tree: Path, out: Path, finished: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Progress] = []
    with ThreadPoolExecutor(2) as pool:
        run_on(pool, monkeypatch, 3)
        report = convert(image_tree, out, **OPTIONS, on_progress=seen.append)
    assert hashes(out) == finished
    assert (report.num_converted, report.num_sources, report.num_shards) == (18, 18, 6)
    assert seen[-1] == Progress(18, 0, 18)
    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)


def test_a_pool_has_no_more_tasks_at_a_time_than_it_wants_and_does_alone_what_breaks_it(
    image_tree: Path, out: Path
) -> None:
    class Bounded(Pool):
        def most_in_flight(self) -> int:
            return 2

        def submit(self, call: Any, /, *arguments: Any) -> Future[ShardRecord]:
            if arguments[1] == 3:
                raise BrokenProcessPool("a worker was killed")
            futures.append(super().submit(call, *arguments))
            waiting.append(sum(not future.done() for future in futures))
            return futures[-1]

        def do_alone(self, task: ShardTask, number: int, terms: Terms) -> ShardRecord:
            alone.append(number)
            return super().submit(executors._work, task, number, terms, 1).result()

    futures: list[Future[ShardRecord]] = []
    waiting, alone = list[int](), list[int]()
    tasks = tasks_of(image_tree, out)
    with ThreadPoolExecutor(1) as threads:
        records = run_on_pool(tasks, Bounded(threads), lambda *counts: None, out / ".convert" / "run", 1)
    assert [record.entry and record.entry.file for record in records] == [task.name for task in tasks]
    assert max(waiting) <= 2
    assert 3 in alone


@pytest.mark.usefixtures("no_waiting")
def test_what_a_lost_worker_had_counted_is_neither_taken_back_nor_counted_twice(
    image_tree: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (image_tree / "train" / "n01" / "n01_0.JPEG").write_bytes(b"")
    counted = threading.Event()
    seen: list[Progress] = []

    def look(progress: Progress) -> None:
        seen.append(progress)
        if progress.done >= 11:
            counted.set()

    def lose(writer: object, *how: object) -> None:
        raise ConnectionError

    class LosesOne(ThreadPoolExecutor):
        def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
            def twice() -> Any:
                with monkeypatch.context() as patch, contextlib.suppress(ConnectionError):
                    patch.setattr(shardtask.ShardFileWriter, "seal", lose)
                    call(*arguments)
                assert counted.wait(30)
                return call(*arguments)

            return super().submit(twice)

    with LosesOne(1) as pool:  # all in one shard
        run_on(pool, monkeypatch)
        report = convert(image_tree / "train", out, size=16, max_bad=1, on_progress=look)
    assert (report.num_converted, sum(report.refused.values())) == (12, 1)
    assert seen[-1] == Progress(12, 1, 12)
    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)
    assert max(progress.refused for progress in seen) == 1


# --- failures ---------------------------------------------------------------------------------------------------------


FAILURES: dict[str, tuple[Exception, type[Exception], str]] = {
    "the engine's own": (RuntimeError("node17 is gone"), ConvertError, "train-00002.npy: RuntimeError: node17 is gone"),
    "cancelled": (CancelledError(), ConvertError, "train-00002.npy: CancelledError"),
    "the machine's": (ConvertError("node17 has torch '1.0'"), ConvertError, "node17 has torch '1.0'"),
    "disk": (OSError(errno.EIO, "Input/output error", "/x"), OSError, "Input/output error"),
    "full disk": (
        OSError(errno.ENOSPC, "No space left", "/x"),
        SpaceError,
        "/x: No space left; 15 of 18 images are kept in .*: make room",
    ),
    "stopped": (Stop(), ConvertError, "train-00002.npy: stopped unexpectedly"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_task_that_fails_ends_the_conversion_and_what_is_finished_is_kept(
    image_tree: Path, out: Path, finished: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, kind, message = FAILURES[name]

    def fail(number: int) -> None:
        if number == 2:
            raise error

    run_on(Here(fail), monkeypatch)
    with pytest.raises(kind, match=message):
        convert(image_tree, out, **OPTIONS)
    assert len(stamps(out)) == 5
    assert not list((out / ".convert").glob("run.*"))
    run_on(Here(), monkeypatch)
    assert convert(image_tree, out, **OPTIONS).num_converted == 3
    assert hashes(out) == finished


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupt_cancels_what_is_not_begun_and_stops_what_is(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    count = TaskLine.report

    def wait(line: TaskLine, done: int, refused: int) -> None:  # so no shard is finished before its progress was seen
        count(line, done, refused)
        deadline = time.monotonic() + 60
        while line._counts[0] and time.monotonic() < deadline:
            count(line, 0, 0)
            time.sleep(0.001)

    monkeypatch.setattr(TaskLine, "report", wait)
    picture = random_picture(np.random.default_rng(3), 160, 200)
    for number in range(60):
        write_jpeg(tmp_path / "src" / "a" / f"{number:03}.jpg", picture)
    options: dict[str, Any] = {"size": 64, "shard_size": 4096 + 20 * 64 * 64 * 3, "labels": "folders"}

    def stop(progress: Progress) -> None:
        if progress.done:
            raise error

    class Recording(ThreadPoolExecutor):
        def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
            futures.append(super().submit(call, *arguments, **options))
            return futures[-1]

    futures: list[Future[Any]] = []
    with Recording(1) as pool:
        with monkeypatch.context() as patch:
            run_on(pool, patch)
            with pytest.raises(error):
                convert(tmp_path / "src", out, **options, on_progress=stop)
        assert [future.cancelled() for future in futures] == [False, True, True]
        assert isinstance(futures[0].exception(60), Stop)
    assert sorted(hashes(out)) == [".convert/plan.json"]
    assert convert(tmp_path / "src", out, **options, workers=2).num_converted == 60


def test_a_set_that_another_process_publishes_meanwhile_is_taken(
    image_tree: Path, out: Path, finished: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtake(number: int) -> None:
        if number == 1:
            with monkeypatch.context() as patch:
                patch.setattr(Engine, "run", run)
                convert(image_tree, out, **OPTIONS)

    run = Engine.run
    run_on(Here(overtake), monkeypatch)
    convert(image_tree, out, **OPTIONS)
    assert hashes(out) == finished


# --- machines that are not alike --------------------------------------------------------------------------------------


@pytest.fixture
def terms(image_tree: Path, out: Path) -> Terms:
    task = tasks_of(image_tree, out)[0]
    run_file = out / ".convert" / "run"
    run_file.touch()
    source = task.sources[0]
    return Terms(run_file, library_versions(), task.origin, source, *task.origin.fingerprints((source,)))


def test_a_machine_like_this_one_takes_part(terms: Terms) -> None:
    pickle.loads(pickle.dumps(terms)).check()


OTHER: dict[str, tuple[Callable[[Terms, Path], object], str]] = {
    "libraries": (
        lambda terms, path: terms.libraries.update({"simplejpeg": "99.0", "pillow": "98.0"}),  # type: ignore[attr-defined]
        r"found pillow '.*', here '98.0'; simplejpeg '.*', here '99.0'",
    ),
    "folder OUT": (
        lambda terms, path: terms.run_file.unlink(),
        r"cannot write to .*: No such file or directory. OUT must be the same",
    ),
    "file lost": (lambda terms, path: path.unlink(), r"does not find b'train/n01/.*SRC must be the same"),
    "file": (lambda terms, path: path.write_bytes(b"other"), r"does not find b'train/n01/.*SRC must be the same"),
}


@pytest.mark.parametrize("other", OTHER)
def test_a_machine_that_is_not_like_this_one_takes_no_part(terms: Terms, image_tree: Path, other: str) -> None:
    change, words = OTHER[other]
    change(terms, image_tree / os.fsdecode(terms.source.key))
    with pytest.raises(ConvertError, match=words):
        terms.check()


# --- the file that ties a task to the process that started it ---------------------------------------------------------


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """Has room for three tasks."""
    path = tmp_path / "run"
    path.write_bytes(bytes(3 * 8))
    return path


def test_a_task_looks_at_once_and_then_every_second(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    line = TaskLine(run_file, 1, executors._LOOK_SECONDS)
    line.report(5, 2)
    assert executors._read_counts(run_file).tolist() == [[0, 0], [5, 2], [0, 0]]
    run_file.unlink()
    now += 0.9
    line.report(1, 0)
    now += 0.2
    with pytest.raises(Stop):
        line.report(1, 0)


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("call", ["open", "pwrite"])
def test_only_a_file_that_is_gone_says_stop(run_file: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    line = TaskLine(run_file, 0, executors._LOOK_SECONDS)
    for code in (errno.EIO, errno.ENOSPC):
        monkeypatch.setattr(os, call, failing(code))
        line.report(1, 0)
    for code in (errno.ESTALE, errno.ENOENT):
        monkeypatch.setattr(os, call, failing(code))
        with pytest.raises(Stop):
            line.report(1, 0)


@pytest.mark.usefixtures("no_waiting")
def test_counts_go_into_a_file_and_nothing_else(run_file: Path, tmp_path: Path) -> None:
    line = TaskLine(run_file, 0, executors._LOOK_SECONDS)
    (tmp_path / "precious").write_bytes(bytes(8))
    for put in (os.mkfifo, lambda path: path.symlink_to("precious"), lambda path: os.link(tmp_path / "precious", path)):
        run_file.unlink(missing_ok=True)
        put(run_file)
        with must_not_block(), pytest.raises(FormatError, match="run: expected a regular file, found"):
            line.report(1, 0)
    assert (tmp_path / "precious").read_bytes() == bytes(8)


# --- one task, two workers --------------------------------------------------------------------------------------------


class Paused:
    """A report that stops after this many sources until it may go on."""

    def __init__(self, number: int) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._left = number

    def __call__(self, done: int, refused: int, /) -> None:
        self._left -= done
        if self._left == 0:
            self.reached.set()
            assert self.go_on.wait(60)


@pytest.fixture
def task(image_tree: Path, out: Path) -> ShardTask:
    """All twelve sources of train, every other of which is bad."""
    for path in sorted((image_tree / "train").rglob("*.JPEG"))[::2]:
        path.write_bytes(b"")
    plan = make_plan(out, scan_tree(image_tree / "train"), ConvertOptions(size=16, order="source"))
    (out / ".convert").mkdir(parents=True)
    return plan.tasks[0]


def begin(pool: ThreadPoolExecutor, task: ShardTask, number: int) -> tuple[Future[ShardRecord], Paused]:
    report = Paused(number)
    future = pool.submit(do_task, task, report)
    assert report.reached.wait(60)
    return future, report


@pytest.mark.parametrize("first_ends_first", [True, False])
@pytest.mark.parametrize(("first", "second"), [(11, 1), (3, 7), (2, 2)])
def test_two_workers_that_do_one_task_at_once_give_the_same_shard_and_do_no_harm(
    task: ShardTask, out: Path, first: int, second: int, first_ends_first: bool
) -> None:
    alone = replace(task, out=out.with_name("alone"))
    (alone.out / ".convert").mkdir(parents=True)
    do_task(alone, lambda done, refused: None)
    expected, refused = hashes(alone.out), refused_so_far(alone)
    assert len(refused) == 6
    with ThreadPoolExecutor(2) as pool:
        both = [begin(pool, task, first), begin(pool, task, second)]
        assert set(refused_so_far(task)) <= set(refused)
        there = os.listdir(out)
        sweep_temporaries(out)
        assert os.listdir(out) == there  # files that are being written stay
        for future, report in both if first_ends_first else both[::-1]:
            report.go_on.set()
            future.result(60)
            assert set(refused_so_far(task)) <= set(refused)
            assert load_record(task) is not None
            assert hashes(out)[task.name] == expected[task.name]
    assert refused_so_far(task) == refused
    lines = f".convert/{task.name}.refused.jsonl"  # which has some of them twice
    assert {**hashes(out), lines: ""} == {**expected, lines: ""}


def test_a_worker_that_is_late_cannot_replace_a_published_shard(image_tree: Path, out: Path, task: ShardTask) -> None:
    with ThreadPoolExecutor(1) as pool:
        future, report = begin(pool, task, 5)
        convert(image_tree / "train", out, size=16, order="source", max_bad=6, workers=1)
        before, published = stamps(out), hashes(out)
        report.go_on.set()
        with pytest.raises(FileNotFoundError):
            future.result(60)
        with pytest.raises(FileNotFoundError):  # also if it has none to refuse, and would note nothing on the way
            do_task(replace(task, sources=task.sources[1::2]), lambda done, refused: None)
    assert stamps(out) == before
    assert hashes(out) == published


def test_a_script_without_the_guard_for_its_processes_ends_with_an_error_that_names_it(
    image_tree: Path, out: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import shardio\nshardio.convert({str(image_tree)!r}, {str(out)!r}, size=16, workers=8)\n")
    result = run_python(script)
    assert result.returncode == 1
    assert 'must do so under `if __name__ == "__main__":`' in result.stderr.splitlines()[-1]
    assert not (out / "manifest.json").exists()

"""One shard task: the same bytes and record from any number of threads, bounded memory, and a clean end."""

from __future__ import annotations

import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from deadlines import must_not_block
from pictures import random_jpeg

from shardio.conversion.images.decode import decode_image
from shardio.conversion.images.fit import Fit
from shardio.conversion.plan import ShardTask
from shardio.conversion.records import load_record, refused_so_far
from shardio.conversion.sources.collection import Source
from shardio.conversion.task import do_task
from shardio.conversion.writing import shard_file as writer
from shardio.errors import DecodeError, FormatError
from shardio.format.layout import WORK_FOLDER, crc32
from shardio.system.files import target_of
from shardio.system.threads import Stop

SIDE = 16
FIT = Fit((SIDE, SIDE))
BAD = {3, 4, 11, 17, 18, 19, 20, 39}
"""Some of 40 sources: one alone, neighbors, a whole block of three, the last."""


@dataclass(frozen=True)
class Memory:
    """Sources that are held in memory, by their numbers."""

    images: Sequence[bytes]

    def read(self, source: Source) -> bytes:
        return self.images[int(source.key)]

    def fingerprints(self, sources: Sequence[Source]) -> list[str]:
        return [""] * len(sources)


class Reports:
    """Counts what a task reports, and raises Stop when `stop_after` sources are done."""

    def __init__(self, stop_after: int = 1 << 30) -> None:
        self.done = self.refused = 0
        self._stop_after = stop_after

    def __call__(self, done: int, refused: int, /) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.done += done
        self.refused += refused
        if self.done >= self._stop_after:
            raise Stop


@pytest.fixture(scope="module")
def images() -> list[bytes]:
    return [b"" if i in BAD else random_jpeg(i, SIDE + 7 * i % 48, SIDE + 11 * i % 48) for i in range(40)]


@pytest.fixture
def task(tmp_path: Path, images: list[bytes]) -> ShardTask:
    (tmp_path / WORK_FOLDER).mkdir()
    sources = tuple(Source(b"%d" % i, i % 5) for i in range(len(images)))
    return ShardTask(Memory(images), tmp_path, "train", 0, sources, 4, FIT)


def shard_of(task: ShardTask) -> Path:
    return task.out / task.name


@pytest.mark.parametrize(("threads", "per_block"), [(1, 2), (1, 100), (2, 1), (3, 7), (8, 3)])
def test_any_threads_and_blocks_give_the_samples_in_order_and_the_refused_apart(
    task: ShardTask, images: list[bytes], monkeypatch: pytest.MonkeyPatch, threads: int, per_block: int
) -> None:
    monkeypatch.setattr(writer, "BLOCK_NBYTES", per_block * SIDE * SIDE * 3)
    reports = Reports()
    record = do_task(task, reports, threads)
    good = [i for i in range(40) if i not in BAD]
    samples = np.load(shard_of(task))
    assert len(samples) == len(good)
    for sample, row, i in zip(samples, record.rows, good, strict=True):
        pixels = decode_image(images[i]).pixels
        np.testing.assert_array_equal(sample, FIT.apply(pixels))
        assert (row["source_height"], row["source_width"]) == pixels.shape[:2]
        assert (row["key"], row["label"], row["crc32"]) == (b"%d" % i, i % 5, crc32(np.ascontiguousarray(sample)))
    assert [int(reject.key) for reject in record.rejects] == sorted(BAD)
    assert (reports.done, reports.refused) == (40, len(BAD))
    found = load_record(task)
    assert found is not None
    assert (found.entry, found.rejects, found.rows.tobytes()) == (record.entry, record.rejects, record.rows.tobytes())


def test_a_task_whose_sources_are_all_refused_has_no_shard(task: ShardTask) -> None:
    record = do_task(replace(task, origin=Memory([b""] * 40)), Reports(), 3)
    assert record.entry is None
    assert (len(record.rows), len(record.rejects)) == (0, 40)
    assert not shard_of(task).exists()


@pytest.mark.parametrize(("threads", "after"), [(1, 0), (1, 5), (2, 39), (4, 1), (4, 5)])
def test_a_task_that_is_stopped_leaves_nothing_but_the_list_of_what_it_refused(
    task: ShardTask, monkeypatch: pytest.MonkeyPatch, threads: int, after: int
) -> None:
    monkeypatch.setattr(writer, "BLOCK_NBYTES", 3 * SIDE * SIDE * 3)
    with pytest.raises(Stop):
        do_task(task, Reports(stop_after=after), threads)
    assert {path.name for path in task.out.iterdir()} == {WORK_FOLDER}
    assert {path.name for path in (task.out / WORK_FOLDER).iterdir()} <= {f"{task.name}.refused.jsonl"}
    assert len(refused_so_far(task)) == len([i for i in BAD if i < after])


@dataclass(frozen=True)
class Failing(Memory):
    """Raises an error at some sources."""

    errors: Mapping[bytes, Exception | type[Exception]]

    def read(self, source: Source) -> bytes:
        if source.key in self.errors:
            raise self.errors[source.key]
        return super().read(source)


@pytest.mark.parametrize(("threads", "at"), [(1, b"10"), (2, b"39"), (4, b"0")])
@pytest.mark.parametrize("error", [OSError, ZeroDivisionError])
def test_an_error_that_is_not_a_sources_fault_ends_the_task(
    task: ShardTask, images: list[bytes], threads: int, at: bytes, error: type[Exception]
) -> None:
    with pytest.raises(error):
        do_task(replace(task, origin=Failing(images, {at: error})), Reports(), threads)
    assert not shard_of(task).exists()
    assert not [path for path in task.out.iterdir() if target_of(path.name)]


def test_every_decode_error_is_a_reject(task: ShardTask, images: list[bytes]) -> None:
    odd = Failing(images, {b"7": DecodeError("unreadable", "gone")})
    record = do_task(replace(task, origin=odd, sources=task.sources[:9]), Reports(), 2)
    assert [(int(r.key), r.reason) for r in record.rejects] == [(3, "empty"), (4, "empty"), (7, "unreadable")]


@dataclass(frozen=True)
class Slow(Memory):
    """Its first source waits until nothing else has been read for a while."""

    read_so_far: list[bytes]

    def read(self, source: Source) -> bytes:
        if source.key == b"0":
            seen = -1
            while len(self.read_so_far) > seen:
                seen = len(self.read_so_far)
                time.sleep(0.1)
        self.read_so_far.append(source.key)
        return super().read(source)


@pytest.mark.parametrize(("per_block", "most"), [(1, 17), (16, 32)])
def test_threads_run_ahead_of_a_slow_source_no_further_than_their_blocks(
    task: ShardTask, images: list[bytes], monkeypatch: pytest.MonkeyPatch, per_block: int, most: int
) -> None:
    monkeypatch.setattr(writer, "BLOCK_NBYTES", per_block * SIDE * SIDE * 3)
    origin = Slow(images, [])
    ahead = []

    def note(done: int, refused: int) -> None:
        if not ahead:
            ahead.append(len(origin.read_so_far))

    do_task(replace(task, origin=origin), note, 2)
    assert 1 < ahead[0] <= most
    assert len(origin.read_so_far) == 40


@pytest.mark.parametrize("threads", [1, 3])
def test_memory_is_bounded_by_four_blocks_and_a_picture_per_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    side, count, block_nbytes = 128, 300, 2 << 20
    monkeypatch.setattr(writer, "BLOCK_NBYTES", block_nbytes)
    (tmp_path / WORK_FOLDER).mkdir()
    data = random_jpeg(0, 200, 300)
    sources = tuple(Source(b"%d" % i, 0) for i in range(count))
    task = ShardTask(Memory([data] * count), tmp_path, "train", 0, sources, 4, Fit((side, side)))
    tracemalloc.start()
    try:
        do_task(task, Reports(), threads)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert shard_of(task).stat().st_size == 4096 + count * side * side * 3 > 6 * block_nbytes
    assert peak < (4 if threads > 1 else 3.1) * (block_nbytes + (1 << 17)) + threads * 300 * 200 * 3 + (1 << 20)


@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_what_another_user_put_in_the_place_of_a_record_is_no_record(
    task: ShardTask, put: Callable[[Path], None]
) -> None:
    record = task.out / WORK_FOLDER / f"{task.name}.json"
    put(record)
    with must_not_block():
        assert load_record(task) is None


def test_refused_sources_are_noted_in_a_file_and_nothing_else(task: ShardTask, tmp_path: Path) -> None:
    noted = task.out / WORK_FOLDER / f"{task.name}.refused.jsonl"
    os.mkfifo(noted)
    with must_not_block():
        with pytest.raises(FormatError, match=r"refused\.jsonl: expected a regular file, found a FIFO"):
            refused_so_far(task)
        do_task(task, Reports())
        assert len(refused_so_far(task)) == len(BAD)


def test_lines_of_refused_sources_that_are_none_are_left_out(task: ShardTask) -> None:
    do_task(task, Reports())
    expected = refused_so_far(task)
    noted = task.out / WORK_FOLDER / f"{task.name}.refused.jsonl"
    with noted.open("ab") as file:
        file.write(b"[]\n3\n{}\nx\n\xff\n" + b"[" * 100_000 + b'\n{"key": []}\n{"key": "\\ud800"}\n')
    assert refused_so_far(task) == expected

"""A shard that was left unfinished: the next try takes over its samples, and ends in the same bytes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversions import Interrupt
from folders import hashes
from tasks import BAD, SIDE, Memory, Reports, jpeg

from shardio.cli.convert import run_convert
from shardio.conversion import journal, plan, records
from shardio.conversion import task as shardtask
from shardio.conversion.convert import Conversion, convert
from shardio.conversion.duplicates import HASH_NBYTES
from shardio.conversion.images.decode import DecodeOptions
from shardio.conversion.images.fit import Fit
from shardio.conversion.journal import Journal, Outcome, Stored, find_left, sweep_unfinished
from shardio.conversion.options import ConvertOptions
from shardio.conversion.plan import ShardTask
from shardio.conversion.progress import ImagesBar
from shardio.conversion.records import ShardRecord, discard_record, load_record, refused_so_far, without_record
from shardio.conversion.report import Progress
from shardio.conversion.sources.collection import Source
from shardio.conversion.task import Control, Stopped, do_task
from shardio.conversion.writing import shard_file as writer
from shardio.errors import ConvertError, DecodeError, SpaceError
from shardio.format.layout import WORK_FOLDER
from shardio.system import files
from shardio.system.files import AtomicFile, sweep_temporaries

PER_BLOCK = 3


@dataclass(frozen=True)
class Sources(Memory):
    """Counts what is read. `marks` are changed with the sources that they stand for."""

    marks: dict[bytes, int] = field(default_factory=dict)
    reads: list[bytes] = field(default_factory=list)

    def read(self, source: Source) -> bytes:
        self.reads.append(source.key)
        return super().read(source)

    def fingerprints(self, sources: Sequence[Source]) -> list[str]:
        return [f"{source.key!r} {self.marks.get(source.key, 0)}" for source in sources]


@pytest.fixture(scope="module")
def images() -> list[bytes]:
    return [b"" if i in BAD else jpeg(i) for i in range(40)]


@pytest.fixture
def task(tmp_path: Path, images: list[bytes], monkeypatch: pytest.MonkeyPatch) -> ShardTask:
    monkeypatch.setattr(writer, "BLOCK_NBYTES", PER_BLOCK * SIDE * SIDE * 3)
    (tmp_path / "out" / WORK_FOLDER).mkdir(parents=True)
    sources = tuple(Source(b"%d" % i, i % 5) for i in range(len(images)))
    return ShardTask(Sources(images), tmp_path / "out", "train", 0, sources, 4, ConvertOptions(Fit((SIDE, SIDE))))


@pytest.fixture
def saved_at_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shardtask, "SAVE_SECONDS", 0.0)


@pytest.fixture
def whole(task: ShardTask) -> ShardRecord:
    """The record of a task that nothing has disturbed."""
    elsewhere = replace(task, out=task.out.with_name("undisturbed"), origin=Sources(origin_of(task).images))
    (elsewhere.out / WORK_FOLDER).mkdir(parents=True)
    return do_task(elsewhere, Reports().control(1))


def origin_of(task: ShardTask) -> Sources:
    assert isinstance(task.origin, Sources)
    return task.origin


class Kept(Reports):
    """Counts also what is kept."""

    kept = 0

    def _report(self, done: int, refused: int, kept: int = 0) -> None:
        super()._report(done, refused)
        self.kept += kept


def stop(task: ShardTask, after: int, threads: int = 1) -> None:
    with pytest.raises(Stopped):
        do_task(task, Kept(stop_after=after).control(threads))


def kill(task: ShardTask, control: Control) -> None:
    """Lets the task stop when `control` says so, without saving anything in the end. The disk takes no time."""

    def write_block(shard: writer.ShardFileWriter, *block: Any) -> None:
        real(shard, *block)
        shard._writing[-1][0].result()
        shard._sync.finish()

    real = writer.ShardFileWriter.write_block
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer.ShardFileWriter, "write_block", write_block)
        patch.setattr(writer.ShardFileWriter, "suspend", lambda shard, save: setattr(shard, "_leave", True))
        with pytest.raises(Stopped):
            do_task(task, control)


def go_on(task: ShardTask, whole: ShardRecord, threads: int = 1) -> int:
    """Does the task and checks that it is whole. Returns how many sources were not read again."""
    origin_of(task).reads.clear()
    reports = Kept()
    record = do_task(task, reports.control(threads))
    assert replace(record, rows=whole.rows, sources_sha256="") == replace(whole, sources_sha256="")
    assert record.rows.tobytes() == whole.rows.tobytes()
    assert (task.out / task.name).read_bytes() == (task.out.with_name("undisturbed") / task.name).read_bytes()
    assert (reports.done, reports.refused) == (len(task.sources), len(record.rejects))
    assert sorted(map(int, origin_of(task).reads)) == list(range(reports.kept, len(task.sources)))
    assert nothing_unfinished(task)
    return reports.kept


def nothing_unfinished(task: ShardTask) -> bool:
    return not [path for path in task.out.rglob("*") if path.suffix in (".tmp", ".journal", ".ahead")]


def the_journal(task: ShardTask) -> Path:
    (path,) = (task.out / WORK_FOLDER).glob("*.journal")
    return path


def the_data(task: ShardTask) -> Path:
    (path,) = task.out.glob(".*.tmp")
    return path


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_a_task_that_is_stopped_at_any_source_keeps_its_full_blocks(
    task: ShardTask, whole: ShardRecord, threads: int
) -> None:
    for after in range(threads, 40, 2):
        stop(task, after, threads)
        kept = go_on(task, whole, 4 - threads)
        # And refused ones behind them, which need no block to be written.
        assert after // PER_BLOCK * PER_BLOCK <= kept <= after, after
        assert {*range(after // PER_BLOCK * PER_BLOCK, kept)} <= BAD
        shutil.rmtree(task.out)
        (task.out / WORK_FOLDER).mkdir(parents=True)


@pytest.mark.usefixtures("saved_at_every_block")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_task_that_is_killed_at_any_source_keeps_what_was_saved(
    task: ShardTask, whole: ShardRecord, threads: int
) -> None:
    for after in range(threads, 40, 2):
        kill(task, Kept(stop_after=after).control(threads))
        sweep_unfinished(task.out)
        kept = go_on(task, whole, 4 - threads)
        assert after // PER_BLOCK * PER_BLOCK <= kept <= after, after
        shutil.rmtree(task.out)
        (task.out / WORK_FOLDER).mkdir(parents=True)


def test_a_task_that_is_stopped_again_and_again_gets_there_by_reading_each_source_about_once(
    task: ShardTask, whole: ShardRecord
) -> None:
    reads = 0
    for after in range(PER_BLOCK + 1, 40, PER_BLOCK):
        stop(task, after)
        reads += len(origin_of(task).reads)
        origin_of(task).reads.clear()
    assert go_on(task, whole) >= 36
    assert reads + len(origin_of(task).reads) < 40 + 12 * PER_BLOCK


@pytest.mark.parametrize("changed", [0, 5, 20, 38, 39])
def test_what_lies_behind_a_changed_source_is_made_again(
    task: ShardTask, whole: ShardRecord, images: list[bytes], changed: int
) -> None:
    stop(task, 31)
    kept = the_journal(task).read_bytes().count(b"\n") - 1
    assert 20 < kept < 38
    pictures = [*images[:changed], jpeg(99), *images[changed + 1 :]]
    other = replace(task, origin=Sources(pictures, {b"%d" % changed: 1}))
    expected = replace(other, out=task.out.with_name("undisturbed"))
    record = do_task(expected, Reports().control(1))
    assert go_on(other, record) == min(changed, kept)


def test_a_source_that_was_replaced_while_the_task_ran_is_made_again(task: ShardTask, whole: ShardRecord) -> None:
    class Replaced(Sources):
        def read(self, source: Source) -> bytes:
            if source.key == b"13":
                self.marks[source.key] = 1
            return super().read(source)

    stop(replace(task, origin=Replaced(origin_of(task).images, origin_of(task).marks)), 31)
    assert go_on(task, whole) == 13


def test_sources_are_looked_at_once_in_each_try(
    task: ShardTask, whole: ShardRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprints(self: Sources, sources: Sequence[Source]) -> list[str]:
        looked_at.append(len(sources))
        return real(self, sources)

    looked_at: list[int] = []
    real = Sources.fingerprints
    monkeypatch.setattr(Sources, "fingerprints", fingerprints)
    stop(task, 31)
    assert go_on(task, whole) == 30
    assert looked_at == [40, 40]


def test_a_source_that_could_not_be_read_is_tried_again(task: ShardTask, whole: ShardRecord) -> None:
    class Failing(Sources):
        def read(self, source: Source) -> bytes:
            if source.key == b"13":
                raise DecodeError("unreadable", "no such luck")
            return super().read(source)

    stop(replace(task, origin=Failing(origin_of(task).images)), 31)
    assert go_on(task, whole) == 13


def test_refused_sources_of_the_kept_part_are_listed_and_counted(task: ShardTask, whole: ShardRecord) -> None:
    stop(task, 31)
    with pytest.raises(Stopped):  # before any new source is looked at
        do_task(task, Kept(stop_after=1).control(1))
    lines = refused_so_far(task)
    assert len(lines) == len([i for i in BAD if i < 30])
    assert go_on(task, whole) == 30
    assert len(refused_so_far(task)) == len(BAD)


def test_a_shard_with_nothing_but_refused_sources_is_left_and_gone_on_with(task: ShardTask) -> None:
    empty = replace(task, origin=Sources([b""] * 40))
    stop(empty, 20)
    reports = Kept()
    record = do_task(empty, reports.control(1))
    assert (record.entry, len(record.rejects), reports.kept) == (None, 40, 20)
    assert nothing_unfinished(task)


def test_hashes_of_sources_are_kept_and_those_that_were_not_asked_for_are_not_made_up(
    task: ShardTask, whole: ShardRecord
) -> None:
    asking = replace(task, hash_sources=True)
    stop(asking, 20)
    hashes = do_task(asking, Kept().control(1)).hashes
    assert hashes is not None
    assert len(hashes) == 40 * HASH_NBYTES
    assert len({hashes[i : i + HASH_NBYTES] for i in range(0, len(hashes), HASH_NBYTES)}) == 40 - len(BAD) + 1
    stop(task, 20)
    assert do_task(asking, Kept().control(1)).hashes is None


# --- what is not whole ------------------------------------------------------------------------------------------------


@pytest.fixture
def left(task: ShardTask, whole: ShardRecord) -> tuple[ShardTask, ShardRecord, Callable[[], None]]:
    """A task that was stopped after 31 sources, and what brings that state back."""
    stop(task, 31)
    store = task.out.with_name("store")
    shutil.copytree(task.out, store)

    def restore() -> None:
        shutil.rmtree(task.out)
        shutil.copytree(store, task.out)

    return task, whole, restore


def test_the_whole_lines_of_a_journal_that_is_cut_anywhere_count(left: Any) -> None:
    task, whole, restore = left
    data = the_journal(task).read_bytes()
    for nbytes in [*range(0, 200, 7), *range(200, len(data), 41)]:
        os.truncate(the_journal(task), nbytes)
        assert go_on(task, whole) == max(0, data[:nbytes].count(b"\n") - 1), nbytes
        restore()


def test_the_lines_before_a_changed_byte_of_a_journal_count(left: Any) -> None:
    task, whole, restore = left
    data = the_journal(task).read_bytes()
    for place in [*range(0, 150, 3), *range(150, len(data), 61)]:
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        the_journal(task).write_bytes(changed)
        assert go_on(task, whole) == max(0, data[:place].count(b"\n") - 1), place
        restore()


def test_lines_that_are_lost_or_come_twice_end_what_counts(left: Any) -> None:
    task, whole, restore = left
    lines = the_journal(task).read_bytes().splitlines(keepends=True)
    for changed in (lines[:8] + lines[9:], lines[:8] + lines[7:], lines[:8] + lines[8:10][::-1] + lines[10:]):
        the_journal(task).write_bytes(b"".join(changed))
        assert go_on(task, whole) == 7
        restore()


def test_the_samples_before_a_changed_byte_count(left: Any) -> None:
    task, whole, restore = left
    nbytes = SIDE * SIDE * 3
    good = [i for i in range(30) if i not in BAD]
    for position, source in enumerate(good):
        with the_data(task).open("r+b") as file:
            file.seek(4096 + position * nbytes + position * 7 % nbytes)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 16]))
        assert go_on(task, whole) == source, position
        restore()


def test_the_whole_samples_of_a_file_that_is_shorter_than_its_journal_says_count(left: Any) -> None:
    task, whole, restore = left
    nbytes = SIDE * SIDE * 3
    good = [i for i in range(30) if i not in BAD]
    for length in (0, 1, 4095, 4096, 4097, 4096 + nbytes - 1, 4096 + nbytes, 4096 + 7 * nbytes + 5):
        os.truncate(the_data(task), length)
        assert go_on(task, whole) == good[max(0, length - 4096) // nbytes], length
        restore()


def test_a_header_that_was_written_for_the_end_or_not_at_all_does_no_harm(left: Any) -> None:
    task, whole, restore = left
    for header in (bytes(4096), b"\xff" * 4096):
        with the_data(task).open("r+b") as file:
            file.write(header)
        assert go_on(task, whole) == 30
        restore()


def with_options(task: ShardTask, **changes: Any) -> ShardTask:
    return replace(task, options=replace(task.options, **changes))


OTHERS: dict[str, Callable[[ShardTask], ShardTask]] = {
    "labels": lambda task: replace(task, sources=tuple(replace(s, label=s.label + 1) for s in task.sources)),
    "order": lambda task: replace(task, sources=task.sources[::-1]),
    "fewer": lambda task: replace(task, sources=task.sources[:39]),
    "fit": lambda task: with_options(task, fit=replace(task.options.fit, mode="squash")),
    "quality": lambda task: with_options(task, quality="fast"),
    "decoding": lambda task: with_options(task, decode=DecodeOptions(exif_rotate=True)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_journal_of_another_conversion_counts_for_nothing(task: ShardTask, name: str) -> None:
    stop(task, 31)
    other = OTHERS[name](task)
    undisturbed = replace(other, out=task.out.with_name("undisturbed"))
    (undisturbed.out / WORK_FOLDER).mkdir(parents=True)
    record = do_task(undisturbed, Reports().control(1))
    reports = Kept()
    assert do_task(other, reports.control(1)).entry == record.entry
    assert reports.kept == 0


def test_the_journal_of_other_libraries_counts_for_nothing(
    task: ShardTask, whole: ShardRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(task, 31)
    versions = {**plan.library_versions(), "pillow": "0"}
    monkeypatch.setattr(shardtask, "library_versions", lambda: versions)
    assert go_on(task, whole) == 0


@pytest.mark.usefixtures("saved_at_every_block")
@pytest.mark.parametrize(
    ("code", "name", "is_network", "is_kept"),
    [
        (errno.EIO, "", False, False),
        (errno.ENOSPC, "", True, False),
        (errno.ENOSPC, "", False, True),
        (errno.EMFILE, "a source", True, True),
    ],
)
def test_after_an_error_of_the_disk_nothing_is_kept_that_may_be_in_the_page_cache_only(
    task: ShardTask,
    whole: ShardRecord,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    name: str,
    is_network: bool,
    is_kept: bool,
) -> None:
    class Broken(Reports):
        def _report(self, done: int, refused: int, kept: int = 0) -> None:
            super()._report(done, refused)
            if self.done == 31:
                raise OSError(code, os.strerror(code), name or str(task.out / task.name))

    monkeypatch.setattr(shardtask, "is_network", lambda kind: is_network)
    with pytest.raises(OSError, match=os.strerror(code)):
        do_task(task, Broken().control(1))
    assert len(list(task.out.glob(".*.tmp"))) == is_kept
    sweep_unfinished(task.out)
    assert nothing_unfinished(task) is not is_kept
    assert go_on(task, whole) == 30 * is_kept


# --- between a shard's name and its record ----------------------------------------------------------------------------


class Killed(BaseException):
    pass


@contextlib.contextmanager
def killed_before(owner: Any, name: str, call: int = 1) -> Iterator[None]:
    """The block is killed before this call of the function `name`, and what a kill would not have done is not done."""

    def dying(*args: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == call:
            raise Killed
        return real(*args, **options)

    calls: list[str] = []
    real = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, dying)
        patch.setattr(writer.ShardFileWriter, "suspend", lambda shard, save: setattr(shard, "_leave", True))
        with pytest.raises(Killed):
            yield


def publish_unrecorded(task: ShardTask) -> int:
    """Does the task, and is killed before its record is written. Returns the inode of its shard."""
    with killed_before(records, "write_atomic", 2):
        do_task(task, Reports().control(1))
    return (task.out / task.name).stat().st_ino


@pytest.mark.usefixtures("saved_at_every_block")
def test_a_shard_that_was_published_and_not_recorded_is_not_made_again(task: ShardTask, whole: ShardRecord) -> None:
    shard = publish_unrecorded(task)
    assert without_record([task]) == [task]
    sweep_unfinished(task.out)
    record = load_record(task)
    assert record is not None
    assert record.rows.tobytes() == whole.rows.tobytes()
    assert replace(record, rows=whole.rows, sources_sha256="") == replace(whole, sources_sha256="")
    assert without_record([task]) == []
    assert nothing_unfinished(task)
    assert (task.out / task.name).stat().st_ino == shard


@pytest.mark.usefixtures("saved_at_every_block")
def test_several_processes_may_find_such_a_shard_at_the_same_moment(task: ShardTask, whole: ShardRecord) -> None:
    publish_unrecorded(task)
    barrier = threading.Barrier(4)

    def load(_: int) -> ShardRecord | None:
        barrier.wait(60)
        return load_record(task)

    with ThreadPoolExecutor(4) as pool:
        for record in pool.map(load, range(4)):
            assert record is not None
            assert record.entry == whole.entry


@pytest.mark.usefixtures("saved_at_every_block")
def test_a_shard_that_another_finds_before_it_is_recorded_is_recorded_all_the_same(
    task: ShardTask, whole: ShardRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(shard: writer.ShardFileWriter) -> None:
        real(shard)
        assert load_record(task) is not None

    real = writer.ShardFileWriter.publish
    monkeypatch.setattr(writer.ShardFileWriter, "publish", publish)
    assert go_on(task, whole) == 0
    assert load_record(task) is not None


@pytest.mark.usefixtures("saved_at_every_block")
@pytest.mark.parametrize("there", ["nothing", "of an earlier try"])
def test_a_record_that_was_written_ahead_does_not_count_for_another_shard(
    task: ShardTask, images: list[bytes], whole: ShardRecord, there: str
) -> None:
    if there != "nothing":  # with other pictures, and of the same size
        others = [jpeg(99) if data else data for data in images]
        do_task(replace(task, origin=Sources(others, {b"0": 1})), Reports().control(1))
        assert (task.out / task.name).stat().st_size == whole.entry.nbytes  # type: ignore[union-attr]
    with killed_before(writer.ShardFileWriter, "publish"):
        do_task(task, Reports().control(1))
    assert load_record(task) is None
    discard_record(task)
    sweep_unfinished(task.out)
    assert go_on(task, whole) > 0


@pytest.mark.usefixtures("saved_at_every_block")
def test_a_record_that_was_written_ahead_replaces_that_of_the_shard_before(task: ShardTask, whole: ShardRecord) -> None:
    before = replace(task, origin=Sources(origin_of(task).images, {b"0": 1}))
    do_task(before, Reports().control(1))
    publish_unrecorded(task)
    assert load_record(before) is None  # although its sources are the same: the shard is another one
    assert load_record(task) is not None


@pytest.mark.usefixtures("saved_at_every_block")
@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"file": [1]}', b"[" * 100_000, b"\xff", None])
def test_what_another_user_put_in_the_place_of_a_record_written_ahead_is_none(
    task: ShardTask, whole: ShardRecord, content: bytes | None
) -> None:
    publish_unrecorded(task)
    ahead = task.out / WORK_FOLDER / f"{task.name}.ahead"
    ahead.unlink()
    if content is None:
        os.mkfifo(ahead)
    else:
        ahead.write_bytes(content)
    assert load_record(task) is None
    sweep_unfinished(task.out)
    if content is not None:
        assert go_on(task, whole) == 0


@pytest.mark.usefixtures("saved_at_every_block")
def test_a_record_that_was_written_ahead_is_discarded_with_the_task(task: ShardTask) -> None:
    publish_unrecorded(task)
    discard_record(task)
    assert load_record(task) is None


def test_a_short_task_writes_nothing_ahead(task: ShardTask) -> None:
    with killed_before(writer.ShardFileWriter, "publish"):
        do_task(task, Reports().control(1))
    assert not list((task.out / WORK_FOLDER).glob("*.ahead"))


@pytest.mark.usefixtures("saved_at_every_block")
def test_a_task_without_a_sample_keeps_what_it_knows_until_it_is_recorded(task: ShardTask) -> None:
    empty = replace(task, origin=Sources([b""] * 40))
    stop(empty, 20)
    with killed_before(records, "write_atomic"):
        do_task(empty, Kept().control(1))
    reports = Kept()
    assert len(do_task(empty, reports.control(1)).rejects) == 40
    assert reports.kept >= 20
    assert nothing_unfinished(task)


# --- who goes on ------------------------------------------------------------------------------------------------------


def test_what_a_living_process_is_writing_is_left_to_it(task: ShardTask, whole: ShardRecord) -> None:
    reached, end = threading.Event(), threading.Event()

    class Waiting(Kept):
        def _report(self, done: int, refused: int, kept: int = 0) -> None:
            self.done += done
            if self.done == 35:
                reached.set()
                assert end.wait(60)

    stop(task, 31)
    data = the_data(task)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(do_task, task, Waiting().control(1))
        assert reached.wait(60)
        assert find_left(task.out, {task.name}) == {}
        sweep_unfinished(task.out)
        assert data.exists()
        reports = Kept()
        second = do_task(task, reports.control(1))
        assert reports.kept == 0
        assert data.exists()
        end.set()
        assert first.result(60).entry == second.entry == whole.entry
    assert nothing_unfinished(task)


def test_one_of_two_tasks_that_go_on_at_the_same_moment_takes_the_file_over(
    task: ShardTask, whole: ShardRecord
) -> None:
    for _ in range(10):
        stop(task, 31)
        barrier = threading.Barrier(2)
        both = [Kept(), Kept()]

        def work(reports: Kept, barrier: threading.Barrier = barrier) -> ShardRecord:
            barrier.wait(60)
            return do_task(
                task, Control(lambda *counts: setattr(reports, "kept", reports.kept + sum(counts[2:])), lambda: False)
            )

        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(work, reports) for reports in both]:
                assert future.result(60).entry == whole.entry
        assert sorted(reports.kept for reports in both) in ([0, 30], [0, 0])  # both may have looked at once
        assert nothing_unfinished(task)


def test_the_file_of_another_machine_is_copied_and_not_touched(
    task: ShardTask, whole: ShardRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(task, 31)
    data = the_data(task)
    before = data.read_bytes()
    monkeypatch.setattr(files, "_machine", lambda: "f" * 8)
    with data.open("rb") as held:  # its writer may be at work
        fcntl.flock(held, fcntl.LOCK_EX)
        reports = Kept()
        assert do_task(task, reports.control(1)).entry == whole.entry
    assert reports.kept == 30
    assert data.read_bytes() == before
    assert find_left(task.out, {task.name})[task.name][0].nbytes == 0
    sweep_unfinished(task.out)
    assert data.exists()
    os.utime(data, (0, 0))  # silent since 1970
    sweep_unfinished(task.out)
    assert nothing_unfinished(task)


def test_what_other_machines_have_left_again_and_again_does_not_pile_up(
    task: ShardTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        monkeypatch.setattr(files, "_machine", lambda number=number: f"{number:08x}")
        stop(task, 10 + 5 * number)
        for path in task.out.glob(".*.tmp"):
            os.utime(path, (0, 0))
    assert len(list(task.out.glob(".*.tmp"))) == 4
    monkeypatch.setattr(files, "_machine", lambda: "f" * 8)
    sweep_unfinished(task.out)
    assert len(list(task.out.glob(".*.tmp"))) == 1
    reports = Kept()
    do_task(task, reports.control(1))
    assert reports.kept >= 20


@pytest.mark.parametrize("label", [1 << 70, -1 << 64, True, 1.5, "1", None])
def test_a_journal_with_numbers_that_are_none_counts_up_to_them(task: ShardTask, label: Any) -> None:
    outcome = Outcome(Stored(0, 5, 6, 7, ""))
    temporary = task.out / f".{task.name}.{'0' * 8}-{'0' * 16}.tmp"
    Journal(temporary, "i", "abc").rewrite([outcome, Outcome(Stored(label, 5, 6, 7, "")), outcome])
    assert Journal(temporary, "i", "abc").read() == [outcome]


def test_the_longest_of_several_is_gone_on_with_and_the_others_are_swept(task: ShardTask, whole: ShardRecord) -> None:
    stop(task, 10)
    store = task.out.with_name("store")
    store.mkdir()
    short = the_data(task), the_journal(task)
    for path in short:
        shutil.move(path, store)
    stop(task, 31)
    for path in short:
        shutil.move(store / path.name, path)
    reports = Kept()
    assert do_task(task, reports.control(1)).entry == whole.entry
    assert reports.kept == 30
    assert short[0].exists()
    sweep_unfinished(task.out)
    assert nothing_unfinished(task)


def test_a_start_sweeps_what_cannot_be_gone_on_with_and_nothing_else(task: ShardTask) -> None:
    stop(task, 31)
    data, lines = the_data(task), the_journal(task)
    with AtomicFile(task.out / "train-00001.npy"):
        pass
    stranger = task.out / data.name.replace("train", "val")
    stranger.write_bytes(b"no journal")
    orphan = lines.with_name(lines.name.replace("train", "val").replace("00000", "00007"))
    orphan.write_bytes(lines.read_bytes())
    sweep_unfinished(task.out)
    assert data.exists()
    assert lines.exists()
    assert not stranger.exists()
    assert not orphan.exists()
    assert find_left(task.out, {task.name})[task.name][0].num_sources == 30
    sweep_temporaries(task.out)
    sweep_unfinished(task.out)
    assert nothing_unfinished(task)


def test_a_sweep_leaves_what_is_left_with_a_journal_while_it_looks(
    task: ShardTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(task, 31)
    data, lines = the_data(task), the_journal(task)
    away = lines.rename(task.out.with_name("away"))

    def look(path: Path) -> Any:
        away.rename(lines)  # just before its process unlocks it
        return real(path)

    real = files._open_left_over
    monkeypatch.setattr(files, "_open_left_over", look)
    sweep_unfinished(task.out)
    assert data.exists()
    assert lines.exists()


def test_processes_that_look_at_the_same_moment_find_the_same_left(task: ShardTask) -> None:
    stop(task, 31)
    with the_data(task).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)  # another process that looks does the same
        assert find_left(task.out, {task.name})[task.name][0].is_ours


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_a_short_task_has_no_journal_and_syncs_nothing_more(task: ShardTask, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **options: object) -> bool:
        raise AssertionError

    monkeypatch.setattr(journal.Journal, "save", never)
    monkeypatch.setattr(os, "fdatasync", never)
    do_task(task, Reports().control(2))


@pytest.mark.parametrize("seconds_per_source", [1.0, 3.0, 30.0])
def test_a_kill_costs_20_seconds_and_the_blocks_that_are_under_way(
    task: ShardTask, whole: ShardRecord, monkeypatch: pytest.MonkeyPatch, seconds_per_source: float
) -> None:
    clock = [1000.0]

    class Clock:
        monotonic = staticmethod(lambda: clock[0])

    monkeypatch.setattr(shardtask, "time", Clock)
    monkeypatch.setattr(journal, "time", Clock)

    class Timed(Kept):
        def _report(self, done: int, refused: int, kept: int = 0) -> None:
            super()._report(done, refused)
            clock[0] += seconds_per_source * (done - kept)

    kill(task, Timed(stop_after=39).control(1))
    lost = 39 - go_on(task, whole)
    assert lost * seconds_per_source < shardtask.SAVE_SECONDS + 2 * PER_BLOCK * seconds_per_source


def test_a_shard_past_the_page_cache_is_gone_on_with(
    tmp_path: Path, images: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    side = 64  # three pages
    monkeypatch.setattr(writer, "BLOCK_NBYTES", PER_BLOCK * side * side * 3)
    monkeypatch.setattr(writer, "_DIRECT_NBYTES", 0)
    for name in ("out", "undisturbed"):
        (tmp_path / name / WORK_FOLDER).mkdir(parents=True)
    sources = tuple(Source(b"%d" % i, i % 5) for i in range(len(images)))
    task = ShardTask(Sources(images), tmp_path / "out", "train", 0, sources, 4, ConvertOptions(Fit((side, side))))
    whole = do_task(replace(task, out=tmp_path / "undisturbed"), Reports().control(1))
    for after in (4, 20, 31):
        stop(task, after)
        assert go_on(task, whole, 2) in range((after - 1) // PER_BLOCK * PER_BLOCK, after + 1)
        np.load(task.out / task.name, mmap_mode="r")


# --- whole conversions ------------------------------------------------------------------------------------------------

ONE_SHARD: dict[str, Any] = {"size": 16, "order": "source"}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BLOCK_NBYTES", PER_BLOCK * 16 * 16 * 3)


def interrupted(src: Path, out: Path, after: int, **options: Any) -> str:
    """Returns the words of the exception of a conversion that gets a Ctrl-C after so many images."""
    with pytest.raises(KeyboardInterrupt) as caught:
        convert(src, out, on_progress=Interrupt(after), workers=1, **{**ONE_SHARD, **options})
    return str(caught.value)


@pytest.mark.usefixtures("small_blocks")
def test_an_interrupt_says_how_many_images_are_kept_and_the_next_call_begins_with_them(
    image_tree: Path, out: Path
) -> None:
    assert interrupted(image_tree, out, 2) == "no image is kept yet"
    assert interrupted(image_tree, out, 8) == f"6 of 18 images are kept in {out}"
    assert interrupted(image_tree, out, 14) == f"12 of 18 images are kept in {out}"
    seen: list[Progress] = []
    report = convert(image_tree, out, **ONE_SHARD, workers=1, on_progress=seen.append)
    assert [(progress.kept, progress.found) for progress in seen][:1] == [(12, 12)]
    assert seen[-1] == Progress(18, 0, 18, kept=12, found=12)
    assert report.num_converted == 6
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


@pytest.mark.usefixtures("small_blocks", "saved_at_every_block")
def test_a_conversion_counts_a_shard_that_was_published_and_not_recorded_as_kept(
    image_tree: Path, out: Path, tmp_path: Path
) -> None:
    with killed_before(records, "write_atomic", 2):
        convert(image_tree, out, **ONE_SHARD, workers=1)
    shards = {path.name: path.stat().st_ino for path in out.glob("*-[0-9]*.npy")}
    assert list(shards) == ["train-00000.npy"]
    seen: list[Progress] = []
    report = convert(image_tree, out, **ONE_SHARD, workers=1, on_progress=seen.append)
    assert seen[0].kept == seen[0].found > 0
    assert report.num_converted == report.num_sources - seen[0].found
    assert (out / "train-00000.npy").stat().st_ino == shards["train-00000.npy"]
    convert(image_tree, tmp_path / "undisturbed", **ONE_SHARD)
    assert hashes(out) == hashes(tmp_path / "undisturbed")


@pytest.mark.usefixtures("small_blocks")
def test_a_shard_that_is_made_again_for_a_changed_image_is_gone_on_with_like_any_other(
    image_tree: Path, out: Path
) -> None:
    with killed_before(Conversion, "_publish"):
        convert(image_tree, out, **ONE_SHARD, workers=1)
    changed = image_tree / "train" / "n02" / "n02_3.JPEG"  # the eighth
    shutil.copy(image_tree / "train" / "n01" / "n01_0.JPEG", changed)
    for after in (3 + 8, 3 + 11):  # of val there are three
        assert interrupted(image_tree, out, after).startswith(f"{after - 2} of 18")
    assert convert(image_tree, out, **ONE_SHARD, workers=1).num_converted == 18 - 12


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("how", ["two threads", "processes", "executor", "parts"])
def test_any_way_of_going_on_gives_the_same_bytes(image_tree: Path, out: Path, tmp_path: Path, how: str) -> None:
    convert(image_tree, tmp_path / "undisturbed", **ONE_SHARD)
    interrupted(image_tree, out, 8)
    match how:
        case "two threads":
            reports = [convert(image_tree, out, **ONE_SHARD, workers=2)]
        case "processes":
            reports = [convert(image_tree, out, **ONE_SHARD, workers=5)]
        case "executor":
            with ThreadPoolExecutor(2) as pool:
                reports = [convert(image_tree, out, **ONE_SHARD, executor=pool)]
        case _:
            reports = [convert(image_tree, out, **ONE_SHARD, workers=1, part=(k, 2)) for k in (2, 1)]
    assert sum(report.num_converted for report in reports) == 12
    assert hashes(out) == hashes(tmp_path / "undisturbed")


@pytest.mark.usefixtures("small_blocks")
def test_what_too_many_refused_images_stopped_is_kept_and_going_on_is_refused_until_they_are_mended(
    image_tree: Path, out: Path, tmp_path: Path
) -> None:
    bad = image_tree / "train" / "n02" / "n02_3.JPEG"  # the eighth
    sound = bad.read_bytes()
    bad.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(ConvertError, match="expected at most 0 refused images of 18, found 1"):
            convert(image_tree, out, **ONE_SHARD, workers=1, max_bad=0)
    bad.write_bytes(sound)
    report = convert(image_tree, out, **ONE_SHARD, workers=1, max_bad=0)
    assert report.num_converted == 18 - 6
    convert(image_tree, tmp_path / "undisturbed", **ONE_SHARD)
    assert hashes(out) == hashes(tmp_path / "undisturbed")


@pytest.mark.usefixtures("small_blocks")
def test_the_room_that_an_unfinished_shard_has_is_not_asked_for_again(
    image_tree: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(image_tree, out, 8)
    free = 4096 + 6 * 16 * 16 * 3  # for val; of train a temporary file of full size is there

    def usage(free: int) -> Callable[[Path], Any]:
        return lambda path: shutil._ntuple_diskusage(1 << 40, 0, free)  # type: ignore[attr-defined]

    monkeypatch.setattr(shutil, "disk_usage", usage(free - 1))
    with pytest.raises(SpaceError, match=f"expected room for {free:,} bytes more"):
        convert(image_tree, out, **ONE_SHARD, workers=1)
    monkeypatch.setattr(shutil, "disk_usage", usage(free))
    convert(image_tree, out, **ONE_SHARD, workers=1)


def test_the_bar_counts_what_was_kept_as_found_and_not_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bars: list[Any] = []
    clock = [1000.0]

    class Timed(ImagesBar):
        def __init__(self, **options: Any) -> None:
            monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
            super().__init__(**{**options, "mininterval": 0})
            self._time = lambda: clock[0]
            self.start_t = self.last_print_t = clock[0]
            bars.append(self)

        def reset(self, total: float | None = None) -> None:
            super().reset(total)
            self.start_t = self.last_print_t = clock[0]

    def fake(*args: Any, on_progress: Callable[[Progress], None], **options: Any) -> Any:
        on_progress(Progress(21_844, 0, 40_000, 0, 21_844, 37_016))
        clock[0] += 1
        on_progress(Progress(37_016, 0, 40_000, 0, 37_016, 37_016))
        for more in range(1, 101):
            clock[0] += 0.01
            on_progress(Progress(37_016 + more, 0, 40_000, 0, 37_016, 37_016))
        raise KeyboardInterrupt("37,116 of 40,000 images are kept in out")

    monkeypatch.setattr("shardio.conversion.progress.ImagesBar", Timed)
    monkeypatch.setattr("shardio.conversion.convert.convert", fake)
    with pytest.raises(KeyboardInterrupt):
        run_convert(tmp_path, tmp_path / "out", as_json=False)
    (bar,) = bars
    state = bar.format_dict
    assert (state["n"], state["initial"], state["total"]) == (37_116, 37_016, 40_000)
    assert state["rate"] is None or state["rate"] <= 101
    assert (state["n"] - state["initial"]) / state["elapsed"] <= 51
    text = capsys.readouterr().err
    assert "shardio: going on: 37,016 of 40,000 images were kept\n" in text
    assert text.endswith("shardio: 37,116 of 40,000 images are kept in out; run the same command again to go on\n")
    rates = [float(found.replace(",", "")) for found in re.findall(r"([\d.,]+) images/s", text)]
    assert rates
    assert max(rates) <= 101

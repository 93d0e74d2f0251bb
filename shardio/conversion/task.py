"""Doing one shard task: read, decode, resize, write; and the record that says it is done.

A task can be done any number of times, by anyone, with the same bytes. Its record, written after the shard is
published, lets a later run of the same conversion skip it, for as long as its sources have not changed. Until then a
journal says how far it is, and a later run goes on behind the last source that is durable and has not changed.
The record of a task that has a journal is also written ahead of the shard's name, for a run that is killed in between.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.duplicates import HASH_NBYTES, UNREAD, hash_source
from shardio.conversion.images.decode import decode_image, decode_object
from shardio.conversion.images.warned import KeptWarnings
from shardio.conversion.journal import Journal, Left, Outcome, Refusal, Sample, find_left
from shardio.conversion.plan import ShardTask, library_versions
from shardio.conversion.sources.collection import UNREADABLE, Given, Source, digest
from shardio.conversion.writing.set_writer import Reject
from shardio.conversion.writing.shard_file import ShardFileWriter
from shardio.errors import DecodeError, FormatError
from shardio.format.checksum import crc32
from shardio.format.layout import WORK_FOLDER, index_dtype
from shardio.format.manifest import ShardEntry
from shardio.system.files import AtomicFile, write_all, write_atomic
from shardio.system.filesystems import filesystem_kind, is_network
from shardio.system.opening import OpenFile, naming, open_untrusted, read_untrusted
from shardio.system.threads import ThreadPool

# Sources that a thread takes at a time. Handing each over by itself would cost the GIL and a switch of threads; with
# many, threads would stand idle at the end of a shard, and a refused image or a Ctrl-C be noticed late.
_PER_HANDOVER = 4
# Samples that are begun, at least, beyond the block that is waited for: enough for no thread to run dry.
_AHEAD_PER_THREAD = 2 * _PER_HANDOVER
# How much work a kill may cost, beside the block of 8 MiB that is being filled. What is saved more often costs flushes
# of the disk's cache; a minute is what people forgive.
SAVE_SECONDS = 20.0


@dataclass(frozen=True)
class Mended:
    """A source that was taken although something had to be mended, or a library warned of it."""

    split: str
    key: bytes
    warning: str


@dataclass(frozen=True)
class ShardRecord:
    """What is known of a task that is done. `entry` is None if every one of its sources was refused."""

    entry: ShardEntry | None
    rows: NDArray[np.void]
    rejects: tuple[Reject, ...]
    mended: tuple[Mended, ...]
    sources_sha256: str
    hashes: bytes | None = None
    """Of the task's sources, end to end and in order, if the task asked for them."""

    @property
    def num_sources(self) -> int:
        return len(self.rows) + len(self.rejects)

    @property
    def has_unreadable(self) -> bool:
        """Whether a source could not be read, which may have been a passing fault of its storage."""
        return any(reject.reason == UNREADABLE for reject in self.rejects)


class Report(Protocol):
    def __call__(self, done: int, refused: int, kept: int = 0, /) -> None:
        """Called with what is done since the last call: sources, of these refused, of these kept of an earlier try."""


class Stopped(Exception):
    """A task was told to stop. What it had done is saved for the next try."""


@dataclass(frozen=True)
class Control:
    """How a running task talks to whoever runs it."""

    report: Report
    stopped: Callable[[], bool]
    threads: int = 1


def _prepare(task: ShardTask, source: Source, place: NDArray[np.uint8]) -> Outcome:
    """Read, decode and resize one source into `place`, which holds anything if it is refused."""
    hashed = None
    with KeptWarnings() as warned:
        try:
            found = task.origin.read(source)
            least_size = task.fit.least_size if task.quality == "fast" else None
            if isinstance(found, Given):
                decoded, label = decode_object(found.image, task.decode, least_size=least_size), found.label
            else:
                if task.hash_sources:
                    hashed = hash_source(found)
                decoded, label = decode_image(found, task.decode, least_size=least_size), source.label
            np.copyto(place, task.fit.apply(decoded.pixels, decoded.source_size, decoded.reduction))
        except DecodeError as error:
            return Outcome(Refusal(error.reason, error.detail), hashed)
    warning = "; ".join(dict.fromkeys(" ".join(text.split()) for text in (decoded.warning, *warned) if text))
    return Outcome(Sample(label, decoded.source_size, crc32(place), warning), hashed)


_Block = tuple[NDArray[np.uint8], Iterator[tuple[Source, Outcome]]]
_Part = tuple[Sequence[Source], NDArray[np.uint8]]


def _prepare_blocks(task: ShardTask, shard: ShardFileWriter, threads: int, first: int) -> Generator[_Block, None, None]:
    """The shard's blocks, each with its sources and their outcomes in order: row i belongs to the i-th of them.

    `first` is the source to begin with.

    While the outcomes of one block are waited for, the threads go on to the next. With one thread nothing runs beside
    the caller: a source is prepared when its outcome is asked for.
    """
    stopped: list[None] = []  # no Event: a set() that is interrupted may leave its lock locked

    def prepare(part: _Part) -> list[tuple[Source, Outcome]]:
        pairs = zip(*part, strict=True)
        return [(source, _prepare(task, source, place)) for source, place in pairs if not stopped]

    with contextlib.ExitStack() as stack:
        run: Callable[..., Iterator[list[tuple[Source, Outcome]]]] = map
        step, ahead = 1, 0
        if threads > 1:
            pool = stack.enter_context(ThreadPool(threads, "shardio-decode"))
            stack.callback(stopped.append, None)
            run, step, ahead = pool.map, _PER_HANDOVER, _AHEAD_PER_THREAD * threads
        under_way: deque[_Block] = deque()
        while first < len(task.sources):
            block = shard.take_block()
            sources = task.sources[first : first + len(block)]
            places = block[: len(sources)]
            parts = [(sources[i : i + step], places[i : i + step]) for i in range(0, len(sources), step)]
            under_way.append((block, chain.from_iterable(run(prepare, parts))))
            first += len(sources)
            if (len(under_way) - 1) * len(block) >= ahead:
                yield under_way.popleft()
        yield from under_way


def reject_of(task: ShardTask, source: Source) -> Reject | None:
    """Why this source of the task is refused, found out anew; None if it is not."""
    result = _prepare(task, source, np.empty((*task.fit.size, 3), np.uint8)).result
    return _reject(task, source, result) if isinstance(result, Refusal) else None


def _reject(task: ShardTask, source: Source, refusal: Refusal) -> Reject:
    return Reject(task.split, source.key, refusal.reason, refusal.detail)


class _Results:
    """What has become of a task's sources, in their order."""

    def __init__(self, task: ShardTask, shard: ShardFileWriter) -> None:
        self._task = task
        self._shard = shard
        self.rejects: list[Reject] = []
        self.mended: list[Mended] = []
        self._hashes: list[bytes | None] = []

    def add(self, source: Source, outcome: Outcome) -> bool:
        """Take the next one; whether it is a sample."""
        task, result = self._task, outcome.result
        if isinstance(result, Refusal):
            self._hashes.append(outcome.hash or UNREAD)
            self.rejects.append(_reject(task, source, result))
            if task.expected_sha256 is None:
                _note_refused(task, self.rejects[-1])
            return False
        self._hashes.append(outcome.hash)
        self._shard.rows.append(label=result.label, key=source.key, source_size=result.source_size, crc32=result.crc32)
        if result.warning:
            self.mended.append(Mended(task.split, source.key, result.warning))
        return True

    @property
    def hashes(self) -> bytes | None:
        """Of all sources, end to end. None if the task, or the earlier try it goes on from, did not ask for them."""
        known = [one for one in self._hashes if one is not None]
        return b"".join(known) if self._task.hash_sources and len(known) == len(self._hashes) else None


def do_task(task: ShardTask, control: Control) -> ShardRecord:
    """Make the task's shard and its record. Raises Stopped if `control` says so.

    Goes on where an earlier try was stopped or killed. In a published set, which the task repairs, nothing is written
    but the shard, and only if it is the one expected.
    """
    if control.stopped():
        raise Stopped
    fingerprints = task.origin.fingerprints(task.sources)  # first: a source that is replaced meanwhile is seen later
    repairs = task.expected_sha256 is not None
    if not repairs:
        _refused_path(task).unlink(missing_ok=True)  # of an earlier try
    with _open_shard(task, control, fingerprints) as (shard, journal, kept):
        results = _Results(task, shard)
        for source, outcome in zip(task.sources, kept, strict=False):
            results.add(source, outcome)
        if kept:
            control.report(len(kept), len(results.rejects), len(kept))
        # Closed here and not when the garbage collector comes by: it may have threads.
        with contextlib.closing(_prepare_blocks(task, shard, control.threads, len(kept))) as blocks:
            for block, outcomes in blocks:
                rows = []
                for row, (source, outcome) in enumerate(outcomes):
                    if control.stopped():
                        raise Stopped
                    is_sample = results.add(source, outcome)
                    journal.add(outcome)
                    if is_sample:
                        rows.append(row)
                    control.report(1, int(not is_sample))
                is_due = not repairs and time.monotonic() - journal.saved_at >= SAVE_SECONDS
                shard.write_block(block, rows, journal.save if is_due else None)
        record = ShardRecord(
            shard.complete() if len(shard.rows) else None,
            shard.rows.to_array(task.key_nbytes),
            tuple(results.rejects),
            tuple(results.mended),
            digest(fingerprints),
            results.hashes,
        )
        if repairs:
            if record.entry is not None and record.entry.sha256 == task.expected_sha256:
                shard.publish()
            return record
        if record.entry is not None:
            if journal.exists:  # else the shard took so little time that it may as well be made again
                write_atomic(_ahead_path(task), _dump_record(record, file=_identify_file(shard.temporary)))
            shard.publish()
        write_atomic(_record_path(task), _dump_record(record))
        shard.discard()  # which has a file still if it has no sample
    with contextlib.suppress(OSError):  # they do no harm
        journal.remove()
        _ahead_path(task).unlink(missing_ok=True)
    return record


@contextlib.contextmanager
def _open_shard(
    task: ShardTask, control: Control, fingerprints: Sequence[str]
) -> Iterator[tuple[ShardFileWriter, Journal, list[Outcome]]]:
    """The shard to write, its journal, and what became of the sources that an earlier try has done.

    If the block raises, what is done is saved for the next try.
    """
    path, identity = task.out / task.name, _identify(task)
    kept: list[Outcome] = []
    with contextlib.ExitStack() as stack:
        left, file, copy_from = _take_over(task)
        if file is not None:
            stack.callback(file.leave)
        if copy_from is not None:
            stack.enter_context(copy_from)
        shard = stack.enter_context(ShardFileWriter(path, (*task.fit.size, 3), len(task.sources), file))
        journal = Journal(shard.temporary, identity, fingerprints)
        try:
            if left is not None:
                kept = _before_unreadable(Journal(left.temporary, identity, fingerprints).read())
                crc32s = [outcome.result.crc32 for outcome in kept if isinstance(outcome.result, Sample)]
                for _ in shard.recover(crc32s, None if copy_from is None else copy_from.fileno()):
                    if control.stopped():
                        raise Stopped
                kept = _before_sample(kept, shard.num_written)
                journal.rewrite(kept)
            yield shard, journal, kept
        except BaseException as error:
            if task.expected_sha256 is None:
                # The page cache would give back what the disk, or the server, has not taken, and never will. Errors
                # of other files, such as a source that cannot be opened, say nothing of this one.
                if (
                    isinstance(error, OSError)
                    and error.filename == str(path)
                    and (error.errno == errno.EIO or is_network(filesystem_kind(task.out)))
                ):
                    shard.discard()
                else:
                    with contextlib.suppress(OSError):
                        shard.suspend(partial(journal.save, durably=False))
            raise


def _take_over(task: ShardTask) -> tuple[Left | None, AtomicFile | None, OpenFile | None]:
    """What an earlier try has left of the shard: its file to go on with, or to copy from if it is another machine's."""
    if task.expected_sha256 is not None:
        return None, None, None
    for left in find_left(task.out, {task.name}).get(task.name, ()):
        if not left.is_ours:
            with contextlib.suppress(OSError, FormatError):
                return left, None, open_untrusted(left.temporary)
        elif (file := AtomicFile.take_over(task.out / task.name, left.temporary)) is not None:
            return left, file, None
    return None, None, None


def _identify(task: ShardTask) -> str:
    """Differs if the bytes of the shard may differ, though no source has changed."""
    facts = (task.split, task.number, task.key_nbytes, task.fit, task.decode, task.quality, library_versions())
    sha256 = hashlib.sha256(repr(facts).encode())
    for source in task.sources:
        sha256.update(b"\0%d %s" % (source.label, source.key))
    return sha256.hexdigest()


def _before_unreadable(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those before the first source that could not be read: that may pass."""

    def was_read(outcome: Outcome) -> bool:
        return not (isinstance(outcome.result, Refusal) and outcome.result.reason == UNREADABLE)

    return list(takewhile(was_read, outcomes))


def _before_sample(outcomes: Sequence[Outcome], number: int) -> list[Outcome]:
    found = []
    for outcome in outcomes:
        if isinstance(outcome.result, Sample):
            if not number:
                break
            number -= 1
        found.append(outcome)
    return found


# --- records ---------------------------------------------------------------------------------------------------------


def _record_path(task: ShardTask) -> Path:
    return task.out / WORK_FOLDER / f"{task.name}.json"


def _ahead_path(task: ShardTask) -> Path:
    """The record, written before the shard is published, so that a kill between the two loses nothing."""
    return task.out / WORK_FOLDER / f"{task.name}.ahead"


def _identify_file(path: Path) -> list[int]:
    """Stays the same when the file is renamed, and differs from any other's that had the name before or comes later."""
    status = path.stat()
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def _adopt_ahead(task: ShardTask) -> None:
    """Have what was written ahead be the record, if the shard there is the very file that it was written for.

    That file was synced before it got its name, so it is as whole as one with a record.
    """
    path = _ahead_path(task)
    try:
        is_published = json.loads(read_untrusted(path))["file"] == _identify_file(task.out / task.name)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return
    if is_published:
        with contextlib.suppress(FileNotFoundError):  # another process was quicker
            path.replace(_record_path(task))


def without_record(tasks: Sequence[ShardTask]) -> list[ShardTask]:
    """Those of the tasks that nobody has recorded as done. FileNotFoundError if there is no work folder any more.

    Whether the sources are still the same is not looked at. Reads the folder's listing, which a network filesystem
    makes anew once this process has written there; of a single file that was not there when it was looked for, it may
    go on for a while to tell that it is not.
    """
    if not tasks:
        return []
    there = set(os.listdir(tasks[0].out / WORK_FOLDER))
    return [task for task in tasks if _record_path(task).name not in there]


def discard_record(task: ShardTask) -> None:
    """Have the task count as not done: nobody publishes its shard, which is about to be replaced by another."""
    for path in (_ahead_path(task), _record_path(task)):
        path.unlink(missing_ok=True)


def _refused_path(task: ShardTask) -> Path:
    """Lines of rejects.jsonl, one as each source is refused: what is known of a task that does not come to its end."""
    return task.out / WORK_FOLDER / f"{task.name}.refused.jsonl"


def _note_refused(task: ShardTask, reject: Reject) -> None:
    path = _refused_path(task)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    with naming(path), open_untrusted(path, flags, sole_name=True) as file:
        write_all(file.fileno(), reject.to_line())


def refused_so_far(task: ShardTask) -> list[bytes]:
    """The lines of rejects.jsonl for a task in any state, in the order of its sources."""
    path = _refused_path(task)
    try:
        lines = read_untrusted(path).splitlines(keepends=True)
    except FileNotFoundError:
        return []
    places = {source.key: number for number, source in enumerate(task.sources)}
    found: dict[int, bytes] = {}
    for line in lines:
        # Two may do the task at the same time, and a full disk may have cut a line.
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            found[places[os.fsencode(json.loads(line)["key"])]] = line
    return [line for _, line in sorted(found.items())]


def _dump_record(record: ShardRecord, **more: object) -> bytes:
    document = {
        "entry": record.entry and asdict(record.entry),
        "rows": base64.b64encode(record.rows.tobytes()).decode("ascii"),
        "rejects": [[r.split, os.fsdecode(r.key), r.reason, r.detail] for r in record.rejects],
        "mended": [[m.split, os.fsdecode(m.key), m.warning] for m in record.mended],
        "sources_sha256": record.sources_sha256,
        "hashes": record.hashes and base64.b64encode(record.hashes).decode("ascii"),
        **more,
    }
    return json.dumps(document).encode("ascii")


def load_record(task: ShardTask) -> ShardRecord | None:
    """The record of a task that is done and whose sources are still the same; None if it must be done."""
    _adopt_ahead(task)
    try:
        document = json.loads(read_untrusted(_record_path(task)))
        entry = document["entry"] and ShardEntry(**document["entry"])
        record = ShardRecord(
            entry,
            np.frombuffer(base64.b64decode(document["rows"]), index_dtype(task.key_nbytes)),
            tuple(Reject(split, os.fsencode(key), *rest) for split, key, *rest in document["rejects"]),
            tuple(Mended(split, os.fsencode(key), warning) for split, key, warning in document["mended"]),
            document["sources_sha256"],
            document["hashes"] and base64.b64decode(document["hashes"]),
        )
        if record.hashes and len(record.hashes) != len(task.sources) * HASH_NBYTES:
            return None
        if entry and (task.out / entry.file).stat().st_size != entry.nbytes:
            return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None  # no record, or one that somebody spoilt: the work is done again
    return record if record.sources_sha256 == digest(task.origin.fingerprints(task.sources)) else None

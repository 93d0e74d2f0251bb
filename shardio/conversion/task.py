"""Does one shard task: reads, decodes, resizes and writes its images, then the arrays that go with them, and leaves the
records that say so.

A task can be done any number of times, by any process, with the same bytes. Its record lets a later run of the same
conversion skip it. Until then a journal says how far it is, and a later run goes on behind the last source that is
durable and has not changed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, takewhile
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.array_files import make_arrays
from shardio.conversion.duplicates import UNREAD, hash_source
from shardio.conversion.images.decode import decode_image
from shardio.conversion.images.warned import KeptWarnings
from shardio.conversion.journal import Journal, Left, Outcome, Refusal, Stored, find_left
from shardio.conversion.plan import ShardTask, library_versions
from shardio.conversion.records import (
    Mended,
    ShardRecord,
    discard_ahead,
    discard_refused,
    find_shard,
    note_refused,
    save_ahead,
    save_record,
)
from shardio.conversion.sources.collection import UNREADABLE, Given, Source, digest
from shardio.conversion.values import check_values
from shardio.conversion.writing.set_writer import Reject
from shardio.conversion.writing.shard_file import ShardFileWriter
from shardio.errors import DecodeError, FormatError
from shardio.format.checksum import crc32
from shardio.system.files import AtomicFile
from shardio.system.machine import filesystem_kind, is_network
from shardio.system.opening import OpenFile, open_untrusted
from shardio.system.threads import ThreadPool

# Sources that a thread takes at a time. Handing each over by itself would cost the GIL and a switch of threads; with
# many, threads would stand idle at the end of a shard, and a refused image or a Ctrl-C be noticed late.
_PER_HANDOVER = 4
# Samples that are begun, at least, beyond the block that is waited for: enough for no thread to run dry.
_AHEAD_PER_THREAD = 2 * _PER_HANDOVER
# How much work a kill may cost, beside the block of 8 MiB that is being filled. Saving more often costs flushes of
# the disk's cache; a minute is what people forgive.
SAVE_SECONDS = 20.0


class Report(Protocol):
    def __call__(self, done: int, refused: int, kept: int = 0, /) -> None:
        """Takes what is done since the last call: sources, of these refused, of these kept from an earlier try."""


class Stopped(Exception):
    """A task was told to stop. The work that it had done is saved for the next try."""


@dataclass(frozen=True)
class Control:
    """The way in which a running task talks to the engine that runs it."""

    report: Report
    stopped: Callable[[], bool]
    threads: int = 1


def _prepare(task: ShardTask, source: Source, row: NDArray[np.uint8]) -> Outcome:
    """Reads, decodes and resizes one source into `row`, which holds anything if it is refused."""
    options, hashed = task.options, UNREAD if task.hash_sources else None
    with KeptWarnings() as warned:
        try:
            found = task.origin.read(source)
            if isinstance(found, Given):
                image, label = found.image, found.label
            else:
                image, label = found, source.label
                if task.hash_sources:
                    hashed = hash_source(found)
            decoded = decode_image(image, options.decode, least_size=options.least_size)
            options.fit.apply(decoded.pixels, decoded.source_size, decoded.reduction, row)
            if task.arrays:
                check_values(task, source, found, decoded)
        except DecodeError as error:
            return Outcome(Refusal(error.reason, error.detail), hashed)
    warning = "; ".join(dict.fromkeys(" ".join(text.split()) for text in (decoded.warning, *warned) if text))
    return Outcome(Stored(label, *decoded.source_size, crc32(row), warning), hashed)


_Block = tuple[NDArray[np.uint8], Iterator[tuple[Source, Outcome]]]
_Handover = tuple[Sequence[Source], NDArray[np.uint8]]


def _prepare_blocks(task: ShardTask, shard: ShardFileWriter, threads: int, first: int) -> Generator[_Block, None, None]:
    """Yields the shard's blocks from the source `first` on, each with its sources and their outcomes: row i belongs to
    the i-th of them.

    While the outcomes of one block are waited for, the threads go on to the next. With one thread nothing runs beside
    the caller: a source is prepared when its outcome is asked for.
    """
    stopped: list[None] = []  # no Event: a set() that is interrupted may leave its lock locked

    def prepare(handover: _Handover) -> list[tuple[Source, Outcome]]:
        pairs = zip(*handover, strict=True)
        return [(source, _prepare(task, source, row)) for source, row in pairs if not stopped]

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
            rows = block[: len(sources)]
            handovers = [(sources[i : i + step], rows[i : i + step]) for i in range(0, len(sources), step)]
            under_way.append((block, chain.from_iterable(run(prepare, handovers))))
            first += len(sources)
            if (len(under_way) - 1) * len(block) >= ahead:
                yield under_way.popleft()
        yield from under_way


def reject_of(task: ShardTask, source: Source) -> Reject | None:
    """Returns why this source of the task is refused, found out anew; None if it is not."""
    result = _prepare(task, source, np.empty(task.options.sample_shape, np.uint8)).result
    return Reject(task.split, source.key, *result) if isinstance(result, Refusal) else None


class _Results:
    """The outcomes of a task's sources, in their order."""

    def __init__(self, task: ShardTask, shard: ShardFileWriter) -> None:
        self._task = task
        self._shard = shard
        self.rejects: list[Reject] = []
        self.mended: list[Mended] = []
        self._hashes: list[bytes | None] = []

    def add(self, source: Source, outcome: Outcome) -> bool:
        """Takes the next one, and returns whether it is a sample."""
        task, result = self._task, outcome.result
        self._hashes.append(outcome.hash)
        if isinstance(result, Refusal):
            self.rejects.append(Reject(task.split, source.key, *result))
            if task.expected_sha256 is None:
                note_refused(task, self.rejects[-1])
            return False
        size = result.source_height, result.source_width
        self._shard.rows.append(label=result.label, key=source.key, source_size=size, crc32=result.crc32)
        if result.warning:
            self.mended.append(Mended(task.split, source.key, result.warning))
        return True

    @property
    def hashes(self) -> bytes | None:
        """The hashes of all sources, end to end; None if the task, or the try it goes on from, did not take them."""
        known = [one for one in self._hashes if one is not None]
        return b"".join(known) if self._task.hash_sources and len(known) == len(self._hashes) else None


def do_task(task: ShardTask, control: Control) -> ShardRecord:
    """Makes the task's shard and arrays, and their records. Raises Stopped if `control` says so.

    Goes on where an earlier try was stopped or killed: a finished shard is not made again for its arrays. In a
    published set, which the task repairs, nothing is written but the shard, and only if it is the one expected.
    """
    if not task.arrays or task.expected_sha256 is not None:
        return _make_shard(task, control)
    record = find_shard(task)
    if record is None:
        record = _make_shard(task, control)
    else:
        control.report(record.num_sources, len(record.rejects), record.num_sources)

    def on_block() -> None:
        if control.stopped():
            raise Stopped
        control.report(0, 0)  # which raises what is to end the work

    return replace(record, arrays=make_arrays(task, record, control.threads, on_block))


def _make_shard(task: ShardTask, control: Control) -> ShardRecord:
    """Makes the task's shard and its record. Raises Stopped if `control` says so.

    Goes on where an earlier try was stopped or killed. In a published set, which the task repairs, nothing is written
    but the shard, and only if it is the one expected.
    """
    if control.stopped():
        raise Stopped
    fingerprints = task.origin.fingerprints(task.sources)  # first: a source that is replaced meanwhile is seen later
    repairs = task.expected_sha256 is not None
    if not repairs:
        discard_refused(task)  # by an earlier try
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
                save_ahead(task, record, shard.temporary)
            shard.publish()
        save_record(task, record)
        shard.discard()  # which has a file still if it has no sample
    with contextlib.suppress(OSError):  # they do no harm
        journal.remove()
        discard_ahead(task)
    return record


@contextlib.contextmanager
def _open_shard(
    task: ShardTask, control: Control, fingerprints: Sequence[str]
) -> Iterator[tuple[ShardFileWriter, Journal, list[Outcome]]]:
    """Yields the shard to write, its journal, and the outcomes of the sources that an earlier try has done.

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
        shard = stack.enter_context(ShardFileWriter(path, task.options.sample_shape, len(task.sources), file))
        journal = Journal(shard.temporary, identity, fingerprints)
        try:
            if left is not None:
                found = Journal(left.temporary, identity, fingerprints).read()
                kept = list(takewhile(lambda outcome: not _is_unreadable(outcome), found))
                crc32s = [outcome.result.crc32 for outcome in kept if isinstance(outcome.result, Stored)]
                for _ in shard.recover(crc32s, None if copy_from is None else copy_from.fileno()):
                    if control.stopped():
                        raise Stopped
                counts = accumulate(isinstance(outcome.result, Stored) for outcome in kept)
                kept = [outcome for outcome, count in zip(kept, counts, strict=True) if count <= shard.num_written]
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
    """Returns what an earlier try has left: its file to go on with, or to copy from if it is another machine's."""
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
    """Returns a text that differs if the bytes of the shard may differ, though no source has changed."""
    options = task.options
    facts = (task.split, task.number, task.key_nbytes, options.fit, options.decode, options.quality, library_versions())
    sha256 = hashlib.sha256(repr(facts).encode())
    if task.arrays:  # their sources may be the reason why one is refused
        sha256.update(repr(task.arrays).encode())
    for source in task.sources:
        sha256.update(b"\0%d %s" % (source.label, source.key))
    return sha256.hexdigest()


def _is_unreadable(outcome: Outcome) -> bool:
    """Whether the source could not be read, which may have been a passing fault."""
    return isinstance(outcome.result, Refusal) and outcome.result.reason == UNREADABLE

"""Doing one shard task: read, decode, resize, write; and the record that says it is done.

A task can be done any number of times, by anyone, with the same bytes. Its record, written after the shard is
published, lets a later run of the same conversion skip it, for as long as its sources have not changed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardio.checksum import crc32
from shardio.decode import decode_image, decode_object
from shardio.duplicates import HASH_NBYTES, UNREAD, hash_source
from shardio.errors import DecodeError
from shardio.files import naming, open_untrusted, read_untrusted, write_all, write_atomic
from shardio.format import WORK_FOLDER, index_dtype
from shardio.manifest import ShardEntry
from shardio.plan import ShardTask
from shardio.setwriter import Reject
from shardio.sources import UNREADABLE, Given, Source
from shardio.writer import ShardFileWriter

# Sources that a thread takes at a time. Handing each over by itself would cost the GIL and a switch of threads; with
# many, threads would stand idle at the end of a shard, and a refused image or a Ctrl-C be noticed late.
_PER_HANDOVER = 4
# Samples that are begun, at least, beyond the block that is waited for: enough for no thread to run dry.
_AHEAD_PER_THREAD = 2 * _PER_HANDOVER


@dataclass(frozen=True)
class Mended:
    """A source that was taken although something had to be mended."""

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


Report = Callable[[int, int], None]
"""Called with (sources done, of these refused) since the last call."""


class Stopped(Exception):
    """A task was told to stop, and left nothing behind but the list of what it had refused."""


@dataclass(frozen=True)
class Control:
    """How a running task talks to whoever runs it."""

    report: Report
    stopped: Callable[[], bool]
    threads: int = 1


@dataclass(frozen=True)
class _Sample:
    """What is known of a sample whose pixels are where they belong."""

    label: int
    source_size: tuple[int, int]
    crc32: int
    warning: str


_Outcome = _Sample | DecodeError
_Hashes = dict[bytes, bytes]


def _prepare(task: ShardTask, source: Source, place: NDArray[np.uint8], hashes: _Hashes) -> _Outcome:
    """Read, decode and resize one source into `place`, which holds anything if it is refused."""
    try:
        found = task.origin.read(source)
        least_size = task.fit.least_size if task.quality == "fast" else None
        if isinstance(found, Given):
            decoded, label = decode_object(found.image, task.decode, least_size=least_size), found.label
        else:
            if task.hash_sources:
                hashes[source.key] = hash_source(found)
            decoded, label = decode_image(found, task.decode, least_size=least_size), source.label
        np.copyto(place, task.fit.apply(decoded.pixels, decoded.source_size, decoded.reduction))
        return _Sample(label, decoded.source_size, crc32(place), decoded.warning)
    except DecodeError as error:
        return error


_Block = tuple[NDArray[np.uint8], Iterator[tuple[Source, _Outcome]]]
_Part = tuple[Sequence[Source], NDArray[np.uint8]]


def _prepare_blocks(
    task: ShardTask, shard: ShardFileWriter, threads: int, hashes: _Hashes
) -> Generator[_Block, None, None]:
    """The shard's blocks, each with its sources and their outcomes in order: row i belongs to the i-th of them.

    While the outcomes of one block are waited for, the threads go on to the next. With one thread nothing runs beside
    the caller: a source is prepared when its outcome is asked for.
    """
    stop = threading.Event()

    def prepare(part: _Part) -> list[tuple[Source, _Outcome]]:
        pairs = zip(*part, strict=True)
        return [(source, _prepare(task, source, place, hashes)) for source, place in pairs if not stop.is_set()]

    with contextlib.ExitStack() as stack:
        run: Callable[..., Iterator[list[tuple[Source, _Outcome]]]] = map
        step, ahead = 1, 0
        if threads > 1:
            pool = ThreadPoolExecutor(threads, thread_name_prefix="shardio-decode")
            stack.callback(pool.shutdown, cancel_futures=True)
            stack.callback(stop.set)
            run, step, ahead = pool.map, _PER_HANDOVER, _AHEAD_PER_THREAD * threads
        under_way: deque[_Block] = deque()
        first = 0
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
    outcome = _prepare(task, source, np.empty((*task.fit.size, 3), np.uint8), {})
    return _reject(task, source, outcome) if isinstance(outcome, DecodeError) else None


def _reject(task: ShardTask, source: Source, error: DecodeError) -> Reject:
    return Reject(task.split, source.key, error.reason, error.detail)


def do_task(task: ShardTask, control: Control) -> ShardRecord:
    """Make the task's shard and its record. Raises Stopped if `control` says so.

    In a published set, which the task repairs, nothing is written but the shard, and only if it is the one expected.
    """
    if control.stopped():
        raise Stopped
    sources_sha256 = task.origin.fingerprint(task.sources)
    rejects: list[Reject] = []
    mended: list[Mended] = []
    hashes: dict[bytes, bytes] = {}
    entry = None
    if task.expected_sha256 is None:
        _refused_path(task).unlink(missing_ok=True)  # of an earlier try
    with (
        ShardFileWriter(task.out / task.name, (*task.fit.size, 3), len(task.sources)) as shard,
        # Closed here and not when the garbage collector comes by: it may have threads.
        contextlib.closing(_prepare_blocks(task, shard, control.threads, hashes)) as blocks,
    ):
        for block, outcomes in blocks:
            kept = []
            for row, (source, outcome) in enumerate(outcomes):
                if control.stopped():
                    raise Stopped
                if isinstance(outcome, DecodeError):
                    rejects.append(_reject(task, source, outcome))
                    if task.expected_sha256 is None:
                        _note_refused(task, rejects[-1])
                    control.report(1, 1)
                    continue
                kept.append(row)
                shard.rows.append(
                    label=outcome.label, key=source.key, source_size=outcome.source_size, crc32=outcome.crc32
                )
                if outcome.warning:
                    mended.append(Mended(task.split, source.key, outcome.warning))
                control.report(1, 0)
            shard.write_block(block, kept)
        if len(shard.rows):
            entry = shard.finish(task.expected_sha256)
        rows = shard.rows.to_array(task.key_nbytes)
    all_hashes = b"".join(hashes.get(source.key, UNREAD) for source in task.sources) if task.hash_sources else None
    record = ShardRecord(entry, rows, tuple(rejects), tuple(mended), sources_sha256, all_hashes)
    if task.expected_sha256 is None:
        write_atomic(_record_path(task), _dump_record(record))
    return record


# --- records ---------------------------------------------------------------------------------------------------------


def _record_path(task: ShardTask) -> Path:
    return task.out / WORK_FOLDER / f"{task.name}.json"


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
    _record_path(task).unlink(missing_ok=True)


def _refused_path(task: ShardTask) -> Path:
    """Lines of rejects.jsonl, one as each source is refused: what is known of a task that does not come to its end."""
    return task.out / WORK_FOLDER / f"{task.name}.refused.jsonl"


def _note_refused(task: ShardTask, reject: Reject) -> None:
    path = _refused_path(task)
    descriptor = open_untrusted(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, sole_name=True)
    with naming(path), os.fdopen(descriptor, "ab", buffering=0) as file:
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


def _dump_record(record: ShardRecord) -> bytes:
    document = {
        "entry": record.entry and asdict(record.entry),
        "rows": base64.b64encode(record.rows.tobytes()).decode("ascii"),
        "rejects": [[r.split, os.fsdecode(r.key), r.reason, r.detail] for r in record.rejects],
        "mended": [[m.split, os.fsdecode(m.key), m.warning] for m in record.mended],
        "sources_sha256": record.sources_sha256,
        "hashes": record.hashes and base64.b64encode(record.hashes).decode("ascii"),
    }
    return json.dumps(document).encode("ascii")


def load_record(task: ShardTask) -> ShardRecord | None:
    """The record of a task that is done and whose sources are still the same; None if it must be done."""
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
    return record if record.sources_sha256 == task.origin.fingerprint(task.sources) else None

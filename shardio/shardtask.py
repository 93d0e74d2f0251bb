"""Doing one shard task: read, decode, resize, write; and the record that says it is done.

A task can be done any number of times, by anyone, with the same bytes. Its record, written after the shard is
published, lets a later run of the same conversion skip it, for as long as its sources have not changed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardio.decode import decode_image, decode_object
from shardio.errors import DecodeError
from shardio.files import write_atomic
from shardio.format import WORK_FOLDER, index_dtype
from shardio.manifest import ShardEntry
from shardio.plan import ShardTask
from shardio.setwriter import Reject
from shardio.sources import Given, Source
from shardio.writer import ShardFileWriter

# Samples prepared ahead of the writer, per thread: about as many as are prepared while it writes a block out.
_AHEAD_PER_THREAD = 32


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

    @property
    def num_sources(self) -> int:
        return len(self.rows) + len(self.rejects)


class Stopped(Exception):
    """A task was told to stop, and left nothing behind but the list of what it had refused."""


@dataclass(frozen=True)
class Control:
    """How a running task talks to whoever runs it."""

    report: Callable[[int, int], None]
    """Called with (sources done, of these refused) since the last call."""
    stopped: Callable[[], bool]
    threads: int = 1


@dataclass(frozen=True)
class _Picture:
    pixels: NDArray[np.uint8]
    label: int
    source_size: tuple[int, int]
    warning: str


def _prepare(task: ShardTask, source: Source) -> _Picture | DecodeError:
    try:
        found = task.origin.read(source)
        if isinstance(found, Given):
            decoded, label = decode_object(found.image), found.label
        else:
            decoded, label = decode_image(found), source.label
        pixels = task.fit.apply(decoded.pixels)
        return _Picture(pixels, label, (decoded.pixels.shape[0], decoded.pixels.shape[1]), decoded.warning)
    except DecodeError as error:
        return error


def _prepare_all(task: ShardTask, threads: int) -> Generator[_Picture | DecodeError, None, None]:
    """The task's pictures in order. With one thread nothing runs beside the caller."""
    if threads == 1:
        for source in task.sources:
            yield _prepare(task, source)
        return

    def prepare(source: Source) -> _Picture | DecodeError:
        outcome = _prepare(task, source)
        if isinstance(outcome, DecodeError):
            return outcome
        # A copy, because a view keeps the whole resized picture, and what waits shall have the size of a sample.
        return replace(outcome, pixels=np.ascontiguousarray(outcome.pixels))

    with ThreadPoolExecutor(threads, thread_name_prefix="shardio-decode") as pool:
        ahead: deque[Future[_Picture | DecodeError]] = deque()
        try:
            for source in task.sources:
                if len(ahead) == threads * _AHEAD_PER_THREAD:
                    yield ahead.popleft().result()
                ahead.append(pool.submit(prepare, source))
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


def do_task(task: ShardTask, control: Control) -> ShardRecord:
    """Make the task's shard and its record. Raises Stopped if `control` says so."""
    if control.stopped():
        raise Stopped
    sources_sha256 = task.origin.fingerprint(task.sources)
    rejects: list[Reject] = []
    mended: list[Mended] = []
    entry = None
    with (
        ShardFileWriter(task.out / task.name, (*task.fit.size, 3), len(task.sources)) as shard,
        open(_refused_path(task), "wb", buffering=0) as refused,
        # Closed here and not when the garbage collector comes by: it may have threads.
        contextlib.closing(_prepare_all(task, control.threads)) as outcomes,
    ):
        for source, outcome in zip(task.sources, outcomes, strict=True):
            if control.stopped():
                raise Stopped
            if isinstance(outcome, DecodeError):
                rejects.append(Reject(task.split, source.key, outcome.reason, outcome.detail))
                refused.write(rejects[-1].to_line())
                control.report(1, 1)
                continue
            shard.append(outcome.pixels, label=outcome.label, key=source.key, source_size=outcome.source_size)
            if outcome.warning:
                mended.append(Mended(task.split, source.key, outcome.warning))
            control.report(1, 0)
        if len(shard.rows):
            entry = shard.finish()
        rows = shard.rows.to_array(task.key_nbytes)
    record = ShardRecord(entry, rows, tuple(rejects), tuple(mended), sources_sha256)
    write_atomic(_record_path(task), _dump_record(record))
    return record


# --- records ---------------------------------------------------------------------------------------------------------


def _record_path(task: ShardTask) -> Path:
    return task.out / WORK_FOLDER / f"{task.name}.json"


def _refused_path(task: ShardTask) -> Path:
    """Lines of rejects.jsonl, one as each source is refused: what is known of a task that does not come to its end."""
    return task.out / WORK_FOLDER / f"{task.name}.refused.jsonl"


def refused_so_far(task: ShardTask) -> bytes:
    """The lines of rejects.jsonl for a task in any state."""
    try:
        return _refused_path(task).read_bytes()
    except FileNotFoundError:
        return b""


def _dump_record(record: ShardRecord) -> bytes:
    document = {
        "entry": record.entry and asdict(record.entry),
        "rows": base64.b64encode(record.rows.tobytes()).decode("ascii"),
        "rejects": [[r.split, os.fsdecode(r.key), r.reason, r.detail] for r in record.rejects],
        "mended": [[m.split, os.fsdecode(m.key), m.warning] for m in record.mended],
        "sources_sha256": record.sources_sha256,
    }
    return json.dumps(document).encode("ascii")


def load_record(task: ShardTask) -> ShardRecord | None:
    """The record of a task that is done and whose sources are still the same; None if it must be done."""
    try:
        document = json.loads(_record_path(task).read_bytes())
        entry = document["entry"] and ShardEntry(**document["entry"])
        record = ShardRecord(
            entry,
            np.frombuffer(base64.b64decode(document["rows"]), index_dtype(task.key_nbytes)),
            tuple(Reject(split, os.fsencode(key), *rest) for split, key, *rest in document["rejects"]),
            tuple(Mended(split, os.fsencode(key), warning) for split, key, warning in document["mended"]),
            document["sources_sha256"],
        )
        if entry and (task.out / entry.file).stat().st_size != entry.nbytes:
            return None
    except (OSError, ValueError, TypeError, KeyError):
        return None  # no record, or one that somebody spoilt: the work is done again
    return record if record.sources_sha256 == task.origin.fingerprint(task.sources) else None

"""Makes one shard: reads, decodes, resizes and writes its images, then its arrays, and last the record of both.

A task can be done any number of times, by any process, and writes the same bytes each time. A task is finished when its
record is written; if it ends earlier, the shard is made again.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.array_files import Report, check_values, make_arrays, make_rows, map_ahead
from shardio.conversion.images.decode import decode_image
from shardio.conversion.images.warned import KeptWarnings
from shardio.conversion.plan import ShardTask
from shardio.conversion.records import (
    MendedSource,
    ShardRecord,
    check_unpublished,
    discard_refused,
    note_refused,
    save_record,
)
from shardio.conversion.sources.collection import DatasetItem, Source, digest
from shardio.conversion.writing.publish import Reject
from shardio.conversion.writing.shard_file import ShardFileWriter
from shardio.errors import DecodeError
from shardio.format.layout import SampleShape, crc32
from shardio.sets.levels import sum_levels

# Samples that are begun, at least, beyond the block that is waited for: enough for no thread to run dry.
_AHEAD_PER_THREAD = 8


class PreparedSample(NamedTuple):
    """A decoded sample's data other than its pixels, which are in a row of a block."""

    key: bytes
    label: int | None
    source_size: tuple[int, int]
    crc32: int
    warning: str


def prepare(task: ShardTask, item: tuple[Source, NDArray[np.uint8]]) -> PreparedSample | Reject:
    """Reads and decodes a source, and resizes it into a row of pixels. `item` is (source, row).

    If the source is refused, the row may hold anything.
    """
    source, row = item
    fit = task.fit
    assert fit is not None
    with KeptWarnings() as warned:
        try:
            found = task.origin.read(source)
            image, label = (found.image, found.label) if isinstance(found, DatasetItem) else (found, source.indexed)
            decoded = decode_image(image, fit.decode, least_size=fit.least_size if fit.quality == "fast" else None)
            fit.apply(decoded.pixels, decoded.source_size, decoded.reduction, row)
            if task.arrays:
                check_values(task, source, found, decoded)
        except DecodeError as error:
            return Reject(task.split, source.key, error.reason, error.detail)
    warning = "; ".join(dict.fromkeys(" ".join(text.split()) for text in (decoded.warning, *warned) if text))
    return PreparedSample(source.key, label, decoded.source_size, crc32(row), warning)


def _prepare_blocks(
    task: ShardTask, shard: ShardFileWriter, threads: int
) -> Generator[tuple[NDArray[np.uint8], Iterator[PreparedSample | Reject]], None, None]:
    """Yields (block of pixels, what its sources became) for the whole shard. Row i of a block has the i-th source."""
    taken: deque[NDArray[np.uint8]] = deque()

    def blocks() -> Iterator[list[tuple[Source, NDArray[np.uint8]]]]:
        first = 0
        while first < len(task.sources):
            block = shard.take_block()
            taken.append(block)
            yield list(zip(task.sources[first : first + len(block)], block, strict=False))
            first += len(block)

    prepared = map_ahead(partial(prepare, task), blocks(), threads, _AHEAD_PER_THREAD * threads)
    with contextlib.closing(prepared) as results:
        for prepared_block in results:
            yield taken.popleft(), prepared_block


# --- the task ---------------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_inside = 0
_before = 1


@contextlib.contextmanager
def one_torch_thread(needed: bool = True) -> Iterator[None]:
    """Sets torch to one thread inside the `with` block, for the calling thread and the threads that it starts.

    Pictures are too small to be split. Several threads may be inside at once; when the last one leaves, torch gets back
    the number of threads that it had before the first one entered. If torch is not `needed`, it is not imported.
    """
    global _inside, _before
    if not needed and "torch" not in sys.modules:
        yield
        return
    import torch

    with _lock:
        # A thread takes the number over that was set last anywhere when it first asks for it, and not when it sets it.
        number = torch.get_num_threads()
        if not _inside:
            _before = number
        _inside += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            torch.set_num_threads(_before)


def do_task(task: ShardTask, report: Report, threads: int = 1) -> ShardRecord:
    """Makes the task's shard and arrays, writes their record, and returns it.

    A task that repairs a published set replaces only the damaged files, and writes no record.
    """
    with one_torch_thread(task.needs_torch):
        return _do_task(task, report, threads)


def _do_task(task: ShardTask, report: Report, threads: int) -> ShardRecord:
    fingerprints = task.origin.fingerprints(task.sources)  # first: a source that is replaced meanwhile is seen later
    discard_refused(task)  # by an earlier try
    if task.sample_shape is None:
        record = make_rows(task, threads, report)
    else:
        record = _make_shard(task, task.sample_shape, report, threads)
        record = make_arrays(task, record, threads, report)
    record = replace(record, sources_sha256=digest(fingerprints))
    if task.wanted is None:
        save_record(task, record)
    return record


def _make_shard(task: ShardTask, shape: SampleShape, report: Report, threads: int) -> ShardRecord:
    rejects: list[Reject] = []
    mended: list[MendedSource] = []
    done = 0
    level_sums = np.zeros((4, shape[2]), np.int64)
    with ShardFileWriter(task.out / task.name, shape, len(task.sources)) as shard:
        check_unpublished(task)
        # Closed here and not when the garbage collector comes by: it may have threads.
        with contextlib.closing(_prepare_blocks(task, shard, threads)) as blocks:
            for block, results in blocks:
                kept = []
                for row, result in enumerate(results):
                    if isinstance(result, Reject):
                        rejects.append(result)
                        note_refused(task, result)
                    else:
                        key, label, source_size, crc, warning = result
                        shard.rows.append(label=label, key=key, source_size=source_size, crc32=crc)
                        kept.append(row)
                        if done + row in task.measured:
                            level_sums += sum_levels(block[row])
                        if warning:
                            mended.append(MendedSource(task.split, key, warning))
                    report(1, int(isinstance(result, Reject)))
                done += len(block)
                shard.write_block(block, kept)
        entry = shard.complete() if len(shard.rows) else None
        if entry is not None and task.publishes(entry):
            shard.publish()
        rows = shard.rows.to_array(task.key_nbytes, has_label=task.has_label)
    return ShardRecord(entry, rows, tuple(rejects), tuple(mended), "", level_sums)

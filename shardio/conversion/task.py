"""Makes one shard: reads, decodes, resizes and writes its images and arrays, and last the record of the task.

A task can be done any number of times, by any process, and writes the same bytes each time. A task is finished when its
record is written; if it ends earlier, the shard is made again.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.array_files import PartWriter, make_values
from shardio.conversion.images.decode import decode_image
from shardio.conversion.images.warned import KeptWarnings
from shardio.conversion.plan import ShardTask
from shardio.conversion.records import (
    MendedSource,
    Reject,
    ShardRecord,
    check_unpublished,
    discard_refused,
    note_refused,
    save_record,
)
from shardio.conversion.sources.collection import DatasetItem, Source, digest
from shardio.conversion.writing.shard_file import IndexRows, ShardFileWriter
from shardio.errors import DecodeError
from shardio.format.layout import crc32
from shardio.sets.levels import sum_levels

# Samples that are begun, at least, beyond the block that is waited for: enough for no thread to run dry. Fewer if the
# values of their arrays are large.
_AHEAD_PER_THREAD = 8
_LEAST_AHEAD_PER_THREAD = 2
# Items that a thread takes at a time, at most. Handing each over by itself would cost the GIL and a switch of threads;
# with many, threads would stand idle at the end of a shard, and a refused image or a Ctrl-C be noticed late.
_PER_HANDOVER = 4
# Values of arrays held in memory for a block of samples, or those of one sample.
_VALUES_NBYTES = 8 << 20

Report = Callable[[int, int], None]
"""Called with (sources done since the last call, sources refused among them). May raise to stop the task."""


class PreparedSample(NamedTuple):
    """The data of a decoded sample without its pixels, which are in a row of a block."""

    key: bytes
    label: int | None
    source_size: tuple[int, int]
    crc32: int
    warning: str
    arrays: Mapping[str, NDArray[Any]]
    """The values of the task's arrays, by name."""


def prepare(task: ShardTask, item: tuple[Source, NDArray[np.uint8]]) -> PreparedSample | Reject:
    """Reads and decodes a source, and resizes it into a row of pixels. `item` is (source, row).

    Returns the rest of the sample, or a Reject if the source is refused. The content of the row is then arbitrary, and
    also if samples have no pixels.
    """
    source, row = item
    fit = task.fit
    with KeptWarnings() as warned:
        try:
            found = task.origin.read(source)
            if fit is None:
                assert isinstance(found, DatasetItem)
                return PreparedSample(source.key, found.label, (0, 0), 0, "", make_values(task, source, found, None))
            image, label = (found.image, found.label) if isinstance(found, DatasetItem) else (found, source.indexed)
            decoded = decode_image(image, fit.decode, least_size=fit.least_size if fit.quality == "fast" else None)
            fit.apply(decoded.pixels, decoded.source_size, decoded.reduction, row)
            arrays = make_values(task, source, found, decoded)
        except DecodeError as error:
            return Reject(task.split, source.key, error.reason, error.detail)
    warning = "; ".join(dict.fromkeys(" ".join(text.split()) for text in (decoded.warning, *warned) if text))
    return PreparedSample(source.key, label, decoded.source_size, crc32(row), warning, arrays)


def _prepare_blocks(
    task: ShardTask, shard: ShardFileWriter | None, threads: int
) -> Generator[tuple[NDArray[np.uint8], Iterator[PreparedSample | Reject]], None, None]:
    """Yields (block of pixels, iterator of its samples and rejects) for the whole shard. Result i belongs to row i.

    Threads work ahead of the block that the caller iterates over. With one thread, no thread is started: each result is
    computed when the caller asks for it. Close the generator after use.
    """
    # Where arrays are larger than the pixels, a block is not filled.
    most = max(1, _VALUES_NBYTES // max(1, sum(spec.row.nbytes for spec in task.arrays)))
    ahead = min(_AHEAD_PER_THREAD, max(most // threads, _LEAST_AHEAD_PER_THREAD)) * threads

    def work(items: Sequence[tuple[Source, NDArray[np.uint8]]]) -> list[PreparedSample | Reject]:
        return [prepare(task, item) for item in items]

    with contextlib.ExitStack() as stack:
        run: Callable[..., Iterator[list[PreparedSample | Reject]]] = map
        if threads > 1:
            pool = ThreadPoolExecutor(threads, "shardio-images")
            stack.callback(pool.shutdown, cancel_futures=True)
            run = pool.map
        under_way: deque[tuple[NDArray[np.uint8], int, Iterator[PreparedSample | Reject]]] = deque()
        first = 0
        while first < len(task.sources):
            block = np.empty((most, 0), np.uint8) if shard is None else shard.take_block()
            items = list(zip(task.sources[first : first + most], block, strict=False))
            first += len(items)
            step = max(1, min(_PER_HANDOVER if threads > 1 else 1, len(items) // threads))
            handovers = [items[i : i + step] for i in range(0, len(items), step)]
            under_way.append((block, len(items), chain.from_iterable(run(work, handovers))))
            if threads == 1 or sum(count for _, count, _ in islice(under_way, 1, None)) >= ahead:
                block, _, results = under_way.popleft()
                yield block, results
        for block, _, results in under_way:
            yield block, results


# --- the task ---------------------------------------------------------------------------------------------------------


def do_task(task: ShardTask, report: Report, threads: int = 1) -> ShardRecord:
    """Makes the task's shard and arrays, writes the task's record, and returns the record.

    A task that repairs a published set replaces only the damaged files, and writes no record.
    """
    # First, so that a source which is replaced meanwhile is seen later.
    fingerprints = task.origin.fingerprints(task.sources)
    discard_refused(task)  # by an earlier try
    record = replace(_make_files(task, report, threads), sources_sha256=digest(fingerprints))
    if task.wanted is None:
        save_record(task, record)
    return record


def _make_files(task: ShardTask, report: Report, threads: int) -> ShardRecord:
    rejects: list[Reject] = []
    mended: list[MendedSource] = []
    count, shape = len(task.sources), task.sample_shape
    level_sums = np.zeros((4, shape[2] if shape else 0), np.int64)
    with contextlib.ExitStack() as stack:
        shard = stack.enter_context(ShardFileWriter(task.out / task.name, shape, count)) if shape else None
        writers = {spec.name: PartWriter(task, spec, count, stack) for spec in task.arrays}
        check_unpublished(task)
        rows = IndexRows()
        # Closed here and not when the garbage collector comes by: it may have threads.
        for block, results in stack.enter_context(contextlib.closing(_prepare_blocks(task, shard, threads))):
            kept, values, before = [], [], len(rows) + len(rejects)
            num_rejects = len(rejects)
            for row, result in enumerate(results):
                if isinstance(result, Reject):
                    rejects.append(result)
                    note_refused(task, result)
                else:
                    key, label, source_size, crc, warning, arrays = result
                    rows.append(label=label, key=key, source_size=source_size, crc32=crc)
                    kept.append(row)
                    values.append(arrays)
                    if shard is not None and before + row in task.measured:
                        level_sums += sum_levels(block[row])
                    if warning:
                        mended.append(MendedSource(task.split, key, warning))
                if shard is not None:
                    report(1, int(isinstance(result, Reject)))
            if shard is not None:
                shard.write_block(block, kept)
            else:  # values are many and small: one call for each would cost more than the values
                report(len(rows) + len(rejects) - before, len(rejects) - num_rejects)
            for name, writer in writers.items() if kept else ():
                writer.append(np.stack([arrays[name] for arrays in values]))
        entry, parts = None, {}
        if len(rows):
            if shard is not None and task.publishes(entry := shard.complete()):
                shard.commit()
            parts = {name: writer.finish() for name, writer in writers.items()}
    made = rows.to_array(task.key_nbytes, has_label=task.has_label)
    return ShardRecord(entry, made, tuple(rejects), tuple(mended), "", level_sums, parts)

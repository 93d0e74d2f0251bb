"""Makes the arrays of a finished shard: for each array a file with the values for the shard's samples, in their order.

Arrays come after the shard, one after the other, and each has a record of its own. So a shard costs no more memory for
its arrays, and a later run goes on behind the last array that is finished.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.arrays import ArraySpec
from shardio.conversion.images.warned import KeptWarnings
from shardio.conversion.plan import ShardTask
from shardio.conversion.records import (
    ArrayPart,
    ShardRecord,
    discard_record,
    load_array,
    save_array,
    save_no_array,
)
from shardio.conversion.sources.collection import Source
from shardio.conversion.values import make_value
from shardio.errors import ConvertError, DecodeError
from shardio.format.checksum import crc32
from shardio.format.layout import WORK_FOLDER, sample_nbytes, shard_nbytes
from shardio.sets.rows import RowsFile
from shardio.system.opening import OpenFile, naming, open_untrusted
from shardio.system.threads import ThreadPool

# Values, or the pixels that they are made of, that are in memory at a time; more only if all threads are to have some.
_BLOCK_NBYTES = 8 << 20
_PER_THREAD = 2
# Samples that a thread takes at a time, at most: see `task`.
_PER_HANDOVER = 4


def make_arrays(
    task: ShardTask, record: ShardRecord, threads: int, on_block: Callable[[], None]
) -> dict[str, ArrayPart]:
    """Makes, or finds, the files of the task's arrays for its finished shard, and their records.

    `on_block` is called now and then; what it raises ends the work, and the file that is being made.
    """
    parts = {}
    for spec in task.arrays:
        if record.entry is None:
            save_no_array(task, spec, record)
            continue
        part = load_array(task, spec, record)
        if part is None:
            os.listdir(task.out / WORK_FOLDER)  # without it the set is published, and no file of it may be replaced
            try:
                part = make_array(task, spec, record.rows, threads, on_block)
            except _DamagedError:
                discard_record(task)
                raise
            save_array(task, spec, record, part)
        parts[spec.name] = part
    return parts


def make_array(
    task: ShardTask,
    spec: ArraySpec,
    rows: NDArray[np.void],
    threads: int,
    on_block: Callable[[], None],
    expected_sha256: str | None = None,
) -> ArrayPart:
    """Makes the file with the array's values for the samples of the task's finished shard, whose index rows are given.

    If `expected_sha256` is given, the file is published only if it has this checksum. Raises ConvertError if a source
    is not what it was when the shard was made.
    """
    crc32s: list[int] = []
    with (
        RowsFile(task.out / task.array_name(spec), spec.row, len(rows)) as file,
        contextlib.closing(_make_values(task, spec, rows, threads, on_block)) as blocks,
    ):
        for values in blocks:
            content = values.reshape(len(values), -1).view(np.uint8)
            crc32s += map(crc32, content)
            file.write(content)
        entry = file.complete()
        if expected_sha256 in (None, entry.sha256):
            file.publish()
    return ArrayPart(entry, np.array(crc32s, np.uint32))


_Sample = tuple[np.void, NDArray[np.uint8]]
"""A row of the index, and the pixels if the values are made of them."""


def _make_values(
    task: ShardTask, spec: ArraySpec, rows: NDArray[np.void], threads: int, on_block: Callable[[], None]
) -> Generator[NDArray[Any], None, None]:
    """Yields the values for these samples in blocks. While one is used, the threads make the next."""
    sources = {source.key: source for source in task.sources}
    most = max(_PER_THREAD * threads, _BLOCK_NBYTES // max(spec.row.nbytes, sample_nbytes(task.options.sample_shape)))

    def make(samples: Sequence[_Sample]) -> list[NDArray[Any]]:
        return [_value(task, spec, sources[row["key"]], row, pixels) for row, pixels in samples]

    with contextlib.ExitStack() as stack:
        run: Callable[..., Iterator[list[NDArray[Any]]]] = map
        if threads > 1:
            run = stack.enter_context(ThreadPool(threads, "shardio-arrays")).map
        shard = stack.enter_context(_opened(task)) if spec.source == "pixels" else None
        under_way: deque[Iterator[list[NDArray[Any]]]] = deque()
        for start in range(0, len(rows), most):
            on_block()
            some = rows[start : start + most]
            samples = list(zip(some, _read_pixels(task, shard, start, some), strict=True))
            step = max(1, min(_PER_HANDOVER, len(samples) // threads))
            handovers = [samples[i : i + step] for i in range(0, len(samples), step)]
            under_way.append(run(make, handovers))
            if len(under_way) > 1:
                yield np.stack(list(chain.from_iterable(under_way.popleft())))
        for block in under_way:
            yield np.stack(list(chain.from_iterable(block)))


def _value(task: ShardTask, spec: ArraySpec, source: Source, row: np.void, pixels: NDArray[np.uint8]) -> NDArray[Any]:
    size = int(row["source_height"]), int(row["source_width"])
    try:
        with KeptWarnings():  # the shard's record has them
            return make_value(task, spec, source, pixels, size)
    except (DecodeError, TypeError, ValueError) as error:
        raise ConvertError(
            f"{task.out / task.array_name(spec)}: {os.fsdecode(source.key)}: expected what was there when {task.name} "
            f"was made, found {error}. Run the same command again"
        ) from error


# --- pixels -----------------------------------------------------------------------------------------------------------


class _DamagedError(ConvertError):
    """The shard does not hold what was written."""


@contextlib.contextmanager
def _opened(task: ShardTask) -> Iterator[OpenFile]:
    path = task.out / task.name
    with naming(path), open_untrusted(path) as file:
        yield file


def _read_pixels(task: ShardTask, shard: OpenFile | None, start: int, rows: NDArray[np.void]) -> NDArray[np.uint8]:
    """Returns the pixels of these samples, from the sample `start` of the shard on; nothing without a shard."""
    if shard is None:
        return np.empty((len(rows), 0), np.uint8)
    shape = task.options.sample_shape
    pixels = np.empty((len(rows), *shape), np.uint8)
    view, offset = pixels.data.cast("B"), shard_nbytes(start, shape)
    done = 0
    with naming(task.out / task.name):
        while done < len(view) and (count := os.preadv(shard.fileno(), [view[done:]], offset + done)):
            done += count
    for row, sample in zip(rows, pixels, strict=True):
        if crc32(sample) != row["crc32"]:
            raise _DamagedError(
                f"{task.out / task.name}: expected the pixels of {os.fsdecode(row['key'])} as they were written, found "
                "others: the disk may be failing. Run the same command again, which makes the shard again"
            )
    return pixels

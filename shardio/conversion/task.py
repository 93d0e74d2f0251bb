"""Makes one shard: reads, decodes, resizes and writes its images and arrays, and last the record of the task.

A task can be done any number of times, by any process, and writes the same bytes each time. A task is finished when its
record is written; if it ends earlier, the shard is made again.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.arrays import ArraySpec
from shardio.conversion.images.decode import DecodedImage, decode_image, turn
from shardio.conversion.images.headers import UPRIGHT, read_orientation
from shardio.conversion.images.mask import decode_mask
from shardio.conversion.images.warned import KeptWarnings
from shardio.conversion.plan import ShardTask
from shardio.conversion.records import (
    ArrayPart,
    MendedSource,
    Reject,
    ShardRecord,
    note_refused,
    refused_path,
    save_record,
)
from shardio.conversion.sources.collection import DatasetItem, Source, digest
from shardio.conversion.writing.shard_file import IndexRows, ShardFileWriter
from shardio.errors import DecodeError
from shardio.format.entries import ShardEntry
from shardio.format.layout import WORK_FOLDER, crc32
from shardio.sets.levels import sum_levels
from shardio.sets.rows import RowsFile, crc32s_of

# Minimum number of samples begun beyond the block that the caller waits for, so no thread runs dry. Fewer if the
# values of their arrays are large.
_AHEAD_PER_THREAD = 8
_LEAST_AHEAD_PER_THREAD = 2
# Maximum number of items that a thread takes at a time. Single items would cost more switches of threads and of the
# GIL; with many, threads would be idle at the end of a shard, and a refused image or a Ctrl-C be noticed late.
_PER_HANDOVER = 4
# Values of arrays held in memory for a block of samples, or those of one sample.
_VALUES_NBYTES = 8 << 20

Report = Callable[[int, int], None]
"""Called with (sources done since the last call, sources refused among them). May raise to stop the task."""


class PreparedSample(NamedTuple):
    """The data of a decoded sample, but not its pixels, which are in a block. `source_size` is (height, width)."""

    key: bytes
    label: int | None
    source_size: tuple[int, int]
    crc32: int
    warning: str
    facts: tuple[str, ...]
    arrays: Mapping[str, NDArray[Any]]
    """The values of the task's arrays, by name."""


def prepare(
    task: ShardTask, source: Source, row: NDArray[np.uint8], ahead: Future[bytes | DatasetItem] | None = None
) -> PreparedSample | Reject:
    """Reads and decodes a source, and resizes it into `row`, uint8 of the shape of `task.pixels_row`. Returns the
    sample without its pixels, or a Reject if the source is refused. After a Reject, the content of `row` is arbitrary.
    If samples have no pixels, `row` is not used. `ahead` is the result of `Origin.read`, if it was called before."""
    if source.key in task.killed:
        return Reject(task.split, source.key, "too large", task.killed[source.key])
    fit = task.fit
    with KeptWarnings() as warned:
        try:
            found = task.origin.read(source) if ahead is None else ahead.result()
            if fit is None:
                assert isinstance(found, DatasetItem)
                values = _make_values(task, source, found, None)
                return PreparedSample(source.key, found.label, (0, 0), 0, "", (), values)
            image, label = (found.image, found.label) if isinstance(found, DatasetItem) else (found, source.indexed)
            decoded = decode_image(
                image,
                exif_rotate=fit.exif_rotate,
                background=fit.background,
                least_size=fit.least_size if fit.quality == "fast" else None,
            )
            fit.apply(decoded.pixels, decoded.source_size, decoded.reduction, row)
            arrays = _make_values(task, source, found, decoded)
        except DecodeError as error:
            return Reject(task.split, source.key, error.reason, error.detail)
    warning = "; ".join(dict.fromkeys(" ".join(text.split()) for text in (decoded.warning, *warned) if text))
    return PreparedSample(source.key, label, decoded.source_size, crc32(row), warning, decoded.facts, arrays)


def _prepare_blocks(
    task: ShardTask, shard: ShardFileWriter | None, threads: int
) -> Generator[tuple[NDArray[np.uint8], Iterator[PreparedSample | Reject]], None, None]:
    """Yields (block, results) until the shard is whole: a block of pixels, uint8 (rows, *row shape), and an iterator of
    a PreparedSample or a Reject for each of its first rows. `shard` is None if samples have no pixels.

    Threads work ahead of the block that the caller iterates over. With one thread, no thread is started: each result is
    computed when the caller asks for it. Close the generator after use.
    """
    # The maximum number of samples in a block: where arrays are larger than the pixels, a block is not filled.
    most = max(1, _VALUES_NBYTES // max(1, sum(spec.row.nbytes for spec in task.arrays)))
    ahead = min(_AHEAD_PER_THREAD, max(most // threads, _LEAST_AHEAD_PER_THREAD)) * threads

    def work(items: Sequence[tuple[Source, NDArray[np.uint8]]]) -> list[PreparedSample | Reject]:
        return [prepare(task, *item) for item in items]

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


def _make_values(
    task: ShardTask, source: Source, found: bytes | DatasetItem, decoded: DecodedImage | None
) -> dict[str, NDArray[Any]]:
    """Returns a sample's value for each array of the task, by name. `found` is the result of `Origin.read`; `decoded`
    is the picture, or None if samples have no pixels."""
    values = {}
    given = found.arrays if isinstance(found, DatasetItem) else {}
    for spec in task.arrays:
        if spec.source == "label":
            values[spec.name] = np.array(source.label, spec.dtype).reshape(spec.row.shape)
        elif decoded is None or task.fit is None or spec.kind != "mask":
            values[spec.name] = given[spec.name]
        elif spec.source == "file":
            values[spec.name] = task.fit.apply_nearest(_read_mask(task, spec, source, decoded))
        else:
            mask = turn(given[spec.name], decoded.orientation)
            expected = (*decoded.source_size, *spec.row.shape[2:])
            if mask.shape != expected:
                split, number = source.item()
                where = f"dataset {split.decode()!r}, item {number}: array {spec.name!r}"
                raise ValueError(f"{where}: expected a mask of the picture's size, {expected}, found {mask.shape}")
            values[spec.name] = task.fit.apply_nearest(mask)
    return values


def _read_mask(task: ShardTask, spec: ArraySpec, source: Source, decoded: DecodedImage) -> NDArray[Any]:
    """Returns the mask in the source's mask file, with the dtype of `spec`, rotated like the picture, but not cropped
    or resized yet. `decoded` is the decoded picture."""
    try:
        data = task.origin.read_mask(source)
        mask: NDArray[Any] = turn(decode_mask(data), decoded.orientation)
        if (own := read_orientation(data)) not in (UPRIGHT, decoded.stored_orientation):
            expected = f"expected the orientation of the picture, {decoded.stored_orientation}"
            raise DecodeError("damaged", f"{expected}, found {own}")
        if mask.shape != decoded.source_size:
            turned = " after rotating the mask like the picture" if decoded.orientation != 1 else ""
            (height, width), (found_height, found_width) = decoded.source_size, mask.shape
            expected = f"expected {width} x {height} pixels, the size of the picture"
            raise DecodeError("damaged", f"{expected}, found {found_width} x {found_height}{turned}")
        if mask.max() > np.iinfo(spec.row.dtype).max:
            found = f"{mask.max()}: store the first mask with 16 bits"
            raise DecodeError("unsupported", f"expected numbers of 8 bits, as in the first mask, found {found}")
    except DecodeError as error:
        raise DecodeError(error.reason, f"mask: {error.detail}") from None
    return mask.astype(spec.dtype)


def do_task(task: ShardTask, report: Report, threads: int = 1) -> ShardRecord:
    """Makes the task's shard and arrays, writes the task's record, and returns the record.

    A task that repairs a published set replaces only the damaged files, and writes no record.
    """
    # Before sources are read: a source that is replaced meanwhile then differs from its fingerprint.
    fingerprints = task.origin.fingerprints(task.sources)
    if task.wanted is None:
        refused_path(task).unlink(missing_ok=True)  # of an earlier try
    record = replace(_make_files(task, report, threads), sources_sha256=digest(fingerprints))
    if task.wanted is None:
        save_record(task, record)
    return record


def _make_files(task: ShardTask, report: Report, threads: int) -> ShardRecord:
    """Makes the task's files. Returns the record without `sources_sha256`."""
    rejects: list[Reject] = []
    mended: list[MendedSource] = []
    facts: Counter[str] = Counter()
    rows, count, row = IndexRows(), len(task.sources), task.pixels_row
    level_sums = np.zeros((4, 3 if row else 0), np.int64)
    files: dict[str, RowsFile] = {}
    # Of small arrays, which get their files when the set is published, the values; of other arrays the crc32s.
    numbers: dict[str, list[NDArray[Any]]] = {spec.name: [] for spec in task.arrays}
    with contextlib.ExitStack() as stack:
        shard = stack.enter_context(ShardFileWriter(task.out / task.name, row, count)) if row else None
        for spec in task.arrays:
            if not spec.row.is_small:
                files[spec.name] = RowsFile(task.out / task.array_name(spec), spec.row, count)
                stack.enter_context(files[spec.name])
        if task.wanted is None:
            # Ends the task if the set has been published meanwhile: its work folder is gone, and then the temporary
            # files made above are removed. Not a stat, which a network filesystem may answer from a cache.
            os.listdir(task.out / WORK_FOLDER)
        # Closed here and not when the garbage collector comes by: it may have threads.
        for block, results in stack.enter_context(contextlib.closing(_prepare_blocks(task, shard, threads))):
            kept, values, before = [], [], len(rows) + len(rejects)
            for place, result in enumerate(results):
                if isinstance(result, Reject):
                    rejects.append(result)
                    note_refused(task, result)
                else:
                    key, label, source_size, crc, warning, true, arrays = result
                    rows.append(label=label, key=key, source_size=source_size, crc32=crc)
                    kept.append(place)
                    values.append(arrays)
                    facts.update(true)
                    if task.fit is not None and before + place in task.measured:
                        level_sums += sum_levels(task.fit.picture_of(block[place]))
                    if warning:
                        mended.append(MendedSource(task.split, key, warning))
                if shard is not None:
                    report(1, int(isinstance(result, Reject)))
            if shard is not None:
                shard.write_block(block, kept)
            else:  # values are many and small: one call for each would cost more than the values
                done = len(rows) + len(rejects) - before
                report(done, done - len(kept))
            for spec in task.arrays if kept else ():
                made = np.stack([arrays[spec.name] for arrays in values])
                if spec.name in files:
                    files[spec.name].write(made.reshape(len(made), -1).view(np.uint8))
                    made = crc32s_of(made)
                numbers[spec.name].append(made)
        entry, parts = None, {}
        if len(rows):
            entry = None if shard is None else _finish(task, shard)
            for name, found in numbers.items():
                part = _finish(task, files[name]) if name in files else None
                parts[name] = ArrayPart(part, np.concatenate(found))
    index = rows.to_array(task.key_nbytes, has_label=task.has_label)
    return ShardRecord(entry, index, tuple(rejects), tuple(mended), "", level_sums, facts, parts)


def _finish(task: ShardTask, file: RowsFile) -> ShardEntry:
    """Completes a file, publishes it (in a repair, only if `task.wanted` has its sha256), and returns its entry."""
    entry = file.seal()
    if task.wanted is None or task.wanted.get(entry.file) == entry.sha256:
        file.commit()
    return entry

"""Makes the arrays of a shard: for each array a file with the values for the shard's samples, in the shard's order.
Values of small arrays stay in the task's record: they get one file for all shards, when the set is published.

Arrays are made after the shard, one array at a time, so more arrays need no more memory. If samples have no
pixels, there is no shard, and all arrays are made in one pass over the sources.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.arrays import ArraySpec
from shardio.conversion.images.decode import DecodedImage, read_turn, turn
from shardio.conversion.images.mask import decode_mask
from shardio.conversion.images.warned import KeptWarnings
from shardio.conversion.plan import ShardTask
from shardio.conversion.records import ArrayPart, ShardRecord, check_unpublished, note_refused
from shardio.conversion.sources.collection import DatasetItem, Source
from shardio.conversion.writing.publish import Reject
from shardio.conversion.writing.shard_file import IndexRows
from shardio.errors import ConvertError, DecodeError
from shardio.format.layout import crc32, sample_nbytes
from shardio.sets.rows import RowsFile

# Values held in memory at a time, but at least some for each thread.
_BLOCK_NBYTES = 8 << 20
_PER_THREAD = 2
# Items that a thread takes at a time, at most. Handing each over by itself would cost the GIL and a switch of threads;
# with many, threads would stand idle at the end of a shard, and a refused image or a Ctrl-C be noticed late.
_PER_HANDOVER = 4

T = TypeVar("T")
R = TypeVar("R")


def make_arrays(task: ShardTask, record: ShardRecord, threads: int, on_block: Callable[[], None]) -> ShardRecord:
    """Makes the values of the task's arrays, publishes their files, and returns the record with both.

    `on_block` is called before each block of values, and may raise to end the work. Raises ConvertError if a source has
    changed since the shard was made. A repair publishes only the files that it repairs. It raises no error for a source
    that has changed, and leaves that array out.
    """
    parts, small = {}, {}
    for spec in task.arrays if record.entry else ():
        with contextlib.closing(_make_values(task, spec, record.rows, threads, on_block)) as blocks:
            try:
                if spec.row.is_small:
                    small[spec.name] = np.concatenate(list(blocks))
                else:
                    parts[spec.name] = _make_array(task, spec, len(record.rows), blocks)
            except ConvertError:
                if task.wanted is None:
                    raise
    return replace(record, arrays=parts, small=small)


def make_rows(
    task: ShardTask, threads: int, on_block: Callable[[], None], report: Callable[[int, int], None]
) -> ShardRecord:
    """Makes the files of the arrays of samples without pixels, publishes them, and returns the task's record.

    `on_block` is called before each block of sources and `report` after it, with the numbers of its sources and of its
    refused sources. Both may raise to end the work. A repair publishes only the files that it repairs.
    """
    rows = IndexRows()
    rejects: list[Reject] = []
    crc32s: dict[str, list[int]] = {spec.name: [] for spec in task.arrays}
    small: dict[str, list[NDArray[Any]]] = {spec.name: [] for spec in task.arrays if spec.row.is_small}
    most = max(_PER_THREAD * threads, _BLOCK_NBYTES // sum(spec.row.nbytes for spec in task.arrays))

    def blocks() -> Iterator[Sequence[Source]]:
        for start in range(0, len(task.sources), most):
            on_block()
            yield task.sources[start : start + most]

    with contextlib.ExitStack() as stack:
        files = {
            spec.name: stack.enter_context(RowsFile(task.out / task.array_name(spec), spec.row, len(task.sources)))
            for spec in task.arrays
            if not spec.row.is_small
        }
        check_unpublished(task)
        read = stack.enter_context(contextlib.closing(map_ahead(partial(read_item, task), blocks(), threads, most)))
        sources = iter(task.sources)
        for block in read:
            kept, first = [], len(rejects)
            for found, source in zip(block, sources, strict=False):
                if isinstance(found, Reject):
                    rejects.append(found)
                    if task.wanted is None:
                        note_refused(task, found)
                else:
                    rows.append(label=found.label, key=source.key, source_size=(0, 0), crc32=0)
                    kept.append(found.arrays)
            for name, file in files.items() if kept else ():
                content = np.stack([values[name] for values in kept]).reshape(len(kept), -1).view(np.uint8)
                crc32s[name] += map(crc32, content)
                file.write(content)
            for name, held in small.items() if kept else ():
                held.append(np.stack([values[name] for values in kept]))
            report(len(kept) + len(rejects) - first, len(rejects) - first)
        parts = {}
        for name, file in files.items() if len(rows) else ():
            entry = file.complete()
            if task.publishes(entry):
                file.publish()
            parts[name] = ArrayPart(entry, np.array(crc32s[name], np.uint32))
    made = rows.to_array(task.key_nbytes, has_label=task.has_label)
    joined = {name: np.concatenate(held) for name, held in small.items() if held}
    return ShardRecord(None, made, tuple(rejects), (), "", np.zeros((4, 0), np.int64), parts, joined)


def read_item(task: ShardTask, source: Source) -> DatasetItem | Reject:
    """Returns a source without a picture, with the values of all arrays, or why it is refused."""
    try:
        with KeptWarnings():
            found = task.origin.read(source)
    except DecodeError as error:
        return Reject(task.split, source.key, error.reason, error.detail)
    assert isinstance(found, DatasetItem)
    labels = {spec.name: _label(spec, source) for spec in task.arrays if spec.source == "label"}
    return found._replace(arrays={**found.arrays, **labels}) if labels else found


def _make_array(task: ShardTask, spec: ArraySpec, num_rows: int, blocks: Iterable[NDArray[Any]]) -> ArrayPart:
    crc32s: list[int] = []
    with RowsFile(task.out / task.array_name(spec), spec.row, num_rows) as file:
        check_unpublished(task)
        for values in blocks:
            content = values.reshape(len(values), -1).view(np.uint8)
            crc32s += map(crc32, content)
            file.write(content)
        entry = file.complete()
        if task.publishes(entry):
            file.publish()
    return ArrayPart(entry, np.array(crc32s, np.uint32))


def _make_values(
    task: ShardTask, spec: ArraySpec, rows: NDArray[np.void], threads: int, on_block: Callable[[], None]
) -> Generator[NDArray[Any], None, None]:
    """Yields the array's values for the samples in `rows`, in blocks."""
    sources = {source.key: source for source in task.sources}
    shape = task.sample_shape
    assert shape is not None
    # A value may be small, and its source a picture.
    most = max(_PER_THREAD * threads, _BLOCK_NBYTES // max(spec.row.nbytes, sample_nbytes(shape)))

    def blocks() -> Iterator[Sequence[np.void]]:
        for start in range(0, len(rows), most):
            on_block()
            yield list(rows[start : start + most])

    def make(row: np.void) -> NDArray[Any]:
        return _value(task, spec, sources[row["key"]], row)

    with contextlib.closing(map_ahead(make, blocks(), threads, most)) as values:
        for block in values:
            yield np.stack(list(block))


def map_ahead(
    function: Callable[[T], R], blocks: Iterable[Sequence[T]], threads: int, ahead: int
) -> Generator[Iterator[R], None, None]:
    """Yields, for each block, the results of `function` for its items, in order. Close the generator after use.

    Threads work on `ahead` items or more beyond the block that the caller has. With one thread, no thread is started:
    each result is computed in the calling thread when the caller asks for it.
    """

    def work(items: Sequence[T]) -> list[R]:
        return [function(item) for item in items]

    with contextlib.ExitStack() as stack:
        run: Callable[[Callable[[Sequence[T]], list[R]], Sequence[Sequence[T]]], Iterator[list[R]]] = map
        most = 1
        if threads > 1:
            pool = ThreadPoolExecutor(threads, "shardio-images")
            stack.callback(pool.shutdown, cancel_futures=True)
            run, most = pool.map, _PER_HANDOVER
        under_way: deque[tuple[int, Iterator[R]]] = deque()
        for block in blocks:
            step = max(1, min(most, len(block) // threads))
            handovers = [block[i : i + step] for i in range(0, len(block), step)]
            under_way.append((len(block), chain.from_iterable(run(work, handovers))))
            if threads == 1 or sum(count for count, _ in islice(under_way, 1, None)) >= ahead:
                yield under_way.popleft()[1]
        for _, results in under_way:
            yield results


def _value(task: ShardTask, spec: ArraySpec, source: Source, row: np.void) -> NDArray[Any]:
    size = int(row["source_height"]), int(row["source_width"])
    try:
        with KeptWarnings():  # the shard's record has them
            return make_value(task, spec, source, size)
    except (DecodeError, TypeError, ValueError) as error:
        raise ConvertError(
            f"{task.out / task.array_name(spec)}: {os.fsdecode(source.key)}: expected the source as it was when "
            f"{task.name} was made, found: {error}. Run the same command again"
        ) from error


# --- values -----------------------------------------------------------------------------------------------------------

# A source's own value for an array: a mask before it is cropped and resized, or a value to store as it is.
Raw = NDArray[Any]


def _label(spec: ArraySpec, source: Source) -> NDArray[Any]:
    return np.array(source.label, spec.dtype).reshape(spec.row.shape)


def check_values(task: ShardTask, source: Source, found: bytes | DatasetItem, decoded: DecodedImage) -> None:
    """Checks the source's values for the task's arrays. `found` is the source as read, `decoded` its picture.

    Raises DecodeError if the source is to be refused, TypeError or ValueError if an item of a dataset does not match
    the declaration of an array.
    """
    for spec in task.arrays:
        _raw(task, spec, source, found, decoded.orientation, decoded.source_size)


def make_value(task: ShardTask, spec: ArraySpec, source: Source, source_size: tuple[int, int]) -> NDArray[Any]:
    """Returns a sample's value for the array `spec`.

    `source_size` is the (height, width) of the sample's picture. Raises the errors of `check_values` if the source has
    changed.
    """
    pictures = task.pictures
    assert pictures is not None
    found: bytes | DatasetItem = b""
    if spec.source == "item" or pictures.decode.exif_rotate:
        found = task.origin.read(source)
    orientation = read_turn(found.image if isinstance(found, DatasetItem) else found, pictures.decode)
    raw = _raw(task, spec, source, found, orientation, source_size)
    if spec.kind == "mask":
        return pictures.fit.apply_nearest(raw)
    return raw.copy()  # the dataset may use its memory again for the next item


def _raw(
    task: ShardTask,
    spec: ArraySpec,
    source: Source,
    found: bytes | DatasetItem,
    orientation: int,
    source_size: tuple[int, int],
) -> Raw:
    """Returns the source's own value for the array. Masks are rotated like the source's picture."""
    if spec.source == "file":
        try:
            mask: Raw = turn(decode_mask(task.origin.read_mask(source)), orientation)
            if mask.shape != source_size:
                raise DecodeError("damaged", _expected_size(mask, source_size, orientation))
            if mask.max() > np.iinfo(spec.row.dtype).max:
                found_instead = f"{mask.max()}: store the first mask with 16 bits"
                raise DecodeError(
                    "unsupported", f"expected numbers of 8 bits, as the first mask has, found {found_instead}"
                )
        except DecodeError as error:
            raise DecodeError(error.reason, f"mask: {error.detail}") from None
        return mask.astype(spec.dtype)
    if spec.source == "label":
        return _label(spec, source)
    assert isinstance(found, DatasetItem)
    split, number = source.item()
    where = f"dataset {split.decode()!r}, item {number}: "
    if spec.kind != "mask":
        return spec.check(found.arrays[spec.name], where)
    mask = turn(spec.check_dtype(found.arrays[spec.name], where), orientation)
    if mask.shape[:2] != source_size or mask.shape[2:] != spec.row.shape[2:]:
        expected = (*source_size, *spec.row.shape[2:])
        raise ValueError(
            f"{where}array {spec.name!r}: expected a mask of the picture's size, {expected}, found {mask.shape}"
        )
    return mask


def _expected_size(mask: Raw, source_size: tuple[int, int], orientation: int) -> str:
    (height, width), (mask_height, mask_width) = source_size, mask.shape
    turned = ", when turned as the picture is" if orientation != 1 else ""
    return f"expected {width} x {height} pixels, as the picture has, found {mask_width} x {mask_height}{turned}"

"""Makes the arrays of a shard: for each array a file with the values for the shard's samples, in the shard's order.
Values of small arrays stay in the task's record: they get one file for all shards, when the set is published.

Arrays are made after the shard, one array at a time, so more arrays need no more memory. If samples have no
pixels, there is no shard, and all arrays are made in one pass over the sources.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
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
from shardio.format.layout import sample_nbytes
from shardio.sets.rows import RowsFile, crc32s_of

# Values held in memory at a time, but at least some for each thread.
_BLOCK_NBYTES = 8 << 20
_PER_THREAD = 2
# Items that a thread takes at a time, at most. Handing each over by itself would cost the GIL and a switch of threads;
# with many, threads would stand idle at the end of a shard, and a refused image or a Ctrl-C be noticed late.
_PER_HANDOVER = 4

T = TypeVar("T")
R = TypeVar("R")

Report = Callable[[int, int], None]
"""Takes the number of sources done since the last call, and how many were refused. May raise, to end the task."""


def make_arrays(task: ShardTask, record: ShardRecord, threads: int, report: Report) -> ShardRecord:
    """Makes the values of the task's arrays, publishes their files, and returns the record with both.

    `report` is called before each block of values. Raises ConvertError if a source has changed since the shard was
    made. A repair publishes only the files that it repairs. It raises no error for a source that has changed, and
    leaves that array out.
    """
    shape = task.sample_shape
    assert shape is not None
    sources = {source.key: source for source in task.sources}
    ignored = () if task.wanted is None else (ConvertError,)
    parts = {}
    for spec in task.arrays if record.entry else ():
        # A value may be small, and its source a picture.
        most = max(_PER_THREAD * threads, _BLOCK_NBYTES // max(spec.row.nbytes, sample_nbytes(shape)))
        blocks = _in_blocks(list(record.rows), most, report)
        with contextlib.suppress(*ignored), _PartWriter(task, spec, len(record.rows)) as writer:
            check_unpublished(task)
            with contextlib.closing(map_ahead(partial(_value, task, spec, sources), blocks, threads, most)) as values:
                for block in values:
                    writer.append(np.stack(list(block)))
            parts[spec.name] = writer.finish()
    return replace(record, arrays=parts)


def make_rows(task: ShardTask, threads: int, report: Report) -> ShardRecord:
    """Makes the files of the arrays of samples without pixels, publishes them, and returns the task's record.

    `report` is called before each block of sources, and after it. A repair publishes only the files that it repairs.
    """
    rows = IndexRows()
    rejects: list[Reject] = []
    most = max(_PER_THREAD * threads, _BLOCK_NBYTES // sum(spec.row.nbytes for spec in task.arrays))
    blocks = _in_blocks(task.sources, most, report)
    with contextlib.ExitStack() as stack:
        writers = {s.name: stack.enter_context(_PartWriter(task, s, len(task.sources))) for s in task.arrays}
        check_unpublished(task)
        read = stack.enter_context(contextlib.closing(map_ahead(partial(read_item, task), blocks, threads, most)))
        sources = iter(task.sources)
        for block in read:
            kept, first = [], len(rejects)
            for found, source in zip(block, sources, strict=False):
                if isinstance(found, Reject):
                    rejects.append(found)
                    note_refused(task, found)
                else:
                    rows.append(label=found.label, key=source.key, source_size=(0, 0), crc32=0)
                    kept.append(found.arrays)
            for name, writer in writers.items() if kept else ():
                writer.append(np.stack([values[name] for values in kept]))
            report(len(kept) + len(rejects) - first, len(rejects) - first)
        parts = {name: writer.finish() for name, writer in writers.items()} if len(rows) else {}
    made = rows.to_array(task.key_nbytes, has_label=task.has_label)
    return ShardRecord(None, made, tuple(rejects), (), "", np.zeros((4, 0), np.int64), parts)


def read_item(task: ShardTask, source: Source) -> DatasetItem | Reject:
    """Returns a source without a picture, with the values of all arrays, or why it is refused."""
    try:
        with KeptWarnings():
            found = task.origin.read(source)
    except DecodeError as error:
        return Reject(task.split, source.key, error.reason, error.detail)
    assert isinstance(found, DatasetItem)
    labels = {spec.name: _label(spec, source) for spec in task.arrays if spec.source == "label"}
    return found._replace(arrays={**found.arrays, **labels})


class _PartWriter:
    """Writes an array's values for the samples of a shard. Leaving the `with` block without `finish` discards them."""

    def __init__(self, task: ShardTask, spec: ArraySpec, num_rows: int) -> None:
        self._task = task
        self._numbers: list[NDArray[Any]] = []
        self._file: RowsFile | None = None
        if not spec.row.is_small:
            self._file = RowsFile(task.out / task.array_name(spec), spec.row, num_rows)

    def __enter__(self) -> _PartWriter:
        return self

    def append(self, values: NDArray[Any]) -> None:
        if self._file is not None:
            self._file.write(values.reshape(len(values), -1).view(np.uint8))
        self._numbers.append(values if self._file is None else crc32s_of(values))

    def finish(self) -> ArrayPart:
        entry = None if self._file is None else self._file.complete()
        if self._file is not None and entry is not None and self._task.publishes(entry):
            self._file.commit()
        return ArrayPart(entry, np.concatenate(self._numbers))

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.discard()


def _in_blocks(items: Sequence[T], most: int, report: Report) -> Iterator[Sequence[T]]:
    """Yields the items in blocks. Calls `report` before each block, so it can end the work."""
    for start in range(0, len(items), most):
        report(0, 0)
        yield items[start : start + most]


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


def _value(task: ShardTask, spec: ArraySpec, sources: Mapping[bytes, Source], row: np.void) -> NDArray[Any]:
    source = sources[row["key"]]
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
    fit = task.fit
    assert fit is not None
    found: bytes | DatasetItem = b""
    if spec.source == "item" or fit.decode.exif_rotate:
        found = task.origin.read(source)
    orientation = read_turn(found.image if isinstance(found, DatasetItem) else found, fit.decode)
    raw = _raw(task, spec, source, found, orientation, source_size)
    if spec.kind == "mask":
        return fit.apply_nearest(raw)
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

"""Makes the arrays of a shard: a file for each array, with the values of the shard's samples in the same order.

Values of small arrays stay in the task's record: a small array gets one file for all shards, when the set is published.
One pass over the sources makes all arrays and the pixels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.arrays import ArraySpec
from shardio.conversion.images.decode import DecodedImage, turn
from shardio.conversion.images.mask import decode_mask
from shardio.conversion.plan import ShardTask
from shardio.conversion.records import ArrayPart
from shardio.conversion.sources.collection import DatasetItem, Source
from shardio.errors import DecodeError
from shardio.format.entries import ArrayShard
from shardio.sets.rows import RowsFile, crc32s_of


class PartWriter:
    """Writes the values of one array for the samples of a shard. Without `finish`, they are discarded by `stack`."""

    def __init__(self, task: ShardTask, spec: ArraySpec, num_rows: int, stack: contextlib.ExitStack) -> None:
        self._task = task
        self._numbers: list[NDArray[Any]] = []
        self._file: RowsFile | None = None
        if not spec.row.is_small:
            self._file = RowsFile(task.out / task.array_name(spec), spec.row, num_rows)
            stack.enter_context(self._file)

    def append(self, values: NDArray[Any]) -> None:
        if self._file is not None:
            self._file.write(values.reshape(len(values), -1).view(np.uint8))
        self._numbers.append(values if self._file is None else crc32s_of(values))

    def finish(self) -> ArrayPart:
        entry = None
        if self._file is not None:
            entry = ArrayShard(*self._file.seal(), self._file.row)
            if self._task.publishes(entry):
                self._file.commit()
        return ArrayPart(entry, np.concatenate(self._numbers))


# --- values -----------------------------------------------------------------------------------------------------------


def make_values(
    task: ShardTask, source: Source, found: bytes | DatasetItem, decoded: DecodedImage | None
) -> dict[str, NDArray[Any]]:
    """Returns a sample's value for each array of the task, by name. `decoded` is the picture, if samples have pixels.

    Raises DecodeError if the source has to be refused, TypeError or ValueError if an item does not match a declaration.
    """
    values = {}
    given = found.arrays if isinstance(found, DatasetItem) else {}
    for spec in task.arrays:
        if spec.source == "label":
            values[spec.name] = np.array(source.label, spec.dtype).reshape(spec.row.shape)
        elif decoded is None or task.fit is None:
            values[spec.name] = given[spec.name]
        elif spec.kind == "mask":
            values[spec.name] = task.fit.apply_nearest(_mask(task, spec, source, given, decoded))
        else:
            values[spec.name] = spec.check(given[spec.name], _where(source))
    return values


def _where(source: Source) -> str:
    split, number = source.item()
    return f"dataset {split.decode()!r}, item {number}: "


def _mask(
    task: ShardTask, spec: ArraySpec, source: Source, given: Mapping[str, NDArray[Any]], decoded: DecodedImage
) -> NDArray[Any]:
    """Returns the source's mask, rotated like the source's picture, but not cropped or resized yet."""
    orientation, source_size = decoded.orientation, decoded.source_size
    if spec.source == "file":
        try:
            mask: NDArray[Any] = turn(decode_mask(task.origin.read_mask(source)), orientation)
            if mask.shape != source_size:
                turned = " after rotating the mask like the picture" if orientation != 1 else ""
                found_size = f"{mask.shape[1]} x {mask.shape[0]}{turned}"
                expected_size = f"{source_size[1]} x {source_size[0]} pixels, the size of the picture"
                raise DecodeError("damaged", f"expected {expected_size}, found {found_size}")
            if mask.max() > np.iinfo(spec.row.dtype).max:
                found_instead = f"{mask.max()}: store the first mask with 16 bits"
                raise DecodeError(
                    "unsupported", f"expected numbers of 8 bits, as in the first mask, found {found_instead}"
                )
        except DecodeError as error:
            raise DecodeError(error.reason, f"mask: {error.detail}") from None
        return mask.astype(spec.dtype)
    where = _where(source)
    mask = turn(spec.check_dtype(given[spec.name], where), orientation)
    if mask.shape[:2] != source_size or mask.shape[2:] != spec.row.shape[2:]:
        expected = (*source_size, *spec.row.shape[2:])
        raise ValueError(
            f"{where}array {spec.name!r}: expected a mask of the picture's size, {expected}, found {mask.shape}"
        )
    return mask

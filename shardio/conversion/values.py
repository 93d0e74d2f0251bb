"""The values of a set's arrays for one sample: read from where they come from, and made to fit the sample."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.conversion.arrays import ArraySpec
from shardio.conversion.images.decode import Decoded, read_turn, turn
from shardio.conversion.images.fit import resize_pixels
from shardio.conversion.images.mask import decode_mask
from shardio.conversion.plan import ShardTask
from shardio.conversion.sources.collection import Given, Item, Source
from shardio.conversion.sources.masks import MaskedOrigin
from shardio.errors import DecodeError

# What a source has for the array: a mask as it lies there or is given, or a value to store as it is.
Raw = NDArray[Any]


def check_values(task: ShardTask, source: Source, found: bytes | Given, decoded: Decoded) -> None:
    """Reads what the source has for the task's arrays. `found` is its image, `decoded` the picture in it.

    Raises DecodeError for a source that is to be refused, TypeError or ValueError for an item of a dataset that is not
    what was declared.
    """
    for spec in task.arrays:
        if spec.source != "pixels":
            _raw(task, spec, source, found, decoded.orientation, decoded.source_size)


def make_value(
    task: ShardTask, spec: ArraySpec, source: Source, pixels: NDArray[np.uint8], source_size: tuple[int, int]
) -> NDArray[Any]:
    """Returns the value of an array for a sample that has these pixels and was made of a picture of this size.

    Raises what `check_values` raises, if the source has changed since.
    """
    fit = task.options.fit
    if spec.source == "pixels":
        return resize_pixels(pixels, spec.size, fit.resample)
    found: bytes | Given = b""
    if spec.source == "item" or task.options.decode.exif_rotate:
        found = task.origin.read(source)
    orientation = read_turn(found.image if isinstance(found, Given) else found, task.options.decode)
    raw = _raw(task, spec, source, found, orientation, source_size)
    if spec.kind == "mask":
        return fit.apply_nearest(raw)
    if spec.kind == "boxes":
        return fit.apply_boxes(raw, *source_size)
    return raw.copy()  # the dataset may use its memory again for the next item


def _raw(
    task: ShardTask,
    spec: ArraySpec,
    source: Source,
    found: bytes | Given,
    orientation: int,
    source_size: tuple[int, int],
) -> Raw:
    """Returns what the source has, masks turned as its picture is."""
    if spec.source == "file":
        assert isinstance(task.origin, MaskedOrigin)
        mask: Raw = turn(decode_mask(task.origin.read_mask(source)), orientation)
        if mask.shape != source_size:
            raise DecodeError("damaged", f"mask: {_expected_size(mask, source_size, orientation)}")
        if mask.max() > np.iinfo(spec.row.dtype).max:
            raise DecodeError(
                "unsupported",
                f"mask: expected numbers of 8 bits, as the first mask has, found {mask.max()}: store that one with "
                "16 bits",
            )
        return mask.astype(spec.dtype)
    assert isinstance(found, Given)
    assert isinstance(source.place, Item)
    where = f"dataset {source.place.where.decode()!r}, item {source.place.number}: "
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

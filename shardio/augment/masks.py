"""Masks of a batch, which go through the same crops, flips and warps as their images.

Masks are read by nearest neighbor. First, a crop and a resize select rows and columns of the mask. Then the bytes of
the mask go through the flips and warps among the image's steps, as if the bytes were channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardio.augment.arguments import check_type
from shardio.augment.boxes import Boxes, Floats, Numbers
from shardio.augment.steps import FILL_AT, SAMPLING_AT, Op, Sampling, Step, Steps
from shardio.kernels.pixels import in_slices, run_steps

MaskFill = float | Mapping[str, float]
"""The value of masks outside of the image: a number, or a mapping of mask names to numbers."""

MaskPlaces = NDArray[np.int32]
"""The rows (or the columns) of each mask to read, int32 (B, length). -1 is outside of the image."""

MOVES = (Op.AFFINE, Op.PERSPECTIVE, Op.MIRROR, Op.FLIP)
"""Operations that move pixels."""

# Channels that go through the kernel of steps at once.
_CHANNELS = 64
# Masks are copied as these, by the size of an element: torch can do less with other dtypes.
_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True, eq=False)
class Masks:
    """The masks of a batch of images of `size`, (H, W): tensors (B, H, W) or (B, H, W, C) in `by_name`.

    `fills` has the value of each mask outside of the image, by name. Tensors are not changed in place.
    """

    size: tuple[int, int]
    by_name: Mapping[str, Tensor]
    fills: Mapping[str, float]

    @classmethod
    def of(cls, images: Tensor, masks: object, mask_fill: MaskFill | None) -> Masks | None:
        """Returns the masks of `images`; None if `masks` is None.

        Raises TypeError or ValueError for masks and fills that do not fit the images.
        """
        if masks is None:
            return None
        if not isinstance(masks, Mapping) or not all(isinstance(name, str) for name in masks):
            raise TypeError(f"masks must be a mapping of names to tensors; found {masks!r:.200}")
        count, _, height, width = images.shape
        for name, mask in masks.items():
            if not isinstance(mask, Tensor):
                raise TypeError(f"masks[{name!r}] must be a tensor; found {type(mask).__name__}")
            if mask.device != images.device:
                raise ValueError(f"masks[{name!r}] must be on {images.device}, like the images; found {mask.device}")
            if mask.ndim not in (3, 4) or mask.shape[:3] != (count, height, width):
                expected = f"({count}, {height}, {width}) or ({count}, {height}, {width}, C)"
                raise ValueError(f"masks[{name!r}] must be of shape {expected}; found {tuple(mask.shape)}")
        return cls((height, width), dict(masks), _fills(masks, 0 if mask_fill is None else mask_fill))

    def stepped(self, steps: Steps) -> Masks:
        moving = tuple(step for step in map(_moving, steps) if step.codes.any())
        return self._changed(self.size, lambda mask, fill: _stepped(mask, moving, fill)) if moving else self

    def placed(
        self,
        boxes: Boxes,
        flips: NDArray[np.bool_],
        sizes: NDArray[np.int64],
        shown: Sequence[NDArray[np.int64]],
    ) -> Masks:
        """Returns the masks cropped to `boxes`, resized to `sizes`, placed by `shown`, and flipped where `flips`.

        `shown` is (rows, columns), (B, side) each. Row y of result i is row rows[i, y] of resized mask i; where that
        is -1, it is the mask's fill. Columns likewise.
        """
        down, across = shown
        across = np.where(flips[:, None] & (across >= 0), sizes[:, 1:] - 1 - across, across)
        rows = _nearest_places(boxes.tops, boxes.heights, sizes[:, 0], self.size[0], down)
        columns = _nearest_places(boxes.lefts, boxes.widths, sizes[:, 1], self.size[1], across)
        size = rows.shape[1], columns.shape[1]
        return self._changed(size, lambda mask, fill: _taken(mask, rows, columns, fill))

    def _changed(self, size: tuple[int, int], change: Callable[[Tensor, Tensor], Tensor]) -> Masks:
        """Returns the masks after `change`, for images of `size`.

        `change(values, fill)` returns the new values of a mask. `values` are the mask's bytes as integers of the mask's
        item size, and `fill`, (1,), is its fill in the same form.
        """
        by_name = {}
        for name, mask in self.by_name.items():
            bits = _BYTES[mask.element_size()]
            fill = torch.full((1,), self.fills[name], dtype=mask.dtype, device="cpu").view(bits)
            by_name[name] = change(mask.detach().view(bits), fill).view(mask.dtype)
        return replace(self, size=size, by_name=by_name)

    @staticmethod
    def chosen(alternatives: Sequence[Masks], numbers: NDArray[np.int64]) -> Masks:
        """Returns masks that take the masks of image i from `alternatives[numbers[i]]`. `numbers` is int64 (B,)."""
        first = alternatives[0]
        by_name = dict(first.by_name)
        for number, other in enumerate(alternatives[1:], start=1):
            for name, mask in other.by_name.items():
                bits = _BYTES[mask.element_size()]
                chosen = torch.from_numpy(numbers == number).view(-1, *[1] * (mask.ndim - 1))
                by_name[name] = torch.where(chosen, mask.view(bits), by_name[name].view(bits)).view(mask.dtype)
        return replace(first, by_name=by_name)


def _nearest_places(starts: Floats, lengths: Floats, sizes: Numbers, limit: int, shown: Numbers) -> MaskPlaces:
    """Returns which row (or column) of each mask is copied to each row of the result, int32 (B, n); -1 for none.

    Of mask i, which has `limit` rows, `lengths[i]` rows from row `starts[i]` on are resized to `sizes[i]` rows by
    nearest neighbor, as torch's "nearest-exact". `shown`, (B, n): which of these is each row of the result, or -1.
    """
    middles = starts[:, None] + (2 * shown + 1) * lengths[:, None] / (2 * sizes[:, None])
    # Rounding may have moved a place slightly below a whole pixel.
    places = np.clip(np.floor(middles + 1e-9), 0, limit - 1).astype(np.int32)
    return np.where(shown < 0, np.int32(-1), places)


def _taken(mask: Tensor, rows: MaskPlaces, columns: MaskPlaces, fill: Tensor) -> Tensor:
    """Returns `rows` and `columns` of each image's mask, with `fill`, (1,), where a row or a column is -1."""
    count, has_outside = len(mask), min(rows.min(initial=0), columns.min(initial=0)) < 0
    rows, columns = (np.broadcast_to(places, (count, places.shape[1])) for places in (rows, columns))
    pixels, level = mask.numpy(), fill.numpy()
    out = np.empty((count, rows.shape[1], columns.shape[1], *pixels.shape[3:]), pixels.dtype)

    def work(some: slice) -> None:
        for to, picture, down, across in zip(out[some], pixels[some], rows[some], columns[some], strict=True):
            to[:] = picture.take(down, axis=0).take(across, axis=1)
            if has_outside:
                to[down < 0] = level
                to[:, across < 0] = level

    in_slices(count, work)
    return torch.from_numpy(out)


def _stepped(mask: Tensor, steps: Steps, fill: Tensor) -> Tensor:
    """Returns a mask after steps, with `fill`, (1,), outside of the image."""
    whole = (mask if mask.ndim == 4 else mask[..., None]).clone(memory_format=torch.contiguous_format)
    picture = whole.view(torch.uint8).numpy()
    levels = fill.view(torch.uint8).tolist() * (picture.shape[3] // fill.element_size())
    codes, values = np.stack([step.codes for step in steps]), np.stack([step.values for step in steps])
    for first in range(0, picture.shape[3], _CHANNELS):
        channels = slice(first, first + _CHANNELS)
        color = np.broadcast_to(np.array(levels[channels], np.float64), (*codes.shape, len(levels[channels])))
        filled = np.concatenate([values, color], axis=2)
        part = np.ascontiguousarray(picture[..., channels])
        in_slices(len(part), partial(_run_some, part, codes, filled))
        picture[..., channels] = part
    return torch.from_numpy(picture).view(mask.dtype).view(mask.shape)


def _run_some(pixels: NDArray[np.uint8], codes: NDArray[np.uint8], values: NDArray[np.float64], some: slice) -> None:
    run_steps(pixels[some], codes[:, some], values[:, some])


def _moving(step: Step) -> Step:
    """Returns the step for masks: only operations that move pixels, by nearest neighbor, without fill values."""
    values = step.values[:, :FILL_AT].copy()
    values[:, SAMPLING_AT] = Sampling.NEAREST
    return replace(step.where(np.isin(step.codes, MOVES)), values=values)


def check_mask_fill(mask_fill: MaskFill | Sequence[tuple[str, float]]) -> float | dict[str, float]:
    """Returns `mask_fill` as a number, or a dict of numbers by name. Raises TypeError if it is something else."""
    if isinstance(mask_fill, str) or not isinstance(mask_fill, Mapping | Sequence):
        check_type("mask_fill", mask_fill)
        return mask_fill
    fills = dict(mask_fill)
    for name, fill in fills.items():
        check_type(f"mask_fill[{name!r}]", fill)
    return fills


def _fills(masks: Mapping[str, Tensor], mask_fill: MaskFill) -> dict[str, float]:
    """Returns the fill of each mask by name. Raises ValueError if a mask's dtype cannot hold its fill."""
    found = check_mask_fill(mask_fill)
    if isinstance(found, dict):
        if unknown := [name for name in found if masks and name not in masks]:
            raise ValueError(f"mask_fill may only have the names of masks, {sorted(masks)}; found the names {unknown}")
        fills = {name: found.get(name, 0) for name in masks}
    else:
        fills = dict.fromkeys(masks, found)
    for name, fill in fills.items():
        if not _holds(masks[name].dtype, fill):
            raise ValueError(
                f"mask_fill of masks[{name!r}] must be a number that {masks[name].dtype} can hold; found {fill!r}: "
                "pass a dict {name: number} for masks of several dtypes"
            )
    return fills


def _holds(dtype: torch.dtype, number: float) -> bool:
    if dtype is torch.bool:
        return number in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return not torch.finfo(dtype).max < abs(number) < math.inf
    limits = torch.iinfo(dtype)
    return limits.min <= number <= limits.max and number == int(number)

"""Stages: what transforms do to each image of a batch, and the calls of the kernels in C that do it.

Transforms record stages before any image is read: random numbers do not depend on pixels. Then any thread may make the
pixels of any images of the batch, from the windows that the first stage reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.augment.boxes import Boxes, Numbers
from shardio.augment.masks import Masks
from shardio.augment.resample import Cast, Filter, cast_images
from shardio.augment.steps import Steps
from shardio.kernels.pixels import run_steps
from shardio.kernels.resample import Planes, resample
from shardio.kernels.rowcopy import Windows

Pixels = NDArray[np.uint8]

# Rounding may put a box beyond its limits by this share of a pixel.
_SLACK = 1e-6


@dataclass(frozen=True, eq=False)
class Canvas:
    """Where a window of the results begins in each resized image, and what is outside of the image.

    Image i is resized to `sizes[i]`. Its result begins at row and column `firsts[i]` of the resized image, which may be
    negative. Both are int64 (B, 2). For `mode` and `fill`, a number for each channel, see `Pad`.
    """

    sizes: Numbers
    firsts: Numbers
    mode: str = "constant"
    fill: tuple[float, ...] = (0,)

    def outside(self, size: tuple[int, int]) -> list[Numbers]:
        """Returns [rows, columns] of the resized image that results of `size` show, (B, side) each; -1 is outside."""
        return [_outside_places(self.firsts[:, i], self.sizes[:, i], size[i], self.mode) for i in range(2)]


def _outside_places(first: Numbers, sizes: Numbers, count: int, mode: str) -> Numbers:
    """Returns the `count` rows (or columns) from `first` on of each image, (B, count), replacing rows outside of it.

    An image has `sizes` rows, (B,), and `first`, (B,), may be negative. Rows outside of the image become -1 if `mode`
    is "constant", and rows inside of the image if `mode` is "edge", "reflect" or "symmetric", as in np.pad.
    """
    place, size = first[:, None] + np.arange(count), sizes[:, None]
    if mode == "constant":
        return np.where((place >= 0) & (place < size), place, -1)
    if mode != "edge":  # mirrored at the middle of the pixel at the edge, or at its end
        period = 2 * size - 2 * (mode == "reflect")
        place = place % np.maximum(period, 1)
        place = np.minimum(place, period - (mode == "symmetric") - place)
    return place.clip(0, size - 1)


@dataclass(frozen=True, eq=False)
class Stage:
    """One pass over each image of a batch. Immutable; any thread may make some of the images.

    - `source`: the height, width and channels of the images; `size`: the results' height and width
    - `boxes`, `within`, `filter`: each image is cropped and resized as in `Batch`
    - `flips`, bool (B,): which images are mirrored then
    - `canvas`: the results are windows of images that were resized to other sizes
    - `steps`: what is done to the results in the end
    """

    source: tuple[int, int, int]
    size: tuple[int, int]
    boxes: Boxes
    within: Boxes
    flips: NDArray[np.bool_]
    filter: Filter
    canvas: Canvas | None = None
    steps: Steps = ()

    @cached_property
    def _axes(self) -> NDArray[np.float64]:
        """The argument `axes` of the kernel `resample`, (B, 2, 4). Low and high: what the filter reads of `within`."""
        sides = np.array(self.source[:2])
        start, length = np.split(self.boxes.sides, 2, axis=1)
        low, room = np.split(self.within.sides, 2, axis=1)
        high = low + room
        inside = (length > 0) & (low >= 0) & (start >= low - _SLACK)
        inside &= (start + length <= high + _SLACK) & (high <= sides + _SLACK)
        if not inside.all():
            i = int(inside.all(axis=1).argmin())
            raise IndexError(
                f"the box of image {i} is not inside its image of {sides[0]} x {sides[1]} pixels, or not in its part "
                f"`within`; found top, left, height, width = {', '.join(f'{value:g}' for value in self.boxes.sides[i])}"
            )
        scale = length / (self.size if self.canvas is None else self.canvas.sizes)
        reach = self.filter.radius * (np.maximum(scale, 1) if self.filter.antialias else 1)
        # Rounding may have moved a limit slightly off a whole pixel.
        low = np.maximum(np.floor(low + 1e-9), np.floor(start - reach))
        high = np.minimum(np.minimum(np.ceil(high - 1e-9), sides), np.ceil(start + length + reach))
        return np.stack([start, scale, low, high], axis=2)

    @cached_property
    def _is_copy(self) -> bool:
        """True if the results, before `steps`, are the images: a filter changes nothing if the size stays the same."""
        if self.canvas is not None or self.size != self.source[:2] or self.flips.any():
            return False
        return bool((self.boxes.sides == (0, 0, *self.size)).all())

    def part(self, some: slice) -> Stage:
        canvas = self.canvas
        if canvas is not None:
            canvas = replace(canvas, sizes=canvas.sizes[some], firsts=canvas.firsts[some])
        cubic = self.filter.cubic
        return replace(
            self,
            boxes=self.boxes[some],
            within=self.within[some],
            flips=self.flips[some],
            filter=self.filter if cubic is None else replace(self.filter, cubic=cubic[some]),
            canvas=canvas,
            steps=tuple(replace(step, codes=step.codes[some], values=step.values[some]) for step in self.steps),
        )

    def windows(self) -> Windows:
        """Returns the window, a rectangle, of each image that the stage reads."""
        if self._is_copy:
            return Windows.whole(len(self.flips), *self.size)
        firsts, ends = (self._axes[:, :, limit].T.astype(np.int64) for limit in (2, 3))
        return Windows(*firsts, *(ends - firsts))

    def make(self, planes: Planes, some: Numbers, out: Pixels) -> None:
        """Writes the results of the images `some` to `out`, (len(some), *size, channels), C-contiguous.

        `planes` are windows of these images. Raises OSError if a page of a mapped file cannot be read.
        """
        if self._is_copy:
            planes.copy_images(out)
        elif self.canvas is None:
            self.resample(planes, some, out)
        else:
            self._place(self.canvas, planes, some, out)
        if self.steps:
            codes = np.stack([step.codes[some] for step in self.steps])
            run_steps(out, codes, np.stack([step.values[some] for step in self.steps]))

    def resample(
        self, planes: Planes, some: Numbers, out: NDArray[Any], cast: Cast | None = None, lines: Numbers | None = None
    ) -> None:
        """Writes the images `some` cropped, resized, mirrored and, with `cast`, cast to `out`, or to `out[lines]`."""
        resample(
            planes,
            self._axes[some],
            self.flips[some],
            out,
            None if cast is None else cast.affine(planes.channels),
            cubic=self.filter.is_cubic(some),
            antialias=self.filter.antialias,
            lines=lines,
        )

    def _place(self, canvas: Canvas, planes: Planes, some: Numbers, out: Pixels) -> None:
        """Writes a window of each resized image of `some` to `out`: image by image, as `canvas.sizes` differ."""
        width = self.size[1]
        shown = canvas.outside(self.size)
        for line, i in enumerate(some.tolist()):
            one, (tall, wide), (top, left) = slice(i, i + 1), canvas.sizes[i].tolist(), canvas.firsts[i].tolist()
            mirrored = bool(self.flips[i])
            resample(
                planes[line : line + 1],
                self._axes[one],
                np.zeros(1, bool),
                out[line : line + 1],
                cubic=self.filter.is_cubic(one),
                antialias=self.filter.antialias,
                resized=(tall, wide),
                first=(top, wide - left - width if mirrored else left),  # of the part that is mirrored then
            )
            picture = out[line]
            if mirrored:
                picture[:] = picture[:, ::-1].copy()
            rows, columns = (places[i] for places in shown)
            outside = min(rows.min(), columns.min()) < 0
            if canvas.mode != "constant":
                picture[:] = picture.take(rows - top, axis=0).take(columns - left, axis=1)
            elif outside and any(canvas.fill):
                level = np.array(canvas.fill).astype(np.uint8)
                picture[rows < 0] = level
                picture[:, columns < 0] = level

    def move(self, masks: Masks) -> Masks:
        """Returns the masks of a whole batch, moved as this stage moves their images."""
        if not self._is_copy:
            sizes = np.full((len(self.flips), 2), self.size)
            canvas = self.canvas or Canvas(sizes, np.zeros_like(sizes))
            masks = masks.placed(self.boxes, self.flips, canvas.sizes, canvas.outside(self.size))
        return masks.stepped(self.steps)


@dataclass(frozen=True, eq=False)
class Choice:
    """Stages of several alternatives, of which each image gets one: image i gets `alternatives[numbers[i]]`."""

    source: tuple[int, int, int]
    size: tuple[int, int]
    numbers: Numbers
    alternatives: tuple[Stages, ...]

    def part(self, some: slice) -> Choice:
        alternatives = tuple(tuple(stage.part(some) for stage in stages) for stages in self.alternatives)
        return replace(self, numbers=self.numbers[some], alternatives=alternatives)

    def windows(self) -> Windows:
        count = len(self.numbers)
        return Windows.picked([windows_of(stages, self.source, count) for stages in self.alternatives], self.numbers)

    def make(self, planes: Planes, some: Numbers, out: Pixels) -> None:
        numbers = self.numbers[some]
        for number in np.unique(numbers).tolist():
            mine = np.flatnonzero(numbers == number)
            out[mine] = run(self.alternatives[number], planes[mine], some[mine], out.shape[1:])

    def move(self, masks: Masks) -> Masks:
        moved = [moved_by(stages, masks) for stages in self.alternatives]
        return Masks.chosen(moved, self.numbers)


Stages = tuple["Stage | Choice", ...]


def windows_of(stages: Stages, source: tuple[int, int, int], count: int) -> Windows:
    """Returns the window that `stages` read of each of `count` images. `source` is their (height, width, channels)."""
    if stages:
        return stages[0].windows()
    return Windows.whole(count, *source[:2])


def run(stages: Stages, planes: Planes, some: Numbers, shape: tuple[int, ...], out: Pixels | None = None) -> Pixels:
    """Returns the results of stages for the images `some`, (len(some), *shape); in `out` if given.

    `planes` are the windows of these images that the first stage reads. Raises OSError if a page of a mapped file
    cannot be read.
    """
    made = np.empty((len(some), *shape), np.uint8) if out is None else out
    if not stages:
        planes.copy_images(made)
    for number, stage in enumerate(stages):
        is_last = number == len(stages) - 1
        after = made if is_last else np.empty((len(some), *stage.size, planes.channels), np.uint8)
        stage.make(planes, some, after)
        if not is_last:
            planes = Planes.of_images(after)
    return made


def run_and_cast(stages: Stages, planes: Planes, some: Numbers, out: NDArray[Any], cast: Cast) -> None:
    """Writes the results of stages for the images `some`, normalized and cast, to `out[some]`.

    `out` has the results of the whole batch, of dtype `cast.kernel_dtype`. For `planes` and errors see `run`.
    """
    is_row = len(some) == some[-1] - some[0] + 1
    casts = out.dtype != np.uint8
    last = stages[-1] if stages else None
    # Such a pass writes each result to its place, and casts it.
    resize = last if isinstance(last, Stage) and not last.steps and last.canvas is None else None
    if not casts and (is_row or resize is None):
        made = run(stages, planes, some, out.shape[1:], out[some[0] : some[-1] + 1] if is_row else None)
        if not is_row:
            out[some] = made
        return
    if before := stages[:-1] if resize else stages:
        planes = Planes.of_images(run(before, planes, some, (*before[-1].size, planes.channels)))
    if resize:
        resize.resample(planes, some, out, cast if casts else None, some)
    else:
        cast_images(planes, out, cast, some)


def moved_by(stages: Stages, masks: Masks) -> Masks:
    for stage in stages:
        masks = stage.move(masks)
    return masks


def joined(several: Sequence[Windows], whole_lines: int, size: tuple[int, int]) -> Windows:
    """Returns the smallest window of each image that covers its window in each of `several`.

    If `whole_lines` is not 0, windows consist of whole lines of images of `size`, and begin and end at line numbers
    that are multiples of `whole_lines`, or at the image's end.
    """
    sides = np.stack([each.sides for each in several])
    firsts, ends = sides[:, :, :2].min(axis=0), (sides[:, :, :2] + sides[:, :, 2:]).max(axis=0)
    if whole_lines:
        units = np.array([whole_lines, size[1]])
        firsts, ends = firsts // units * units, np.minimum(-(-ends // units) * units, size)
    return Windows(*firsts.T, *(ends - firsts).T)

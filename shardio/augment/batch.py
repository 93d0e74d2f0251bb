"""Batch, which each transform returns to the next: images, and recorded changes that are not computed yet.

A batch records crops, resizes, flips, color operations, a normalization and a cast. So several changes take one pass
over the pixels. The changed pixels are computed when a transform needs them, and at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from shardio.augment.boxes import Boxes, Draws, outside_places
from shardio.augment.masks import Masks, taken
from shardio.augment.pixels import run_steps
from shardio.augment.resample import (
    Interpolation,
    Resampling,
    Statistics,
    chosen,
    normalized,
    repeated,
    resample,
    resample_onto,
)
from shardio.augment.steps import NEEDS_RGB, Op, Step, Steps

Images = torch.Tensor | tuple[torch.Tensor, ...]
Arrays = dict[str, Images]
"""Masks by name: a tensor, or a tuple with a tensor per view."""


_UNCHANGED = Resampling((0, 0))


@dataclass(frozen=True)
class Batch:
    """Images, (B, C, H, W), and the changes recorded for them, in the order in which they apply.

    - Each image is cropped to its box in `boxes` and resized to its row of `sizes`, int64 (B, 2), height and width. The
      filter reads no pixel outside of the box `within`. In a new batch, `sizes` are the sizes before any squashing.
    - Images are mirrored where `flips`, bool (B,), is true, and then go through `steps`.
    - `how` has the filter of the resize, used if `resized` is true, and the normalization and cast at the end. The size
      in `how` is ignored: see `resampling`.

    A field that is None records no change. `masks` are the masks of `images`, before the changes. With several views of
    each image, the other fields have all images of the first view, then all images of the next view.
    """

    images: torch.Tensor
    draws: Draws
    sizes: NDArray[np.int64]
    labels: torch.Tensor | None = None
    masks: Masks | None = None
    boxes: Boxes | None = None
    within: Boxes | None = None
    flips: NDArray[np.bool_] | None = None
    resized: bool = False
    steps: Steps = ()
    how: Resampling = _UNCHANGED

    def __len__(self) -> int:
        return len(self.sizes)

    def cropped(self, boxes: Boxes) -> Batch:
        """Returns the batch with each image cropped to its box, in pixels of the images after the earlier changes."""
        self.check_uint8()
        if self.steps:
            return self.finished().cropped(boxes)
        if self.flips is not None:  # crops are done before flips, so the box is mirrored
            lefts = np.where(self.flips, self.sizes[:, 1] - boxes.lefts - boxes.widths, boxes.lefts)
            boxes = replace(boxes, lefts=lefts)
        part = boxes.inside_of(self.region, self.sizes)
        sizes = np.stack([boxes.heights, boxes.widths], axis=1).astype(np.int64)
        # An image that was resized before its crop was made of pixels beyond the crop, too.
        return replace(self, boxes=part, within=self.within if self.resized else part, sizes=sizes)

    def resized_to(
        self,
        sizes: NDArray[np.int64],
        interpolation: Interpolation = "bilinear",
        antialias: bool = True,
        purpose: str = "",
    ) -> Batch:
        """Returns the batch resized to `sizes`, (B, 2). The interpolation "random" draws a filter with `purpose`."""
        self.check_uint8()
        if self.resized or self.steps:
            return self.made().resized_to(sizes, interpolation, antialias, purpose)
        cubic = self.draws.uniform(f"{purpose}/interpolation", 1)[0] < 0.5 if interpolation == "random" else None
        how = replace(self.how, interpolation=interpolation, antialias=antialias, cubic=cubic)
        within = self.within or self.region
        return replace(self, boxes=self.region, within=within, sizes=sizes, resized=True, how=how)

    def mirrored(self, flips: NDArray[np.bool_]) -> Batch:
        if self.steps:
            return self.stepped(Op.MIRROR, where=flips)
        self.check_uint8()
        return replace(self, flips=flips if self.flips is None else self.flips ^ flips)

    def stepped(
        self, codes: Op | NDArray[np.uint8], *values: ArrayLike, where: NDArray[np.bool_] | None = None
    ) -> Batch:
        """Returns the batch with one more operation recorded.

        `codes` is an Op for all images, or an Op for each image, uint8 (B,). Each of the operation's `values` is a
        number for all images, or an array (B,). Images where `where`, bool (B,), is false stay unchanged.
        """
        self.check_uint8()
        step = Step.of(len(self), self.images.shape[1], codes, *values)
        self.check_channels(map(Op, np.unique(step.codes).tolist()))
        return replace(self, steps=(*self.steps, step if where is None else step.where(where)))

    def check_channels(self, ops: Iterable[Op]) -> None:
        """Raises ValueError if one of `ops` is not defined for the images' number of channels.

        Transforms check all operations that they may draw, so the error comes with the first batch.
        """
        channels = self.images.shape[1]
        if channels not in (1, 3) and (wrong := NEEDS_RGB.intersection(ops)):
            names = ", ".join(sorted(op.name.lower() for op in wrong))
            raise ValueError(
                f"images must have 3 channels (red, green and blue) or 1 channel for the operations {names}; found "
                f"{channels} channels"
            )

    def unsquashed(self) -> Batch:
        """Returns the batch with squashed images resized to their original sizes.

        A batch that was cropped, resized or cast is returned unchanged. If the original sizes differ, ValueError is
        raised later, when the pixels are computed.
        """
        if self.boxes is not None or self.is_cast or (self.sizes == self.images.shape[2:]).all():
            return self
        return self.resized_to(self.sizes)

    @property
    def is_cast(self) -> bool:
        """True if the images are not uint8, or a recorded change normalizes or casts them."""
        return self.how.made != torch.uint8 or self.images.dtype != torch.uint8

    def check_uint8(self) -> None:
        if self.is_cast:
            raise ValueError(
                "crops, resizes, flips, warps and color changes need uint8 images; found normalized or cast images: "
                "put these transforms before Normalize and ToDtype"
            )

    @property
    def region(self) -> Boxes:
        """The box of each stored image that is used: `boxes`, or the whole images if `boxes` is None."""
        return self.boxes or Boxes.whole(len(self), *self.images.shape[2:])

    @property
    def is_mirrored(self) -> NDArray[np.bool_]:
        """Whether each image is mirrored, bool (B,): `flips`, or all false if `flips` is None."""
        return np.zeros(len(self), bool) if self.flips is None else self.flips

    def holding(self, images: torch.Tensor, masks: Masks | None = None) -> Batch:
        """Returns a batch with new `images` of the same samples, and no recorded changes.

        `masks` are the masks of the new images, by default the masks of this batch after its changes. Raises ValueError
        if the masks and the new images differ in size.
        """
        masks = masks or self._moved_masks()
        if masks is not None and masks.size != (size := tuple(images.shape[2:])):
            raise ValueError(f"masks must have the (height, width) of the images, {size}; found {masks.size}")
        return Batch(images, self.draws, sizes_of(images), self.labels, masks)

    def check_no_masks(self) -> None:
        """Raises ValueError if the batch has masks, which Mixup and CutMix cannot combine."""
        if self.masks is not None:
            names = ", ".join(self.masks.by_name) or "{}"
            raise ValueError(
                f"Mixup and CutMix combine images, but cannot combine masks; found masks {names}: remove Mixup and "
                "CutMix from the transform, or pass images and labels only"
            )

    def finished(self) -> Batch:
        """Computes the recorded changes. Returns a batch of the new images. Raises ValueError if their sizes differ."""
        images = self._done()
        if images is self.images:
            return self
        sizes = self.sizes if self.boxes is None else sizes_of(images)
        return Batch(images, self.draws, sizes, self.labels, self._moved_masks())

    def made(self) -> Batch:
        """Computes the recorded changes like `finished`, but crops and resizes may give images of different sizes.

        Images of different sizes lie in the upper left corners of images of the largest height and the largest width.
        The returned batch has their boxes. With steps or a cast recorded, different sizes raise ValueError.
        """
        if self.steps or self.is_cast or self.boxes is None or (self.sizes == self.sizes[0]).all():
            return self.finished()
        heights, widths = self.sizes.T
        batch = self.placed((int(heights.max()), int(widths.max())), np.zeros_like(self.sizes))
        zeros = np.zeros(len(self))
        own = Boxes(zeros, zeros, heights.astype(float), widths.astype(float))
        return replace(batch, boxes=own, within=own, sizes=self.sizes)

    def placed(
        self, size: tuple[int, int], firsts: NDArray[np.int64], mode: str = "constant", fill: Sequence[float] = (0,)
    ) -> Batch:
        """Computes the recorded crops, resizes and flips. Returns a batch of windows of `size` of the new images.

        Each window begins at row and column `firsts`, int64 (B, 2), which may be negative. Outside of the image, `mode`
        "constant" gives `fill`, a number per channel. For "edge", "reflect" and "symmetric" see `Pad`.
        """
        boxes, flips, sizes = self.region, self.is_mirrored, self.sizes
        # Images without a border are cropped as by `cropped`: otherwise rounding would depend on the batch.
        inside: NDArray[np.bool_] = np.all((firsts >= 0) & (firsts + size <= sizes), axis=1)
        lefts = np.where(flips, sizes[:, 1] - firsts[:, 1] - size[1], firsts[:, 1])
        part = Boxes(
            *np.stack([firsts[:, 0], lefts]).astype(float), *(np.full(len(self), float(side)) for side in size)
        )
        boxes = Boxes.picked([boxes, part.inside_of(boxes, sizes)], inside.astype(np.int64))
        sizes, firsts = np.where(inside[:, None], size, sizes), np.where(inside[:, None], 0, firsts)
        how = replace(self.how, size=size)
        within = self.within if self.resized else None
        images = resample_onto(self.images, boxes, flips, how, sizes, firsts, within=within)
        shown = [outside_places(firsts[:, i], sizes[:, i], size[i], mode) for i in range(2)]
        if mode != "constant" or (any(fill) and any((places < 0).any() for places in shown)):
            rows, columns = (
                np.where(places < 0, -1, places - firsts[:, i : i + 1]).astype(np.int32)
                for i, places in enumerate(shown)
            )
            level = torch.tensor(fill, dtype=torch.float64, device="cpu").to(torch.uint8)
            images = taken(images.permute(0, 2, 3, 1), rows, columns, level).permute(0, 3, 1, 2)
        masks = None if self.masks is None else self.masks.placed(boxes, flips, sizes, size, firsts, mode)
        return self.holding(images, masks)

    @property
    def is_plain(self) -> bool:
        """True if the batch has no masks, and no recorded crop, resize, flip or operation."""
        return self.masks is None and self.boxes is None and self.flips is None and not self.steps

    def _moved_masks(self) -> Masks | None:
        if self.masks is None:
            return None
        is_whole = self.boxes is None and self.flips is None
        return self.masks.moved(None if is_whole else self.region, self.is_mirrored, self.size, self.steps)

    def _done(self) -> torch.Tensor:
        how = self.how
        if self.steps:
            images = replace(self, steps=(), how=replace(how, statistics=None, dtype=None))._done()
            if (made := fused(images, self.steps, how.statistics, how.dtype)) is not None:
                return made
            if images is self.images:
                images = images.clone(memory_format=torch.channels_last)
            return replace(self, images=run_steps(images, self.steps), boxes=None, flips=None, steps=())._done()
        images = self.images
        if (self.boxes is None and self.flips is None) or images.is_cuda:
            images = repeated(images, len(self))
        if self.boxes is None and self.flips is None:
            # The result has the memory format of the images, as with torch's operations.
            is_last = images.is_contiguous(memory_format=torch.channels_last)
            if self.is_cast and is_last and (made := fused(images, (), how.statistics, how.dtype)) is not None:
                return made
            return normalized(images, how.statistics, how.dtype)
        boxes, flips, how = self.region, self.is_mirrored, self.resampling
        if images.is_cuda and how.cubic is not None:
            return chosen(how.cubic, *(replace(self, how=one)._done() for one in how.of_each_filter))
        if images.is_cuda:
            from shardio.augment.resample_cuda import resample_if_trusted  # Triton takes its time to import

            if (made := resample_if_trusted(images, boxes, self.within or boxes, flips, how)) is not None:
                return made
        return resample(images, boxes, flips, how, within=self.within)

    @property
    def resampling(self) -> Resampling:
        """`how`, with the size of the new images. Raises ValueError if the new images would have several sizes."""
        return replace(self.how, size=self.size)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width after the recorded changes. Raises ValueError if the images would have several sizes."""
        if self.boxes is None:  # mirrored only: images have their stored size
            height, width = self.images.shape[2:]
            return height, width
        height, width = self.sizes[0].tolist()
        if (self.sizes != (height, width)).any():
            least, most = self.sizes.min(axis=0).tolist(), self.sizes.max(axis=0).tolist()
            raise ValueError(
                f"the images of a batch must have one size; found heights from {least[0]} to {most[0]} and widths from "
                f"{least[1]} to {most[1]}: add a CenterCrop or RandomCrop, or resize to (height, width)"
            )
        return height, width


def sizes_of(images: torch.Tensor) -> NDArray[np.int64]:
    return np.tile(np.array(images.shape[2:], np.int64), (len(images), 1))


def fused(
    images: torch.Tensor, steps: Steps, statistics: Statistics | None, dtype: torch.dtype | None
) -> torch.Tensor | None:
    """Returns the images after steps, normalization and cast, computed by Triton kernels, in channels_last memory.

    Returns None on the CPU, and if the kernels cannot be used: see `run_steps_if_trusted`. `images` stay unchanged.
    """
    if not images.is_cuda:
        return None
    from shardio.augment.pixels_cuda import run_steps_if_trusted  # Triton takes its time to import

    return run_steps_if_trusted(images, steps, statistics, dtype)

"""Batch, which each transform returns to the next: images, and recorded changes that are not computed yet.

A batch records crops, resizes, flips, color operations, a normalization and a cast. So several changes take one pass
over the pixels: a `Stage`. The stage is computed when a transform needs its pixels, and at the end.

A deferred batch has no pixels, only the shape of images that will be read later. It collects stages, and its `rest` has
the transforms that can only be applied when the pixels are there. See `shardio.augment.program`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from shardio.augment.boxes import Boxes, Draws
from shardio.augment.masks import Masks
from shardio.augment.resample import UNCAST, Cast, Filter, Interpolation, as_made, normalized
from shardio.augment.stage import Canvas, Choice, Stage, Stages, moved_by, run_and_cast
from shardio.augment.steps import NEEDS_RGB, Op, Step, Steps
from shardio.kernels.pixels import in_slices
from shardio.kernels.resample import Planes

Images = torch.Tensor | tuple[torch.Tensor, ...]
Arrays = dict[str, Images]
"""Masks by name: a tensor, or a tuple with a tensor per view."""


@dataclass(frozen=True)
class Batch:
    """Images, (B, C, H, W), and the changes recorded for them, in the order in which they apply.

    - Each image is cropped to its box in `boxes` and resized to its row of `sizes`, int64 (B, 2), height and width. The
      `filter` reads no pixel outside of the box `within`. In a new batch, `sizes` are the sizes before any squashing.
    - Images are mirrored where `flips`, bool (B,), is true, go through `steps`, and are normalized and cast by `cast`.

    A field that is None records no change. `masks` are the masks of `images`, before the changes. With several views of
    each image, the other fields have all images of the first view, then all images of the next view.

    The images of a deferred batch are on torch's device "meta", after `stages`. `casts` says whether Normalize and
    ToDtype are recorded, or left to `rest`.
    """

    images: torch.Tensor
    draws: Draws
    sizes: NDArray[np.int64]
    labels: torch.Tensor | None = None
    masks: Masks | None = None
    boxes: Boxes | None = None
    within: Boxes | None = None
    flips: NDArray[np.bool_] | None = None
    filter: Filter | None = None
    steps: Steps = ()
    cast: Cast = UNCAST
    stages: Stages = ()
    rest: tuple[Any, ...] = ()
    casts: bool = True

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
        return replace(self, boxes=part, within=self.within if self.filter else part, sizes=sizes)

    def resized_to(
        self,
        sizes: NDArray[np.int64],
        interpolation: Interpolation = "bilinear",
        antialias: bool = True,
        purpose: str = "",
    ) -> Batch:
        """Returns the batch resized to `sizes`, (B, 2). The interpolation "random" draws a filter with `purpose`."""
        self.check_uint8()
        if self.filter or self.steps:
            return self.made().resized_to(sizes, interpolation, antialias, purpose)
        cubic = self.draws.uniform(f"{purpose}/interpolation", 1)[0] < 0.5 if interpolation == "random" else None
        region = self.region
        reading = Filter(interpolation, antialias, cubic)
        return replace(self, boxes=region, within=self.within or region, sizes=sizes, filter=reading)

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
        return self.cast.made != torch.uint8 or self.images.dtype != torch.uint8

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
        if masks is None and self.masks is not None:
            masks = self.masks if self.is_whole else self._stage().move(self.masks)
        if masks is not None and masks.size != (size := tuple(images.shape[2:])):
            raise ValueError(f"masks must have the (height, width) of the images, {size}; found {masks.size}")
        return Batch(images, self.draws, sizes_of(images), self.labels, masks)

    @property
    def is_deferred(self) -> bool:
        return self.images.device.type == "meta"

    def part(self, some: slice, num_shared: int) -> Batch:
        """Returns a batch of the images `some` of this batch, which must have no recorded changes.

        The first `num_shared` stages, which all views have in common, come before the views, and stay as they are.
        """
        stages = (*self.stages[:num_shared], *(stage.part(some) for stage in self.stages[num_shared:]))
        images = self.images[some] if len(self.images) == len(self) else self.images
        return replace(self, images=images, sizes=self.sizes[some], stages=stages)

    def closed(self) -> Batch:
        """Returns the batch after all recorded changes. In a deferred batch, `cast` and `rest` stay as they are."""
        if not self.is_deferred:
            return self.finished()
        return replace(replace(self, cast=UNCAST).finished(), cast=self.cast, rest=self.rest)

    def finished(self) -> Batch:
        """Computes the recorded changes. Returns a batch of the new images. Raises ValueError if their sizes differ.

        A deferred batch, which has no pixels yet, is returned with the changes as one more stage.
        """
        if self.is_whole and self.cast.made == torch.uint8 and (self.is_deferred or len(self.images) == len(self)):
            return self
        sizes = self.sizes if self.boxes is None else np.full((len(self), 2), self.size)
        return self.after(None if self.is_whole else self._stage(), sizes)

    def made(self) -> Batch:
        """Computes the recorded changes like `finished`, but crops and resizes may give images of different sizes.

        Images of different sizes lie in the upper left corners of images of the largest height and the largest width.
        The `boxes` of the returned batch say where. With steps or a cast recorded, different sizes raise ValueError.
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
        part = Boxes.of_one_size(*size, firsts[:, 0].astype(float), lefts.astype(float))
        boxes = Boxes.picked([boxes, part.inside_of(boxes, sizes)], inside.astype(np.int64))
        sizes, firsts = np.where(inside[:, None], size, sizes), np.where(inside[:, None], 0, firsts)
        within = self.within if self.filter and self.within else boxes
        canvas = Canvas(sizes, firsts, mode, tuple(fill))
        stage = replace(self._stage(size), boxes=boxes, within=within, canvas=canvas, steps=())
        return self.after(stage, np.full((len(self), 2), size))

    def _stage(self, size: tuple[int, int] | None = None) -> Stage:
        """Returns the recorded changes, without the cast, as a stage with results of `size` (default: `self.size`)."""
        channels, height, width = self.images.shape[1:]
        region, reading = self.region, self.filter or Filter()
        within, source = self.within or region, (height, width, channels)
        return Stage(source, size or self.size, region, within, self.is_mirrored, reading, steps=self.steps)

    def after(self, stage: Stage | Choice | None, sizes: NDArray[np.int64]) -> Batch:
        """Returns the batch after `stage` and the recorded cast. `sizes`, int64 (B, 2), are heights and widths before
        any squashing."""
        stages = () if stage is None else (stage,)
        if self.is_deferred:
            assert not self.is_cast
            shape = (len(self), self.images.shape[1], *stage.size) if stage else self.images.shape
            images = torch.empty(shape, dtype=torch.uint8, device="meta")
            return Batch(images, self.draws, sizes, stages=(*self.stages, *stages), casts=self.casts)
        images = computed(self.images, stages, self.cast, len(self))  # first, as it refuses images on a GPU
        masks = None if self.masks is None else moved_by(stages, self.masks)
        return Batch(images, self.draws, sizes, self.labels, masks)

    @property
    def is_whole(self) -> bool:
        """True if no crop, resize, flip or operation is recorded."""
        return self.boxes is None and self.flips is None and not self.steps

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


def check_no_masks(names: Iterable[str]) -> None:
    """Raises ValueError if there are masks, called `names`: Mixup and CutMix cannot combine masks."""
    if found := ", ".join(names):
        raise ValueError(
            f"Mixup and CutMix combine images, but cannot combine masks; found masks {found}: remove Mixup and CutMix "
            "from the transform, or pass images and labels only"
        )


def sizes_of(images: torch.Tensor) -> NDArray[np.int64]:
    return np.full((len(images), 2), images.shape[2:])


def computed(images: torch.Tensor, stages: Stages, cast: Cast, count: int) -> torch.Tensor:
    """Returns images after `stages`, normalized and cast, in as many threads as torch has.

    `images` are (n, C, H, W), uint8 if there are stages. They are repeated until there are `count`, a multiple of n,
    such as once for each view; the stages are of `count` images. The results are in channels_last memory.
    """
    if not stages and len(images) != count:
        images = torch.cat([images] * (count // len(images)))
    is_in_place = images.device.type == "cpu" and images.is_contiguous(memory_format=torch.channels_last)
    if not stages and (images.dtype != torch.uint8 or not is_in_place):
        return normalized(images, cast)
    if images.device.type != "cpu":
        raise ValueError(
            f"images are on {images.device}: a ShardLoader makes crops, resizes, flips, warps and color changes on the "
            "CPU, before the batch is copied to its device. Pass the transform to the loader, or images on the CPU; "
            "Normalize, ToDtype, RandomErasing, Mixup and CutMix take images on any device"
        )
    pixels = images.detach().permute(0, 2, 3, 1).contiguous().numpy()
    size = stages[-1].size if stages else pixels.shape[1:3]
    out = np.empty((count, *size, pixels.shape[3]), cast.kernel_dtype)
    planes = Planes.of_images(pixels)

    def work(part: slice) -> None:
        some = np.arange(count)[part]
        run_and_cast(stages, planes[some % len(pixels)], some, out, cast)

    in_slices(count, work)
    return as_made(torch.from_numpy(out), cast).permute(0, 3, 1, 2)

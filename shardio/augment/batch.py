"""Transforms of batches, and the batch that makes several of them one pass over the pixels.

A batch on its way through transforms has its pixels as they were stored, and notes what is wanted of them: a region, a
size, a mirror image, a mean, a dtype. The pixels are computed where a transform needs them, and at the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from shardio.augment.boxes import Boxes, Draws
from shardio.augment.description import Described
from shardio.augment.pixels import fused, normalized, run_steps
from shardio.augment.resample import Interpolation, Statistics, resample
from shardio.augment.steps import NEEDS_RGB, Op, Step, Steps
from shardio.augment.targets import Targets
from shardio.system.eager import eager, is_recorded
from shardio.system.kernels import warn_of_missing_kernels

if TYPE_CHECKING:
    from typing_extensions import Unpack

Images = torch.Tensor | tuple[torch.Tensor, ...]
Arrays = dict[str, Images]
"""Masks and boxes by name, each a tensor, or one for each view."""


@dataclass(frozen=True)
class Batch:
    """Pictures of `sizes`, int64 (B, 2), height and width: those that `boxes` of `images`, (B, C, H, W), become.

    A new batch is what the images show, which may be squashed. The filter sees no pixel outside of `within`. Pictures
    are mirrored where `flips`, (B,), is true, go through `steps`, are normalised by `statistics`, mean and standard
    deviation of each channel, and then cast to `dtype`. None leaves them as they are. `targets` are those of `images`.
    """

    images: torch.Tensor
    draws: Draws
    sizes: NDArray[np.int64]
    labels: torch.Tensor | None = None
    targets: Targets | None = None
    boxes: Boxes | None = None
    within: Boxes | None = None
    flips: NDArray[np.bool_] | None = None
    resized: bool = False
    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    steps: Steps = ()
    statistics: Statistics | None = None
    dtype: torch.dtype | None = None

    def __len__(self) -> int:
        return len(self.images)

    def cropped(self, boxes: Boxes) -> Batch:
        """Takes a box of each picture, in the picture's own pixels."""
        self.check_uint8()
        if self.steps:
            return self.finished().cropped(boxes)
        if self.flips is not None:  # crops come before flips in the end, so that this box is taken as in a mirror
            lefts = np.where(self.flips, self.sizes[:, 1] - boxes.lefts - boxes.widths, boxes.lefts)
            boxes = replace(boxes, lefts=lefts)
        part = boxes.inside_of(self.region, self.sizes)
        sizes = np.stack([boxes.heights, boxes.widths], axis=1).astype(np.int64)
        # A picture that was resized before its crop was made of pixels beyond the crop, too.
        return replace(self, boxes=part, within=self.within if self.resized else part, sizes=sizes)

    def resized_to(self, sizes: NDArray[np.int64], interpolation: Interpolation, antialias: bool) -> Batch:
        self.check_uint8()
        if self.resized or self.steps:
            return self.finished().resized_to(sizes, interpolation, antialias)
        return replace(
            self,
            boxes=self.region,
            within=self.within or self.region,
            sizes=sizes,
            resized=True,
            interpolation=interpolation,
            antialias=antialias,
        )

    def mirrored(self, flips: NDArray[np.bool_]) -> Batch:
        if self.steps:
            return self.stepped(np.where(flips, np.uint8(Op.MIRROR), np.uint8(Op.NOTHING)))
        self.check_uint8()
        return replace(self, flips=flips if self.flips is None else self.flips ^ flips)

    def stepped(self, codes: Op | NDArray[np.uint8], *values: ArrayLike) -> Batch:
        """Adds an operation for each picture, an Op or `codes`, (B,); each of its `values` is a number or (B,)."""
        self.check_uint8()
        step = Step.of(len(self), self.images.shape[1], codes, *values)
        self.check_channels(map(Op, np.unique(step.codes).tolist()))
        return replace(self, steps=(*self.steps, step))

    def check_channels(self, ops: Iterable[Op]) -> None:
        """Raises ValueError if one of these operations is not defined for pictures of so many channels.

        Transforms ask for all that they may draw: an error that only some batches bring would come late.
        """
        channels = self.images.shape[1]
        if channels not in (1, 3) and (wrong := NEEDS_RGB.intersection(ops)):
            names = ", ".join(sorted(op.name.lower() for op in wrong))
            raise ValueError(
                f"expected images of 3 channels, red, green and blue, or of 1 for {names}; found {channels}"
            )

    def unsquashed(self) -> Batch:
        """Resizes squashed pictures to what they were before, which must be one size for all, unless they are cast."""
        if self.boxes is not None or self.is_cast or (self.sizes == self.images.shape[2:]).all():
            return self
        return self.resized_to(self.sizes, self.interpolation, self.antialias)

    @property
    def is_cast(self) -> bool:
        """True if the pictures are not uint8, or will not be in the end."""
        return self.statistics is not None or self.dtype is not None or self.images.dtype != torch.uint8

    def check_uint8(self) -> None:
        if self.is_cast:
            raise ValueError(
                "crops, resizes, flips, warps and changes of colour take uint8 images: they come before Normalize and "
                "ToDtype"
            )

    @property
    def region(self) -> Boxes:
        """The boxes of `images` that the pictures are."""
        return self.boxes or Boxes.whole(len(self), *self.images.shape[2:])

    def holding(self, images: torch.Tensor, targets: Targets | None = None) -> Batch:
        """Returns a batch of other pictures of the same samples, with nothing noted.

        Masks and boxes are `targets`, or those of the finished batch, whose pictures must have had this size.
        """
        targets = targets or self._moved_targets()
        if targets is not None and targets.size != (size := tuple(images.shape[2:])):
            raise ValueError(f"expected masks and boxes of pictures of {size}, height and width; found {targets.size}")
        return Batch(images, self.draws, _sizes_of(images), self.labels, targets)

    def check_no_targets(self, what: str) -> None:
        """Raises ValueError if there are masks or boxes, for which `what` leaves no place."""
        if self.targets is not None:
            names = ", ".join([*self.targets.masks, *self.targets.boxes]) or "none in a mapping"
            raise ValueError(
                f"{what} one picture of several, for which there are no masks and boxes; found {names}: leave "
                "that out of the transform, or give images and labels only"
            )

    def finished(self) -> Batch:
        """Computes the pixels. Raises ValueError if the pictures have several sizes."""
        images = self._done()
        if images is self.images:
            return self
        sizes = self.sizes if self.boxes is None else _sizes_of(images)
        return Batch(images, self.draws, sizes, self.labels, self._moved_targets())

    def _moved_targets(self) -> Targets | None:
        if self.targets is None:
            return None
        if self.boxes is None and self.flips is None:
            return self.targets.moved(None, None, self.size, self.steps)
        flips = np.zeros(len(self), bool) if self.flips is None else self.flips
        return self.targets.moved(self.region, flips, self.size, self.steps)

    def _done(self) -> torch.Tensor:
        if self.steps:
            images = replace(self, steps=(), statistics=None, dtype=None)._done()
            if (made := fused(images, self.steps, self.statistics, self.dtype)) is not None:
                return made
            if images is self.images:
                images = images.clone(memory_format=torch.channels_last)
            return replace(self, images=run_steps(images, self.steps), boxes=None, flips=None, steps=())._done()
        images = self.images
        if self.boxes is None and self.flips is None:
            # The result has the memory format of the images, as that of torch's operations.
            if self.is_cast and images.is_contiguous(memory_format=torch.channels_last):
                made = fused(images, (), self.statistics, self.dtype)
                if made is not None:
                    return made
            if self.statistics is not None:
                images = normalized(images, self.statistics)
            return images if self.dtype is None else images.to(self.dtype)
        size = self.size
        boxes = self.region
        flips = np.zeros(len(self), bool) if self.flips is None else self.flips
        if images.is_cuda:
            from shardio.augment.resample_cuda import can_fuse, resample_fused  # Triton takes its time to import

            if can_fuse(images, size):
                return resample_fused(
                    images,
                    boxes,
                    self.within or boxes,
                    flips,
                    size,
                    self.interpolation,
                    antialias=self.antialias,
                    statistics=self.statistics,
                    dtype=self.dtype,
                )
        images = resample(
            images,
            boxes,
            flips,
            size,
            self.interpolation,
            antialias=self.antialias,
            within=self.within,
            statistics=self.statistics,
        )
        return images if self.dtype is None else images.to(self.dtype)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of all pictures. Raises ValueError if they have several sizes."""
        if self.boxes is None:  # mirrored only: pictures have the size in which they were stored
            height, width = self.images.shape[2:]
            return height, width
        height, width = self.sizes[0].tolist() if len(self) else (1, 1)
        if (self.sizes != (height, width)).any():
            least, most = self.sizes.min(axis=0).tolist(), self.sizes.max(axis=0).tolist()
            raise ValueError(
                f"the pictures of a batch must have one size; found (height, width) from {tuple(least)} to "
                f"{tuple(most)}: let a CenterCrop or RandomCrop follow, or resize to (height, width)"
            )
        return height, width


def _sizes_of(images: torch.Tensor) -> NDArray[np.int64]:
    return np.tile(np.array(images.shape[2:], np.int64), (len(images), 1))


class _NoDraws(Draws):
    """Refuses to draw while torch.export records a program, in which random numbers would be constants."""

    def uniform(self, purpose: str, count: int) -> NDArray[np.float64]:
        raise ValueError(
            f"torch.export: expected transforms without random numbers, found {purpose}: the exported program would "
            "draw the same for every batch; export Resize, CenterCrop, Normalize and ToDtype only"
        )


class _Samples(TypedDict, total=False):
    """The arguments by which a ShardLoader tells a transform about the samples of a batch."""

    indices: ArrayLike | None
    seed: int
    epoch: int
    view: int
    sizes: ArrayLike | None


class _Alone(_Samples, total=False):
    """The arguments of a call without masks and boxes."""

    masks: None
    boxes: None
    mask_fill: float | Mapping[str, float]


class _WithArrays(_Samples, total=False):
    """The arguments of a call with masks, boxes or both."""

    masks: Mapping[str, torch.Tensor] | None
    boxes: Mapping[str, torch.Tensor] | None
    mask_fill: float | Mapping[str, float]


class Transform(Described, ABC):
    """A change of each picture of a batch. Any number of threads may use one at the same time."""

    @overload
    def __call__(self, images: torch.Tensor, labels: None = None, **samples: Unpack[_Alone]) -> Images: ...
    @overload
    def __call__(
        self, images: torch.Tensor, labels: torch.Tensor, **samples: Unpack[_Alone]
    ) -> tuple[Images, torch.Tensor]: ...
    @overload
    def __call__(
        self, images: torch.Tensor, labels: None = None, **samples: Unpack[_WithArrays]
    ) -> tuple[Images, Arrays]: ...
    @overload
    def __call__(
        self, images: torch.Tensor, labels: torch.Tensor, **samples: Unpack[_WithArrays]
    ) -> tuple[Images, torch.Tensor, Arrays]: ...
    @eager
    def __call__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor | None = None,
        *,
        masks: Mapping[str, torch.Tensor] | None = None,
        boxes: Mapping[str, torch.Tensor] | None = None,
        mask_fill: float | Mapping[str, float] = 0,
        indices: ArrayLike | None = None,
        seed: int = 0,
        epoch: int = 0,
        view: int = 0,
        sizes: ArrayLike | None = None,
    ) -> Images | tuple[Images, torch.Tensor] | tuple[Images, Arrays] | tuple[Images, torch.Tensor, Arrays]:
        """Returns (B, C, *size) for uint8 images (B, C, H, W), on the same device, uint8 unless normalised or cast.

        The result is in channels_last memory if it is cropped, resized or mirrored, or if `images` are.

        With `labels`, int64 (B,), returns the pair of images and labels. Mixup and CutMix make the labels float32
        (B, classes).

        With `masks` or `boxes`, tensors by name, the result ends with a dict of all of them, which have moved as their
        pictures have. Colours, erasing and casts leave them as they are.

        - A mask, (B, H, W) or (B, H, W, C) of any dtype, is read by nearest neighbour, as torch's "nearest-exact".
          Where the picture shows what is outside of it, masks are `mask_fill`: a number, or numbers by name.
        - Boxes are float32 (B, K, 5): left, top, right and bottom in pixels of `images`, and the label, which is below
          0 where there is no box. Those of the result are in its pixels, around the four moved corners, inside of the
          picture. Row k is still row k: a box of which less than a pixel is left, in width or height, has become zeros
          with the label -1.

        Random numbers depend on `seed`, `epoch`, `view` and each sample's number in `indices`, (B,), by default 0 to
        B - 1; another `view` is an independent augmentation of the same samples. `sizes`, (B, 2), are the heights and
        widths that the pictures had before they were squashed to one shape: with them, they are treated as if they had
        never been. Masks and boxes are those of the squashed pictures all the same. A ShardLoader gives samples and
        sizes.

        All tensors are only read. Images and masks are returned themselves if nothing is to be done to them.
        """
        if not isinstance(images, torch.Tensor) or not isinstance(labels, torch.Tensor | None):
            found_types = f"{type(images).__name__} and {type(labels).__name__}"
            raise TypeError(f"images, and labels if there are any, must be tensors; found {found_types}")
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise ValueError(f"images must be uint8 (B, C, H, W); found {images.dtype} {tuple(images.shape)}")
        if images.device.type == "cpu":
            warn_of_missing_kernels()
        count = len(images)
        numbers = np.arange(count) if indices is None else np.asarray(_on_the_host(indices))
        if numbers.shape != (count,) or numbers.dtype.kind not in "iu":
            raise ValueError(f"indices must be integers of shape {(count,)}; found {numbers.dtype} {numbers.shape}")
        found = _sizes_of(images) if sizes is None else np.asarray(_on_the_host(sizes), np.int64)
        if found.shape != (count, 2) or (count and found.min() < 1):
            least = f", at least {found.min()}" if found.size else ""
            raise ValueError(f"sizes must be of shape {(count, 2)}, each at least 1; found {found.shape}{least}")
        if labels is not None and labels.shape != (count,):
            raise ValueError(f"labels must be of shape {(count,)}; found {tuple(labels.shape)}")
        draws = (_NoDraws if is_recorded(images) else Draws)(seed, epoch, numbers.astype(np.int64), view)
        targets = Targets.of(images, masks, boxes, mask_fill)
        changed, labels, arrays = self._finish(Batch(images, draws, found, labels, targets))
        if arrays is None:
            return changed if labels is None else (changed, labels)
        return (changed, arrays) if labels is None else (changed, labels, arrays)

    @property
    def mixes(self) -> bool:
        """True if pictures of the result are made of several pictures of the batch, and labels likewise."""
        return False

    def _finish(self, batch: Batch) -> tuple[Images, torch.Tensor | None, Arrays | None]:
        done = self.apply(batch, type(self).__name__).finished()
        return done.images, done.labels, None if done.targets is None else {**done.targets.arrays()}

    @abstractmethod
    def apply(self, batch: Batch, purpose: str) -> Batch:
        """Returns the batch after this transform. `purpose` keys the random numbers, so that several transforms of one
        class draw different ones."""


def checked(transforms: Iterable[Transform]) -> tuple[Transform, ...]:
    """Returns a tuple. Raises ValueError if one of them may not be part of another transform."""
    if not isinstance(transforms, Iterable):
        raise TypeError(f"transforms must be a list of them; found {transforms!r}")
    parts = tuple(transforms)
    for transform in parts:
        if not isinstance(transform, Transform) or isinstance(transform, Views):
            raise ValueError(f"expected a Transform, and Views only around all others; found {transform!r}")
    return parts


def _on_the_host(values: ArrayLike | torch.Tensor) -> ArrayLike:
    return values.cpu() if isinstance(values, torch.Tensor) else values


@dataclass(frozen=True, repr=False)
class Compose(Transform):
    """One transform after the other."""

    transforms: Iterable[Transform]

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", checked(self.transforms))
        super().__post_init__()

    @property
    def mixes(self) -> bool:
        return any(transform.mixes for transform in self.transforms)

    def apply(self, batch: Batch, purpose: str) -> Batch:
        # A transform is numbered among those of its class, so that one without randomness may come or go before it.
        numbers = Counter[str]()
        for transform in self.transforms:
            name = type(transform).__name__
            batch = transform.apply(batch, f"{purpose}/{name} {numbers[name]}")
            numbers[name] += 1
        return batch


@dataclass(frozen=True, repr=False)
class Views(Transform):
    """Several independent augmentations of each sample: a tuple of images, one for each of `transforms`.

    Transforms that are the same give different views; labels come once, and as they were.
    """

    transforms: Sequence[Transform]

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", checked(self.transforms))
        super().__post_init__()
        if not self.transforms:
            raise ValueError("Views takes one or more transforms; found none")

    def _finish(self, batch: Batch) -> tuple[Images, torch.Tensor | None, Arrays | None]:
        count = len(self.transforms)
        views, several = [], []
        for number, transform in enumerate(self.transforms):
            draws = replace(batch.draws, view=batch.draws.view * count + number)
            done = transform.apply(replace(batch, draws=draws, labels=None), "Views").finished()
            views.append(done.images)
            if done.targets is not None:
                several.append(done.targets.arrays())
        arrays: Arrays = {name: tuple(each[name] for each in several) for name in several[0]} if several else {}
        return tuple(views), batch.labels, None if batch.targets is None else arrays

    def apply(self, batch: Batch, purpose: str) -> Batch:
        raise ValueError("Views comes last, around all other transforms")

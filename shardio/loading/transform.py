"""The `transform` of a loader: fixed for an epoch, and called with each of its batches.

A transform of shardio.augment also gets the samples of the batch, and the sizes of the source images of a squashed
split. If it begins with crops and resizes that can be split off, only the regions that these use are read: then each
batch has a Cut.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.augment.boxes import Draws, LoaderBatch
from shardio.augment.chain import Transform
from shardio.augment.cut import Cut, SplitTransform
from shardio.augment.per_sample import check_foreign, name_of
from shardio.format.layout import LABEL_ROW, LABELS_NAME, RowType
from shardio.loading.options import Function, Options, Parts
from shardio.loading.prefetch import Tensors, traced
from shardio.reading.mixed import AnySet

# What the kernel for CUDA is told of each picture, which comes with the batch: a copy of its own would wait for larger
# ones. No array has such names.
CUT_ROWS = {"/parameters": RowType("<f8", (9,)), "/places": RowType("<i8", (2,))}

# Pictures on which the kernel for windows is compared.
_NUM_DRAWN = 3


class TransformStep:
    """Calls the loader's transform with each batch. Immutable; to be used by one thread."""

    def __init__(
        self,
        function: Function | None,
        may_read_regions: bool,
        whole_lines: int,
        options: Options,
        parts: Parts,
        shards: AnySet,
        indices: NDArray[np.int64] | None,
    ) -> None:
        """Raises ValueError if `function` does not suit the split.

        - `may_read_regions`: read only the regions that the first crops and resizes use, if they can be split off
        - `whole_lines`: see `SplitTransform.cut`
        - `indices`: the indices of the samples to read; None for all samples of the split
        """
        self.function = function
        self._whole_lines = whole_lines
        self._options = options
        self._parts = parts
        if function is not None and parts.image_shape is None:
            raise ValueError(f"{shards.path}: batches have no images to transform: leave out transform=")
        self._shards = shards
        self._ours = ours = _ours(function)
        if ours is not None:
            _check_classes(ours, parts.label_row, shards, indices)
        elif function is not None:
            _check_function(function, parts.masks)
        self.two_parts = self._two_parts_of(ours) if may_read_regions and ours is not None else None
        """The transform in two parts, if only the regions that its first part uses are read; otherwise None."""

    def _two_parts_of(self, transform: Transform) -> SplitTransform | None:
        split, device = SplitTransform.of(transform), self._options.device
        if split is None or device.type == "cpu":
            return split
        try:
            draws, shape = Draws(0, 0, np.arange(_NUM_DRAWN)), self._shards.sample_shape
            works = split.cut(draws, shape, None, self._whole_lines).works_on(device)
        except (ValueError, IndexError):  # which each batch will raise, by then of its own pictures
            return None
        return split if works else None

    def cut(self, indices: NDArray[np.int64], draws: Draws) -> Cut | None:
        """Returns the regions to read of a batch's images, as a Cut; None if images are read whole, or not at all."""
        if self.two_parts is None or not len(indices):
            return None
        shape = self._shards.sample_shape
        return self.two_parts.cut(draws, shape, self._shards.source_sizes(indices), self._whole_lines)

    def __call__(
        self,
        tensors: Tensors,
        indices: NDArray[np.int64],
        draws: Draws,
        cut: Cut | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]:
        """Returns the transformed batch: images, labels, and arrays by name.

        Images are a tuple of tensors if the transform returns several views. Labels are None if there are none. A
        transform of shardio.augment also changes masks. `indices` are the samples, and `draws` are
        their random numbers. With `cut`, the images of `tensors` are already resampled; or, if they are
        one-dimensional, they are the windows that `cut` resamples.
        """
        images, more = tensors.images, dict(tensors.more)
        if self._parts.label_row in (None, LABEL_ROW):  # without labels, a column may have the name of the array
            labels = None if self._parts.label_row is None else tensors.labels
        else:
            labels = more.pop(LABELS_NAME)
        told = [more.pop(name) for name in CUT_ROWS if name in more]
        if self.function is None:
            return images, labels, more
        with traced("shardio.transform"):
            if cut is not None:
                if images.ndim == 1:
                    images = cut.resampled_on_cuda(images, *told) if told else cut.resampled(images)
                finished, targets, moved = cut.finish(images, labels, self._masks(more))
                return cast(torch.Tensor, finished), targets, {**more, **(moved or {})}
            # The shapes of an empty batch are those of another sample.
            sizes = partial(self._shards.source_sizes, indices if len(indices) else np.zeros(1, np.int64))
            if self._ours is None:
                with LoaderBatch(images, draws, sizes).here():
                    return cast(torch.Tensor, self.function(images)), labels, more
            changed, targets, moved = self._ours.changed(images, labels, self._masks(more), draws, sizes())
            return cast(torch.Tensor, changed), targets, {**more, **(moved or {})}

    def _masks(self, more: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """Returns the masks among a batch's arrays; None if the batch has no masks."""
        return {name: more[name] for name in self._parts.masks} or None


def _check_function(function: Function, masks: tuple[str, ...]) -> None:
    """Raises ValueError if batches have `masks`, which a plain function would not change, and the errors of
    `check_foreign`."""
    if masks:
        raise ValueError(
            f"transform: {name_of(function)} gets only the images, so {', '.join(masks)} would not move with them; "
            "pass a transform of shardio.augment itself, without a function around it, or PerSample(transform), or "
            "call the function in the training loop"
        )
    check_foreign(function)


def _check_classes(
    transform: Transform, label_row: RowType | None, shards: AnySet, indices: NDArray[np.int64] | None
) -> None:
    """Raises ValueError if the transform mixes labels that the split does not have, or has another `num_classes`."""
    for number in transform.mixed_classes:
        if label_row is None:
            raise ValueError("transform: Mixup and CutMix mix labels; found a split without labels: leave them out")
        if label_row != LABEL_ROW:
            if number is not None:
                raise ValueError(
                    f"transform: Mixup and CutMix of float32 labels take no num_classes; found num_classes={number}"
                )
            continue
        expected, is_known = len(shards.classes), bool(shards.classes)
        if not is_known:  # the largest label, but others may need more classes
            labels = shards.labels if indices is None else shards.labels[indices]
            expected = int(labels.max(initial=-1)) + 1
        if number is None or number < expected or (is_known and number != expected):
            at_least = f"must have num_classes of at least {expected}"
            wanted = f"must have num_classes={expected}, like the set" if is_known else at_least
            raise ValueError(f"transform: Mixup and CutMix {wanted}; found num_classes={number}")


def _ours(transform: object) -> Transform | None:
    """Returns the transform of shardio.augment that `transform` is or that torch.compile wraps; otherwise None.
    torch.compile compiles nothing of such a transform, and hides that it needs seed, epoch and samples."""
    original = transform
    # Only torch's own wrappers are looked through: a user's may do more than what it wraps.
    while getattr(original, "__globals__", {}).get("__name__", "").startswith("torch.") and hasattr(
        original, "__wrapped__"
    ):
        original = original.__wrapped__
    return original if isinstance(original, Transform) else None

"""The `transform` of a loader: called with each batch, and told what transforms of shardio.augment ask for.

These want to know which samples the batch holds, and how large the pictures were before they were squashed. The sizes
are read from the index by the gather thread that finishes a batch, which may have to wait for storage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.augment.boxes import Draws, Loaded
from shardio.augment.chain import Transform
from shardio.augment.cut import Cut, Split
from shardio.augment.foreign import Watch, check_foreign
from shardio.format.layout import RowType, SampleShape
from shardio.loading.parts import Parts
from shardio.loading.prefetch import Tensors
from shardio.loading.ring import Drawn
from shardio.loading.traced import traced
from shardio.reading.reader import Reader

Function: TypeAlias = Transform | Callable[[torch.Tensor], torch.Tensor]


# What the kernel for CUDA is told of each picture, which comes with the batch: a copy of its own would wait for larger
# ones. No array has such names.
CUT_ROWS = {"/parameters": RowType("<f4", (9,)), "/places": RowType("<i8", (2,))}

PictureSizes: TypeAlias = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""Indices of samples -> heights and widths, (B, 2): how large pictures were before they were squashed."""


def sizes_before(reader: Reader, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the heights and widths that pictures of a squashed split had before."""
    columns = [reader.column_of(name, indices) for name in ("source_height", "source_width")]
    return np.stack(columns, axis=1).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Cutter:
    """What is needed for the cut of a batch."""

    split: Split
    draws: Draws
    shape: SampleShape
    sizes: PictureSizes | None
    """Tells the sizes of pictures before they were squashed, if they were."""
    resamples: bool
    """Whether gather threads compute the results of the cut; else they read windows alone."""
    whole_lines: int
    """Of which multiple these are, see `Split.cut`."""

    def cut(self, indices: NDArray[np.int64]) -> Cut:
        sizes = None if self.sizes is None else self.sizes(indices)
        return self.split.cut(self.draws, self.shape, sizes, self.whole_lines)


class TransformStep:
    """Calls a function with each batch. It may be replaced at any time, also while batches are under way.

    With `roi`, gather threads read what the first part of a transform of shardio.augment sees, if it can be split: of
    pictures that are stored in `shape`. With `gather_resamples`, they do that part, too.

    `num_classes` returns how many classes the samples have, and whether that is all: else, the labels may have more.
    """

    def __init__(
        self,
        function: Function | None,
        seed: int,
        sizes: PictureSizes | None,
        parts: Parts,
        shape: SampleShape,
        num_classes: Callable[[], tuple[int, bool]],
        *,
        device: torch.device,
        roi: bool,
        gather_resamples: bool,
        whole_lines: int,
    ) -> None:
        self.roi = roi
        """Whether functions that are set may be split."""
        self._gather_resamples = gather_resamples
        self._whole_lines = whole_lines
        self._device = device
        self._shape = shape
        self._seed = seed
        self._sizes = sizes
        self._num_classes = num_classes
        self._masks = parts.masks
        self._boxes = parts.boxes
        self.split: Split | None = None
        """The function in two parts, if only what the first sees is read."""
        self.function = function

    @property
    def function(self) -> Function | None:
        return self._function

    @function.setter
    def function(self, function: Function | None) -> None:
        ours = _ours(function)
        if ours is not None:
            self._check_classes(ours)
        self._watch: Watch | None = None
        if function is not None and ours is None:
            check_foreign(function, (*self._masks, *self._boxes))
            self._watch = Watch(function)
        self._function = function
        # For one that does the same, batches under way are still right.
        if self.split is None or self.split.transform != ours:
            self.split = self._split_of(ours) if self.roi and ours is not None else None

    def _check_classes(self, transform: Transform) -> None:
        """Raises ValueError if it mixes labels for another number of classes than the split has."""
        for number in transform.mixed_classes:
            num_classes, is_known = self._num_classes()
            if number < num_classes or (is_known and number != num_classes):
                raise ValueError(
                    f"transform: Mixup and CutMix must have num_classes={num_classes}, as the set; found {number}"
                )

    def _split_of(self, transform: Transform) -> Split | None:
        split = Split.of(transform)
        if split is None or self._device.type == "cpu":
            return split
        try:
            works = split.cut(Draws(0, 0, np.zeros(1, np.int64)), self._shape).works_on(self._device)
        except (ValueError, IndexError):  # which each batch will raise, by then of its own pictures
            return None
        return split if works else None

    def cutter(self, counters: NDArray[np.int64], epoch: int) -> Cutter | None:
        """Returns what makes the cut of a batch; None if pictures are read whole, or there are none."""
        if self.split is None or not len(counters):
            return None
        draws, how = Draws(self._seed, epoch, counters), (self._gather_resamples, self._whole_lines)
        return Cutter(self.split, draws, self._shape, self._sizes, *how)

    def sizes_wanted(self) -> PictureSizes | None:
        """Returns what gives the sizes that `function` asks for; None if it asks for none."""
        return None if self._sizes is None or _ours(self.function) is None else self._sizes

    def __call__(
        self, tensors: Tensors, drawn: Drawn, counters: NDArray[np.int64], epoch: int, cut: Cut | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Returns the images, or a tuple of views of them, and the labels that `function` makes of these; and what
        comes with them by name. Of this a transform of shardio.augment is given masks and boxes.

        `counters` are the numbers of the samples for random numbers: what is drawn depends on (seed, epoch, counter).
        With `cut`, the images are what it has made of the pictures; or, in one dimension, the windows that it needs.
        """
        function: Callable[[torch.Tensor], Any] | None = self.function
        images, labels, more = tensors.images, tensors.labels, dict(tensors.more)
        told = [more.pop(name) for name in CUT_ROWS if name in more]
        if function is None:
            return images, labels, more
        with traced("shardio.transform"):
            if cut is not None:
                if images.ndim == 1:
                    images = cut.resampled_on_cuda(images, *told) if told else cut.resampled(images)
                finished, targets, moved = cut.finish(images, labels, **self._arrays(more))
                return cast(torch.Tensor, finished), targets, {**more, **moved}
            if self._watch is not None:
                sizes_of = None if self._sizes is None else partial(self._sizes, drawn.indices)
                batch = Loaded(images, Draws(self._seed, epoch, counters), sizes_of)
                return self._watch(batch), labels, more
            ours = _ours(function)
            assert ours is not None
            sizes = drawn.sizes
            if sizes is None and self._sizes is not None:  # `function` was set while the batch was under way
                sizes = self._sizes(drawn.indices)
            changed, targets, *arrays = ours(
                images,
                labels,
                **self._arrays(more),
                indices=counters,
                seed=self._seed,
                epoch=epoch,
                sizes=sizes,
            )
            for changed_arrays in arrays:  # one, or none
                more.update(changed_arrays)
            return cast(torch.Tensor, changed), targets, more  # Views return a tuple

    def _arrays(self, more: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments for masks and boxes, if there are any."""
        if not self._masks and not self._boxes:
            return {}
        return {
            "masks": {name: more[name] for name in self._masks},
            "boxes": {name: more[name] for name in self._boxes},
        }


def _ours(transform: object) -> Transform | None:
    """Returns the transform of shardio.augment that this is, or that torch.compile was given; None of any other.

    The compiler compiles nothing of such a transform, and hides that it asks for seed, epoch and samples.
    """
    original = transform
    # Only torch's own wrappers are looked through: a user's may do more than what it wraps.
    while getattr(original, "__globals__", {}).get("__name__", "").startswith("torch.") and hasattr(
        original, "__wrapped__"
    ):
        original = original.__wrapped__
    return original if isinstance(original, Transform) else None

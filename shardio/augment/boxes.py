"""Draws, which computes the random numbers of a batch, and Boxes, a crop box for each image of the batch.

Random boxes match torchvision's RandomResizedCrop, which takes one image at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.kernels.rowcopy import Rectangles
from shardio.order.rng import make_keys, random_bits, uniform

Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]

# torchvision draws this many boxes before it takes the center.
_TRIES = 10
MOST_DRAWS = 32
"""The maximum `count` of `Draws.uniform`: random numbers per sample and purpose."""


@dataclass(frozen=True, eq=False)
class Looks:
    """Which samples a loader's batch has, int64 (B,), and in which pass over all samples of the split each comes.

    `passes`, int64 (B,), are counted from 0. If `passes` is None, samples may repeat within a pass.
    """

    samples: Numbers
    passes: Numbers | None

    def __getitem__(self, some: slice | Numbers) -> Looks:
        return Looks(self.samples[some], None if self.passes is None else self.passes[some])


@dataclass(frozen=True)
class Draws:
    """Random numbers for B samples, computed from `counters`, int64 (B,): a counter for each sample.

    The numbers of a sample depend only on `seed`, `epoch`, `view` and the sample's counter, not on the batch. A counter
    is the sample's index, or its position in an order that may repeat samples. Each `view` is an independent
    augmentation of the sample within an epoch. `view` may be an array (B,), with a view for each sample.
    `seed` may be a function that returns the seed. If `looks` is None, the counters are the samples, and the epoch is
    the pass of each sample.
    """

    seed: int | Callable[[], int]
    epoch: int
    counters: Numbers
    view: int | Numbers = 0
    looks: Looks | None = None

    def __getitem__(self, some: slice | Numbers) -> Draws:
        """Returns the Draws of the samples `some`, positions in this batch. `view` must be a number."""
        return replace(self, counters=self.counters[some], looks=self.looks and self.looks[some])

    def uniform(self, purpose: str, count: int) -> Floats:
        """Returns `count` random numbers from [0, 1) for each sample, float64 (count, B).

        Different strings `purpose` give independent numbers. Raises ValueError unless `count` is from 1 to MOST_DRAWS.
        """
        if not 0 < count <= MOST_DRAWS:
            raise ValueError(f"count must be from 1 to {MOST_DRAWS} random numbers per sample; found {count}")
        first = self.counters.astype(np.uint64) * np.uint64(MOST_DRAWS)
        return uniform(self._key(purpose), first + np.arange(count, dtype=np.uint64)[:, np.newaxis])

    def _key(self, purpose: str) -> np.uint64 | NDArray[np.uint64]:
        if isinstance(self.view, np.ndarray):
            views, numbers = np.unique(self.view, return_inverse=True)
            return np.array([replace(self, view=view)._key(purpose) for view in views.tolist()])[numbers]
        if not 0 <= self.view < 1 << 32:
            raise ValueError(f"view must be from 0 to 2**32 - 1; found {self.view}")
        seed = self.seed() if callable(self.seed) else self.seed
        (key,) = make_keys(f"shardio augment 1 {purpose} {self.view}".encode(), seed, self.epoch, 1)
        return key

    def keys(self, purpose: str) -> Numbers:
        """Returns 64 random bits for each sample, int64 (B,). Different strings `purpose` give independent bits."""
        return random_bits(self._key(purpose), self.counters.astype(np.uint64)).view(np.int64)

    def of_the_batch(self) -> Draws:
        """Returns Draws that give every sample of a view the random numbers of the batch's first sample."""
        return replace(self, counters=np.full_like(self.counters, self.counters[0]))

    def normal(self, purpose: str, count: int) -> Floats:
        """Returns random numbers from a standard normal distribution, float64 (count, B). See `uniform`."""
        shares = torch.from_numpy(self.uniform(purpose, count) + 2.0**-54)
        quantiles: Floats = torch.special.ndtri(shares).numpy()
        return quantiles


@dataclass
class LoaderBatch:
    """The batch that a loader passes to its transform, if the transform is a plain function.

    If the function calls transforms of shardio, the transforms use the `draws` of this batch. Each call is another
    view of its images, so two calls of one transform draw different numbers.
    """

    images: torch.Tensor
    draws: Draws
    sizes: Callable[[], Numbers | None]
    """A function that returns the images' sizes before they were squashed, (B, 2), or None."""
    made: list[tuple[torch.Tensor, Numbers, Numbers]] = field(default_factory=list)
    """The results of the transforms that were called: images, their places in the batch, and their sizes before any
    squashing."""
    places: Numbers | None = None
    """The places in the batch of the images with which a transform was called last; None if they are unknown."""

    def __post_init__(self) -> None:
        self._views = np.zeros(len(self.images), np.int64)  # calls so far, by place

    def find(self, images: torch.Tensor) -> tuple[Numbers | None, Numbers | None]:
        """Returns the places of `images` in the batch, and their sizes before squashing; None for unknown ones.

        Slices of the batch and of `made` are found by their memory. As many other images are the batch's samples.
        """
        count, sizes, own = len(images), self.sizes(), None
        if sizes is None:  # not squashed
            own, sizes = (np.full((len(some), 2), some.shape[2:]) for some in (images, self.images))
        known = [(self.images, np.arange(len(self.images)), sizes), *self.made]
        for whole, places, shown in known:
            first = images.storage_offset() - whole.storage_offset()
            rows = (first + np.arange(count) * images.stride(0)) // max(whole.stride(0), 1)
            is_part = images.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            if is_part and ((rows >= 0) & (rows < len(whole))).all():
                is_whole = (images.shape[2:], images.stride()[2:]) == (whole.shape[2:], whole.stride()[2:])
                return places[rows], (shown[rows] if count else shown[:1]) if is_whole else own
        if count != len(self.images):
            return None, own
        # A copy, of the batch or of a result: all that it may be of must have the same sizes.
        alike = [shown for whole, _, shown in known if whole.shape == images.shape]
        is_clear = bool(alike) and all(np.array_equal(alike[0], other) for other in alike)
        return np.arange(count), alike[0] if is_clear else own

    def next_view(self, places: Numbers) -> int:
        """Returns the view of one more call with the images at these places, 0 for the first."""
        views = self._views[places]
        if (views != views[:1]).any():
            raise ValueError("expected parts of a loader's batch that do not overlap, found some that do: pass view=")
        self._views[places] += 1
        return int(views.max(initial=0))

    @contextmanager
    def here(self) -> Iterator[None]:
        """Returns a context manager. Inside, `CURRENT.get()` returns this batch in the same thread."""
        token = CURRENT.set(self)
        try:
            yield
        finally:
            CURRENT.reset(token)


CURRENT: ContextVar[LoaderBatch | None] = ContextVar("shardio_loaded", default=None)
"""The batch that a loader is passing to a plain function in this thread; None if no loader is."""


class Boxes(Rectangles[np.float64]):
    """A box for each image of a batch, in pixels of the image, float64."""

    dtype = np.float64

    def inside_of(self, outer: Boxes, sizes: Numbers) -> Boxes:
        """Returns `self`, boxes in pixels of cropped and resized images, as boxes in pixels of the stored images.

        The stored images were cropped to `outer`, and resized to `sizes`, int64 (B, 2), height and width.
        """
        by_height, by_width = outer.heights / sizes[:, 0], outer.widths / sizes[:, 1]
        return Boxes(
            outer.tops + self.tops * by_height,
            outer.lefts + self.lefts * by_width,
            self.heights * by_height,
            self.widths * by_width,
        )


def between(bounds: Iterable[float], shares: Floats) -> Floats:
    """Returns low + share * (high - low) for each of `shares`, with (low, high) = `bounds`."""
    low, high = bounds
    return low + (high - low) * shares


def random_resized_boxes(
    draws: Draws,
    purpose: str,
    heights: Numbers,
    widths: Numbers,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Boxes:
    """Returns random boxes, drawn as by torchvision's RandomResizedCrop.get_params.

    `heights` and `widths`, int64 (B,), are the sizes of the images in pixels. The box's share of the image's area is
    uniform in `scale`. Its width / height is uniform in `ratio` on a logarithmic scale. Its position is uniform among
    whole pixels. If none of ten such boxes fits, the result is the largest centered box whose ratio is allowed.
    For `purpose` see `Draws.uniform`.
    """
    numbers = draws.uniform(purpose, 2 * _TRIES + 2)
    area = (heights * widths) * between(scale, numbers[:_TRIES])
    aspect = np.exp(between(map(math.log, ratio), numbers[_TRIES:-2]))
    box_widths = np.rint(np.sqrt(area * aspect))
    box_heights = np.rint(np.sqrt(area / aspect))
    fits = (box_widths > 0) & (box_widths <= widths) & (box_heights > 0) & (box_heights <= heights)
    chosen = (fits.argmax(axis=0), np.arange(fits.shape[1]))
    found = fits.any(axis=0)
    # Otherwise a box is as wide or as high as the image, whichever keeps the ratio within its bounds.
    own = widths / heights
    widest, highest = np.maximum(np.rint(heights * ratio[1]), 1), np.maximum(np.rint(widths / ratio[0]), 1)
    box_width = np.where(found, box_widths[chosen], np.where(own > ratio[1], widest, widths))
    box_height = np.where(found, box_heights[chosen], np.where(own < ratio[0], highest, heights))
    room_above, room_left = heights - box_height, widths - box_width
    tops = np.where(found, np.floor(numbers[-2] * (room_above + 1)), room_above // 2)
    lefts = np.where(found, np.floor(numbers[-1] * (room_left + 1)), room_left // 2)
    return Boxes(tops, lefts, box_height, box_width)

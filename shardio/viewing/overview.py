"""Computes the numbers of a report: classes and sizes of all samples, brightness and levels of some pictures.

Reads the whole index, but only a fixed selection of the pictures, as pictures are large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.drawing.sheet import as_image
from shardio.format.layout import SampleShape
from shardio.format.manifest import Manifest
from shardio.reading.shardset import ShardSet
from shardio.sets.history import conversions_of
from shardio.sets.levels import Levels, chosen_samples, levels_of, stored_levels, sum_levels
from shardio.viewing.pictures import NO_LABEL, AllSamples, read_pictures
from shardio.viewing.repeats import Repeats, find_repeats, hash_picture

OnProgress = Callable[[int, int], None]
"""Called with the number of pictures read so far, and the number of pictures to read."""


@dataclass(frozen=True)
class Histogram:
    """A histogram: counts[i] values lie between edges[i] and edges[i + 1]. `ticks` are indices of edges to label."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    ticks: tuple[int, ...]
    quantiles: tuple[float, ...]
    """Minimum, 5% quantile, median, 95% quantile and maximum of the values."""


Scale = Callable[[float, float], tuple[NDArray[Any], Sequence[int]]]
"""A function of the minimum and maximum of some numbers. Returns edges of bins, and the indices of edges to label."""


def histogram(values: NDArray[Any], scale: Scale) -> Histogram | None:
    """Returns a histogram of numbers, in the bins of `scale`; None if `values` is empty."""
    if not len(values):
        return None
    edges, ticks = scale(values.min(), values.max())
    counts = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0]
    quantiles = np.quantile(values, (0, 0.05, 0.5, 0.95, 1))
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist()), tuple(ticks), tuple(quantiles.tolist()))


def bins_of_shares(low: float, high: float) -> tuple[NDArray[Any], Sequence[int]]:
    """Returns (edges of 20 bins from 0 to 1, indices of the edges to label), for any `low` and `high`: see `Scale`."""
    return np.linspace(0, 1, 21), range(0, 21, 5)


def bins_of_counts(low: float, high: float) -> tuple[NDArray[Any], Sequence[int]]:
    """Returns (edges of about 40 bins at most, of equal whole width, indices of the edges to label): see `Scale`."""
    steps = (nice * 10**power for power in count() for nice in (1, 2, 5))
    step = next(step for step in steps if step * 40 > high - low)
    first, last = int(low // step), int(high // step) + 1
    every = 1 if last - first < 8 else 5 if last - first <= 20 else 10
    return np.arange(first, last + 1) * step, [n - first for n in range(first, last + 1) if n % every == 0]


def bins_of_sizes(low: float, high: float, per_octave: int = 4) -> tuple[NDArray[Any], Sequence[int]]:
    """Returns (edges of `per_octave` bins for each factor of 2, indices of the edges to label): see `Scale`."""
    first, last = (math.floor(math.log2(value) * per_octave) for value in (low, high))
    numbers = np.arange(first, last + 2)
    ticks = np.flatnonzero(numbers % per_octave == 0).tolist()
    if len(ticks) < 2:  # one power of two does not make a scale
        ticks = sorted({0, *ticks, len(numbers) - 1})
    return np.exp2(numbers / per_octave), ticks[:: -(-len(ticks) // 7)]


LabelCounts = dict[int, tuple[int, ...]]
"""Label -> the number of its samples in each split, in the order of the splits. Labels ascend."""


def count_labels(labels: Sequence[NDArray[np.int64]], num_classes: int) -> LabelCounts:
    """Returns the counts of the labels 0 to `num_classes` - 1, and of any others. `labels` has each split's labels."""
    found = [np.unique(some, return_counts=True) for some in labels]
    known = np.unique(np.concatenate([np.arange(num_classes), *(values for values, _ in found)]))
    table = np.zeros((len(known), len(labels)), np.int64)
    for column, (values, counts) in enumerate(found):
        table[np.searchsorted(known, values), column] = counts
    return dict(zip(known.tolist(), map(tuple, table.tolist()), strict=True))


@dataclass(frozen=True)
class ResizeLoss:
    """How much of the pictures of a split was lost by cropping and resizing them to samples."""

    fit: str
    share: Histogram | None
    """Share of each picture that was cropped; for "pad", share of each sample that is margin; None for "squash"."""
    reduction: Histogram
    """Side of each picture divided by the side of its resized picture. Below 1, the picture was enlarged."""
    num_enlarged: int


def measure_loss(widths: NDArray[Any], heights: NDArray[Any], size: tuple[int, int], fit: str) -> ResizeLoss | None:
    """Returns the loss if pictures of these sizes, in pixels, become samples of `size` (height, width). `fit` is
    "crop", "pad" or "squash", as in `convert`. Returns None if there are no pictures."""
    across, down = size[1] / widths, size[0] / heights
    if fit == "squash":
        scale, share = np.sqrt(across * down), None
    else:
        scale = np.maximum(across, down) if fit == "crop" else np.minimum(across, down)
        # The area of the resized picture, in samples: at least 1 if it is cropped, at most 1 if it is padded.
        area = scale / across * (scale / down)
        share = histogram(1 - (1 / area if fit == "crop" else area), bins_of_shares)
    reduction = histogram(1 / scale, bins_of_sizes)
    return None if reduction is None else ResizeLoss(fit, share, reduction, int((scale > 1 + 1e-9).sum()))


@dataclass(frozen=True)
class SplitOverview:
    """The numbers of a split. `widths`, `heights`, `aspects` are of the original images; None if sizes are unknown.
    `per_class` counts classes by their number of samples; None without integer labels."""

    name: str
    num_samples: int
    per_class: Histogram | None
    widths: Histogram | None
    heights: Histogram | None
    aspects: Histogram | None
    """Width divided by height."""
    loss: ResizeLoss | None
    brightness: Histogram | None
    """The mean gray of each picture that was read, from 0 for black to 1 for white."""


@dataclass(frozen=True)
class SetOverview:
    """The numbers of a set.

    `levels` are from the manifest if `levels_are_stored`, else measured; None if samples have no pixels.
    """

    splits: list[SplitOverview]
    classes: LabelCounts
    """If no sample has a label, NO_LABEL is the only label; otherwise samples without a label are left out."""
    levels: Levels | None
    levels_are_stored: bool
    repeats: Repeats
    num_read: int
    """The number of pictures that were read, to measure brightness and to find pictures that look alike."""

    @property
    def has_labels(self) -> bool:
        return NO_LABEL not in self.classes

    @property
    def num_samples(self) -> int:
        return sum(split.num_samples for split in self.splits)


def make_overview(splits: Mapping[str, ShardSet], num_pictures: int, on_progress: OnProgress) -> SetOverview:
    """Returns the numbers of the set with these splits.

    Brightness and pictures that look alike come from about `num_pictures` pictures, at least one per split. Further
    pictures are read to measure levels that are not stored, and to compare pictures. Samples without pixels are only
    counted.
    """
    manifest = next(iter(splits.values())).manifest
    samples = AllSamples(splits)
    inner = samples.starts[1:-1]
    labels = np.split(samples.labels, inner)
    known = [of_split[of_split != NO_LABEL] for of_split in labels]
    classes = count_labels(known, len(manifest.classes)) if any(map(len, known)) else count_labels(labels, 0)
    stored: Levels | None = None
    levels: Levels | None = None
    fit, grays, repeats, num_read = "", [np.empty(0)] * len(splits), Repeats((), (), 0), 0
    if manifest.sample_shape is not None:
        total = len(samples.labels)
        chosen = [chosen_samples(len(one), max(1, num_pictures * len(one) // total)) for one in labels]
        numbers = np.concatenate([one + start for one, start in zip(chosen, samples.starts, strict=False)])
        num_read = len(numbers)
        hashes, means = np.empty(num_read, np.uint64), np.empty(num_read)
        for place, picture in enumerate(samples.read(numbers)):
            gray = as_image(picture).convert("L")
            hashes[place], means[place] = hash_picture(gray), np.asarray(gray).mean() / 255
            on_progress(place + 1, num_read)
        grays = np.split(means, np.searchsorted(numbers, inner))
        fit = _fit_of(manifest, manifest.sample_shape)
        stored = stored_levels(manifest.provenance, manifest.sample_shape[2])
        levels = stored or _measure(splits)
        repeats = find_repeats(samples, numbers, hashes)
    described = [_describe(*of_split, fit) for of_split in zip(splits.values(), labels, grays, strict=True)]
    return SetOverview(described, classes, levels, stored is not None, repeats, num_read)


def _measure(splits: Mapping[str, ShardSet]) -> Levels:
    """Returns the levels of some pictures of the first split. Raises FormatError if one of them is damaged."""
    name, shards = next(iter(splits.items()))
    chosen = chosen_samples(len(shards))
    sums = np.zeros((4, shards.sample_shape[2]), np.int64)
    for picture in read_pictures(shards, chosen, check=True):
        sums += sum_levels(picture)
    return levels_of(name, sums)


def _fit_of(manifest: Manifest, sample_shape: SampleShape) -> str:
    """Returns "crop" or "pad" if all conversions that made the set had this `fit` and this sample size; else ""."""
    conversions = [one["conversion"] for one in conversions_of(manifest)]
    size = list(sample_shape[:2])
    for fit in ("crop", "pad"):
        if conversions and all(one.get("fit") == fit and one.get("size") == size for one in conversions):
            return fit
    return ""


def _describe(shards: ShardSet, labels: NDArray[np.int64], grays: NDArray[np.float64], fit: str) -> SplitOverview:
    """Returns the numbers of a split with these `labels`. `grays`: mean grays of pictures, 0 to 1; `fit`: `_fit_of`."""
    fit = "squash" if shards.content.squashed else fit
    widths, heights = (shards.column_of(name, np.arange(len(shards))) for name in ("source_width", "source_height"))
    known = (widths > 0) & (heights > 0)
    widths, heights = widths[known].astype(np.float64), heights[known].astype(np.float64)
    counts = np.unique(labels, return_counts=True)[1]
    empty = np.zeros(max(0, len(shards.classes) - len(counts)), np.int64)
    return SplitOverview(
        shards.split,
        len(shards),
        histogram(np.concatenate([counts, empty]), bins_of_counts) if shards.content.index.has_label else None,
        histogram(widths, bins_of_sizes),
        histogram(heights, bins_of_sizes),
        histogram(widths / heights, partial(bins_of_sizes, per_octave=8)),
        measure_loss(widths, heights, shards.sample_shape[:2], fit) if fit else None,
        histogram(grays, bins_of_shares),
    )

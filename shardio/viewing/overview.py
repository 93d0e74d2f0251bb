"""Computes the numbers of a report: classes and sizes of all samples, brightness and levels of some pictures.

Reads the whole index, but only a fixed selection of the pictures, as pictures are large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

_MAX_BINS = 40


@dataclass(frozen=True)
class Histogram:
    """A histogram: counts[i] values lie between edges[i] and edges[i + 1]. `ticks` are indices of edges to label."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    ticks: tuple[int, ...]
    quantiles: tuple[float, ...]
    """Minimum, 5% quantile, median, 95% quantile and maximum of the values."""


def histogram_of_shares(values: NDArray[Any]) -> Histogram | None:
    """Returns a histogram of numbers from 0 to 1 in 20 bins; None if `values` is empty."""
    return _histogram(values, np.linspace(0, 1, 21), range(0, 21, 5)) if len(values) else None


def histogram_of_counts(values: NDArray[Any]) -> Histogram | None:
    """Returns a histogram of integers in about 40 bins or fewer; None if `values` is empty."""
    if not len(values):
        return None
    low, high = int(values.min()), int(values.max())
    steps = (nice * 10**power for power in count() for nice in (1, 2, 5))
    step = next(step for step in steps if step * _MAX_BINS > high - low)
    first, last = low // step, high // step + 1
    every = 1 if last - first < 8 else 5 if last - first <= 20 else 10
    ticks = [number - first for number in range(first, last + 1) if number % every == 0]
    return _histogram(values, np.arange(first, last + 1) * step, ticks)


def histogram_of_sizes(values: NDArray[Any], per_octave: int = 4) -> Histogram | None:
    """Returns a histogram of positive numbers, with `per_octave` bins per factor of 2; None if `values` is empty."""
    if not len(values):
        return None
    first, last = (math.floor(math.log2(value) * per_octave) for value in (values.min(), values.max()))
    numbers = np.arange(first, last + 2)
    ticks = np.flatnonzero(numbers % per_octave == 0).tolist()
    if len(ticks) < 2:  # one power of two does not make a scale
        ticks = sorted({0, *ticks, len(numbers) - 1})
    return _histogram(values, np.exp2(numbers / per_octave), ticks[:: -(-len(ticks) // 7)])


def _histogram(values: NDArray[Any], edges: NDArray[Any], ticks: Sequence[int]) -> Histogram:
    counts = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0]
    quantiles = np.quantile(values, (0, 0.05, 0.5, 0.95, 1))
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist()), tuple(ticks), tuple(quantiles.tolist()))


@dataclass(frozen=True)
class LabelCounts:
    """The number of samples with the label `label` in each split, in the order of the splits."""

    label: int
    counts: tuple[int, ...]


def count_labels(labels: Sequence[NDArray[np.int64]], num_classes: int) -> list[LabelCounts]:
    """Returns the counts of each class and each other label, by ascending label. `labels` has an array per split."""
    found = [np.unique(some, return_counts=True) for some in labels]
    known = np.unique(np.concatenate([np.arange(num_classes), *(values for values, _ in found)]))
    table = np.zeros((len(known), len(labels)), np.int64)
    for column, (values, counts) in enumerate(found):
        table[np.searchsorted(known, values), column] = counts
    return [LabelCounts(label, tuple(row)) for label, row in zip(known.tolist(), table.tolist(), strict=True)]


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
    """Returns the loss if pictures of these sizes become samples of `size` (height, width) by `fit`.

    Returns None if `widths` is empty.
    """
    across, down = size[1] / widths, size[0] / heights
    if fit == "squash":
        scale, share = np.sqrt(across * down), None
    else:
        scale = np.maximum(across, down) if fit == "crop" else np.minimum(across, down)
        # The area of the resized picture, in samples: at least 1 if it is cropped, at most 1 if it is padded.
        area = scale / across * (scale / down)
        share = histogram_of_shares(1 - (1 / area if fit == "crop" else area))
    reduction = histogram_of_sizes(1 / scale)
    return None if reduction is None else ResizeLoss(fit, share, reduction, int((scale > 1 + 1e-9).sum()))


@dataclass(frozen=True)
class SplitOverview:
    """The numbers of a split. `widths`, `heights`, `aspects` are of the original images; None if sizes are unknown."""

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

    manifest: Manifest
    splits: tuple[SplitOverview, ...]
    classes: tuple[LabelCounts, ...]
    """The counts of each label. If no sample has a label, NO_LABEL is the only label; otherwise it is left out."""
    levels: Levels | None
    levels_are_stored: bool
    repeats: Repeats
    num_read: int
    """The number of pictures that were read, to measure brightness and to find pictures that look alike."""

    @property
    def has_labels(self) -> bool:
        return any(one.label != NO_LABEL for one in self.classes)

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
    some = [of_split[of_split != NO_LABEL] for of_split in labels]
    counted = tuple(count_labels(some, len(manifest.classes)) if any(map(len, some)) else count_labels(labels, 0))
    if manifest.sample_shape is None:
        bare = tuple(
            _describe(shards, "", one, np.empty(0)) for shards, one in zip(splits.values(), labels, strict=True)
        )
        return SetOverview(manifest, bare, counted, None, False, Repeats((), (), 0), 0)
    total = len(samples.labels)
    chosen = [chosen_samples(len(one), max(1, num_pictures * len(one) // total)) for one in labels]
    numbers = np.concatenate([one + start for one, start in zip(chosen, samples.starts, strict=False)])
    hashes, grays = np.empty(len(numbers), np.uint64), np.empty(len(numbers))
    for place, picture in enumerate(samples.read(numbers)):
        gray = as_image(picture).convert("L")
        hashes[place], grays[place] = hash_picture(gray), np.asarray(gray).mean() / 255
        on_progress(place + 1, len(numbers))
    levels = stored_levels(manifest.provenance, manifest.sample_shape[2])
    fit = _fit_of(manifest, manifest.sample_shape)
    return SetOverview(
        manifest,
        tuple(
            _describe(shards, "squash" if shards.content.squashed else fit, labels_of_split, grays_of_split)
            for shards, labels_of_split, grays_of_split in zip(
                splits.values(), labels, np.split(grays, np.searchsorted(numbers, inner)), strict=True
            )
        ),
        counted,
        levels or _measure(splits),
        levels is not None,
        find_repeats(samples, numbers, hashes),
        len(numbers),
    )


def _measure(splits: Mapping[str, ShardSet]) -> Levels:
    """Returns the levels of some pictures of the first split. Raises FormatError if one of them is damaged."""
    name, shards = next(iter(splits.items()))
    chosen = chosen_samples(len(shards))
    sums = np.zeros((4, shards.sample_shape[2]), np.int64)
    for picture in read_pictures(shards, chosen, check=True):
        sums += sum_levels(picture)
    return levels_of(name, sums)


def _fit_of(manifest: Manifest, sample_shape: SampleShape) -> str:
    """Returns "crop" or "pad" if every conversion that made the set used it, with this sample size; otherwise ""."""
    conversions = [one["conversion"] for one in conversions_of(manifest)]
    size = list(sample_shape[:2])
    for fit in ("crop", "pad"):
        if conversions and all(one.get("fit") == fit and one.get("size") == size for one in conversions):
            return fit
    return ""


def _describe(shards: ShardSet, fit: str, labels: NDArray[np.int64], grays: NDArray[np.float64]) -> SplitOverview:
    widths, heights = (shards.column_of(name, np.arange(len(shards))) for name in ("source_width", "source_height"))
    known = (widths > 0) & (heights > 0)
    widths, heights = widths[known].astype(np.float64), heights[known].astype(np.float64)
    counts = np.unique(labels, return_counts=True)[1]
    empty = np.zeros(max(0, len(shards.classes) - len(counts)), np.int64)
    return SplitOverview(
        shards.split,
        len(shards),
        histogram_of_counts(np.concatenate([counts, empty])) if shards.content.index.has_label else None,
        histogram_of_sizes(widths),
        histogram_of_sizes(heights),
        histogram_of_sizes(widths / heights, per_octave=8),
        measure_loss(widths, heights, shards.sample_shape[:2], fit) if fit else None,
        histogram_of_shares(grays),
    )

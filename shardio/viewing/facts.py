"""What is known of a set, read from it: classes and sizes of all samples, and some of their pictures.

The index is read whole. Pictures are many bytes: at most so many are looked at, and the facts say how many they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardio.drawing.sheet import as_image
from shardio.format.manifest import Manifest
from shardio.order.permutation import Permutation
from shardio.reading.shardset import ShardSet
from shardio.sets.history import conversions_of
from shardio.sets.levels import Levels, chosen_samples, measure_levels, sound_pictures, stored_levels
from shardio.viewing.alike import hash_picture
from shardio.viewing.pictures import read_pictures
from shardio.viewing.repeats import Repeats, Seen, find_repeats
from shardio.viewing.statistics import ClassCount, Distribution, Loss, count_classes, distribution, measure_loss

OnProgress = Callable[[int, int], None]
"""Is called with how many pictures were looked at, and how many will be."""


@dataclass(frozen=True)
class SplitFacts:
    """`widths`, `heights` and `aspects` are those of the original images; None if the index has none."""

    name: str
    num_samples: int
    per_class: Distribution | None
    widths: Distribution | None
    heights: Distribution | None
    aspects: Distribution | None
    """Width over height."""
    loss: Loss | None
    brightness: Distribution | None
    """The mean grey of each picture, from 0 for black to 1 for white, of `num_seen` samples."""
    num_seen: int


@dataclass(frozen=True)
class Facts:
    """`levels` are those of the manifest if `levels_are_stored`, or else were computed in the same way."""

    manifest: Manifest
    splits: tuple[SplitFacts, ...]
    classes: tuple[ClassCount, ...]
    levels: Levels
    levels_are_stored: bool
    repeats: Repeats

    @property
    def num_samples(self) -> int:
        return sum(split.num_samples for split in self.splits)

    @property
    def num_seen(self) -> int:
        return sum(split.num_seen for split in self.splits)


def find_facts(splits: Mapping[str, ShardSet], num_pictures: int, on_progress: OnProgress | None = None) -> Facts:
    """Reads the facts of opened splits. At most `num_pictures` of all samples are looked at, and one of each split."""
    manifest = next(iter(splits.values())).manifest
    labels = {name: shards.labels_of(_all(shards)) for name, shards in splits.items()}
    chosen = _choose(splits, num_pictures)
    seen: dict[str, Seen] = {}
    greys: dict[str, NDArray[np.float64]] = {}
    done, num_chosen = 0, sum(map(len, chosen.values()))
    for name, indices in chosen.items():
        hashes, greys[name] = np.empty(len(indices), np.uint64), np.empty(len(indices))
        for place, picture in enumerate(read_pictures(splits[name], indices)):
            grey = as_image(picture).convert("L")
            hashes[place], greys[name][place] = hash_picture(grey), np.asarray(grey).mean() / 255
            done += 1
            if on_progress is not None:
                on_progress(done, num_chosen)
        seen[name] = Seen(indices, hashes)
    levels = stored_levels(manifest.provenance, manifest.sample_shape[2])
    margins = _fit(manifest)
    return Facts(
        manifest,
        tuple(
            _facts(shards, "squash" if shards.content.squashed else margins, labels[name], greys[name])
            for name, shards in splits.items()
        ),
        tuple(count_classes(list(labels.values()), len(manifest.classes))),
        levels or _compute(splits),
        levels is not None,
        find_repeats(splits, labels, seen),
    )


def _all(shards: ShardSet) -> NDArray[np.int64]:
    return np.arange(len(shards))


def _choose(splits: Mapping[str, ShardSet], num_pictures: int) -> dict[str, NDArray[np.int64]]:
    """Returns the samples of each split that are looked at, always the same ones, ascending."""
    total = sum(map(len, splits.values()))
    chosen = {}
    for name, shards in splits.items():
        count = min(max(1, num_pictures * len(shards) // total), len(shards))
        chosen[name] = np.sort(Permutation(len(shards), 0, 0)(np.arange(count)))
    return chosen


def _compute(splits: Mapping[str, ShardSet]) -> Levels:
    name, shards = next(iter(splits.items()))
    chosen = chosen_samples(len(shards))
    pictures, crc32s = read_pictures(shards, chosen), shards.column_of("crc32", chosen)

    def path_of(sample: int) -> str:
        return shards.path_of(shards.locate_one(sample)[0])

    return measure_levels(name, sound_pictures(chosen, pictures, crc32s, path_of))


def _fit(manifest: Manifest) -> str:
    """Returns how all conversions kept aspect ratios in samples of this shape; "" if that is not told, or differs."""
    told = [one["conversion"] for one in conversions_of(manifest)]
    size = list(manifest.sample_shape[:2])
    for fit in ("crop", "pad"):
        if told and all(one.get("fit") == fit and one.get("size") == size for one in told):
            return fit
    return ""


def _facts(shards: ShardSet, fit: str, labels: NDArray[np.int64], greys: NDArray[np.float64]) -> SplitFacts:
    widths, heights = (shards.column_of(name, _all(shards)) for name in ("source_width", "source_height"))
    known = (widths > 0) & (heights > 0)
    widths, heights = widths[known], heights[known]
    counts = np.unique(labels, return_counts=True)[1]
    empty = np.zeros(max(0, len(shards.classes) - len(counts)), np.int64)
    height, width, _ = shards.sample_shape
    return SplitFacts(
        shards.split,
        len(shards),
        distribution(np.concatenate([counts, empty]), whole=True),
        distribution(widths, per_octave=4),
        distribution(heights, per_octave=4),
        distribution(widths / heights, per_octave=8),
        measure_loss(widths, heights, (height, width), fit) if fit else None,
        distribution(greys, within=(0, 1)),
        len(greys),
    )

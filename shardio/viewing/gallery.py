"""Thumbnails of each class of a split, as many as a page has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardio.reading.shardset import ShardSet
from shardio.viewing.pictures import read_pictures
from shardio.viewing.thumbnails import thumbnail

# The bytes of a page that thumbnails of classes take, at most: with all else, it has less than 20 MB.
_NBYTES = 12_000_000
_MOST_PICTURES = 8000
_MOST_PER_CLASS = 24
# Classes of which a thumbnail each is made to learn how large they are.
_NUM_TRIED = 64


@dataclass(frozen=True)
class Shown:
    """A sample with its thumbnail, a data URL."""

    index: int
    picture: str


def make_gallery(shards: ShardSet, labels: NDArray[np.int64], wanted: Sequence[int]) -> dict[int, list[Shown]]:
    """Returns samples of the `wanted` labels, from all over the split; `labels` are those of all its samples. Where
    there is room for some labels alone, these lie evenly among all."""
    order = np.argsort(labels, kind="stable")
    order = order[np.isin(labels[order], np.array(wanted, np.int64))]
    if not len(order):
        return {}
    there, starts = np.unique(labels[order], return_index=True)
    members = np.split(order, starts[1:])
    tried = _evenly(len(there), _NUM_TRIED)
    nbytes = np.mean([len(shown.picture) for shown in _show(shards, [int(members[i][0]) for i in tried]).values()])
    room = min(int(_NBYTES / nbytes), _MOST_PICTURES)
    classes = _evenly(len(there), room)
    per_class = min(max(1, room // len(there)), _MOST_PER_CLASS)
    chosen = {int(there[i]): members[i][_evenly(len(members[i]), per_class)].tolist() for i in classes}
    shown = _show(shards, [index for some in chosen.values() for index in some], _NBYTES)
    return {label: [shown[index] for index in some if index in shown] for label, some in chosen.items()}


def _evenly(count: int, most: int) -> NDArray[np.int64]:
    """Returns at most so many of the numbers below `count`, ascending."""
    return np.arange(min(count, most)) * count // min(count, most)


def _show(shards: ShardSet, indices: Sequence[int], most_nbytes: int | None = None) -> dict[int, Shown]:
    """Returns these samples by their numbers, those that there is room for."""
    shown = {}
    nbytes = 0
    ordered = np.sort(np.array(indices, np.int64))
    for index, picture in zip(ordered.tolist(), read_pictures(shards, ordered), strict=True):
        shown[index] = Shown(index, thumbnail(picture))
        nbytes += len(shown[index].picture)
        if most_nbytes is not None and nbytes > most_nbytes:
            break
    return shown

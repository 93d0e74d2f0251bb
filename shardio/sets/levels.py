"""Mean and standard deviation of a split's pixels, for each channel, as `Normalize` takes them.

They are measured on some lines of at most NUM_SAMPLES samples, chosen by the number of samples alone. The sums are
integers, so the result depends neither on how the samples are read nor on the machine. Only pixels with the right
crc32 are measured: no digest covers the result, so a wrong result would not be noticed later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.format.entries import ShardEntry
from shardio.format.layout import HEADER_NBYTES, SampleShape, crc32, sample_nbytes
from shardio.order.permutation import Permutation
from shardio.sets.storage import FolderStorage

NUM_SAMPLES = 2048
"""The most samples to measure: photographs vary by about 0.15, so their mean is within 0.01 of the mean of all."""

# Neighbouring lines are alike: these tell as much of a picture as all of them do, in an eighth of the time.
_NUM_LINES = 32

LEVELS = "pixels"
"""The key of the levels in the provenance of a set."""


@dataclass(frozen=True)
class Levels:
    """Mean and standard deviation of each channel, from 0 for black to 1 for white, over some samples of a split."""

    split: str
    num_samples: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def describe(self) -> dict[str, Any]:
        """Returns the levels as a set's provenance records them."""
        return {
            "split": self.split,
            "num_samples": self.num_samples,
            "mean": list(self.mean),
            "std": list(self.std),
        }


def stored_levels(provenance: Mapping[str, Any], num_channels: int) -> Levels | None:
    """Returns the levels that `describe` recorded in a provenance; None if they are missing or malformed."""
    told = provenance.get(LEVELS)
    if not isinstance(told, dict) or not isinstance(told.get("split"), str) or type(told.get("num_samples")) is not int:
        return None
    mean, std = (_numbers(told.get(name), num_channels) for name in ("mean", "std"))
    return Levels(told["split"], told["num_samples"], mean, std) if mean and std else None


def _numbers(value: object, count: int) -> tuple[float, ...]:
    if isinstance(value, list) and len(value) == count and all(type(n) in (int, float) and 0 <= n <= 1 for n in value):
        return tuple(map(float, value))
    return ()


def first_split(splits: Iterable[str]) -> str:
    """Returns the split that models are trained with: `train`, or else the first by name."""
    names = sorted(splits)
    return "train" if "train" in names else names[0]


def chosen_samples(num_samples: int) -> NDArray[np.int64]:
    """Returns the samples to measure in a split of `num_samples`, in ascending order."""
    return np.sort(Permutation(num_samples, 0, 0)(np.arange(min(NUM_SAMPLES, num_samples))))


def measure_levels(split: str, pictures: Iterable[NDArray[np.uint8]]) -> Levels:
    """Returns the levels of one or more pictures (height, width, channels) of one shape, from `sound_pictures`."""
    total = squares = np.zeros(1, np.int64)
    num_samples = num_values = 0
    for picture in pictures:
        height, width, channels = picture.shape
        step = max(1, height // _NUM_LINES)
        lines = np.ascontiguousarray(picture[step // 2 :: step]).reshape(-1, width * channels)
        # Sums over lines, and then over columns: as fast as memory, and exact.
        total = total + _over_columns(lines.sum(axis=0, dtype=np.uint32), channels)
        squares = squares + _over_columns(np.multiply(lines, lines, dtype=np.uint16).sum(0, dtype=np.uint32), channels)
        num_samples += 1
        num_values += len(lines) * width
    mean = total / num_values
    variance = np.maximum(squares / num_values - mean * mean, 0)
    return Levels(split, num_samples, _shares(mean), _shares(np.sqrt(variance)))


def _over_columns(sums: NDArray[np.uint32], channels: int) -> NDArray[np.int64]:
    result: NDArray[np.int64] = sums.reshape(-1, channels).sum(axis=0, dtype=np.int64)
    return result


def _shares(levels: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(round(float(level) / 255, 6) for level in levels)


def sound_pictures(
    chosen: NDArray[np.int64],
    pictures: Iterable[NDArray[np.uint8]],
    crc32s: NDArray[np.uint32],
    path_of: Callable[[int], str],
) -> Iterator[NDArray[np.uint8]]:
    """Yields `pictures`, which belong to the samples `chosen`. Raises FormatError if a picture does not have the crc32
    in `crc32s`. `path_of` returns the file of a sample, for the message."""
    for number, picture, crc in zip(chosen.tolist(), pictures, crc32s.tolist(), strict=True):
        if (found := crc32(picture)) != crc:
            place = f"{path_of(number)}: sample {number}"
            raise FormatError(f"{place}: crc32: expected {crc:08x}, found {found:08x}; the disk may be failing")
        yield picture


def measure_shards(
    folder: Path, split: str, shards: Sequence[ShardEntry], shape: SampleShape, crc32s: NDArray[np.uint32]
) -> Levels:
    """Returns the levels of a split without an order, checking measured samples against `crc32s`.

    Raises OSError if a shard cannot be read, FormatError if a shard is damaged.
    """
    chosen = chosen_samples(len(crc32s))
    starts = np.cumsum([0, *(shard.num_samples for shard in shards)])

    def locate(sample: int) -> tuple[ShardEntry, int]:
        place = int(np.searchsorted(starts, sample, "right")) - 1
        return shards[place], sample - int(starts[place])

    picture = np.empty(shape, np.uint8)
    with closing(FolderStorage(folder)) as storage:

        def read(sample: int) -> NDArray[np.uint8]:
            shard, row = locate(sample)
            storage.read_into(shard, HEADER_NBYTES + row * sample_nbytes(shape), picture.data.cast("B"))
            return picture

        def path_of(sample: int) -> str:
            return storage.path_of(locate(sample)[0])

        return measure_levels(split, sound_pictures(chosen, map(read, chosen.tolist()), crc32s[chosen], path_of))

"""The order of an epoch: position -> sample index, for every way of shuffling. Pure arithmetic: reads no data.

An order of `num_samples` positions is a function of (epoch, positions), computed for any positions at any time and
never stored. `describe()` returns everything that the order depends on, for the loader's state.
"""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardio.order.permutation import MAX_N, VERSION, Permutation, check_below, divide, permute, round_keys
from shardio.order.rng import make_keys, random_bits, uniform


def as_integer(name: str, value: SupportsIndex) -> int:
    """Returns `value`, an integer of any type (such as np.int64), as an int. Raises TypeError otherwise."""
    try:
        return int(operator.index(value))
    except TypeError:
        raise TypeError(f"{name} must be an integer; found {value!r}") from None


def as_array(name: str, values: Any) -> NDArray[Any]:
    """Returns `values` as an array. Raises ValueError for a masked array, whose mask would be lost."""
    if isinstance(values, np.ma.MaskedArray):
        way_out = "filled(0)" if name == "weights" else "compressed()"
        raise ValueError(f"{name} must be an array without a mask; found a masked array: use {name}.{way_out}")
    return np.asarray(values)


@dataclass(frozen=True)
class BlockShuffle:
    """Shuffles blocks of `size` consecutive samples, then the samples within each window of `window` blocks.

    For sets larger than memory, on storage where random reads are slow. With samples of 256 x 256 x 3 bytes, the
    default blocks have 6 MB and the default windows 1.6 GB: disks and parallel filesystems can stream a block, and a
    window fits in the page cache of a training node.
    """

    size: int = 32
    window: int = 256

    def __post_init__(self) -> None:
        for name in ("size", "window"):
            object.__setattr__(self, name, as_integer(name, getattr(self, name)))
        if self.size < 1 or self.window < 1:
            raise ValueError(f"size and window of a BlockShuffle must be at least 1; found {self}")


Shuffle = Literal["block"] | BlockShuffle | bool


class Order(Protocol):
    """An order of samples. Immutable; any number of threads may use an order."""

    @property
    def num_samples(self) -> int:
        """The number of positions in an epoch."""

    def __call__(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the sample index at each position, int64. Raises ValueError for one outside [0, num_samples)."""

    @property
    def redraws(self) -> bool:
        """Whether a sample may come more than once in an epoch."""

    def describe(self) -> dict[str, Any]:
        """Returns everything except the epoch that the order depends on, as JSON values.

        Orders with equal descriptions are equal.
        """


@dataclass(frozen=True)
class StoredOrder:
    """The order in which samples are stored: position p is sample p, in every epoch."""

    num_samples: int
    redraws = False

    def __call__(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return check_below(self.num_samples, positions).copy()

    def describe(self) -> dict[str, Any]:
        return {"shuffle": False, "num_samples": self.num_samples}


@dataclass(frozen=True)
class GlobalShuffle:
    """A random order: each epoch is another permutation of all samples."""

    num_samples: int
    seed: int
    redraws = False

    def __call__(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return Permutation(self.num_samples, self.seed, epoch)(positions)

    def describe(self) -> dict[str, Any]:
        return {"shuffle": True, "seed": self.seed, "num_samples": self.num_samples}


@dataclass(frozen=True)
class BlockOrder:
    """The order of a BlockShuffle: each epoch is a permutation of all samples, window by window.

    Blocks of `sizes.size` consecutive samples are permuted, then divided into windows of about equal numbers of blocks,
    at most `sizes.window`. Then the samples of each window are permuted. So a window is read completely before the next
    window, from at most `sizes.window` blocks of the shards. The last block of the split may have fewer samples, and
    may be in any window.
    """

    num_samples: int
    seed: int
    sizes: BlockShuffle = BlockShuffle()
    redraws = False

    def __call__(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        positions = check_below(self.num_samples, positions)
        if not positions.size:
            return positions
        size = min(self.sizes.size, self.num_samples)
        num_blocks = -(-self.num_samples // size)
        blocks = Permutation(num_blocks, self.seed, epoch)
        # Positions number the samples only; slots number them as if every block were full. The last block's samples
        # end at slot `end`, and the slots behind it are those that the block lacks.
        lacking = num_blocks * size - self.num_samples
        end = (int(blocks.inverse(np.array([num_blocks - 1]))[0]) + 1) * size - lacking

        def to_slots(positions: NDArray[np.int64]) -> NDArray[np.int64]:
            return positions + lacking * (positions >= end)

        def to_positions(slots: NDArray[np.int64]) -> NDArray[np.int64]:
            """Returns how many samples come before each of `slots`, which must be multiples of `size`."""
            return slots - lacking * (slots > end)

        # `longer` windows of `length` + 1 blocks, then windows of `length`.
        num_windows = -(-num_blocks // self.sizes.window)
        length, longer = divmod(num_blocks, num_windows)
        place = to_slots(positions) // size
        window = np.where(place < longer * (length + 1), place // (length + 1), (place - longer) // length)
        windows, which = _distinct(window)
        first = to_positions((windows * length + np.minimum(windows, longer)) * size)
        stop = to_positions(((windows + 1) * length + np.minimum(windows + 1, longer)) * size)

        keys = [random_bits(key, windows.astype(np.uint64)) for key in round_keys(self.seed, epoch, "window")]
        counts = stop - first
        inside = positions - first[which]
        for count in np.unique(counts).tolist():  # at most four: two lengths, with and without the short block
            chosen = np.flatnonzero(counts[which] == count)
            theirs = which[chosen]
            inside[chosen] = permute(inside[chosen], count, [key[theirs] for key in keys])
        place, sample = divide(to_slots(first[which] + inside), np.int64(size))
        places, which = _distinct(place)
        return blocks(places)[which] * size + sample

    def describe(self) -> dict[str, Any]:
        return {
            "shuffle": "block",
            "seed": self.seed,
            "num_samples": self.num_samples,
            "block_size": self.sizes.size,
            "window_blocks": self.sizes.window,
        }


@dataclass(frozen=True, eq=False)
class WeightedDraws:
    """Independent random draws with replacement: each position is sample i with probability weights[i] / sum(weights).

    A draw looks up a hash of (seed, epoch, position) in the cumulative sum of the weights, so any position can be
    computed alone. Unlike torch.multinomial, it takes more than 2**24 weights.
    """

    weights: NDArray[np.float64]
    seed: int
    num_samples: int
    _ends: NDArray[np.float64] = field(init=False, repr=False)
    redraws = True

    def __post_init__(self) -> None:
        weights = np.array(self.weights, np.float64)  # a copy, so that the caller's changes do not reach it
        bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if bad.size or not weights.any():
            found = f"{weights[bad[0]]} at {bad[0]}; {bad.size} weights are invalid" if bad.size else "only zeros"
            raise ValueError(f"weights must be finite, at least 0, not all 0; found {found}")
        # Scaled, which is exact, so that no sum overflows or is too small for the share of a draw. np.cumsum adds from
        # left to right, so that it rounds alike everywhere.
        ends = np.cumsum(np.ldexp(weights, -np.frexp(weights.max())[1]))
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "_ends", ends)

    def __call__(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        positions = check_below(self.num_samples, positions)
        (key,) = make_keys(b"shardio weighted %d" % VERSION, self.seed, epoch, 1)
        # Each sample owns [end - weight, end); u <= 1 - 2**-53, so that u * total stays below the last end.
        targets = uniform(key, positions.astype(np.uint64)) * self._ends[-1]
        ascending = targets.argsort()  # finding them in this order is kind to the cache: twice as fast
        indices = np.empty(len(targets), np.int64)
        indices[ascending] = self._ends.searchsorted(targets[ascending], side="right")
        return indices

    def describe(self) -> dict[str, Any]:
        return {
            "shuffle": True,
            "seed": self.seed,
            "num_samples": self.num_samples,
            "weights": self._digest,
        }

    @cached_property
    def _digest(self) -> str:
        return _digest_of(self.weights)


@dataclass(frozen=True, eq=False)
class Subset:
    """An order of the samples `indices` alone: position p is sample indices[order(epoch, p)]. `order` is an order of
    len(indices) samples."""

    order: Order
    indices: NDArray[np.int64]

    @property
    def num_samples(self) -> int:
        return self.order.num_samples

    @cached_property
    def redraws(self) -> bool:
        return self.order.redraws or len(np.unique(self.indices)) < len(self.indices)

    def __call__(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.indices[self.order(epoch, positions)]

    def describe(self) -> dict[str, Any]:
        return {**self.order.describe(), "indices": self._digest}

    @cached_property
    def _digest(self) -> str:
        return _digest_of(self.indices)


@dataclass(frozen=True)
class Endless:
    """All epochs of `order`, one after the other, as a single endless epoch without a tail. Position p is position p %
    n of epoch p // n of `order`, with n = order.num_samples."""

    order: Order
    num_samples = MAX_N
    redraws = True

    def __call__(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        passes, places = divide(check_below(MAX_N, positions), np.int64(self.order.num_samples))
        if passes.size and (only := int(passes.min())) == passes.max():
            return self.order(only, places)
        indices = np.empty_like(places)
        for number in np.unique(passes).tolist():
            some = np.flatnonzero(passes == number)
            indices[some] = self.order(number, places[some])
        return indices

    def describe(self) -> dict[str, Any]:
        return {**self.order.describe(), "endless": True}


def make_order(
    set_size: int,
    *,
    indices: ArrayLike | None = None,
    shuffle: Shuffle = True,
    seed: int = 0,
    weights: ArrayLike | None = None,
) -> Order:
    """Returns the order of a split of `set_size` samples. See ShardLoader for the options. Raises ValueError if an
    option is invalid, or if options contradict each other."""
    if isinstance(shuffle, np.bool_):
        shuffle = bool(shuffle)
    if shuffle == "block":
        shuffle = BlockShuffle()
    if not isinstance(shuffle, (bool, BlockShuffle)):
        raise ValueError(f'shuffle must be True, False, "block" or BlockShuffle(size, window); found {shuffle!r}')
    if weights is not None and shuffle is not True:
        raise ValueError(f"weights draw samples at random: they need shuffle=True; found shuffle={shuffle!r}")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be from 0 to 2**64 - 1; found {seed}")
    chosen = None if indices is None else _checked_indices(indices, set_size)
    size = set_size if chosen is None else len(chosen)
    order: Order
    if weights is not None:
        weights = as_array("weights", weights)
        if weights.shape != (size,):
            what = "the split" if chosen is None else "indices"
            raise ValueError(f"expected {size} weights, one for each sample of {what}; found shape {weights.shape}")
        order = WeightedDraws(weights, seed, size)
    elif isinstance(shuffle, BlockShuffle):
        order = BlockOrder(size, seed, shuffle)
    else:
        order = GlobalShuffle(size, seed) if shuffle else StoredOrder(size)
    return order if chosen is None else Subset(order, chosen)


def _checked_indices(indices: ArrayLike, set_size: int) -> NDArray[np.int64]:
    found = as_array("indices", indices)
    if found.ndim != 1 or not found.size or found.dtype.kind not in "iu":
        hint = "; for a mask, np.flatnonzero(mask)" if found.dtype.kind == "b" else ""
        raise ValueError(
            f"indices must be a one-dimensional array of integers, at least one{hint}; "
            f"found shape {found.shape}, {found.dtype}"
        )
    if found.min() < 0 or found.max() >= set_size:
        raise ValueError(f"indices must be from 0 to {set_size - 1}; found {found.min()} to {found.max()}")
    return found.astype(np.int64)  # a copy, so that the caller's changes do not reach it


def _distinct(numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Returns (values, which) with values[which] == numbers, so a function of the numbers can be computed once per
    value. `values` is shorter than `numbers` if the numbers are close together; otherwise it is `numbers`."""
    low, high = int(numbers.min()), int(numbers.max())
    if high - low < len(numbers):
        return np.arange(low, high + 1), numbers - low
    return numbers, np.arange(len(numbers))


def _digest_of(array: NDArray[Any]) -> str:
    """Returns a hash (hex) of the array's values, which does not depend on the machine's byte order."""
    return hashlib.blake2b(array.astype(array.dtype.newbyteorder("<")).tobytes(), digest_size=16).hexdigest()

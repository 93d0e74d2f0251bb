"""Finds pictures that look alike, by a hash of each: dHash, 64 signs of differences between neighbouring greys.

The hash is Neal Krawetz's ("Kind of Like That", hackerfactor.com, 2013). Two are close if few of their bits differ. To
find those, the hashes are sorted four times, each time by another quarter of their bits first: two that differ in at
most three bits have one quarter in common, and stand near each other there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

MOST_BITS = 3
"""Hashes that differ in more bits are not taken for alike: with fewer quarters than bits, none need be in common."""

_QUARTERS = 4
_QUARTER_BITS = 16
# Of so many that have a quarter in common, each is compared with all others; of more, with the next ones in order, so
# that flat pictures, whose hashes are all alike, do not make it slow.
_WINDOW = 256
# Flat pictures have differences of no meaning: where fewer bits than these are set, or unset, the hash says nothing.
_LEAST_BITS = 6
# Both pictures in so many fields a side differ by so many grey levels at most, on the average.
_FIELDS = 16
_MOST_DIFFERENCE = 8.0

# Every bit of two, of four, of eight; and one in each byte.
_TWOS, _FOURS, _EIGHTS, _ONES = (np.uint64((1 << 64) // n) for n in (3, 5, 17, 255))


def as_image(picture: NDArray[np.uint8]) -> Image.Image:
    """Returns a picture (height, width, channels) in colours if it has three or four channels; else the first, grey."""
    seen = picture[:, :, :3] if picture.shape[2] in (3, 4) else picture[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(seen))


def hash_picture(image: Image.Image) -> int:
    """Returns the picture's dHash, 64 bits."""
    greys = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX))
    return int.from_bytes(np.packbits(greys[:, 1:] > greys[:, :-1]).tobytes(), "big")


def tells(hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Returns which hashes are of pictures that are not flat."""
    bits = count_bits(hashes)
    return (bits >= _LEAST_BITS) & (bits <= 64 - _LEAST_BITS)


def count_bits(numbers: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns how many bits of each number are set."""
    # Sums of neighbouring bits, then of neighbouring sums (Warren, "Hacker's Delight", 2002, 5-1).
    one, two, four, top = (np.uint64(n) for n in (1, 2, 4, 56))
    sums = numbers - ((numbers >> one) & _TWOS)
    sums = (sums & _FOURS) + ((sums >> two) & _FOURS)
    sums = (((sums + (sums >> four)) & _EIGHTS) * _ONES) >> top
    counts: NDArray[np.int64] = sums.astype(np.int64)
    return counts


def close_pairs(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns pairs (n, 2) of places whose hashes differ in at most MOST_BITS bits, each once, ascending.

    Of places with one hash, each is paired with the first alone.
    """
    values, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    again = np.flatnonzero(first[inverse] != np.arange(len(hashes)))
    pairs = [np.stack([first[inverse[again]], again], axis=1)]
    for quarter in range(_QUARTERS):
        shift = np.uint64(quarter * _QUARTER_BITS)
        turned = (values << shift) | (values >> (np.uint64(64) - shift) if shift else np.uint64(0))
        order = np.argsort(turned)
        common = turned[order] >> np.uint64(64 - _QUARTER_BITS)
        near = np.arange(len(values))
        for step in range(1, _WINDOW):
            near = near[near + step < len(values)]
            near = near[common[near] == common[near + step]]
            if not len(near):
                break
            one, other = order[near], order[near + step]
            close = count_bits(values[one] ^ values[other]) <= MOST_BITS
            pairs.append(np.stack([first[one[close]], first[other[close]]], axis=1))
    lower, higher = np.sort(np.concatenate(pairs), axis=1).T
    # One number for each pair: np.unique of rows takes ten times as long.
    found = np.unique(lower * len(hashes) + higher)
    return np.stack(np.divmod(found, len(hashes)), axis=1)


def fields_of(picture: NDArray[np.uint8]) -> NDArray[np.int16]:
    """Returns the mean colours of a picture in 16 x 16 fields."""
    return np.asarray(as_image(picture).resize((_FIELDS, _FIELDS), Image.Resampling.BOX)).astype(np.int16)


def look_alike(one: NDArray[np.int16], other: NDArray[np.int16]) -> bool:
    """Returns whether two pictures, whose hashes are close, have about the same colours in all fields."""
    return float(np.abs(one - other).mean()) <= _MOST_DIFFERENCE


def join(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Returns groups of two or more, ascending, of what the pairs join."""
    above: dict[int, int] = {}

    def top(number: int) -> int:
        while (higher := above.setdefault(number, number)) != number:
            above[number] = number = above[higher]
        return number

    for one, other in pairs:
        lower, higher = sorted((top(one), top(other)))
        above[higher] = lower
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for number in sorted(above):
        groups[top(number)].append(number)
    return [groups[number] for number in sorted(groups) if len(groups[number]) > 1]

"""Pixels stored as yuv420, in plain NumPy without shardio: written and read as docs/format.md says, and resized."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]


def plain_yuv420(picture: Pixels) -> Pixels:
    """Returns the stored row of a picture, (height * 3 / 2, width)."""
    red, green, blue = picture.astype(np.int64).transpose(2, 0, 1)
    y = (19595 * red + 38470 * green + 7471 * blue + 2**15) >> 16
    red, green, blue = (c[::2, ::2] + c[::2, 1::2] + c[1::2, ::2] + c[1::2, 1::2] for c in (red, green, blue))
    cb = ((128 << 18) - 11059 * red - 21709 * green + 32768 * blue + 2**17) >> 18
    cr = ((128 << 18) + 32768 * red - 27439 * green - 5329 * blue + 2**17) >> 18
    flat = np.concatenate([c.ravel().clip(0, 255) for c in (y, cb, cr)])
    return flat.astype(np.uint8).reshape(-1, picture.shape[1])


def plain_planes(sample: Pixels) -> list[Pixels]:
    height, width = len(sample) * 2 // 3, sample.shape[1]
    parts = np.split(sample.ravel(), [height * width, height * width * 5 // 4])
    return [part.reshape(-1, width >> (i > 0)) for i, part in enumerate(parts)]


def plain_colors(y: Pixels, cb: Pixels, cr: Pixels) -> Pixels:
    light, blue, red = y.astype(np.int64), cb.astype(np.int64) - 128, cr.astype(np.int64) - 128
    colors = (
        light + ((45941 * red + 2**14) >> 15),
        light + ((-11277 * blue - 23401 * red + 2**14) >> 15),
        light + ((58065 * blue + 2**14) >> 15),
    )
    return np.stack(colors, axis=2).clip(0, 255).astype(np.uint8)


def plain_enlarged(plane: Pixels) -> Pixels:
    """Returns a plane of twice the size: along lines, and then along columns, 3/4 of a pixel and 1/4 of a neighbor."""
    for axis in (1, 0):
        pixels = np.moveaxis(plane, axis, 0).astype(np.int64)
        padded = np.concatenate([pixels[:1], pixels, pixels[-1:]])
        both = (3 * pixels + padded[:-2] + 2) >> 2, (3 * pixels + padded[2:] + 2) >> 2
        plane = np.moveaxis(np.stack(both, axis=1).reshape(-1, *pixels.shape[1:]), 0, axis).astype(np.uint8)
    return plane


def plain_picture(sample: Pixels) -> Pixels:
    """Returns the picture of a stored row, (height, width, 3)."""
    light, *colors = plain_planes(sample)
    return plain_colors(light, *map(plain_enlarged, colors))


def plain_filter(kind: str, antialias: bool, x: float) -> float:
    if kind == "box":
        return float(-0.5 < x <= 0.5)
    x, a = abs(x), -0.5 if antialias else -0.75
    if kind == "bilinear":
        return max(1 - x, 0.0)
    if kind == "cubic":
        near, far = ((a + 2) * x - (a + 3)) * x * x + 1, ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
        return near if x < 1 else far if x < 2 else 0.0
    if x == 0 or x >= 3:
        return float(x == 0)
    pi = math.pi
    return math.sin(x * pi) / (x * pi) * (math.sin(x / 3 * pi) / (x / 3 * pi))


RADII = {"box": 0.5, "bilinear": 1, "cubic": 2, "lanczos": 3}


def plain_weights(
    axis: tuple[float, ...], side: int, resized: int, kind: str, antialias: bool, wide: bool
) -> tuple[NDArray[np.int64], int]:
    """Returns the weight of each of `side` inputs for each output, in units of 2^-bits, and the bits."""
    start, scale, low, high = axis
    weights = np.zeros((resized, side))
    if scale == 1 and start == math.floor(start):
        weights[np.arange(resized), int(start) + np.arange(resized)] = 1
        return weights.astype(np.int64), 0
    shrink = max(scale, 1.0) if antialias else 1.0
    radius = RADII[kind] * shrink
    for i in range(resized):
        center = start + scale * (i + 0.5)
        begin, stop = math.floor(center - radius + 0.5), math.floor(center + radius + 0.5)
        first = int(min(max(begin, low), high - 1))
        end = int(min(max(stop, first + 1), high))
        total = 0.0
        for at in range(first, end) if antialias else range(begin, stop):
            weight = plain_filter(kind, antialias, (at - center + 0.5) * (1 / shrink))
            weights[i, min(max(at, first), end - 1)] += weight
            total += weight
        if total == 0:
            weights[i, first] = total = 1.0
        weights[i] /= total
    bits = 22
    while not wide and bits and not abs(weights).max() * 2.0**bits + 0.5 < 2**15:
        bits -= 1
    return ((abs(weights) * 2.0**bits + 0.5).astype(np.int64) * np.sign(weights)).astype(np.int64), bits


def plain_rgb(
    sample: Pixels, axes: NDArray[np.float64], resized: tuple[int, int], kind: str, antialias: bool, wide: bool
) -> Pixels:
    """Returns the whole resized image. Planes are resampled along lines, rounded, and resampled along columns."""
    made = []
    for plane_number, plane in enumerate(plain_planes(sample)):
        for number in (1, 0):
            side = plane.shape[number]
            axis = plain_halved(axes[number].tolist(), side) if plane_number else tuple(axes[number].tolist())
            its_kind = "bilinear" if plane_number and axis[1] < 1 else kind
            weights, bits = plain_weights(axis, side, resized[number], its_kind, antialias, wide)
            sums = np.tensordot(weights, np.moveaxis(plane, number, 0).astype(np.int64), 1)
            levels = ((sums + (1 << bits >> 1)) >> bits).clip(0, 255).astype(np.uint8)
            plane = np.moveaxis(levels, 0, number)
        made.append(plane)
    return plain_colors(*made)


def plain_halved(axis: Sequence[float], side: int) -> tuple[float, ...]:
    start, scale, low, high = axis
    return start / 2, scale / 2, max(0, (int(low) - 1) >> 1), min(side, (int(high) >> 1) + 1)


def plain_window(whole: Pixels, size: tuple[int, int], first: tuple[int, int], flip: bool) -> Pixels:
    """Returns a window of a resized image. What is outside is black; a mirrored part stays where it is."""
    top, left = (max(start, 0) for start in first)
    part = whole[top : first[0] + size[0], left : first[1] + size[1]]
    out = np.zeros((*size, 3), np.uint8)
    above, before = top - first[0], left - first[1]
    out[above : above + part.shape[0], before : before + part.shape[1]] = part[:, ::-1] if flip else part
    return out

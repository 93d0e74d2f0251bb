"""Random steps and pictures, for tests that compare ways to run steps."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from pictures import random_picture

from shardio.augment.steps import FILL_AT, SAMPLING_AT, WARPS, Op, Step

NAN = math.nan


def pictures(rng: np.random.Generator, count: int, height: int, width: int, channels: int) -> NDArray[np.uint8]:
    """Smooth pictures and noise in turn."""
    smooth = np.stack([random_picture(rng, height, width * channels)[:, :, 0] for _ in range(count)])
    noise = rng.integers(0, 256, (count, height, width * channels), dtype=np.uint8)
    chosen = (np.arange(count) % 2 == 0)[:, None, None]
    return np.where(chosen, smooth, noise).reshape(count, height, width, channels)


def drawn_values(rng: np.random.Generator, op: Op, height: int, width: int, channels: int) -> NDArray[np.float64]:
    """Returns what one picture's operation takes: usual values, and some at the ends of their ranges."""
    values = np.zeros(FILL_AT + channels)
    if op in (Op.BRIGHTNESS, Op.CONTRAST, Op.SATURATION, Op.SHARPNESS):
        values[0] = rng.choice([0.0, 1.0, rng.uniform(0, 3), 100.0])
    elif op is Op.HUE:
        values[0] = rng.choice([-0.5, 0.0, 0.5, rng.uniform(-0.5, 0.5)])
    elif op is Op.POSTERIZE:
        values[0] = rng.integers(0, 9)
    elif op is Op.SOLARIZE:
        values[0] = rng.choice([0.0, 100.5, 255.0, 256.0])
    elif op is Op.SOLARIZE_ADD:
        values[:2] = rng.uniform(-110.0, 110.0), rng.choice([0.0, 128.0, 256.0])
    elif op is Op.BLUR:
        reach = rng.integers(0, min(width, 12)), rng.integers(0, min(height, 12))
        values[:4] = 2 * reach[0] + 1, 2 * reach[1] + 1, *rng.uniform(0.1, 3.0, 2)
    elif op is Op.ERASE:
        top, left = rng.integers(0, height + 1), rng.integers(0, width + 1)
        values[:4] = top, left, rng.integers(0, height - top + 1), rng.integers(0, width - left + 1)
        values[FILL_AT:] = rng.choice([0.0, 255.0, rng.uniform(0, 255)], channels)
    elif op in WARPS:
        about = np.array([1.0, 0.0, 0.0, 0.0, 1.0, 0.0])
        spread = np.array([0.5, 0.5, width / 4, 0.5, 0.5, height / 4])
        kind = rng.integers(0, 4)
        if kind == 0:  # by whole pixels
            values[:6] = about
            values[[2, 5]] = rng.integers(-width, width + 1), rng.integers(-height, height + 1)
        elif kind == 1:  # a shear
            values[:6] = about
            values[1] = rng.uniform(-0.5, 0.5)
        elif kind == 2:
            values[:6] = about + rng.uniform(-1, 1, 6) * spread
        else:
            values[:6] = rng.choice([0.0, -1.0, 0.5, 1e30, -1e30, 3.0], 6)
        if op is Op.PERSPECTIVE:
            values[6:8] = rng.choice([0.0, rng.uniform(-0.02, 0.02)], 2)
        values[SAMPLING_AT] = rng.integers(0, 4)
        values[FILL_AT:] = NAN if rng.random() < 0.3 else rng.uniform(0, 255, channels)
    return values


def drawn_step(rng: np.random.Generator, ops: NDArray[np.uint8], size: tuple[int, int], channels: int) -> Step:
    return Step(ops, np.stack([drawn_values(rng, Op(int(op)), *size, channels) for op in ops]))

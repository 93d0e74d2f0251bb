"""The kernel fits pictures to samples to the bytes of torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from conversions import MODES
from numpy.typing import NDArray

from shardio.conversion.images.fit import Fit
from shardio.conversion.options import FitMode
from shardio.kernels import resample as kernel

pytestmark = pytest.mark.skipif(not kernel.AVAILABLE, reason="installed without a compiler")


def with_torch(fit: Fit, *picture: Any) -> NDArray[np.uint8]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "AVAILABLE", False)
        return fit.apply(*picture)


def random_fit(rng: np.random.Generator) -> Fit:
    height, width = rng.integers(1, rng.choice([5, 20, 100]), 2).tolist()
    size = (height, height) if rng.random() < 0.3 else (height, width)
    return Fit(size, str(rng.choice(MODES)), str(rng.choice(["bicubic", "bilinear"])))  # type: ignore[arg-type]


def random_pixels(rng: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    # Black and white make filters overshoot.
    return pixels if rng.random() < 0.5 else (pixels >> 7) * np.uint8(255)


def test_random_pictures_are_as_torch_makes_them() -> None:
    rng = np.random.default_rng(0)
    for _ in range(4000):
        fit, (height, width) = random_fit(rng), rng.integers(1, rng.choice([5, 20, 100, 250]), 2).tolist()
        pixels = random_pixels(rng, height, width)
        found = fit.apply(pixels)
        np.testing.assert_array_equal(found, with_torch(fit, pixels), err_msg=f"{height} x {width}, {fit}")


def test_random_reduced_pictures_are_as_torch_makes_them() -> None:
    rng = np.random.default_rng(1)
    reduced = 0
    while reduced < 500:
        fit, reduction = random_fit(rng), int(rng.choice([2, 4, 8]))
        height, width = rng.integers(1, rng.choice([50, 400, 2000]), 2).tolist()
        shape = (math.ceil(height / reduction), math.ceil(width / reduction))
        if any(side < least for side, least in zip(shape, fit.least_size(height, width), strict=True)):
            continue
        reduced += 1
        picture = random_pixels(rng, *shape), (height, width), reduction
        np.testing.assert_array_equal(fit.apply(*picture), with_torch(fit, *picture), err_msg=f"{picture[1:]}, {fit}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((1, 5000), (3, 3)),
        ((5000, 1), (3, 3)),
        ((2, 20_000), (64, 64)),
        ((20_000, 2), (64, 64)),
        ((3000, 2000), (1, 1)),
        ((3, 2), (1, 700)),
        ((700, 1), (350, 1)),
    ],
)
def test_extreme_shapes_are_as_torch_makes_them(shape: tuple[int, int], size: tuple[int, int], mode: FitMode) -> None:
    fit = Fit(size, mode)
    pixels = random_pixels(np.random.default_rng(2), *shape)
    np.testing.assert_array_equal(fit.apply(pixels), with_torch(fit, pixels))


def test_a_sample_is_made_in_the_memory_that_is_given() -> None:
    pixels = random_pixels(np.random.default_rng(3), 40, 60)
    for mode in MODES:
        fit = Fit((30, 20), mode)
        block = np.full((3, 30, 20, 3), 7, np.uint8)
        assert fit.apply(pixels, out=block[1]) is not None
        np.testing.assert_array_equal(block[1], fit.apply(pixels))
        np.testing.assert_array_equal(with_torch(fit, pixels, None, 1, block[2]), block[1])
        assert (block[0] == 7).all()

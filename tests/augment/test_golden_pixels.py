"""Operations give what torchvision 0.28.0 has made of a drawn picture: tools/draw_golden_pixels.py."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from draw_golden_pixels import drawn_picture
from pictures import as_batch, psnr

from shardio.augment import pixels
from shardio.augment.steps import Op, Step

GOLDEN = Path(__file__).parents[1] / "data" / "golden_pixels.npz"
WAYS = [False, *([True] if pixels.kernel.AVAILABLE else [])]
EXACT = ("posterize", "solarize", "invert", "equalize", "mirror", "flip")
FILL = (10.0, 100.0, 200.0)
NO_FILL = (math.nan,) * 3


def results() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as file:
        return dict(file)


RESULTS = results()


def step_of(name: str) -> Step:
    word, *numbers = name.split()
    if word in ("affine", "perspective"):
        places = np.zeros(8)
        given = RESULTS[f"numbers {word}"]
        places[: len(given)] = given
        sampling = ("nearest", "bilinear").index(numbers[0])
        return Step.of(1, 3, Op[word.upper()], *places, sampling, *(FILL if numbers[1] == "True" else NO_FILL))
    values = [float(number) for number in numbers]
    if word == "blur":
        size, sigma = values
        values = [size, size, sigma, sigma]
    return Step.of(1, 3, Op[word.upper()], *values)


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("name", [name for name in RESULTS if not name.startswith("numbers")])
def test_it_is_what_torchvision_makes(name: str, native: bool) -> None:
    batch = as_batch(drawn_picture()[None].copy())
    found = pixels.run_steps(batch, (step_of(name),), native=native)[0].permute(1, 2, 0).numpy()
    expected = RESULTS[name]
    beside = np.abs(found.astype(int) - expected)
    if name.startswith(EXACT):
        assert beside.max() == 0
    elif "nearest" in name:  # torchvision finds the place of a pixel in floats
        assert (beside.max(axis=2) > 0).sum() <= 2
    else:
        assert beside.max() <= 1
        assert psnr(found, expected) >= 60

"""Windows: the same for the same (seed, epoch, sample), inside, and everywhere with the same probability."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from shardio.crop import Crop

SHAPE = (256, 320, 3)
# (seed, epoch, sample) -> (top, left) of a 224 x 224 window. Never to be rewritten.
GOLDEN = {
    (0, 0, 0): (24, 2),
    (0, 0, 1): (1, 3),
    (0, 1, 0): (2, 26),
    (7, 3, 1281166): (2, 60),
    (7, 3, 10000000000): (23, 68),
}


def corners(crop: Crop, epoch: int, indices: Any) -> list[tuple[int, int]]:
    windows = crop.windows(epoch, np.asarray(indices, np.int64))
    assert windows.tops.dtype == windows.lefts.dtype == np.int64
    return list(zip(windows.tops.tolist(), windows.lefts.tolist(), strict=True))


@pytest.mark.parametrize(
    ("height", "width", "corner"),
    [(256, 320, (0, 0)), (224, 224, (16, 48)), (255, 319, (0, 0)), (253, 317, (2, 2)), (1, 1, (128, 160))],
)
def test_the_centre_is_torchvisions(height: int, width: int, corner: tuple[int, int]) -> None:
    """center_crop takes int(round((height - h) / 2.0)): half to even."""
    crop = Crop(height, width, "center", 0, SHAPE)
    assert corners(crop, 5, [0, 9, 10**9]) == [corner] * 3
    assert corners(crop, 5, []) == []


def test_a_random_window_depends_on_seed_epoch_and_sample_alone() -> None:
    crop = Crop(224, 224, "random", 7, SHAPE)
    indices = np.random.default_rng(0).integers(0, 10**10, 1000)
    whole = corners(crop, 3, indices)
    assert corners(crop, 3, indices[::-1]) == whole[::-1]
    assert [corners(crop, 3, [i])[0] for i in indices[:50]] == whole[:50]
    assert corners(Crop(224, 224, "random", 7, SHAPE), 3, indices) == whole
    for other in (corners(crop, 4, indices), corners(Crop(224, 224, "random", 8, SHAPE), 3, indices)):
        same = sum(a == b for a, b in zip(whole, other, strict=True))
        assert same < 12  # 1000 / (33 * 97) are expected


def test_the_windows_of_a_seed_have_not_changed() -> None:
    crops = {seed: Crop(224, 224, "random", seed, SHAPE) for seed in (0, 7)}
    found = {
        (seed, epoch, sample): corners(crops[seed], epoch, [sample])[0]
        for seed, epoch, sample in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (7, 3, 1_281_166), (7, 3, 10**10)]
    }
    assert found == GOLDEN


def test_every_place_has_the_same_probability() -> None:
    crop = Crop(6, 4, "random", 1, (9, 8, 3))
    count = 200_000
    counts = Counter(corners(crop, 0, np.arange(count)))
    assert set(counts) == {(top, left) for top in range(4) for left in range(5)}
    chi2 = sum((n - count / 20) ** 2 / (count / 20) for n in counts.values())
    assert abs(chi2 - 19) / math.sqrt(2 * 19) < 4


def test_a_window_as_large_as_the_sample_has_one_place() -> None:
    assert set(corners(Crop(256, 320, "random", 1, SHAPE), 0, range(100))) == {(0, 0)}


@pytest.mark.parametrize(("height", "width"), [(0, 1), (1, 0), (257, 1), (1, 321), (-1, 5)])
def test_a_window_that_does_not_fit_is_refused(height: int, width: int) -> None:
    with pytest.raises(ValueError, match=r"crop must be from \(1, 1\) to \(256, 320\), the size of the samples; found"):
        Crop(height, width, "center", 0, SHAPE)


def test_another_place_is_refused() -> None:
    with pytest.raises(ValueError, match="crop_at must be one of center, random; found 'corner'"):
        Crop(1, 1, "corner", 0, SHAPE)  # type: ignore[arg-type]

"""Boxes have the distribution that torchvision's definition gives them, and depend on nothing but their names."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from shardio.augment.boxes import Draws, random_resized_boxes

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
COUNT = 30_000
GOLDEN = [[14, 77, 231, 229], [124, 69, 100, 123], [18, 16, 228, 247], [7, 6, 244, 307], [21, 38, 191, 203]]


def by_definition(rng: np.random.Generator, height: int, width: int, count: int) -> NDArray[np.float64]:
    """Boxes as torchvision's documentation and code describe one: rows of (top, left, height, width)."""
    w, h = np.zeros((2, count))
    left = np.arange(count)
    for _ in range(10):
        area = height * width * rng.uniform(*SCALE, len(left))
        aspect = np.exp(rng.uniform(*np.log(RATIO), len(left)))
        w[left], h[left] = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
        left = left[(w[left] <= 0) | (w[left] > width) | (h[left] <= 0) | (h[left] > height)]
    tops, lefts = rng.integers(0, height - np.minimum(h, height) + 1), rng.integers(0, width - np.minimum(w, width) + 1)
    rows = np.stack([tops, lefts, h, w], axis=1)
    if width / height < RATIO[0]:
        h, w = round(width / RATIO[0]), width
    elif width / height > RATIO[1]:
        h, w = height, round(height * RATIO[1])
    else:
        h, w = height, width
    rows[left] = (height - h) // 2, (width - w) // 2, h, w
    return rows


def drawn(
    height: int, width: int, count: int, scale: tuple[float, float] = SCALE, ratio: tuple[float, float] = RATIO
) -> NDArray[np.float64]:
    sizes = np.full(count, height), np.full(count, width)
    return random_resized_boxes(Draws(1, 2, np.arange(count)), "crop", *sizes, scale, ratio).sides


@pytest.mark.parametrize(("height", "width"), [(256, 256), (375, 500), (500, 120), (40, 400), (3, 2)])
def test_boxes_are_whole_pixels_distributed_as_the_definition_says(height: int, width: int) -> None:
    from scipy import stats

    defined = by_definition(np.random.default_rng(height * width), height, width, COUNT)
    found = drawn(height, width, COUNT)
    assert np.array_equal(found, np.rint(found))
    assert found[:, :2].min() >= 0
    assert found[:, 2:].min() >= 1
    assert ((found[:, :2] + found[:, 2:]).max(axis=0) <= (height, width)).all()
    ones, others = ([*rows.T, rows[:, 2] * rows[:, 3], rows[:, 3] / rows[:, 2]] for rows in (found, defined))
    for one, other in zip(ones, others, strict=True):
        assert stats.ks_2samp(one, other).pvalue > 1e-5


def test_a_picture_that_no_box_fits_is_cut_in_its_center_to_the_next_ratio() -> None:
    for height, width in ((100, 1000), (1000, 100), (7, 300)):
        h, w = (round(width / RATIO[0]), width) if width < height else (height, round(height * RATIO[1]))
        expected = (height - h) // 2, (width - w) // 2, h, w
        assert np.array_equal(np.unique(drawn(height, width, 1000, (1.0, 1.0)), axis=0), [expected])


def test_a_box_of_the_thinnest_pictures_has_a_pixel() -> None:
    for size, ratio in (((1, 50), (0.1, 0.3)), ((50, 1), (3.0, 9.0))):
        rows = drawn(*size, 100, (1.0, 1.0), ratio)
        assert rows[:, 2:].min() >= 1
        assert (rows[:, :2] + rows[:, 2:] <= size).all()


def test_seeds_epochs_views_and_purposes_are_independent() -> None:
    indices = np.arange(60_000)
    draws = Draws(1, 2, indices)
    others = Draws(2, 2, indices), Draws(1, 3, indices), Draws(1, 2, indices, view=1)
    numbers = [draws.uniform("crop", 2), draws.uniform("flip", 1), *(other.uniform("crop", 1) for other in others)]
    assert np.abs(np.corrcoef(np.concatenate(numbers)) - np.eye(6)).max() < 0.01
    assert np.array_equal(draws.uniform("crop", 1), numbers[0][:1])


def test_a_golden_table_of_boxes() -> None:
    """These may never change: a resumed job would see other pictures."""
    assert drawn(256, 320, 5).tolist() == GOLDEN

"""Boxes have the distribution that torchvision's definition gives them, and depend on nothing but their names."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from shardio.augment.boxes import Boxes, Draws, random_resized_boxes

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


def drawn(height: int, width: int, count: int, **names: int) -> Boxes:
    sizes = np.full(count, height), np.full(count, width)
    draws = Draws(**{"seed": 1, "epoch": 2, "counters": np.arange(count), **names})  # type: ignore[arg-type]
    return random_resized_boxes(draws, "crop", *sizes, SCALE, RATIO)


def as_rows(boxes: Boxes) -> NDArray[np.float64]:
    return np.stack([boxes.tops, boxes.lefts, boxes.heights, boxes.widths], axis=1)


@pytest.mark.parametrize(("height", "width"), [(256, 256), (375, 500), (500, 120), (40, 400), (3, 2)])
def test_boxes_are_whole_pixels_distributed_as_the_definition_says(height: int, width: int) -> None:
    from scipy import stats

    defined = by_definition(np.random.default_rng(height * width), height, width, COUNT)
    found = as_rows(drawn(height, width, COUNT))
    assert np.array_equal(found, np.rint(found))
    assert found[:, :2].min() >= 0
    assert found[:, 2:].min() >= 1
    assert ((found[:, :2] + found[:, 2:]).max(axis=0) <= (height, width)).all()
    for one, other in ((found, defined), (found[:, 2:].prod(axis=1), defined[:, 2:].prod(axis=1))):
        for column in range(one.shape[1] if one.ndim == 2 else 1):
            pair = (one[:, column], other[:, column]) if one.ndim == 2 else (one, other)
            assert stats.ks_2samp(*pair).pvalue > 1e-5, column
    assert stats.ks_2samp(found[:, 3] / found[:, 2], defined[:, 3] / defined[:, 2]).pvalue > 1e-5


def test_a_picture_that_no_box_fits_is_cut_in_its_center_to_the_next_ratio() -> None:
    for height, width in ((100, 1000), (1000, 100), (7, 300)):
        sizes = np.full(1000, height), np.full(1000, width)
        boxes = random_resized_boxes(Draws(0, 0, np.arange(1000)), "crop", *sizes, (1.0, 1.0), RATIO)
        h, w = (round(width / RATIO[0]), width) if width < height else (height, round(height * RATIO[1]))
        expected = (height - h) // 2, (width - w) // 2, h, w
        assert np.array_equal(np.unique(as_rows(boxes), axis=0), [expected])


def test_a_box_of_the_thinnest_pictures_has_a_pixel() -> None:
    thin = np.ones(100, np.int64), np.full(100, 50)
    for sizes, ratio in ((thin, (0.1, 0.3)), (thin[::-1], (3.0, 9.0))):
        rows = as_rows(random_resized_boxes(Draws(0, 0, np.arange(100)), "crop", *sizes, (1.0, 1.0), ratio))
        assert rows[:, 2:].min() >= 1
        assert (rows[:, :2] + rows[:, 2:] <= np.stack(sizes, axis=1)).all()


def test_seeds_epochs_views_and_purposes_are_independent() -> None:
    indices = np.arange(60_000)
    numbers = [
        Draws(1, 2, indices).uniform("crop", 1),
        Draws(2, 2, indices).uniform("crop", 1),
        Draws(1, 3, indices).uniform("crop", 1),
        Draws(1, 2, indices, view=1).uniform("crop", 1),
        Draws(1, 2, indices).uniform("flip", 1),
        Draws(1, 2, indices).uniform("crop", 2)[1:],
    ]
    found = np.corrcoef(np.concatenate(numbers))
    assert np.abs(found - np.eye(len(numbers))).max() < 0.01
    assert np.array_equal(Draws(1, 2, indices).uniform("crop", 2)[:1], numbers[0])


def test_a_golden_table_of_boxes() -> None:
    """These may never change: a resumed job would see other pictures."""
    assert as_rows(drawn(256, 320, 5)).tolist() == GOLDEN


def test_boxes_of_pictures_that_are_parts_of_others_are_stretched_with_them() -> None:
    inner = Boxes(*np.array([[10.0, 3], [20, 4], [30, 5], [40, 6]]))
    outer = Boxes(*np.array([[7.0, 0], [9, 0], [50, 20], [200, 30]]))
    sizes = np.array([[100, 100], [20, 30]])
    assert as_rows(inner.inside_of(outer, sizes)).tolist() == [[12, 49, 15, 80], [3, 4, 5, 6]]
    assert as_rows(Boxes.whole(2, 3, 4)).tolist() == [[0, 0, 3, 4]] * 2

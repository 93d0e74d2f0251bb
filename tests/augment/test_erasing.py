"""RandomErasing erases rectangles of the distribution that torchvision and timm draw from, by colors or by noise."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from drawn import assert_distributed, assert_independent, assert_shares, assert_uniform, noted
from numpy.typing import NDArray
from plain_arithmetic import plain_random_bits
from transforms import changed

from shardio.augment import Compose, Mixup, Normalize, RandomApply, RandomErasing, ToDtype, Views
from shardio.augment.boxes import Draws
from shardio.augment.chain import Transform
from shardio.augment.erasing import noise
from shardio.augment.steps import Op

MANY = 60_000
GOLDEN_NOISE = [[-0.2672, -0.1184, -1.313, 1.1969, 0.0387, -0.2342], [0.0545, 0.4658, 0.9992, 0.6325, -2.8238, 0.2327]]
Numbers = NDArray[np.int64]


def boxes_of(transform: RandomErasing, size: tuple[int, int], count: int = MANY, of: int = 1) -> Numbers:
    """First row, first column, height and width of the first rectangle of each sample, of so many."""
    return transform._boxes(Draws(3, 1, np.arange(count)), "RandomErasing/0", size, np.full(count, of))


def by_definition(size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]) -> Numbers:
    """Boxes as torchvision draws them, with numpy's random numbers; height 0 where ten tries have failed."""
    rng = np.random.default_rng(8)
    height, width = size
    tall, wide = np.zeros((2, MANY))
    left = np.ones(MANY, bool)
    for _ in range(10):
        area = height * width * rng.uniform(*scale, MANY)
        aspect = np.exp(rng.uniform(*np.log(ratio), MANY))
        h, w = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
        fits = left & (h < height) & (w < width)
        tall[fits], wide[fits] = h[fits], w[fits]
        left &= ~fits
    rows, columns = rng.integers(0, (height - tall + 1).astype(int)), rng.integers(0, (width - wide + 1).astype(int))
    return np.stack([rows, columns, tall, wide]).astype(np.int64)


@pytest.mark.parametrize(
    ("size", "scale"), [((224, 224), (0.02, 0.33)), ((60, 300), (0.02, 0.5)), ((7, 5), (0.1, 0.9))]
)
def test_rectangles_are_distributed_as_torchvisions(size: tuple[int, int], scale: tuple[float, float]) -> None:
    from scipy import stats

    ratio = (0.3, 3.3)
    found = boxes_of(RandomErasing(scale=scale, ratio=ratio), size)
    expected = by_definition(size, scale, ratio)
    assert abs((found[2] == 0).mean() - (expected[2] == 0).mean()) < 0.01
    found, expected = (boxes[:, boxes[2] > 0] for boxes in (found, expected))
    ones, others = ([*boxes[:2], boxes[2] * boxes[3], boxes[2] / boxes[3].clip(1)] for boxes in (found, expected))
    for one, other in zip(ones, others, strict=True):
        assert stats.ks_2samp(one, other).pvalue > 1e-7
    rows, columns, heights, widths = found
    assert (rows + heights <= size[0]).all()
    assert (columns + widths <= size[1]).all()


def test_several_rectangles_share_the_area() -> None:
    side = 100_000  # so large that whole pixels do not show
    rows, columns, heights, widths = boxes_of(RandomErasing(scale=(0.1, 0.3)), (side, side), MANY // 8, of=5)
    area = heights * widths / side**2
    assert_uniform(area.clip(0.02, 0.06), 0.02, 0.06)
    assert_independent(area, np.log(heights / widths), rows / (side - heights + 1), columns / (side - widths + 1))


def test_the_number_of_rectangles_is_uniform_and_a_cast_changes_none() -> None:
    erase = RandomErasing(0.6, scale=(0.3, 0.4), ratio=(1, 1), count=(2, 4))
    steps = noted(erase, MANY // 4, (1, 12, 12)).steps
    counts = np.sum([step.codes == Op.ERASE for step in steps], axis=0)
    assert_shares(counts, [0.4, 0, 0.2, 0.2, 0.2])
    some = counts == 4
    assert_independent(*(step.values[some, place] for step in steps for place in range(2)))
    images = torch.full((50, 1, 12, 12), 9, dtype=torch.uint8)
    assert torch.equal(
        changed(Compose([ToDtype(torch.float32), erase]), images), changed(Compose([erase]), images).float()
    )


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        *(
            (dtype, value, expected)
            for dtype in (torch.uint8, torch.float32, torch.bfloat16)
            for value, expected in ((0.0, [0, 0, 0]), ((1, 2, 3), [1, 2, 3]), ([9], [9, 9, 9]))
        ),
        (torch.float32, (-5.5, 300, 1e6), [-5.5, 300, 1e6]),
    ],
)
def test_a_rectangle_of_one_color_is_erased_and_nothing_else(dtype: torch.dtype, value: Any, expected: Any) -> None:
    images = torch.randint(100, 256, (40, 3, 9, 11), dtype=torch.uint8)
    cast: list[Transform] = [] if dtype == torch.uint8 else [ToDtype(dtype)]
    found = changed(Compose([*cast, RandomErasing(1.0, scale=(0.1, 0.3), value=value)]), images)
    assert found.dtype == dtype
    is_erased = found == torch.tensor(expected, dtype=dtype)[:, None, None]
    assert torch.equal(is_erased[:, :1].expand_as(is_erased), is_erased)
    assert torch.equal(found[~is_erased], images.to(dtype)[~is_erased])
    for one in is_erased[:, 0]:
        rows, columns = one.any(dim=1), one.any(dim=0)
        assert one.any()
        assert torch.equal(one, rows[:, None] & columns[None])


@pytest.mark.parametrize("cast", [[], [ToDtype(torch.float32)]])
def test_images_of_other_choices_and_views_stay_whole_after_a_cast_that_changes_nothing(cast: list[Transform]) -> None:
    erase, first = RandomErasing(1.0, value=0.5), [Normalize(0.1, 0.3), Mixup(num_classes=3)]
    images, labels = torch.full((64, 3, 24, 32), 200, dtype=torch.uint8), torch.arange(64) % 3

    def is_erased(last: Transform) -> list[list[bool]]:
        found, _ = Compose([*first, last])(images, labels, seed=1)
        return [(one == 0.5).flatten(1).any(1).tolist() for one in (found if isinstance(found, tuple) else (found,))]

    assert 9 < sum(is_erased(RandomApply([*cast, erase], 0.3))[0]) < 30
    assert is_erased(Views([Compose([*cast, erase]), Compose(cast)])) == [[True] * 64, [False] * 64]


def everything(value: str, count: int, channels: int = 3, size: int = 30, **options: Any) -> torch.Tensor:
    """What lies in a square in the middle that is erased in nearly all of gray pictures."""
    transform = Compose([Normalize(0.5, 0.5), RandomErasing(1.0, (0.9, 0.92), (1, 1), value)])
    images = torch.full((count, channels, size, size), 100, dtype=torch.uint8)
    return changed(transform, images, **options)[:, :, 8:-8, 8:-8]


def test_noise_is_normal_and_independent() -> None:
    from scipy import stats

    found = everything("random", 150, 5).numpy().astype(float)
    assert_distributed(found.ravel(), stats.norm.cdf)
    assert abs(found.mean()) < 5.5 / math.sqrt(found.size)
    by_channel = [found[:, channel].ravel() for channel in range(5)]
    assert_independent(*by_channel, np.roll(by_channel[0], 14))
    others = [everything("random", 150, **{name: 1})[:, 0].ravel().numpy() for name in ("seed", "epoch", "view")]
    assert_independent(everything("random", 150)[:, 0].ravel().numpy(), *others)


def test_colors_are_normal_and_one_for_each_channel() -> None:
    from scipy import stats

    found = everything("color", 5_000, size=20)
    assert torch.equal(found, found[:, :, :1, :1].expand_as(found))
    colors = found[:, :, 0, 0].numpy().astype(float).T
    for row in colors:
        assert_distributed(row, stats.norm.cdf)
    assert_independent(*colors)


def test_noise_is_the_same_in_a_box_and_in_the_whole_picture() -> None:
    keys = torch.from_numpy(np.random.default_rng(1).integers(-(2**63), 2**63, 6))
    for channels in (1, 3, 4, 5, 9):
        shape = (6, channels, 17, 23)
        whole = noise(keys, (0, 0, 17, 23), shape)
        assert whole.shape == shape
        for top, left, height, width in ((0, 0, 1, 1), (3, 4, 5, 6), (16, 22, 1, 1), (0, 7, 17, 2)):
            part = noise(keys, (top, left, height, width), shape)
            assert torch.equal(part, whole[:, :, top : top + height, left : left + width])
        assert torch.equal(noise(keys[2:3], (0, 0, 17, 23), shape), whole[2:3])


def test_a_golden_piece_of_noise() -> None:
    """It may never change: a resumed job would see other pictures."""
    keys, shape = [1, 2**63], (2, 6, 8, 8)
    found = noise(torch.tensor(keys, dtype=torch.uint64).view(torch.int64), (2, 3, 1, 1), shape)[:, :, 0, 0].tolist()
    assert [[round(number, 4) for number in row] for row in found] == GOLDEN_NOISE
    for key, row in zip(keys, found, strict=True):
        for channel, number in enumerate(row):
            bits = plain_random_bits(key, 2 * 8 + 3 + channel // 4 * 64) >> 16 * (channel % 4) & 0xFFFF
            assert number == pytest.approx(NormalDist().inv_cdf((bits + 0.5) / 65536), abs=1e-6)

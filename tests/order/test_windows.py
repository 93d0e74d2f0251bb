"""Windows: the same for the same (seed, epoch, sample), inside, and everywhere with the same probability."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pictures import sample_pixels

from shardio.loading.loader import ShardLoader
from shardio.order.windows import Crop, Windows
from shardio.reading.choose import Io
from shardio.reading.shardset import open_shards

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


# Through the loader.

SAMPLE = (21, 17, 3)
NUM_SAMPLES = 43
ENGINES = [io for io in get_args(Io) if io != "auto"]


def read(out: Path, batch_size: int = 5, start: int = 0, **options: Any) -> dict[int, np.ndarray]:
    """Sample -> pixels, of one epoch."""
    options = {"tail": "short", "device": "cpu", "num_threads": 2, "return_indices": True, "seed": 3, **options}
    try:
        loader = ShardLoader(out, batch_size, **options)
    except ValueError as error:
        if "O_DIRECT does not work" in str(error):
            pytest.skip("no O_DIRECT here")
        raise
    with loader:
        loader.load_state_dict({**loader.state_dict(), "epoch": 2, "consumed": start})
        found = {}
        for images, labels, indices in loader:
            assert images.is_contiguous(memory_format=torch.channels_last)
            assert (labels == indices % 7).all()
            for image, index in zip(images.permute(0, 2, 3, 1).numpy(), indices.tolist(), strict=True):
                found[index] = image.copy()
        return found


@pytest.mark.parametrize("io", ENGINES)
@pytest.mark.parametrize("crop", [(21, 17), (20, 17), (21, 5), (9, 16), (1, 1), 12])
@pytest.mark.parametrize("at", ["center", "random"])
def test_every_engine_reads_the_window_and_nothing_else(
    io: str, crop: Any, at: Any, make_set: Callable[..., Path]
) -> None:
    out = make_set(NUM_SAMPLES, SAMPLE)
    found = read(out, io=io, crop=crop, crop_at=at)
    height, width = crop if isinstance(crop, tuple) else (crop, crop)
    windows = Crop(height, width, at, 3, SAMPLE).windows(2, np.arange(NUM_SAMPLES))
    assert sorted(found) == list(range(NUM_SAMPLES))
    for i, image in found.items():
        top, left = windows.tops[i], windows.lefts[i]
        expected = sample_pixels(i, SAMPLE)[top : top + height, left : left + width]
        assert np.array_equal(image, expected), i


def test_windows_stay_the_same_on_other_ranks_with_other_batches_and_after_a_resume(
    make_set: Callable[..., Path],
) -> None:
    out = make_set(NUM_SAMPLES, SAMPLE)
    options = {"crop": (9, 8), "crop_at": "random"}
    whole = read(out, **options)
    parts = [read(out, 3, rank=rank, world_size=2, num_threads=1, **options) for rank in range(2)]
    rest = read(out, 4, start=10, **options)
    assert len(rest) == NUM_SAMPLES - 10
    for part in (*parts, rest, read(out, shuffle=False, **options)):
        for index, image in part.items():
            assert np.array_equal(image, whole[index]), index
    assert any(not np.array_equal(image, whole[index]) for index, image in read(out, **{**options, "seed": 4}).items())


@pytest.mark.parametrize("crop", [22, (21, 18), 0, (5, -1)])
def test_a_crop_that_does_not_fit_the_set_is_refused(crop: Any, make_set: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"crop must be from \(1, 1\) to \(21, 17\)"):
        read(make_set(NUM_SAMPLES, SAMPLE), crop=crop)


def test_a_shard_set_gathers_windows_and_refuses_those_that_are_not_inside(make_set: Callable[..., Path]) -> None:
    shards = open_shards(make_set(NUM_SAMPLES, SAMPLE))
    indices = np.array([5, 42, 5])
    windows = Windows.alike(5, 4, np.array([0, 3, 16]), np.array([13, 0, 2]))
    out = np.zeros((3, 5, 4, 3), np.uint8)
    shards.gather(indices, out, windows)
    for image, i, top, left in zip(out, indices, windows.tops, windows.lefts, strict=True):
        assert np.array_equal(image, sample_pixels(int(i), SAMPLE)[top : top + 5, left : left + 4])
    for tops, lefts in (([0, 3, 17], [0, 0, 0]), ([0, 0, 0], [0, -1, 0]), ([0, 0], [0, 0, 0]), ([0, 0, 0], [14, 0, 0])):
        out[:] = 7
        with pytest.raises(IndexError, match=r"expected (windows inside of \(21, 17\)|as many tops)"):
            shards.gather(indices, out, Windows.alike(5, 4, np.array(tops), np.array(lefts)))
        assert (out == 7).all()
    for height, width in ((22, 4), (5, 18), (0, 4), (5, -1)):
        with pytest.raises(IndexError, match=rf"inside of \(21, 17\), height and width; found {height} x {width} pix"):
            shards.gather(indices, out, Windows.alike(height, width, windows.tops, windows.lefts))
    several = Windows(windows.tops, windows.lefts, np.array([1, 2, 3]), np.array([4, 3, 1]))
    packed = np.zeros(3 * (4 + 6 + 3), np.uint8)
    shards.gather(indices, packed, several)
    expected = [sample_pixels(int(i), SAMPLE)[several.part(k)].reshape(-1) for k, i in enumerate(indices)]
    assert np.array_equal(packed, np.concatenate(expected))
    with pytest.raises(ValueError, match=r"expected out of one dimension, for windows of several sizes"):
        shards.gather(indices, out, several)
    with pytest.raises(ValueError, match="out must be"):
        shards.gather(indices, np.zeros((3, 5, 5, 3), np.uint8), windows)

"""Transforms of whole batches do what torchvision's of the same names do to each picture, and always the same."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pictures import as_batch, psnr, random_pictures
from PIL import Image

from shardio.augment import (
    AlternatingFlip,
    CenterCrop,
    Compose,
    CutMix,
    HorizontalFlip,
    Normalize,
    Pad,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    ToDtype,
)
from shardio.augment import batch as transform_module
from shardio.augment.chain import Transform
from shardio.augment.resample import resample

SEED = 20


def pictures(count: int, height: int, width: int, seed: int = SEED) -> NDArray[np.uint8]:
    return random_pictures(np.random.default_rng(seed), count, height, width)


def changed(transform: Transform, images: torch.Tensor, **options: Any) -> torch.Tensor:
    result = transform(images, **{"seed": 0, "indices": range(len(images)), **options})
    assert isinstance(result, torch.Tensor)
    return result


def assert_like_pillow(found: torch.Tensor, expected: list[NDArray[np.uint8]]) -> None:
    for pixels, picture in zip(found.permute(0, 2, 3, 1).numpy(), expected, strict=True):
        assert psnr(pixels, picture) >= 50
        assert np.abs(pixels.astype(int) - picture).max() <= 1


def resized(picture: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    return np.array(Image.fromarray(picture).resize((width, height), Image.Resampling.BILINEAR))


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        ((60, 80), 30, (30, 40)),
        ((80, 60), 30, (40, 30)),
        ((50, 75), 31, (31, 46)),  # 46.5: torchvision cuts
        ((60, 80), (20, 50), (20, 50)),
        ((60, 80), 60, (60, 80)),
    ],
)
def test_resize_is_of_the_short_side_or_of_both(
    shape: tuple[int, int], size: int | tuple[int, int], expected: tuple[int, int]
) -> None:
    images = pictures(3, *shape)
    found = changed(Resize(size), as_batch(images))
    assert found.shape[2:] == expected
    assert_like_pillow(found, [resized(image, *expected) for image in images])


@pytest.mark.parametrize(("shape", "size"), [((33, 40), (20, 21)), ((9, 9), (4, 3)), ((8, 12), (8, 12))])
def test_a_center_crop_is_where_torchvision_has_it(shape: tuple[int, int], size: tuple[int, int]) -> None:
    images = as_batch(pictures(2, *shape))
    top, left = round((shape[0] - size[0]) / 2.0), round((shape[1] - size[1]) / 2.0)
    expected = images[:, :, top : top + size[0], left : left + size[1]]
    assert torch.equal(changed(CenterCrop(size), images), expected)


def test_resize_and_center_crop_in_one_pass_are_what_pillow_makes_of_them_in_two() -> None:
    images = pictures(4, 120, 90)
    found = changed(Compose([Resize(64), CenterCrop(56)]), as_batch(images))
    whole = [resized(image, 85, 64) for image in images]
    top, left = round((85 - 56) / 2.0), 4
    assert_like_pillow(found, [picture[top : top + 56, left : left + 56] for picture in whole])


def test_every_place_of_a_random_crop_is_as_probable_as_any_other() -> None:
    # Pixels that say where they are.
    rows, columns = np.meshgrid(np.arange(6), np.arange(5), indexing="ij")
    image = np.stack([rows, columns, rows], axis=2).astype(np.uint8)
    count = 60_000
    images = as_batch(np.broadcast_to(image, (count, 6, 5, 3)).copy())
    found = changed(RandomCrop((4, 3)), images, seed=SEED)
    places = found[:, 0, 0, 0].int() * 3 + found[:, 1, 0, 0].int()
    counts = torch.bincount(places, minlength=9)
    assert counts.shape == (9,)
    # Within five standard deviations of a binomial distribution.
    assert (counts - count / 9).abs().max() < 5 * math.sqrt(count / 9 * (8 / 9))
    assert torch.equal(found[:, 0, :, 0] - found[:, 0, :1, 0], torch.arange(4, dtype=torch.uint8).expand(count, 4))


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_flips_have_their_probability(p: float) -> None:
    count = 1_000_000
    images = torch.tensor([1, 2], dtype=torch.uint8).expand(count, 1, 1, 2).contiguous()
    found = changed(HorizontalFlip(p), images, seed=SEED)
    assert torch.equal(found.sort(dim=3).values, images)
    share = (found[:, 0, 0, 0] == 2).float().mean().item()
    assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_imagenets_statistics_by_name_are_those_of_torchvision(dtype: torch.dtype) -> None:
    images = as_batch(pictures(2, 8, 9))
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    found = changed(Compose([Normalize("imagenet"), ToDtype(dtype)]), images)
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, ((images.float() / 255 - mean) / std).to(dtype), rtol=2**-7, atol=1e-6)
    same = changed(Compose([Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), ToDtype(dtype)]), images)
    assert torch.equal(same, found)


def test_a_cast_scales_if_it_is_told_to() -> None:
    images = as_batch(pictures(2, 5, 4))
    assert torch.equal(changed(ToDtype(torch.float32), images), images.float())
    torch.testing.assert_close(changed(ToDtype(torch.float32, scale=True), images), images.float() / 255)


USUAL = Compose([RandomResizedCrop(24), HorizontalFlip(), Normalize("imagenet"), ToDtype(torch.float32)])


def test_a_transform_without_randomness_in_front_changes_no_draw() -> None:
    images = as_batch(pictures(20, 32, 32))
    crop = RandomCrop(20)
    assert torch.equal(changed(Compose([CenterCrop(32), crop]), images), changed(Compose([crop]), images))


# --- borders, and flips that alternate --------------------------------------------------------------------------------


def noise(count: int, height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(SEED).integers(0, 256, (count, height, width, 3), np.uint8)


NUMPYS = ("edge", "reflect", "symmetric")
BORDERS = [
    (0, (0, 0, 0, 0)),
    (3, (3, 3, 3, 3)),
    ((2, 5), (2, 5, 2, 5)),
    ((1, 0, 4, 2), (1, 0, 4, 2)),
    ([1], (1, 1, 1, 1)),
]


@pytest.mark.parametrize(("padding", "sides"), BORDERS, ids=str)
@pytest.mark.parametrize("mode", ["constant", *NUMPYS])
@pytest.mark.parametrize("channels", [1, 3])
def test_borders_are_those_of_numpy(padding: Any, sides: tuple[int, int, int, int], mode: Any, channels: int) -> None:
    images = as_batch(noise(2, 7, 6))[:, :channels]
    left, above, right, below = sides
    widths = ((0, 0), (0, 0), (above, below), (left, right))
    if mode == "constant":
        expected = np.pad(images.numpy(), widths, constant_values=77)
        found = changed(Pad(padding, 77), images)
    else:
        expected = np.pad(images.numpy(), widths, mode)
        found = changed(Pad(padding, padding_mode=mode), images)
    assert np.array_equal(found.numpy(), expected)
    assert found.dtype == torch.uint8


def test_a_mirrored_border_may_be_wider_than_the_picture() -> None:
    images = as_batch(noise(2, 3, 4))
    for mode in ("edge", "symmetric"):
        expected = np.pad(images.numpy(), ((0, 0), (0, 0), (9, 9), (9, 9)), mode)  # type: ignore[call-overload]
        assert np.array_equal(changed(Pad(9, padding_mode=mode), images).numpy(), expected)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be less than .*\(3, 4\); found 3"):
        changed(Pad(3, padding_mode="reflect"), images)
    assert changed(Pad((3, 2), padding_mode="reflect"), images).shape == (2, 3, 7, 10)


def test_a_border_has_a_color_for_each_channel() -> None:
    images = as_batch(noise(2, 3, 4))
    for fill, expected in (((1, 2, 3), [1, 2, 3]), (9, [9, 9, 9]), (None, [0, 0, 0]), ((5,), [5, 5, 5])):
        found = changed(Pad(1, fill), images)
        assert found[0, :, 0, 0].tolist() == found[1, :, -1, 2].tolist() == expected
        assert torch.equal(found[:, :, 1:-1, 1:-1], images)


def test_a_border_of_a_squashed_picture_is_of_true_pixels() -> None:
    images = as_batch(noise(3, 20, 20))
    sizes = np.tile([30, 24], (3, 1))
    true = changed(Resize((30, 24)), images, sizes=sizes)
    assert torch.equal(changed(Pad(2), images, sizes=sizes), changed(Pad(2), true))


@pytest.mark.parametrize("mode", ["constant", *NUMPYS])
def test_a_random_crop_of_a_picture_with_a_border_is_a_part_of_that(mode: Any) -> None:
    images = as_batch(noise(1, 6, 5)).expand(4000, -1, -1, -1)
    found = changed(RandomCrop((6, 5), (1, 2), 33, mode), images)
    bordered = changed(Pad((1, 2), 33, mode), images[:1])
    windows = [bordered[0, :, top : top + 6, left : left + 5] for top in range(5) for left in range(3)]
    same = torch.stack([(found == window).flatten(1).all(dim=1) for window in windows])
    assert same.any(dim=0).all()
    counts = same.sum(dim=1)
    # Within 5.5 standard deviations of a binomial distribution.
    assert (counts - 4000 / 15).abs().max() < 5.5 * math.sqrt(4000 / 15 * (14 / 15))


def test_the_draws_of_a_crop_do_not_depend_on_its_border() -> None:
    images = as_batch(noise(50, 9, 9))
    bordered = changed(Pad(2, 4), images)
    assert torch.equal(changed(RandomCrop(8, 2, 4), images), changed(RandomCrop(8), bordered))


def test_each_sample_is_flipped_in_every_other_epoch() -> None:
    count = 1_000_000
    images = torch.tensor([1, 2], dtype=torch.uint8).expand(count, 1, 1, 2)
    flipped = [changed(AlternatingFlip(), images, seed=SEED, epoch=epoch)[:, 0, 0, 0] == 2 for epoch in range(4)]
    share = flipped[0].float().mean().item()
    assert abs(share - 0.5) < 5.5 * 0.5 / math.sqrt(count)
    assert torch.equal(flipped[1], ~flipped[0])
    assert torch.equal(flipped[2], flipped[0])
    assert torch.equal(flipped[3], flipped[1])
    for other in ({"seed": 1}, {"seed": SEED, "view": 1}):
        differs = flipped[0] != (changed(AlternatingFlip(), images, **other)[:, 0, 0, 0] == 2)
        assert abs(differs.float().mean().item() - 0.5) < 5.5 * 0.5 / math.sqrt(count)


# --- pictures that were squashed -------------------------------------------------------------------------------------


def test_crops_of_squashed_pictures_are_boxes_of_the_true_picture() -> None:
    """A disc in a picture of 3:1 is an ellipse when that is squashed, and must be round again in every crop."""
    height, width = 128, 384
    rows, columns = np.mgrid[:height, :width]
    gradient = np.stack([rows * 2, columns * 2 // 3, np.full_like(rows, 77)], axis=2).astype(np.uint8)
    squashed = resized(gradient, 128, 128)[None]
    count = 32
    images = as_batch(np.broadcast_to(squashed, (count, 128, 128, 3)).copy())
    sizes = np.tile([height, width], (count, 1))
    transform = RandomResizedCrop(64, scale=(0.1, 0.3))
    found = changed(transform, images, sizes=sizes, seed=SEED).permute(0, 2, 3, 1).numpy().astype(int)
    true = changed(transform, as_batch(np.broadcast_to(gradient, (count, height, width, 3)).copy()), seed=SEED)
    difference = np.abs(found - true.permute(0, 2, 3, 1).numpy())
    # A pixel of the squashed picture is two levels from the next; only at a crop's edge the filters see other pixels.
    assert difference.max() <= 3
    assert difference.mean() < 0.75


def test_evaluation_of_squashed_pictures_is_undistorted() -> None:
    height, width = 96, 192
    rows, columns = np.mgrid[:height, :width]
    gradient = np.stack([rows * 2, columns, rows], axis=2).astype(np.uint8)
    usual = Compose([Resize(64), CenterCrop(56)])
    images = as_batch(resized(gradient, 96, 96)[None])
    found = changed(usual, images, sizes=[[height, width]])
    true = changed(usual, as_batch(gradient[None]))
    assert (found.int() - true.int()).abs().max() <= 3


def test_pictures_of_several_sizes_are_no_batch_until_they_are_cropped() -> None:
    images = as_batch(pictures(2, 40, 40))
    sizes = [[40, 80], [60, 40]]
    with pytest.raises(ValueError, match=r"found \(height, width\) from \(32, 32\) to \(48, 64\)"):
        Resize(32)(images, sizes=sizes)
    assert changed(Compose([Resize(32), CenterCrop(32)]), images, sizes=sizes).shape == (2, 3, 32, 32)
    assert changed(Resize((20, 30)), images, sizes=sizes).shape == (2, 3, 20, 30)


@pytest.mark.parametrize(
    "crop",
    [CenterCrop(20), RandomCrop(20), RandomResizedCrop(16), Compose([Resize(32), CenterCrop(32)])],
    ids=["center", "random", "resized", "evaluation"],
)
def test_a_flip_in_front_of_a_crop_of_squashed_pictures_flips_the_true_picture(crop: Transform) -> None:
    images = as_batch(pictures(12, 64, 64))
    sizes = np.random.default_rng(SEED).integers(20, 90, (12, 2))
    alone = changed(Compose([crop]), images, sizes=sizes)
    assert torch.equal(changed(Compose([HorizontalFlip(0.0), crop]), images, sizes=sizes), alone)
    mirrored = changed(Compose([HorizontalFlip(1.0), crop]), images.flip(3), sizes=sizes)
    assert (mirrored.int() - alone.int()).abs().max() <= 1


# --- orders, and what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chain",
    [
        [HorizontalFlip(1.0), CenterCrop((11, 6)), Resize((22, 12))],
        [Resize((30, 33)), RandomCrop(20), HorizontalFlip(1.0), Resize(10)],
        [RandomResizedCrop(20), CenterCrop(13), HorizontalFlip(1.0), HorizontalFlip(1.0)],
        [Resize((30, 33)), RandomResizedCrop(20)],
        [CenterCrop(20), RandomCrop(11), Resize(8)],
        [HorizontalFlip(), RandomResizedCrop(20), HorizontalFlip()],
    ],
)
def test_one_pass_over_the_pixels_is_what_one_transform_after_the_other_is(chain: list[Transform]) -> None:
    images = as_batch(pictures(6, 26, 31))

    class Stop(Transform):
        def apply(self, batch: Any, purpose: str) -> Any:
            return batch.finished()

    one_by_one = [step for transform in chain for step in (transform, Stop())]
    found, expected = changed(Compose(chain), images), changed(Compose(one_by_one), images)
    assert (found.int() - expected.int()).abs().max() <= 2  # rounded once, or at each step


def test_nothing_to_do_returns_the_images_themselves() -> None:
    images = as_batch(pictures(2, 5, 6))
    assert changed(Compose([]), images) is images


def test_one_number_stands_for_every_channel() -> None:
    images = torch.randint(0, 256, (4, 3, 6, 5), dtype=torch.uint8)
    expected = changed(Normalize([0.4] * 3, [0.3] * 3), images)
    tensor = torch.tensor([0.3], dtype=torch.float64)
    for mean, std in ((0.4, 0.3), ([0.4], [0.3]), (0.4, [0.3] * 3), (np.full(3, 0.4), tensor)):
        assert torch.equal(changed(Normalize(mean, std), images), expected)
    assert torch.equal(changed(Normalize(0.4, 0.3), images[:, :1]), expected[:, :1])


@pytest.mark.parametrize("native", [True, False])
def test_what_torch_is_set_to_changes_nothing(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(transform_module, "resample", partial(resample, native=False))
    images = as_batch(pictures(6, 32, 30))
    labels = torch.arange(6)
    chain = Compose([USUAL, CutMix(6, label_smoothing=0.1)])
    plain = Normalize()
    expected = (*chain(images, labels, seed=0), plain(images))
    with torch.device("meta"):
        elsewhere = (*chain(images, labels, seed=0), plain(images))
    with torch.autocast("cpu", torch.bfloat16):
        autocast = (*chain(images, labels, seed=0), plain(images))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        wide = (*chain(images, labels, seed=0), plain(images))
    finally:
        torch.set_default_dtype(before)
    for found in (elsewhere, autocast, wide):
        for one, other in zip(found, expected, strict=True):
            assert isinstance(one, torch.Tensor)
            assert isinstance(other, torch.Tensor)
            assert one.dtype == other.dtype == torch.float32
            assert torch.equal(one, other)

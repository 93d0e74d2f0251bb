"""Crops, resizes, flips, borders, normalizing and casting do to each picture what those of torchvision do."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from drawn import assert_share, assert_shares, noted
from pictures import as_batch, random_pictures
from transforms import changed

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
    VerticalFlip,
)
from shardio.augment.chain import Transform
from shardio.augment.steps import Op

MANY = 60_000


def pictures(count: int, height: int, width: int) -> torch.Tensor:
    return as_batch(random_pictures(np.random.default_rng(20), count, height, width))


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
def test_resize_is_of_the_short_side_or_of_both(shape: tuple[int, int], size: Any, expected: tuple[int, int]) -> None:
    assert changed(Resize(size), pictures(3, *shape)).shape[2:] == expected


@pytest.mark.parametrize(("shape", "size"), [((33, 40), (20, 21)), ((9, 9), (4, 3)), ((8, 12), (8, 12))])
def test_a_center_crop_is_where_torchvision_has_it(shape: tuple[int, int], size: tuple[int, int]) -> None:
    images = pictures(2, *shape)
    top, left = round((shape[0] - size[0]) / 2.0), round((shape[1] - size[1]) / 2.0)
    expected = images[:, :, top : top + size[0], left : left + size[1]]
    assert torch.equal(changed(CenterCrop(size), images), expected)


def test_every_place_of_a_random_crop_is_as_probable_as_any_other() -> None:
    boxes = noted(RandomCrop((4, 3)), MANY, (1, 6, 5)).region
    assert_shares((boxes.tops * 3 + boxes.lefts).astype(int), [1 / 9] * 9)
    grid = noted(RandomCrop(3, step=2), MANY, (1, 8, 3)).region
    assert_shares(grid.tops.astype(int), [1 / 3, 0, 1 / 3, 0, 1 / 3])


def test_flips_have_their_probability() -> None:
    for p in (0.0, 0.3, 1.0):
        assert_share(noted(HorizontalFlip(p), MANY).is_mirrored, p)
        assert_share(noted(VerticalFlip(p), MANY).steps[0].codes == Op.FLIP, p)
    images = pictures(9, 8, 6)
    assert torch.equal(changed(HorizontalFlip(1.0), images), images.flip(3))
    assert torch.equal(changed(VerticalFlip(1.0), images), images.flip(2))


def test_each_sample_is_flipped_in_every_other_epoch() -> None:
    flipped = [noted(AlternatingFlip(), MANY, epoch=epoch).is_mirrored for epoch in range(3)]
    assert_share(flipped[0], 0.5)
    assert np.array_equal(flipped[1], ~flipped[0])
    assert np.array_equal(flipped[2], flipped[0])
    for other in ({"seed": 2}, {"view": 1}):
        assert_share(flipped[0] != noted(AlternatingFlip(), MANY, epoch=0, **other).is_mirrored, 0.5)


def test_statistics_are_imagenets_or_a_number_for_every_channel() -> None:
    assert Normalize("imagenet").statistics == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    images = pictures(4, 6, 5)
    expected = changed(Normalize([0.4] * 3, [0.3] * 3), images)
    for mean, std in ((0.4, 0.3), ([0.4], [0.3]), (0.4, [0.3] * 3)):
        assert torch.equal(changed(Normalize(mean, std), images), expected)
    assert torch.equal(changed(Normalize(0.4, 0.3), images[:, :1]), expected[:, :1])


def test_a_cast_scales_if_it_is_told_to() -> None:
    images = pictures(2, 5, 4)
    assert torch.equal(changed(ToDtype(torch.float32), images), images.float())
    torch.testing.assert_close(changed(ToDtype(torch.float32, scale=True), images), images.float() / 255)


def test_nothing_to_do_returns_the_images_themselves() -> None:
    images = pictures(2, 5, 6)
    assert changed(Compose([]), images) is images


MODES = ("constant", "edge", "reflect", "symmetric")


@pytest.mark.parametrize(
    ("padding", "mode"),
    [*product([0, 3, (2, 5), (1, 0, 4, 2), [1]], MODES), *product([9], ["constant", "edge", "symmetric"])],
)
def test_borders_are_those_of_numpy(padding: Any, mode: Any) -> None:
    images = torch.randint(0, 256, (2, 3, 7, 6), dtype=torch.uint8)
    sides = [padding] if isinstance(padding, int) else [*padding]
    left, above, right, below = sides * (4 // len(sides))
    widths = ((0, 0), (0, 0), (above, below), (left, right))
    fill = {"constant_values": 77} if mode == "constant" else {}
    found = changed(Pad(padding, 77, mode), images)
    assert np.array_equal(found.numpy(), np.pad(images.numpy(), widths, mode, **fill))


@pytest.mark.parametrize("mode", MODES)
def test_a_random_crop_with_a_border_is_a_crop_of_the_picture_with_that_border(mode: Any) -> None:
    images = pictures(50, 9, 9)
    bordered = changed(Pad((2, 1), 4, mode), images)
    assert torch.equal(changed(RandomCrop(8, (2, 1), 4, mode), images), changed(RandomCrop(8), bordered))


def test_a_border_of_a_squashed_picture_is_of_true_pixels() -> None:
    images, sizes = pictures(3, 20, 20), np.tile([30, 24], (3, 1))
    true = changed(Resize((30, 24)), images)
    assert torch.equal(changed(Pad(2), images, sizes=sizes), changed(Pad(2), true))


@pytest.mark.parametrize("transform", [RandomResizedCrop(64, scale=(0.1, 0.3)), Compose([Resize(64), CenterCrop(56)])])
def test_crops_of_squashed_pictures_are_boxes_of_the_true_picture(transform: Transform) -> None:
    rows, columns = np.mgrid[:128, :384]
    gradient = np.stack([rows * 2, columns * 2 // 3, np.full_like(rows, 77)], axis=2).astype(np.uint8)
    true = as_batch(gradient[None]).expand(32, -1, -1, -1)
    squashed, sizes = changed(Resize((128, 128)), true), np.tile([128, 384], (32, 1))
    difference = (changed(transform, squashed, sizes=sizes).float() - changed(transform, true).float()).abs()
    # A pixel of the squashed picture is two levels from the next; only at a crop's edge the filters see other pixels.
    assert difference.max() <= 3
    assert difference.mean() < 0.75


@pytest.mark.parametrize(
    "crop", [CenterCrop(20), RandomCrop(20), RandomResizedCrop(16), Compose([Resize(32), CenterCrop(32)])], ids=repr
)
def test_a_flip_in_front_of_a_crop_of_squashed_pictures_flips_the_true_picture(crop: Transform) -> None:
    images, sizes = pictures(12, 64, 64), np.random.default_rng(20).integers(20, 90, (12, 2))
    alone = changed(Compose([crop]), images, sizes=sizes)
    assert torch.equal(changed(Compose([HorizontalFlip(0.0), crop]), images, sizes=sizes), alone)
    mirrored = changed(Compose([HorizontalFlip(1.0), crop]), images.flip(3), sizes=sizes)
    assert (mirrored.int() - alone.int()).abs().max() <= 1


class Stop(Transform):
    """Ends a pass over the pixels."""

    def apply(self, batch: Any, purpose: str) -> Any:
        return batch.finished()


@pytest.mark.parametrize(
    "chain",
    [
        [Resize(20), CenterCrop(18)],
        [HorizontalFlip(1.0), CenterCrop((11, 6)), Resize((22, 12))],
        [Resize((30, 33)), RandomCrop(20), HorizontalFlip(1.0), Resize(10)],
        [RandomResizedCrop(20), CenterCrop(13), HorizontalFlip(1.0), HorizontalFlip(1.0)],
        [Resize((30, 33)), RandomResizedCrop(20)],
        [CenterCrop(20), RandomCrop(11), Resize(8)],
        [HorizontalFlip(), RandomResizedCrop(20), HorizontalFlip()],
    ],
)
def test_one_pass_over_the_pixels_is_what_one_transform_after_the_other_is(chain: list[Transform]) -> None:
    images = pictures(6, 26, 31)
    one_by_one = [step for transform in chain for step in (transform, Stop())]
    found, expected = changed(Compose(chain), images), changed(Compose(one_by_one), images)
    assert (found.int() - expected.int()).abs().max() <= 2  # rounded once, or at each step


def test_what_torch_is_set_to_changes_nothing() -> None:
    images, labels, plain = pictures(6, 32, 30), torch.arange(6), Normalize()
    chain = Compose([RandomResizedCrop(24), HorizontalFlip(), plain, CutMix(6, label_smoothing=0.1)])

    def made() -> tuple[Any, ...]:
        return (*chain(images, labels, seed=0), plain(images))

    expected = made()
    with torch.device("meta"):
        results = [made()]
    with torch.autocast("cpu", torch.bfloat16):
        results.append(made())
    torch.set_default_dtype(torch.float64)
    try:
        results.append(made())
    finally:
        torch.set_default_dtype(torch.float32)
    for found in results:
        assert all(map(torch.equal, found, expected))
        assert {one.dtype for one in found} == {torch.float32}

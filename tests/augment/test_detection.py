"""Random sizes, crops by boxes, zooming out and photometric distortion, as torchvision, DETR and timm define them."""

from __future__ import annotations

import math
import random
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pictures import as_batch, random_pictures
from scipy.stats import chisquare, ks_2samp, kstest

from shardio.augment import (
    CenterCrop,
    ColorJitter,
    Compose,
    HorizontalFlip,
    RandomApply,
    RandomChoice,
    RandomCrop,
    RandomIoUCrop,
    RandomPhotometricDistort,
    RandomResize,
    RandomResizedCrop,
    RandomShortestSize,
    RandomSizeCrop,
    RandomZoomOut,
    Resize,
    ResizeKeepRatio,
    ScaleJitter,
    VerticalFlip,
    Views,
    recipe,
)
from shardio.augment.batch import Batch
from shardio.augment.boxes import Draws
from shardio.augment.chain import Transform

COUNT = 2000
SEED = 11
LEAST = 1e-4
Sizes = NDArray[np.int64]


def blank(count: int = COUNT, height: int = 6, width: int = 8) -> torch.Tensor:
    return torch.zeros(count, 1, height, width, dtype=torch.uint8)


def sizes_after(transform: Transform, sizes: tuple[int, int], count: int = COUNT) -> Sizes:
    """Returns the heights and widths that a transform gives to pictures of one size, without making pixels."""
    batch = Batch(blank(count), Draws(SEED, 0, np.arange(count)), np.tile(sizes, (count, 1)))
    return transform.apply(batch, "x").sizes


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_the_shorter_side_is_each_size_of_the_range_as_often() -> None:
    sizes = sizes_after(RandomResize(50, 60), (300, 400))
    assert chisquare(np.bincount(sizes[:, 0])[50:60]).pvalue > LEAST
    assert {*sizes[:, 0]} == {*range(50, 60)}
    assert (sizes[:, 1] == 400 * sizes[:, 0] // 300).all()


def test_the_shorter_side_is_one_of_the_sizes_and_the_longer_not_more_than_the_most() -> None:
    sizes = sizes_after(RandomShortestSize([400, 500, 600], 700), (300, 400))
    assert {*map(tuple, sizes.tolist())} == {(400, 533), (500, 666), (525, 700)}
    assert chisquare(np.unique(sizes[:, 0], return_counts=True)[1]).pvalue > LEAST
    assert (sizes_after(RandomShortestSize(480), (640, 480)) == (640, 480)).all()


def test_the_scale_is_even_over_its_range() -> None:
    sizes = sizes_after(ScaleJitter((500, 1000), (0.5, 1.5)), (1000, 1000))
    assert (sizes[:, 0] == sizes[:, 1]).all()
    assert kstest((sizes[:, 0] / 500 - 0.5), "uniform").pvalue > LEAST


def keep_ratio(rng: random.Random, size: tuple[int, int], target: tuple[int, int], longest: float) -> list[int]:
    """A size drawn by the rules of timm's ResizeKeepRatio, with its arguments for the crop modes rkrc and rkrr."""
    ratio_h, ratio_w = size[0] / target[0], size[1] / target[1]
    ratio = max(ratio_h, ratio_w) * longest + min(ratio_h, ratio_w) * (1 - longest)
    factors = [1.0, 1.0]
    if rng.random() < 0.5:
        factors = [1 / math.sqrt(rng.uniform(0.8, 1.0))] * 2
    if rng.random() < 0.5:
        stretch = math.sqrt(math.exp(rng.uniform(math.log(0.9), math.log(1 / 0.9))))
        factors = [factors[0] / stretch, factors[1] * stretch]
    return [round(side * factor / ratio) for side, factor in zip(size, factors, strict=True)]


@pytest.mark.parametrize("longest", [0.0, 0.4, 1.0])
def test_sizes_that_keep_the_ratio_have_the_distribution_of_timm(longest: float) -> None:
    rng = random.Random(SEED)
    expected = np.array([keep_ratio(rng, (375, 500), (224, 224), longest) for _ in range(COUNT)])
    transform = ResizeKeepRatio(224, longest, 0.5, (0.8, 1.0), True, 0.5, (0.9, 1 / 0.9))
    found = sizes_after(transform, (375, 500))
    for measure in (lambda sizes: sizes[:, 0], lambda sizes: sizes[:, 1], lambda sizes: sizes[:, 0] / sizes[:, 1]):
        assert ks_2samp(measure(found), measure(expected)).pvalue > LEAST
    assert abs((found == 224).all(axis=1).mean() - (expected == 224).all(axis=1).mean()) < 0.06


def test_windows_of_random_size_have_each_size_and_place_as_often() -> None:
    batch = Batch(blank(), Draws(SEED, 0, np.arange(COUNT)), np.tile((20, 40), (COUNT, 1)))
    changed = RandomSizeCrop(11, 25).apply(batch, "x")
    heights, widths = changed.sizes.T
    assert chisquare(np.bincount(heights, minlength=21)[11:]).pvalue > LEAST
    assert chisquare(np.bincount(widths, minlength=26)[11:]).pvalue > LEAST
    region = changed.region
    shares = region.lefts * 40 / 8 / (40 - widths + 1)
    assert kstest(shares + np.random.default_rng(1).random(COUNT) / (40 - widths + 1), "uniform").pvalue > LEAST


def one_by_one(images: torch.Tensor, parts: list[Transform], last: Any) -> list[torch.Tensor]:
    """Returns each picture after `parts`, alone and whole, as `last` makes it from the size and the edges it has."""
    made = []
    for number in range(len(images)):
        batch = Batch(
            images[number : number + 1], Draws(SEED, 0, np.array([number])), np.tile(images.shape[2:], (1, 1))
        )
        for transform, purpose in Compose(parts).parts("Compose"):
            batch = transform.apply(batch, purpose)
        made.append(last(batch.made(), number))
    return made


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
@pytest.mark.parametrize("place", ["random", "center"])
def test_smaller_pictures_get_the_border_of_numpy_and_larger_ones_are_cropped(mode: Any, place: str) -> None:
    images = as_batch(random_pictures(np.random.default_rng(1), 30, 20, 24))
    parts: list[Transform] = [ScaleJitter(22, (0.6, 1.6)), HorizontalFlip()]
    crop = RandomCrop(22, None, 50, mode, pad_if_needed=True) if place == "random" else CenterCrop(22, mode, 50)
    found = Compose([*parts, crop])(images, seed=SEED, indices=range(30))
    assert isinstance(found, torch.Tensor)
    numbers = Draws(SEED, 0, np.arange(30)).uniform("Compose/RandomCrop 0", 2)

    def pasted(batch: Batch, number: int) -> torch.Tensor:
        pixels = batch.images[0].permute(1, 2, 0).numpy()
        for axis, share in enumerate(numbers[:, number]):
            room = 22 - pixels.shape[axis]
            if room > 0:
                before = int(share * (room + 1)) if place == "random" else room // 2
                sides = [(0, 0)] * 3
                sides[axis] = (before, room - before)
                if mode == "constant":
                    pixels = np.pad(pixels, sides, constant_values=50)
                else:
                    pixels = np.pad(pixels, sides, mode)
            else:
                first = int(share * (1 - room)) if place == "random" else round(-room / 2)
                pixels = pixels.take(range(first, first + 22), axis=axis)
        return torch.from_numpy(pixels).permute(2, 0, 1)

    expected = torch.stack(one_by_one(images, parts, pasted))
    assert (found.int() - expected.int()).abs().max() <= 1  # a crop of a resize rounds its weights for itself
    assert ((found != expected).float().mean()) < 0.05


def test_a_second_resize_reads_the_pixels_of_the_first_at_their_own_size() -> None:
    """DETR's second branch: sizes differ from picture to picture in between."""
    images = as_batch(random_pictures(np.random.default_rng(2), 12, 30, 40))
    parts: list[Transform] = [RandomShortestSize([20, 25, 40]), RandomSizeCrop(12, 30), HorizontalFlip()]
    found = Compose([*parts, Resize((16, 18))])(images, seed=SEED, indices=range(12))
    expected = one_by_one(images, parts, lambda batch, number: Resize((16, 18))(batch.images)[0])
    assert torch.equal(found, torch.stack(expected))  # type: ignore[arg-type]
    both = RandomChoice([Resize((16, 18)), Compose([*parts, Resize((16, 18))])])(images, seed=SEED)
    assert both.shape == (12, 3, 16, 18)  # type: ignore[union-attr]


SEVERAL_SIZES: list[list[Transform]] = [
    [RandomShortestSize((20, 26)), RandomSizeCrop(10, 16), HorizontalFlip(), Resize((14, 15))],
    [RandomZoomOut(7, (1.0, 2.0)), HorizontalFlip(), RandomResizedCrop((16, 18), interpolation="random")],
    [HorizontalFlip(), ResizeKeepRatio(20, 0.2, 0.5, (0.5, 1.2), False, 0.5, (0.5, 2)), CenterCrop(18, "reflect")],
    [ScaleJitter(20, (0.5, 1.5)), HorizontalFlip(), RandomCrop(16, fill=90, pad_if_needed=True)],
    [RandomSizeCrop(10, 28), HorizontalFlip(), RandomCrop(16, step=4, pad_if_needed=True)],
    [CenterCrop(22, "edge"), HorizontalFlip(), RandomResizedCrop(16)],
    [RandomCrop(24, pad_if_needed=True), Resize((9, 30))],
    [ScaleJitter(20, (0.5, 1.5)), CenterCrop(16, "reflect"), CenterCrop(12, "edge")],
    [RandomIoUCrop(), HorizontalFlip(), RandomZoomOut(side_range=(1, 2)), RandomIoUCrop(), Resize((20, 20))],
]


@pytest.mark.parametrize("parts", SEVERAL_SIZES, ids=repr)
def test_pixels_masks_and_boxes_of_a_picture_do_not_depend_on_the_others(parts: list[Transform]) -> None:
    rng = np.random.default_rng(SEED)
    transform = Compose(parts)
    for seed in range(25):
        images = as_batch(random_pictures(rng, 6, *rng.integers(20, 30, 2).tolist()))
        corners = np.sort(rng.uniform(0, 28, (6, 3, 2, 2)), axis=2).reshape(6, 3, 4)
        boxes = torch.from_numpy(np.concatenate([corners, np.ones((6, 3, 1))], axis=2).astype(np.float32))
        sizes = rng.integers(18, 50, (6, 2)) if seed % 2 else None
        given = {"masks": {"m": images[:, 0].clone()}, "boxes": {"b": boxes}}
        found, arrays = transform(images, seed=seed, indices=range(6), sizes=sizes, **given)
        for i in range(6):
            own = {kind: {name: values[i : i + 1] for name, values in some.items()} for kind, some in given.items()}
            size = None if sizes is None else sizes[i : i + 1]
            alone, others = transform(images[i : i + 1], seed=seed, indices=[i], sizes=size, **own)
            assert torch.equal(found[i], alone[0])  # type: ignore[index]
            assert all(torch.equal(values[i], others[name][0]) for name, values in arrays.items())


def test_a_box_of_less_than_a_pixel_does_not_depend_on_what_other_pictures_do() -> None:
    images = torch.zeros(12, 3, 20, 20, dtype=torch.uint8)
    boxes = torch.tensor([[[5.0, 5, 5.6, 9, 1]]]).repeat(12, 1, 1)
    transform = Compose([VerticalFlip(0.3), Resize((40, 40))])
    _, whole = transform(images, boxes={"b": boxes}, seed=SEED, indices=range(12))
    for i in range(12):
        _, alone = transform(images[:1], boxes={"b": boxes[:1]}, seed=SEED, indices=[i])
        assert torch.equal(alone["b"][0], whole["b"][i])
    assert 0 < (whole["b"][:, 0, 4] >= 0).sum() < 12


def test_views_may_share_pictures_of_several_sizes() -> None:
    images = as_batch(random_pictures(np.random.default_rng(6), 9, 30, 40))
    parts: list[Transform] = [RandomShortestSize([20, 25, 40]), HorizontalFlip()]
    views = Compose([*parts, Views([Resize((16, 18)), RandomCrop(15)])])(images, seed=SEED)
    assert torch.equal(views[0], Compose([*parts, Resize((16, 18))])(images, seed=SEED))  # type: ignore[arg-type]
    assert views[1].shape == (9, 3, 15, 15)


# --- zooming out ------------------------------------------------------------------------------------------------------


def test_pictures_lie_on_canvases_as_torchvision_pads_them() -> None:
    images = as_batch(random_pictures(np.random.default_rng(3), 25, 20, 30))
    boxes = torch.tensor([[[3.0, 4, 20, 15, 7]]]).repeat(25, 1, 1)
    masks = {"m": images[:, 0].clone()}
    transform = Compose([RandomZoomOut((9, 80, 200), (1.5, 3.0), 0.7), Resize((40, 50))])
    found, arrays = transform(images, masks=masks, boxes={"b": boxes}, seed=SEED, indices=range(25))
    wanted, factors, across, down = Draws(SEED, 0, np.arange(25)).uniform("Compose/RandomZoomOut 0", 4)
    assert 0.3 < (wanted < 0.7).mean() < 1
    for i, picture in enumerate(images):
        factor = 1.5 + 1.5 * factors[i] if wanted[i] < 0.7 else 1
        width, height = int(30 * factor), int(20 * factor)
        left, top = int((width - 30) * across[i]), int((height - 20) * down[i])
        canvas = torch.tensor([9, 80, 200], dtype=torch.uint8)[:, None, None].repeat(1, height, width)
        canvas[:, top : top + 20, left : left + 30] = picture
        mask = torch.zeros(height, width, dtype=torch.uint8)
        mask[top : top + 20, left : left + 30] = picture[0]
        box = torch.tensor([[[3.0 + left, 4 + top, 20 + left, 15 + top, 7]]])
        own = {"masks": {"m": mask[None]}, "boxes": {"b": box}}
        expected, moved = Resize((40, 50))(canvas[None], **own)
        assert torch.equal(found[i], expected[0])  # type: ignore[index]
        assert torch.equal(arrays["m"][i], moved["m"][0])
        torch.testing.assert_close(arrays["b"][i], moved["b"][0])


def test_canvases_of_squashed_pictures_have_the_shape_of_the_original() -> None:
    """A picture of one color stays one rectangle, as wide as its share of the canvas."""
    images = torch.full((40, 3, 20, 20), 255, dtype=torch.uint8)
    sizes = np.tile([30, 60], (40, 1))
    found = Compose([RandomZoomOut(0, (2.0, 3.0), 1.0), Resize((60, 60))])(images, sizes=sizes)
    assert isinstance(found, torch.Tensor)
    shown = (found[:, 0] > 127).float()
    shares = shown.mean(dim=(1, 2)).sqrt()
    assert 1 / 3 - 0.03 < shares.min() < shares.max() < 1 / 2 + 0.03


# --- crops by boxes ---------------------------------------------------------------------------------------------------


def test_boxes_move_with_the_part_also_after_flips_crops_and_on_squashed_pictures() -> None:
    images = torch.zeros(60, 3, 40, 40, dtype=torch.uint8)
    images[:, :, 12:28, 8:20] = 255
    boxes = {"b": torch.tensor([[[8.0, 12, 20, 28, 2]]]).repeat(60, 1, 1), "none": torch.full((60, 2, 5), -1.0)}
    chain = [HorizontalFlip(), RandomIoUCrop(), HorizontalFlip(), Resize((64, 64))]
    sizes = np.tile([60, 90], (60, 1))
    for parts, options in (
        (chain, {}),
        (chain, {"sizes": sizes}),
        ([RandomZoomOut(side_range=(1, 2)), *chain], {}),
        ([RandomApply([ColorJitter(0.0)]), RandomZoomOut(side_range=(1, 2)), *chain], {"sizes": sizes}),
    ):
        found, arrays = Compose(parts)(images, boxes=boxes, masks={"m": images[:, 0]}, seed=4, **options)  # type: ignore[arg-type]
        assert isinstance(found, torch.Tensor)
        for picture, mask, (left, top, right, bottom, label) in zip(
            found[:, 0], arrays["m"], arrays["b"][:, 0].tolist(), strict=True
        ):
            assert label == 2
            for shown, slack in ((picture > 127, 1.01), (mask > 127, 1.01)):
                rows, columns = shown.any(dim=1).nonzero(), shown.any(dim=0).nonzero()
                assert abs(int(rows.min()) - top) < slack
                assert abs(int(rows.max()) + 1 - bottom) < slack
                assert abs(int(columns.min()) - left) < slack
                assert abs(int(columns.max()) + 1 - right) < slack
        assert (arrays["none"][..., 4] < 0).all()


def test_pictures_without_boxes_stay_whole_and_a_batch_without_boxes_is_an_error() -> None:
    images = as_batch(random_pictures(np.random.default_rng(3), 9, 20, 30))
    found, _ = Compose([RandomIoUCrop(), Resize((20, 30))])(images, boxes={"b": torch.full((9, 3, 5), -1.0)}, seed=2)
    assert torch.equal(found, images)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="boxes"):
        RandomIoUCrop()(images)


# --- colors -----------------------------------------------------------------------------------------------------------


def test_channels_change_places_and_each_order_comes_as_often() -> None:
    images = torch.tensor([10, 20, 30], dtype=torch.uint8)[None, :, None, None].expand(COUNT, -1, 2, 2)
    still = {"brightness": (1.0, 1.0), "contrast": (1.0, 1.0), "saturation": (1.0, 1.0), "hue": (0.0, 0.0)}
    found = RandomPhotometricDistort(**still, p=0.6)(images, seed=SEED, indices=range(COUNT))  # type: ignore[arg-type]
    assert isinstance(found, torch.Tensor)
    orders = [tuple((image[:, 0, 0] // 10 - 1).tolist()) for image in found]
    counts = np.array([orders.count(order) for order in permutations(range(3))])
    expected = np.full(6, 0.6 * COUNT / 6)
    expected[0] += 0.4 * COUNT
    assert chisquare(counts, expected).pvalue > LEAST
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_each_color_change_comes_as_often_as_it_should_and_contrast_before_or_after() -> None:
    transform = RandomPhotometricDistort((0.5, 0.5), (0.5, 0.5), (0.0, 0.0), (0.0, 0.0), 0.5)
    images = as_batch(random_pictures(np.random.default_rng(4), COUNT, 4, 4))
    batch = Batch(images, Draws(SEED, 0, np.arange(COUNT)), np.tile((4, 4), (COUNT, 1)))
    numbers = batch.draws.uniform("x", 10)
    brightness, contrast, saturation, _, exchanged = numbers[4:9] < 0.5
    first = numbers[9] < 0.5
    for chosen in (brightness, contrast, saturation, exchanged, first):
        assert abs(chosen.mean() - 0.5) < 5 * 0.5 / math.sqrt(COUNT)
    found = transform.apply(batch, "x").images
    for change, kind in (({"brightness": (0.5, 0.5)}, brightness), ({"contrast": (0.5, 0.5)}, contrast)):
        others = [some for some in (brightness, contrast, saturation, exchanged) if some is not kind]
        alone = kind & ~np.any(others, axis=0)
        expected = ColorJitter(**change)(batch.images)  # type: ignore[arg-type]
        assert alone.sum() > 50
        assert torch.equal(found[alone], expected[alone])  # type: ignore[index]
    for before, order in ((True, ["contrast", "saturation"]), (False, ["saturation", "contrast"])):
        some = ~brightness & contrast & saturation & ~exchanged & (first == before)
        factors = {"contrast": (0.5, 0.5), "saturation": (0.0, 0.0)}
        expected = Compose([ColorJitter(**{name: factors[name]}) for name in order])(batch.images)  # type: ignore[arg-type]
        assert some.sum() > 50
        assert torch.equal(found[some], expected[some])  # type: ignore[index]


def test_the_recipe_of_rf_detr_makes_squares_with_boxes() -> None:
    images = as_batch(random_pictures(np.random.default_rng(5), 8, 60, 80))
    boxes = {"b": torch.tensor([[[10.0, 10, 60, 50, 3]]]).repeat(8, 1, 1)}
    found, arrays = recipe("rf-detr", 64)(images, boxes=boxes, seed=SEED)
    assert found.shape == (8, 3, 64, 64)  # type: ignore[union-attr]
    assert arrays["b"].shape == (8, 1, 5)
    assert arrays["b"][..., :4].max() <= 64

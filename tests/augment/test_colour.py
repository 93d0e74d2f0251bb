"""Transforms of colours draw what they say, for each sample by itself, and do it in the order that they have drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from drawn import (
    assert_apart,
    assert_independent,
    assert_share,
    assert_shares,
    assert_uniform,
    noted,
)
from pictures import as_batch, random_picture

from shardio.augment import (
    ColorJitter,
    Compose,
    GaussianBlur,
    Normalize,
    RandomAdjustSharpness,
    RandomAutocontrast,
    RandomEqualize,
    RandomGrayscale,
    RandomInvert,
    RandomPosterize,
    RandomSolarize,
)
from shardio.augment.batch import Batch
from shardio.augment.boxes import Draws
from shardio.augment.chain import Transform
from shardio.augment.steps import Op

MILLION = 1_000_000
JITTERED = (Op.BRIGHTNESS, Op.CONTRAST, Op.SATURATION, Op.HUE)


def pictures(count: int = 6, height: int = 12, width: int = 10) -> torch.Tensor:
    rng = np.random.default_rng(3)
    return as_batch(np.stack([random_picture(rng, height, width) for _ in range(count)]))


def changed(transform: Transform, images: torch.Tensor, **options: Any) -> torch.Tensor:
    result = transform(images, **{"seed": 0, "indices": range(len(images)), **options})
    assert isinstance(result, torch.Tensor)
    return result


def factors(batch: Batch) -> dict[Op, np.ndarray[Any, Any]]:
    """The factor of each operation for each sample, whenever it comes."""
    codes = np.stack([step.codes for step in batch.steps])
    values = np.stack([step.values[:, 0] for step in batch.steps])
    return {op: values.T[(codes == op).T] for op in JITTERED if (codes == op).any()}


def test_jitters_factors_are_uniform_and_independent() -> None:
    found = factors(noted(ColorJitter(0.4, (0.2, 3.0), 1.5, 0.1), 400_000))
    bounds = {
        Op.BRIGHTNESS: (0.6, 1.4),
        Op.CONTRAST: (0.2, 3.0),
        Op.SATURATION: (0.0, 2.5),
        Op.HUE: (-0.1, 0.1),
    }
    assert found.keys() == bounds.keys()
    for op, (low, high) in bounds.items():
        assert len(found[op]) == 400_000
        assert_uniform(found[op], low, high)
    assert_independent(*found.values())


def test_every_order_of_jitters_operations_is_as_probable_as_any_other() -> None:
    batch = noted(ColorJitter(0.4, 0.4, 0.4, 0.1), 400_000)
    orders = np.stack([step.codes for step in batch.steps], axis=1).astype(int)
    number_of = {order: number for number, order in enumerate(permutations(map(int, JITTERED)))}
    found, inverse = np.unique(orders, axis=0, return_inverse=True)
    assert_shares(np.array([number_of[tuple(order)] for order in found])[inverse.ravel()], [1 / 24] * 24)
    place = (orders == Op.HUE).argmax(axis=1)
    assert_independent(place, *factors(batch).values())


def test_jitter_leaves_out_what_cannot_change() -> None:
    one = noted(ColorJitter(saturation=(1.0, 1.0), hue=0.5), 1000)
    assert len(one.steps) == 1
    assert (one.steps[0].codes == Op.HUE).all()
    assert noted(ColorJitter(), 10).steps == ()
    images = pictures()
    assert changed(ColorJitter(contrast=0), images) is images
    fixed = noted(ColorJitter(brightness=(0.5, 0.5)), 10)
    assert (fixed.steps[0].values[:, 0] == 0.5).all()


def test_jitter_does_its_operations_in_the_order_that_it_has_drawn() -> None:
    images = torch.randint(0, 256, (40, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    transform = ColorJitter((0.4, 0.4), (1.8, 1.8))
    batch = transform.apply(Batch(images, Draws(0, 0, np.arange(40)), np.full((40, 2), 4)), "ColorJitter")
    found = changed(transform, images)
    orders = set()
    for number, image in enumerate(images):
        order = [Op(int(step.codes[number])) for step in batch.steps]
        orders.add(tuple(order))
        alone = Compose(
            [
                ColorJitter(**{op.name.lower(): (factor, factor)})
                for op, factor in zip(order, [0.4 if op is Op.BRIGHTNESS else 1.8 for op in order], strict=True)
            ]
        )
        assert torch.equal(found[number], changed(alone, image[None])[0])
    assert len(orders) == 2
    # The order matters: what contrast has cut off is not darkened before.
    one = changed(Compose([ColorJitter((0.4, 0.4)), ColorJitter(contrast=(1.8, 1.8))]), images)
    other = changed(Compose([ColorJitter(contrast=(1.8, 1.8)), ColorJitter((0.4, 0.4))]), images)
    assert not torch.equal(one, other)


SOMETIMES: dict[Op, Callable[[float], Transform]] = {
    Op.GRAYSCALE: RandomGrayscale,
    Op.INVERT: RandomInvert,
    Op.AUTOCONTRAST: RandomAutocontrast,
    Op.EQUALIZE: RandomEqualize,
    Op.POSTERIZE: lambda p: RandomPosterize(3, p),
    Op.SOLARIZE: lambda p: RandomSolarize(77.5, p),
    Op.SHARPNESS: lambda p: RandomAdjustSharpness(1.9, p),
}


@pytest.mark.parametrize("op", SOMETIMES)
@pytest.mark.parametrize("p", [0.0, 0.2, 1.0])
def test_an_operation_has_its_probability(op: Op, p: float) -> None:
    batch = noted(SOMETIMES[op](p), MILLION, (1, 4, 4))
    (step,) = batch.steps
    assert set(np.unique(step.codes)) <= {Op.NOTHING, op}
    assert_share(step.codes == op, p)
    value = {Op.POSTERIZE: 3, Op.SOLARIZE: 77.5, Op.SHARPNESS: 1.9}.get(op)
    assert value is None or (step.values[:, 0] == value).all()


def test_defaults_are_torchvisions() -> None:
    assert RandomGrayscale().p == 0.1
    assert {transform.p for transform in (RandomInvert(), RandomAutocontrast(), RandomEqualize())} == {0.5}
    assert {t.p for t in (RandomPosterize(3), RandomSolarize(128), RandomAdjustSharpness(2))} == {0.5}
    assert GaussianBlur(3).sigma == (0.1, 2.0)


def test_the_standard_deviation_of_a_blur_is_uniform() -> None:
    (step,) = noted(GaussianBlur((5, 3)), MILLION, (1, 8, 8)).steps
    assert (step.codes == Op.BLUR).all()
    assert (step.values[:, :2] == (5, 3)).all()  # width, height
    assert_uniform(step.values[:, 2], 0.1, 2.0)
    assert np.array_equal(step.values[:, 2], step.values[:, 3])
    (fixed,) = noted(GaussianBlur(5, 0.7), 10).steps
    assert (fixed.values[:, 2:4] == 0.7).all()


def test_a_wide_blur_is_not_a_high_one() -> None:
    image = torch.zeros(1, 1, 9, 9, dtype=torch.uint8)
    image[..., 4, 4] = 255
    found = changed(GaussianBlur((5, 1), 1.0), image)[0, 0] > 0
    assert found.nonzero().tolist() == [[4, column] for column in range(2, 7)]


@pytest.mark.parametrize(
    "transform",
    [ColorJitter(0.5), RandomGrayscale(0.5), RandomInvert(), RandomSolarize(99), GaussianBlur(3)],
)
def test_samples_views_epochs_seeds_and_places_in_a_chain_draw_numbers_of_their_own(transform: Transform) -> None:
    assert_apart(transform)


def test_grey_pictures_stay_as_they_are_where_there_is_no_colour() -> None:
    grey = pictures()[:, :1]
    for transform in (ColorJitter(saturation=(0.0, 0.0)), ColorJitter(hue=(0.3, 0.3)), RandomGrayscale(1.0)):
        assert torch.equal(changed(transform, grey), grey)
    assert changed(ColorJitter(0.5, 0.5, 0.5, 0.5), grey).shape == grey.shape


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ColorJitter(-0.1), r"brightness must be a number of at least 0, or \(least, most\); found -0.1"),
        (lambda: ColorJitter(NAN), "brightness must be a number of at least 0"),
        (lambda: ColorJitter(INF), "brightness must be a number of at least 0"),
        (lambda: ColorJitter(contrast=(1, NAN)), r"contrast must be \(least, most\), at least 0; found \(1, nan\)"),
        (lambda: ColorJitter(contrast=(NAN, 1)), "contrast must be"),
        (lambda: ColorJitter(contrast=(1, INF)), "contrast must be"),
        (lambda: ColorJitter(saturation=(2, 1)), r"saturation must be \(least, most\)"),
        (lambda: ColorJitter(saturation=(1, 2, 3)), r"saturation must be \(least, most\); found \(1, 2, 3\)"),
        (lambda: ColorJitter(saturation=()), r"saturation must be \(least, most\); found \(\)"),
        (lambda: ColorJitter(saturation=(-1, 2)), "saturation must be"),
        (lambda: ColorJitter(hue=0.6), r"hue must be a number from 0 to 0.5, or \(least, most\); found 0.6"),
        (lambda: ColorJitter(hue=(-0.6, 0)), "hue must be .* at least -0.5 and at most 0.5; found"),
        (lambda: RandomGrayscale(1.1), "p must be from 0 to 1; found 1.1"),
        (lambda: RandomInvert(-0.1), "p must be from 0 to 1; found -0.1"),
        (lambda: RandomEqualize(NAN), "p must be from 0 to 1; found nan"),
        (lambda: RandomPosterize(9), "bits must be an integer, from 0 to 8; found 9"),
        (lambda: RandomPosterize(3.5), "bits must be an integer"),  # type: ignore[arg-type]
        (lambda: RandomPosterize("3"), "bits must be an integer"),  # type: ignore[arg-type]
        (lambda: RandomPosterize(True), "bits must be an integer"),
        (lambda: RandomSolarize(-1), "threshold must be a grey level from 0 to 255, or 256 for none; found -1"),
        (lambda: RandomSolarize(NAN), "threshold must be a grey level"),
        (lambda: RandomAdjustSharpness(-1), "sharpness_factor must be a finite number of at least 0; found -1"),
        (lambda: RandomAdjustSharpness(NAN), "sharpness_factor must be a finite number of at least 0; found nan"),
        (lambda: RandomAdjustSharpness(INF), "sharpness_factor must be a finite number of at least 0; found inf"),
        (lambda: GaussianBlur(4), "kernel_size must be odd; found 4"),
        (lambda: GaussianBlur(0), "kernel_size must be an integer, 1 or more; found 0"),
        (lambda: GaussianBlur((3, 5, 7)), r"kernel_size must be an odd number of pixels, or \(width, height\); found"),  # type: ignore[arg-type]
        (lambda: GaussianBlur(()), r"kernel_size must be an odd number of pixels"),  # type: ignore[arg-type]
        (lambda: GaussianBlur("ab"), "kernel_size must be"),  # type: ignore[arg-type]
        (lambda: GaussianBlur(3, 0), r"sigma must be \(least, most\), above 0; found \(0, 0\)"),
        (lambda: GaussianBlur(3, (2, 1)), "sigma must be"),
        (lambda: GaussianBlur(3, (1, NAN)), "sigma must be"),
        (lambda: GaussianBlur(3, "x"), "sigma must be"),  # type: ignore[arg-type]
    ],
)
def test_values_that_make_no_sense_are_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ColorJitter("x"), "brightness must be a number; found 'x'"),  # type: ignore[arg-type]
        (lambda: ColorJitter(None), "brightness must be a number; found None"),  # type: ignore[arg-type]
        (lambda: ColorJitter(hue=(0, "x")), "hue must be a number; found 'x'"),  # type: ignore[arg-type]
        (lambda: RandomGrayscale("x"), "p must be a number; found 'x'"),  # type: ignore[arg-type]
        (lambda: RandomGrayscale([0.5]), r"p must be a number; found \(0.5,\)"),  # type: ignore[arg-type]
        (lambda: RandomSolarize("x"), "threshold must be a number"),  # type: ignore[arg-type]
        (lambda: RandomAdjustSharpness("x"), "sharpness_factor must be a number"),  # type: ignore[arg-type]
    ],
)
def test_values_of_a_wrong_type_are_refused_in_words(make: Callable[[], object], match: str) -> None:
    with pytest.raises(TypeError, match=match):
        make()


@pytest.mark.parametrize("channels", [2, 5])
@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (ColorJitter(0.1, 0.1), "contrast"),
        (ColorJitter(hue=0.1), "hue"),
        (RandomGrayscale(1e-9), "grayscale"),  # even if this batch draws none
    ],
)
def test_colours_need_three_channels(transform: Transform, name: str, channels: int) -> None:
    with pytest.raises(ValueError, match=rf"3 channels, red, green and blue.*{name}; found {channels}"):
        transform(torch.zeros(1, channels, 8, 8, dtype=torch.uint8))


def test_what_needs_no_colours_takes_any_channels() -> None:
    images = torch.randint(0, 256, (3, 5, 8, 7), dtype=torch.uint8)
    chain = Compose(
        [
            ColorJitter(0.5),
            GaussianBlur(3),
            RandomSolarize(99),
            RandomPosterize(2),
            RandomInvert(),
            RandomEqualize(),
            RandomAutocontrast(),
            RandomAdjustSharpness(2),
        ]
    )
    found = changed(chain, images)
    for channel in range(5):
        assert torch.equal(found[:, channel : channel + 1], changed(chain, images[:, channel : channel + 1]))


@pytest.mark.parametrize("transform", [ColorJitter(0.1), RandomInvert(), GaussianBlur(3)])
def test_colours_come_before_normalize(transform: Transform) -> None:
    with pytest.raises(ValueError, match="changes of colour take uint8 images: they come before Normalize"):
        Compose([Normalize(), transform])(pictures())


def test_a_blur_fits_into_the_picture() -> None:
    images = pictures(2, 8, 6)
    assert changed(GaussianBlur((11, 15)), images).shape == images.shape
    for size in ((13, 15), (11, 17)):
        with pytest.raises(ValueError, match=r"less than twice the picture's size, \(8, 6\), height and width; found"):
            GaussianBlur(size)(images)

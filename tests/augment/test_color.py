"""Transforms of colors draw what they say, for each sample by itself, and do it in the order that they have drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from drawn import assert_independent, assert_share, assert_shares, assert_uniform, noted
from transforms import changed

from shardio.augment import (
    ColorJitter,
    Compose,
    GaussianBlur,
    RandomAdjustSharpness,
    RandomAutocontrast,
    RandomEqualize,
    RandomGrayscale,
    RandomInvert,
    RandomPosterize,
    RandomSolarize,
)
from shardio.augment.batch import Batch
from shardio.augment.chain import Transform
from shardio.augment.steps import Op

MANY = 60_000
JITTERED = (Op.BRIGHTNESS, Op.CONTRAST, Op.SATURATION, Op.HUE)


def factors(batch: Batch) -> dict[Op, np.ndarray[Any, Any]]:
    """The factor of each operation for each sample, whenever it comes."""
    codes = np.stack([step.codes for step in batch.steps])
    values = np.stack([step.values[:, 0] for step in batch.steps])
    return {op: values.T[(codes == op).T] for op in JITTERED if (codes == op).any()}


def test_jitters_factors_are_uniform_and_independent() -> None:
    found = factors(noted(ColorJitter(0.4, (0.2, 3.0), 1.5, 0.1), 40_000))
    bounds = {
        Op.BRIGHTNESS: (0.6, 1.4),
        Op.CONTRAST: (0.2, 3.0),
        Op.SATURATION: (0.0, 2.5),
        Op.HUE: (-0.1, 0.1),
    }
    assert found.keys() == bounds.keys()
    for op, (low, high) in bounds.items():
        assert len(found[op]) == 40_000
        assert_uniform(found[op], low, high)
    assert_independent(*found.values())


def test_every_order_of_jitters_operations_is_as_probable_as_any_other() -> None:
    batch = noted(ColorJitter(0.4, 0.4, 0.4, 0.1), 40_000)
    orders = np.stack([step.codes for step in batch.steps], axis=1).astype(int)
    assert_shares(np.unique(orders, axis=0, return_inverse=True)[1].ravel(), [1 / 24] * 24)
    place = (orders == Op.HUE).argmax(axis=1)
    assert_independent(place, *factors(batch).values())


def test_jitter_leaves_out_what_cannot_change() -> None:
    (one,) = noted(ColorJitter(saturation=(1.0, 1.0), hue=0.5), 1000).steps
    assert (one.codes == Op.HUE).all()
    assert noted(ColorJitter(contrast=0), 10).steps == ()


SOMETIMES: dict[Op, Callable[[float], Transform]] = {
    Op.GRAYSCALE: RandomGrayscale,
    Op.INVERT: RandomInvert,
    Op.AUTOCONTRAST: RandomAutocontrast,
    Op.EQUALIZE: RandomEqualize,
    Op.POSTERIZE: lambda p: RandomPosterize(3, p),
    Op.SOLARIZE: lambda p: RandomSolarize(77.5, p),
    Op.SHARPNESS: lambda p: RandomAdjustSharpness(1.9, p),
}


def test_an_operation_has_its_probability() -> None:
    (step,) = noted(RandomInvert(0.2), MANY, (1, 4, 4)).steps
    assert_share(step.codes == Op.INVERT, 0.2)
    for op, make in SOMETIMES.items():
        assert not noted(make(0.0), 100, (1, 4, 4)).steps[0].codes.any()
        (step,) = noted(make(1.0), 100, (1, 4, 4)).steps
        assert (step.codes == op).all()
        value = {Op.POSTERIZE: 3, Op.SOLARIZE: 77.5, Op.SHARPNESS: 1.9}.get(op, 0)
        assert (step.values[:, 0] == value).all()


def test_defaults_are_torchvisions() -> None:
    assert RandomGrayscale().p == 0.1
    halves = (RandomInvert(), RandomAutocontrast(), RandomEqualize(), RandomPosterize(3), RandomSolarize(128))
    assert {transform.p for transform in (*halves, RandomAdjustSharpness(2))} == {0.5}
    assert GaussianBlur(3).sigma == (0.1, 2.0)


def test_a_blur_that_is_too_narrow_changes_nothing() -> None:
    images = torch.randint(0, 256, (2, 3, 12, 15), dtype=torch.uint8)
    for sigma in (1e-300, 1e-20, 1e-3):
        assert torch.equal(changed(GaussianBlur(5, sigma), images), images)


def test_the_standard_deviation_of_a_blur_is_uniform() -> None:
    (step,) = noted(GaussianBlur((15, 3)), MANY, (1, 4, 8)).steps  # the widest that fits
    assert (step.codes == Op.BLUR).all()
    assert (step.values[:, :2] == (15, 3)).all()  # width, height
    assert_uniform(step.values[:, 2], 0.1, 2.0)
    assert np.array_equal(step.values[:, 2], step.values[:, 3])
    (fixed,) = noted(GaussianBlur(5, 0.7), 10).steps
    assert (fixed.values[:, 2:4] == 0.7).all()


def test_what_needs_no_colors_takes_any_channels() -> None:
    images = torch.randint(0, 256, (3, 5, 8, 7), dtype=torch.uint8)
    some = [ColorJitter(0.5), GaussianBlur(3), *(make(0.5) for op, make in SOMETIMES.items() if op != Op.GRAYSCALE)]
    found = changed(Compose(some), images)
    alone = [changed(Compose(some), images[:, channel : channel + 1]) for channel in range(5)]
    assert torch.equal(found, torch.cat(alone, dim=1))

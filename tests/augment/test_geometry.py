"""Transforms of shape draw what they say, and move each pixel where it belongs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from drawn import assert_independent, assert_share, assert_shares, assert_uniform, noted
from numpy.typing import NDArray
from transforms import changed

from shardio.augment import Pad, RandomAffine, RandomPerspective, RandomRotation
from shardio.augment.batch import Batch
from shardio.augment.geometry import affine
from shardio.augment.steps import FILL_AT, SAMPLING_AT, Op, Sampling

COUNT = 30_000
SHAPE = (1, 40, 60)


def pictures(count: int, height: int, width: int, channels: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)


def numbers_of(batch: Batch) -> NDArray[np.float64]:
    """The six numbers of each sample's map, (6, B)."""
    (step,) = batch.steps
    assert (step.codes == Op.AFFINE).all()
    return step.values[:, :6].T


def test_angles_of_rotation_are_uniform_and_counter_clockwise() -> None:
    a, b, _, d, e, _ = numbers_of(noted(RandomRotation((-30, 75)), COUNT, SHAPE))
    assert_uniform(np.degrees(np.arctan2(d, a)), -30, 75)
    assert np.allclose(a, e)
    assert np.allclose(b, -d)
    assert np.allclose(a * a + b * b, 1)
    a, _, _, d, _, _ = numbers_of(noted(RandomRotation(20), COUNT, SHAPE))
    assert_uniform(np.degrees(np.arctan2(d, a)), -20, 20)


def test_the_numbers_of_an_affine_map_are_uniform_and_independent() -> None:
    transform = RandomAffine((-20, 40), (0.2, 0.5), (0.5, 2.0), (-10, 15, -8, 4))
    a, b, c, d, e, f = numbers_of(noted(transform, COUNT, SHAPE))
    # The picture moves by R(angle) scale Y(shear_y) X(shear_x), where det Y = det X = 1.
    movement = np.linalg.inv(np.stack([a, b, d, e], axis=1).reshape(-1, 2, 2))
    scale = np.sqrt(np.linalg.det(movement))
    middle = np.array([30.0, 20.0])
    way = np.einsum("nij,nj->ni", movement, middle - np.stack([c, f], axis=1)) - middle
    # X leaves (1, 0) as it is, and Y makes (1, -tan(shear_y)) of it, which R turns.
    first = movement[:, :, 0] / scale[:, None]
    shear_y = np.arccos(np.clip(1 / np.hypot(*first.T), -1, 1))  # up to its sign
    assert_uniform(scale, 0.5, 2.0)
    assert np.allclose(way, np.rint(way), atol=1e-6)
    for ways, most in zip(np.rint(way).astype(int).T, (12, 20), strict=True):  # uniform from -most to most, rounded
        assert_shares(ways + most, [0.25 / most, *[0.5 / most] * (2 * most - 1), 0.25 / most])
    assert shear_y.max() <= np.radians(8) + 1e-6
    assert_independent(scale, *way.T)


@pytest.mark.parametrize(
    ("transform", "place", "least", "most"),
    [
        (RandomAffine((-20, 40)), 1, -20, 40),  # clockwise
        (RandomAffine(0, shear=(-10, 25)), 1, -10, 25),
        (RandomAffine(0, shear=7), 1, -7, 7),
        (RandomAffine(0, shear=(0, 0, -12, 5)), 3, -12, 5),
    ],
)
def test_angle_and_shears_of_an_affine_map_are_uniform(
    transform: RandomAffine, place: int, least: float, most: float
) -> None:
    numbers = numbers_of(noted(transform, COUNT, SHAPE))
    assert_uniform(np.degrees(np.arctan2(numbers[place], numbers[0])), least, most)
    a, b, _, d, e, _ = numbers
    assert np.allclose(a * e - b * d, 1)
    if transform.degrees == 0:
        assert np.allclose([a, e, numbers[4 - place]], [[1], [1], [0]])


def test_corners_of_a_perspective_move_inwards_by_whole_pixels() -> None:
    height, width = SHAPE[1:]
    (step,) = noted(RandomPerspective(0.6, p=0.7), COUNT, SHAPE).steps
    assert_share(step.codes == Op.PERSPECTIVE, 0.7)
    a, b, c, d, e, f, g, h = step.values[:, :8].T
    # Where each corner's pixel is seen is what the map reads at the corner: its inverse.
    forward = np.linalg.inv(np.stack([a, b, c, d, e, f, g, h, np.ones_like(a)], axis=1).reshape(-1, 3, 3))
    ways = []
    for x, y in ((0, 0), (width - 1, 0), (width - 1, height - 1), (0, height - 1)):
        seen = forward @ np.array([x, y, 1.0])
        ways += [np.abs(seen[:, axis] / seen[:, 2] - place) for axis, place in enumerate((x, y))]
        assert (seen[:, :2] / seen[:, 2:] > -1e-5).all()
        assert (seen[:, :2] / seen[:, 2:] < np.array([width, height]) - 1 + 1e-5).all()
    for number, way in enumerate(ways):
        most = int(0.6 * ((height if number % 2 else width) // 2))
        assert np.allclose(way, np.rint(way), atol=1e-5)
        assert_shares(np.rint(way).astype(int), [1 / (most + 1)] * (most + 1))
    assert_independent(*ways, step.codes)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("size", [8, 9])
def test_quarter_turns_and_none_are_exact(size: int, interpolation: Any) -> None:
    images = pictures(3, size, size)
    for turns in range(-4, 5):
        angle = 90.0 * turns
        found = changed(RandomRotation((angle, angle), interpolation), images)
        assert torch.equal(found, images.rot90(turns, (2, 3)))
        found = changed(RandomAffine((angle, angle), interpolation=interpolation), images)
        assert torch.equal(found, images.rot90(-turns, (2, 3)))
    half = pictures(2, 6, 11)
    assert torch.equal(changed(RandomRotation((180, 180), interpolation), half), half.flip(2, 3))
    for distortion, p in ((0.0, 1.0), (1.0, 0.0)):
        assert torch.equal(changed(RandomPerspective(distortion, p, interpolation), half), half)


def test_maps_about_a_point_are_the_inverse_of_movements_one_after_the_other() -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        angle, shear_x, shear_y = rng.uniform(-60, 60, 3)
        scale, center, way = rng.uniform(0.3, 3), rng.uniform(-50, 50, 2), rng.uniform(-9, 9, 2)
        turn, x, y = np.radians([angle, shear_x, shear_y])
        rotate = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        movement = rotate @ np.array([[1, 0], [-np.tan(y), 1]]) @ np.array([[1, -np.tan(x)], [0, 1]]) * scale
        a, b, c, d, e, f = affine(tuple(center), angle, tuple(way), scale, (shear_x, shear_y))
        for point in rng.uniform(-100, 100, (5, 2)):
            seen = movement @ (point - center) + center + way
            assert np.allclose([a * seen[0] + b * seen[1] + c, d * seen[0] + e * seen[1] + f], point)


def test_a_center_of_its_own_stays_where_it_is() -> None:
    for transform in (RandomRotation(180, center=(3.5, 4.5)), RandomAffine(180, center=(3.5, 4.5), scale=(0.5, 2.0))):
        a, b, c, d, e, f = numbers_of(noted(transform, 100, (1, 9, 12)))
        assert np.allclose(a * 3.5 + b * 4.5 + c, 3.5)
        assert np.allclose(d * 3.5 + e * 4.5 + f, 4.5)


def test_corners_that_meet_are_no_error_and_other_pictures_stay_as_they_are() -> None:
    count = 3000
    images = pictures(1, 4, 4, 1).expand(count, -1, -1, -1)
    transform = RandomPerspective(1.0, 1.0)
    whole = changed(transform, images)
    for some in (slice(0, 1), slice(700, 800)):
        assert torch.equal(changed(transform, images[some], indices=np.arange(count)[some]), whole[some])
    assert changed(transform, images[:5, :, :1, :1]).shape == (5, 1, 1, 1)
    assert changed(transform, images[:5, :, :1]).shape == (5, 1, 1, 4)


def test_what_lies_outside_has_the_fill() -> None:
    images = torch.full((1, 3, 10, 10), 200, dtype=torch.uint8)
    fill: Any
    for fill, expected in ((0, [0, 0, 0]), (None, [0, 0, 0]), (7, [7] * 3), ((1, 2, 3), [1, 2, 3]), ([5], [5] * 3)):
        for transform in (RandomRotation((45, 45), fill=fill), RandomAffine((45, 45), fill=fill), Pad(2, fill)):
            assert changed(transform, images)[0, :, 0, 0].tolist() == expected
    (step,) = noted(RandomRotation(1, "bilinear", (1, 2, 3)), 5).steps
    assert (step.values[:, SAMPLING_AT] == Sampling.BILINEAR).all()
    assert (step.values[:, FILL_AT:] == (1, 2, 3)).all()

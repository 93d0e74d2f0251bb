"""RandomApply, RandomChoice and RandomOrder do to each sample what the chosen transforms do to it alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from drawn import assert_independent, assert_share, assert_shares, noted
from numpy.typing import NDArray
from pictures import as_batch, random_pictures
from transforms import changed

from shardio.augment import (
    CenterCrop,
    ColorJitter,
    Compose,
    CutMix,
    GaussianBlur,
    HorizontalFlip,
    Mixup,
    Pad,
    RandomApply,
    RandomChoice,
    RandomCrop,
    RandomErasing,
    RandomInvert,
    RandomOrder,
    RandomPosterize,
    RandomResizedCrop,
    RandomRotation,
    RandomSolarize,
    Resize,
    ToDtype,
    TrivialAugmentWide,
    VerticalFlip,
)
from shardio.augment.batch import Batch
from shardio.augment.boxes import Draws
from shardio.augment.chain import Transform
from shardio.augment.steps import Op

COUNT = 40
MANY = 60_000


def pictures(count: int = COUNT, height: int = 16, width: int = 16) -> torch.Tensor:
    return as_batch(random_pictures(np.random.default_rng(4), count, height, width))


def alone(transform: Transform, images: torch.Tensor, purpose: str, sizes: Any = None) -> torch.Tensor:
    """What the transform makes of the images with the numbers that it draws for `purpose`."""
    count = len(images)
    found = np.tile(np.array(images.shape[2:]), (count, 1)) if sizes is None else np.asarray(sizes)
    return transform.apply(Batch(images, Draws(0, 0, np.arange(count)), found), purpose).finished().images


def which(found: torch.Tensor, alternatives: Sequence[torch.Tensor]) -> NDArray[np.int64]:
    """The number of the first alternative that each picture is. Fails if it is none."""
    same = torch.stack([(found == other).flatten(1).all(dim=1) for other in alternatives])
    assert same.any(dim=0).all()
    return same.int().argmax(dim=0).numpy()


# One that notes all, one that has to compute between its parts, one whose boxes differ.
CHAINS: list[list[Transform]] = [
    [ColorJitter(0.4, 0.4), RandomRotation(30)],
    [RandomInvert(1.0), RandomResizedCrop(16), RandomSolarize(99, 1.0)],
    [RandomCrop(12), Resize((16, 16)), HorizontalFlip()],
    [Pad(2), CenterCrop(16), VerticalFlip()],
    [RandomErasing(1.0)],
]


def test_each_picture_has_all_of_the_chain_or_none_of_it() -> None:
    images = pictures()
    for chain in CHAINS:
        found = changed(RandomApply(chain), images)
        assert 8 < which(found, [images, alone(Compose(chain), images, "RandomApply")]).sum() < 32


def test_choices_of_crops_stay_one_pass() -> None:
    """Boxes of several transforms are noted, so that the pixels are read once."""
    images = pictures()
    transform = RandomChoice([RandomCrop(9), CenterCrop(9), RandomCrop(9)])
    batch = noted(transform, 1000)
    assert batch.boxes is not None
    assert batch.images.shape == (1000, 3, 16, 16)
    crops = [alone(crop, images, f"RandomChoice/{number}") for number, crop in enumerate(transform.transforms)]
    assert len(np.unique(which(changed(transform, images), crops))) == 3
    chain = Compose(
        [RandomChoice([RandomResizedCrop(8, (0.1, 0.3)), RandomResizedCrop(8, (0.5, 1.0))]), RandomInvert()]
    )
    assert len(noted(chain, 100).steps) == 1
    assert noted(chain, 100).images.shape == (100, 3, 16, 16)


MIX = TrivialAugmentWide()
LENGTHS: list[list[Transform]] = [
    [MIX],
    [RandomInvert(1.0), RandomSolarize(99, 1.0), RandomPosterize(3, 1.0), MIX],
    [MIX, MIX],
]


@pytest.mark.parametrize("chains", [CHAINS, LENGTHS])
def test_each_picture_has_what_its_own_choice_gives(chains: Sequence[list[Transform]]) -> None:
    images, transforms = pictures(80), [Compose(chain) for chain in chains]
    found = changed(RandomChoice(transforms), images)
    numbers = which(found, [alone(t, images, f"RandomChoice/{number}") for number, t in enumerate(transforms)])
    assert set(numbers) == set(range(len(transforms)))


def test_each_picture_has_its_own_order() -> None:
    images = pictures(60)
    parts = [RandomInvert(1.0), RandomSolarize(60, 1.0), ColorJitter((0.5, 0.5))]
    orders = list(permutations(range(3)))
    numbers = which(
        changed(RandomOrder(parts), images),
        [changed(Compose([parts[number] for number in order]), images) for order in orders],
    )
    assert len(np.unique(numbers)) == 6
    # Parts that draw do it once, whenever their turn is.
    for one, two in (
        (ColorJitter(contrast=(0.2, 0.8)), RandomRotation(90)),
        (RandomErasing(1.0, value=9), RandomCrop(16, padding=3)),
    ):
        forwards = alone(two, alone(one, images, "RandomOrder/0"), "RandomOrder/1")
        backwards = alone(one, alone(two, images, "RandomOrder/1"), "RandomOrder/0")
        assert set(which(changed(RandomOrder([one, two]), images), [forwards, backwards])) == {0, 1}


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_chains_are_applied_with_their_probability(p: float) -> None:
    assert_share(codes(RandomApply([RandomInvert(1.0)], p)) == Op.INVERT, p)


def codes(transform: Transform) -> NDArray[np.uint8]:
    """What the only step does to many samples."""
    steps = noted(transform, MANY, (1, 2, 2)).steps
    if not steps:
        return np.zeros(MANY, np.uint8)
    (step,) = steps
    return step.codes


@pytest.mark.parametrize("p", [None, (1, 2, 7), (0, 1, 0), (0.25, 0, 0.75), (1e-300, 0, 1e-300)])
def test_choices_have_their_probabilities(p: Sequence[float] | None) -> None:
    ops = [Op.INVERT, Op.SOLARIZE, Op.FLIP]
    found = codes(RandomChoice([RandomInvert(1.0), RandomSolarize(99, 1.0), VerticalFlip(1.0)], p))
    number_of = np.full(256, 99)
    number_of[ops] = range(3)
    shares = np.array([1, 1, 1] if p is None else p, float)
    assert_shares(number_of[found], list(shares / shares.sum()))


def test_orders_are_equally_probable() -> None:
    steps = noted(RandomOrder([RandomInvert(1.0), RandomSolarize(99, 1.0), VerticalFlip(1.0)]), 60_000, (1, 2, 2)).steps
    numbers = np.stack([step.codes for step in steps]).astype(int)
    weights = numbers[0] * 32 + numbers[1]
    assert len(steps) == 3
    assert_shares(np.unique(weights, return_inverse=True)[1], [1 / 6] * 6)
    assert (numbers.sum(axis=0) == Op.INVERT + Op.SOLARIZE + Op.FLIP).all()


def test_a_choice_is_independent_of_what_is_chosen() -> None:
    transform = RandomApply([ColorJitter(0.5), RandomSolarize(99, 0.5)])
    first, second = noted(transform, MANY, (1, 2, 2)).steps
    applied = first.codes != 0
    assert_share(second.codes[applied] != 0, 0.5)
    assert not second.codes[~applied].any()
    factors = np.where(applied, first.values[:, 0], 1.0)[applied]
    assert_independent(factors, second.codes[applied])


def test_mixing_is_chosen_for_the_batch_by_its_first_sample() -> None:
    images, labels = pictures(6), torch.arange(6)
    transform = Compose([ToDtype(torch.float32), RandomChoice([Mixup(6, p=0.0), CutMix(6)], p=[1, 2])])
    kinds = []
    for first in range(60):
        found, targets = transform(images, labels, indices=np.arange(first * 10, first * 10 + 6))
        assert isinstance(found, torch.Tensor)
        own = torch.nn.functional.one_hot(labels, 6).float()
        kinds.append(bool(torch.equal(targets, own) and torch.equal(found, images.float())))
        same, _ = transform(images[:1], labels[:1], indices=[first * 10])
        assert isinstance(same, torch.Tensor)
    # CutMix may draw a window without a pixel, but seldom.
    assert 5 < sum(kinds) < 40


def test_choices_of_squashed_pictures() -> None:
    """Some transforms undo that pictures were squashed, and then all alternatives have to."""
    images = pictures(40)
    sizes = np.tile([20, 24], (40, 1))
    whole = alone(Resize((20, 24)), images, "", sizes)
    found = changed(RandomApply([GaussianBlur(5)]), images, sizes=sizes)
    blurred = alone(GaussianBlur(5), whole, "RandomApply/GaussianBlur 0")
    assert set(which(found, [whole, blurred])) == {0, 1}
    crops = changed(RandomChoice([CenterCrop(10), RandomCrop(10)]), images, sizes=sizes)
    expected = [
        alone(crop, images, f"RandomChoice/{number}", sizes)
        for number, crop in enumerate([CenterCrop(10), RandomCrop(10)])
    ]
    assert set(which(crops, expected)) == {0, 1}

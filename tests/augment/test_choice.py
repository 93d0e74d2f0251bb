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

MANY = 60_000
IMAGES = as_batch(random_pictures(np.random.default_rng(4), 80, 16, 16))


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
    for chain in CHAINS:
        found = which(changed(RandomApply(chain), IMAGES), [IMAGES, alone(Compose(chain), IMAGES, "RandomApply")])
        assert set(found) == {0, 1}


def test_choices_of_crops_stay_one_pass() -> None:
    crops = RandomChoice([RandomResizedCrop(8, (0.1, 0.3)), RandomResizedCrop(8, (0.5, 1.0))])
    batch = noted(Compose([crops, RandomInvert()]), 100)
    assert batch.boxes is not None
    assert len(batch.steps) == 1
    assert batch.images.shape == (100, 3, 16, 16)


MIX = TrivialAugmentWide()
LENGTHS: list[list[Transform]] = [
    [MIX],
    [RandomInvert(1.0), RandomSolarize(99, 1.0), RandomPosterize(3, 1.0), MIX],
    [MIX, MIX],
]
CROPS: list[list[Transform]] = [[RandomCrop(9)], [CenterCrop(9)], [RandomCrop(9)]]


@pytest.mark.parametrize("chains", [CHAINS, LENGTHS, CROPS])
def test_each_picture_has_what_its_own_choice_gives(chains: Sequence[list[Transform]]) -> None:
    transforms = [Compose(chain) for chain in chains]
    expected = [alone(transform, IMAGES, f"RandomChoice/{number}") for number, transform in enumerate(transforms)]
    assert set(which(changed(RandomChoice(transforms), IMAGES), expected)) == set(range(len(transforms)))


def test_each_picture_has_its_own_order() -> None:
    parts = [RandomInvert(1.0), RandomSolarize(60, 1.0), ColorJitter((0.5, 0.5))]
    expected = [changed(Compose(order), IMAGES) for order in permutations(parts)]
    assert set(which(changed(RandomOrder(parts), IMAGES), expected)) == set(range(6))
    # Parts that draw do it once, whenever their turn is.
    for one, two in (
        (ColorJitter(contrast=(0.2, 0.8)), RandomRotation(90)),
        (RandomErasing(1.0, value=9), RandomCrop(16, padding=3)),
    ):
        forwards = alone(two, alone(one, IMAGES, "RandomOrder/0"), "RandomOrder/1")
        backwards = alone(one, alone(two, IMAGES, "RandomOrder/1"), "RandomOrder/0")
        assert set(which(changed(RandomOrder([one, two]), IMAGES), [forwards, backwards])) == {0, 1}


THREE = [RandomInvert(1.0), RandomSolarize(99, 1.0), VerticalFlip(1.0)]
OPS = [Op.NOTHING, Op.INVERT, Op.SOLARIZE, Op.FLIP]


@pytest.mark.parametrize(
    ("transform", "shares"),
    [
        *((RandomApply(THREE[:1], p), [1 - p, p, 0, 0]) for p in (0.0, 0.3, 1.0)),
        (RandomChoice(THREE), [0, 1, 1, 1]),
        *((RandomChoice(THREE, p), [0, *p]) for p in ((1, 2, 7), (0, 1, 0), (0.25, 0, 0.75), (1e-300, 0, 1e-300))),
    ],
)
def test_chains_and_choices_have_their_probabilities(transform: Transform, shares: list[float]) -> None:
    (step,) = noted(transform, MANY, (1, 2, 2)).steps
    number_of = np.full(256, 99)
    number_of[OPS] = range(4)
    assert_shares(number_of[step.codes], [share / sum(shares) for share in shares])


def test_orders_are_equally_probable() -> None:
    steps = noted(RandomOrder(THREE), MANY, (1, 2, 2)).steps
    numbers = np.stack([step.codes for step in steps]).astype(int)
    weights = numbers[0] * 32 + numbers[1]
    assert len(steps) == 3
    assert_shares(np.unique(weights, return_inverse=True)[1], [1 / 6] * 6)
    assert (numbers.sum(axis=0) == sum(OPS)).all()


def test_a_choice_is_independent_of_what_is_chosen() -> None:
    transform = RandomApply([ColorJitter(0.5), RandomSolarize(99, 0.5)])
    first, second = noted(transform, MANY, (1, 2, 2)).steps
    applied = first.codes != 0
    assert_share(second.codes[applied] != 0, 0.5)
    assert not second.codes[~applied].any()
    factors = np.where(applied, first.values[:, 0], 1.0)[applied]
    assert_independent(factors, second.codes[applied])


def test_mixing_is_chosen_for_the_batch_by_its_first_sample() -> None:
    images, labels = IMAGES[:6], torch.arange(6)
    own = torch.nn.functional.one_hot(labels, 6).float()
    transform = Compose([ToDtype(torch.float32), RandomChoice([Mixup(6, p=0.0), CutMix(6, minmax=(0.5, 0.6))])])
    kinds = [
        [
            torch.equal(transform(images, labels, indices=[first, *others])[1], own)
            for others in (range(90, 95), range(80, 85))
        ]
        for first in range(60)
    ]
    assert all(one == other for one, other in kinds)
    assert 10 < sum(one for one, _ in kinds) < 50


def test_choices_of_squashed_pictures() -> None:
    """Some transforms undo that pictures were squashed, and then all alternatives have to."""
    sizes = np.tile([20, 24], (80, 1))
    whole = alone(Resize((20, 24)), IMAGES, "", sizes)
    found = changed(RandomApply([GaussianBlur(5)]), IMAGES, sizes=sizes)
    blurred = alone(GaussianBlur(5), whole, "RandomApply/GaussianBlur 0")
    assert set(which(found, [whole, blurred])) == {0, 1}
    crops = [CenterCrop(10), RandomCrop(10)]
    found = changed(RandomChoice(crops), IMAGES, sizes=sizes)
    expected = [alone(crop, IMAGES, f"RandomChoice/{number}", sizes) for number, crop in enumerate(crops)]
    assert set(which(found, expected)) == {0, 1}

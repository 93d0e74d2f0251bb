"""Pictures of several sizes in one batch, as squashed pictures have after a resize of the shorter side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pictures import as_batch, random_pictures

from shardio.augment import (
    CenterCrop,
    ColorJitter,
    Compose,
    HorizontalFlip,
    RandomApply,
    RandomChoice,
    RandomCrop,
    RandomGrayscale,
    RandomOrder,
    RandomResizedCrop,
    Resize,
    VerticalFlip,
    Views,
)
from shardio.augment.batch import Batch
from shardio.augment.boxes import Draws
from shardio.augment.chain import Transform

COUNT, SEED = 12, 11
IMAGES = as_batch(random_pictures(np.random.default_rng(2), COUNT, 20, 24))
SIZES = np.random.default_rng(1).integers(18, 40, (COUNT, 2))
FIRST: list[Transform] = [Resize(20), HorizontalFlip()]
"""After these, shorter sides have 20 pixels, and longer sides up to 44."""


def one_by_one(last: Any) -> torch.Tensor:
    """Returns each picture after FIRST, alone and whole, as `last` makes it from a batch of one and its number."""
    made = []
    for number in range(COUNT):
        one = slice(number, number + 1)
        batch = Batch(IMAGES[one], Draws(SEED, 0, np.array([number])), SIZES[one])
        made.append(last(Compose(FIRST).apply(batch, "Compose").made().images, number))
    return torch.stack(made)


def changed(*parts: Transform) -> Any:
    return Compose(parts)(IMAGES, seed=SEED, indices=range(COUNT), sizes=SIZES)


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric"])
@pytest.mark.parametrize("place", ["random", "center"])
def test_smaller_pictures_get_the_border_of_numpy_and_larger_ones_are_cropped(mode: Any, place: str) -> None:
    crop = RandomCrop(26, None, 50, mode, pad_if_needed=True) if place == "random" else CenterCrop(26, mode, 50)
    fill = {"constant_values": 50} if mode == "constant" else {}
    numbers = Draws(SEED, 0, np.arange(COUNT)).uniform("Compose/RandomCrop 0", 2)

    def pasted(images: torch.Tensor, number: int) -> torch.Tensor:
        pixels = images[0].permute(1, 2, 0).numpy()
        for axis, share in enumerate(numbers[:, number]):
            room = 26 - pixels.shape[axis]
            if room > 0:
                before = int(share * (room + 1)) if place == "random" else room // 2
                sides = [(0, 0)] * 3
                sides[axis] = (before, room - before)
                pixels = np.pad(pixels, sides, mode, **fill)
            else:
                first = int(share * (1 - room)) if place == "random" else round(-room / 2)
                pixels = pixels.take(range(first, first + 26), axis=axis)
        return torch.from_numpy(pixels).permute(2, 0, 1)

    found, expected = changed(*FIRST, crop), one_by_one(pasted)
    assert (found.int() - expected.int()).abs().max() <= 1  # a crop of a resize rounds its weights for itself
    assert ((found != expected).float().mean()) < 0.05


def test_a_second_resize_reads_the_pixels_of_the_first_at_their_own_size() -> None:
    square = Resize((16, 18))
    expected = one_by_one(lambda images, number: square(images)[0])
    assert torch.equal(changed(*FIRST, square), expected)
    assert changed(RandomChoice([square, Compose([*FIRST, square])])).shape == (COUNT, 3, 16, 18)
    views = changed(*FIRST, Views([square, RandomCrop(15)]))
    assert torch.equal(views[0], expected)
    assert views[1].shape == (COUNT, 3, 15, 15)


def flat(result: Any) -> list[torch.Tensor]:
    """Returns the images of each view, and the masks."""
    images, arrays = result
    return [*images, *arrays["m"]] if isinstance(images, tuple) else [images, arrays["m"]]


@pytest.mark.parametrize(
    "parts",
    [
        [Resize(22), HorizontalFlip(), Resize((14, 15))],
        [Resize(22), HorizontalFlip(), CenterCrop(30, "reflect")],
        [Resize(20, "random"), HorizontalFlip(), RandomCrop(24, fill=90, pad_if_needed=True)],
        [HorizontalFlip(), RandomCrop(28, step=4, pad_if_needed=True)],
        [CenterCrop(22, "edge"), HorizontalFlip(), RandomResizedCrop(16)],
        [RandomCrop(24, pad_if_needed=True), Resize((9, 30))],
        [Resize(20), CenterCrop(26, "reflect"), CenterCrop(12, "edge")],
        [CenterCrop(16), RandomApply([ColorJitter(0.4)], 0.3), Resize((12, 12))],
        [CenterCrop(16), RandomChoice([VerticalFlip(0.3), HorizontalFlip()], [0.3, 0.7]), Resize((12, 12))],
        [CenterCrop(16), RandomOrder([VerticalFlip(0.1), RandomGrayscale(0.1)]), Resize((12, 12))],
        [CenterCrop(16), RandomApply([VerticalFlip()], 0.2), Views([Resize((12, 12)), RandomResizedCrop(12)])],
    ],
    ids=repr,
)
def test_pixels_and_masks_of_a_picture_do_not_depend_on_the_others(parts: list[Transform]) -> None:
    rng = np.random.default_rng(SEED)
    transform = Compose(parts)
    for seed in range(4):
        images = as_batch(random_pictures(rng, 6, *rng.integers(20, 30, 2).tolist()))
        sizes = rng.integers(18, 50, (6, 2)) if seed % 2 else None
        whole = transform(images, indices=range(6), sizes=sizes, seed=seed, masks={"m": images[:, 0]})
        for one in (slice(i, i + 1) for i in range(6)):
            own = None if sizes is None else sizes[one]
            alone = transform(images[one], indices=range(6)[one], sizes=own, seed=seed, masks={"m": images[one, 0]})
            for found, expected in zip(flat(alone), flat(whole), strict=True):
                assert torch.equal(found, expected[one])

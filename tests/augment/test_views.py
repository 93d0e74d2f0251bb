"""Views: what comes before them is drawn once, and each of them draws for itself, however they are computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transforms import SINGLE

from shardio.augment import Compose, HorizontalFlip, RandomCrop, RandomResizedCrop, Resize, VerticalFlip, Views
from shardio.augment.chain import Transform


def coordinates(count: int = 40) -> torch.Tensor:
    """Pictures whose colors say where each pixel is: red is 3 times the column, green 4 times the row."""
    rows, columns = np.mgrid[:60, :80]
    picture = np.stack([columns * 3, rows * 4, np.full_like(rows, 128)]).astype(np.uint8)
    return torch.from_numpy(picture).expand(count, -1, -1, -1)


def test_what_comes_before_views_is_drawn_once_for_all_of_them() -> None:
    images = coordinates()
    alone: Any = Compose([RandomResizedCrop(32), HorizontalFlip()])(images, seed=5)
    shared = Compose([RandomResizedCrop(32), HorizontalFlip(), Views([Compose([]), Resize(16), VerticalFlip(1.0)])])
    views = shared(images, seed=5)
    assert torch.equal(views[0], alone)
    assert views[1].shape == (40, 3, 16, 16)
    assert torch.equal(views[2], alone.flip(2))


def test_views_inside_views_make_one_tuple_and_draw_independently() -> None:
    crop = RandomResizedCrop(16)
    nested = Views([Compose([HorizontalFlip(0.0), Views([crop, crop])]), Views([crop, crop, crop]), crop])
    views = nested(coordinates(), seed=1)
    assert isinstance(views, tuple)
    assert len(views) == 6
    for number, one in enumerate(views):
        for other in views[:number]:
            assert not (one == other).flatten(1).all(dim=1).any()


@pytest.mark.parametrize("transform", SINGLE, ids=repr)
@pytest.mark.parametrize("shared", [[], [HorizontalFlip()], [Resize((18, 17)), RandomCrop((18, 17), padding=1)]])
def test_equal_views_that_are_computed_together_are_those_that_are_computed_alone(
    transform: Transform, shared: list[Transform]
) -> None:
    images = coordinates(12)[:, :, 20:38, 30:47].contiguous(memory_format=torch.channels_last)
    whole = Compose([*shared, Views([Resize(9), *[transform] * 3, Compose([])])])
    together = whole(images, seed=7, indices=range(12))
    # With masks, each view is computed alone.
    alone, _ = whole(images, seed=7, indices=range(12), masks={"m": images[:, 0]})
    assert all(map(torch.equal, together, alone))
    assert [view.stride() for view in together] == [view.stride() for view in alone]


@pytest.mark.parametrize("count", [5, 0])
def test_views_have_a_mask_each_and_labels_once(count: int) -> None:
    images, labels = coordinates(count), torch.arange(count)
    transform = Compose([RandomResizedCrop(32), Views([HorizontalFlip(), RandomCrop(8), VerticalFlip(0.0)])])
    views, targets, arrays = transform(images, labels, masks={"m": images.permute(0, 2, 3, 1)})
    assert [view.shape for view in views] == [(count, 3, side, side) for side in (32, 8, 32)]
    assert [mask.shape for mask in arrays["m"]] == [(count, side, side, 3) for side in (32, 8, 32)]
    assert torch.equal(targets, labels)
    assert transform(images, labels, masks={})[2] == {}
